"""The roofline, against flops, bytes and times counted by hand."""

import jax
import jax.numpy as jnp
import pytest

from jax_hremat._shared.errors import TargetUnavailableError
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.hlo.trips import trip_count
from jax_hremat._xla.rates import Rates
from jax_hremat._xla.target import get_target

# Powers of ten, so that a term that is mixed up with another one shows.
RATES = Rates({"bf16": 1e6, "f32": 1e5}, vector_flops_per_s=1e4, bytes_per_s=1e9, launch_s=1e-3)
TARGETS = ("cpu", "h200")


def estimate(text, rates=RATES):
    return estimate_step(parse_hlo("HloModule m, is_scheduled=true\n\n" + text), rates)


def entry(*lines):
    return (
        "ENTRY %main (p: f32[]) -> f32[] {\n" + "\n".join(f"  {line}" for line in lines) + "\n}\n"
    )


def compiled(target, fun, *avals):
    try:
        text = compile_flat(fun, avals, get_target(target)).hlo_text
    except TargetUnavailableError as error:
        pytest.skip(str(error))
    return estimate_step(parse_hlo(text), RATES)


def aval(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


# --- snippets -------------------------------------------------------------------------


def test_dot_time_is_arithmetic_traffic_and_launch():
    text = entry(
        "%a = bf16[8,4]{1,0} parameter(0)",
        "%b = bf16[4,16]{1,0} parameter(1)",
        "ROOT %d = f32[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0},"
        ' metadata={op_name="here"}',
    )
    cost = estimate(text)
    (kernel,) = cost.kernels
    assert (kernel.name, kernel.opcode, kernel.op_name) == ("d", "dot", "here")
    assert cost.flops == 2 * 8 * 16 * 4
    assert cost.vector_flops == 0
    assert cost.bytes == 2 * 8 * 4 + 2 * 4 * 16 + 4 * 8 * 16
    assert cost.time_s == pytest.approx(1024 / 1e6 + 1e-3)
    assert not cost.unknown
    slow_memory = Rates(RATES.flops_per_s, 1e4, 1.0, 0.0)
    assert estimate(text, slow_memory).time_s == pytest.approx(64 + 128 + 512)


def test_a_type_without_matrix_units_runs_on_the_vector_units():
    text = entry(
        "%a = s32[10,10]{1,0} parameter(0)",
        "ROOT %d = s32[10,10]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    cost = estimate(text)
    assert cost.time_s == pytest.approx(2000 / 1e4 + 1e-3)
    assert cost.bytes == 400 + 400  # the repeated operand is read once


def test_fusion_reads_and_writes_only_at_its_edges():
    cost = estimate(
        """\
%fused (p0: f32[1000], p1: f32[]) -> f32[1000] {
  %p0 = f32[1000]{0} parameter(0)
  %p1 = f32[] parameter(1)
  %all = f32[1000]{0} broadcast(%p1), dimensions={}
  %sum = f32[1000]{0} add(%p0, %all)
  %exp = f32[1000]{0} exponential(%sum)
  ROOT %out = f32[1000]{0} multiply(%exp, %p0)
}

"""
        + entry(
            "%x = f32[1000]{0} parameter(0)",
            "%c = f32[] constant(1)",
            "ROOT %f = f32[1000]{0} fusion(%x, %c), kind=kLoop, calls=%fused",
        )
    )
    assert cost.bytes == 4000 + 4 + 4000
    assert cost.vector_flops == 1000 * (1 + 8 + 1)
    assert cost.flops == 0


def test_fused_slices_read_what_they_cut_out():
    cost = estimate(
        """\
%fused (p0: f32[100,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %neg = f32[100,8]{1,0} negate(%p0)
  %row = f32[1,8]{1,0} dynamic-slice(%neg, %p1, %zero), dynamic_slice_sizes={1,8}
  %other = f32[1,8]{1,0} slice(%p0), slice={[3:4], [0:8]}
  ROOT %out = f32[1,8]{1,0} add(%row, %other)
}

"""
        + entry(
            "%x = f32[100,8]{1,0} parameter(0)",
            "%i = s32[] parameter(1)",
            "ROOT %f = f32[1,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused",
        )
    )
    assert cost.bytes == pytest.approx(2 * 32 + 4 + 32)
    assert cost.vector_flops == pytest.approx(8 + 8)


UPDATE = """\
%fused (p0: f32[100,8], p1: f32[1,8], p2: s32[]) -> f32[100,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %BODY
}

"""
UPDATE_ENTRY = entry(
    "%x = f32[100,8]{1,0} parameter(0)",
    "%u = f32[1,8]{1,0} parameter(1)",
    "%i = s32[] parameter(2)",
    "ROOT %f = f32[100,8]{1,0} fusion(%x, %u, %i), kind=kLoop, calls=%fused",
)


def test_update_in_place_moves_the_slice_only():
    root = "ROOT %d = f32[100,8]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)"
    cost = estimate(UPDATE.replace("%BODY", root) + UPDATE_ENTRY)
    assert cost.bytes == 32 + 4 + 32


def test_update_that_is_not_in_place_moves_the_buffer():
    body = (
        "%d = f32[100,8]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)\n"
        "  ROOT %n = f32[100,8]{1,0} negate(%d)"
    )
    cost = estimate(UPDATE.replace("%BODY", body) + UPDATE_ENTRY)
    assert cost.bytes == 3200 + 32 + 4 + 3200


def test_gather_and_scatter_touch_their_rows():
    region = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

"""
    cost = estimate(
        region
        + entry(
            "%x = f32[100,8]{1,0} parameter(0)",
            "%i = s32[5,1]{1,0} parameter(1)",
            "%g = f32[5,8]{1,0} gather(%x, %i), offset_dims={1}, slice_sizes={1,8}",
            "ROOT %s = f32[100,8]{1,0} scatter(%x, %i, %g), update_window_dims={1}, to_apply=%add",
        )
    )
    gather, scatter = cost.kernels
    assert gather.bytes == pytest.approx(160 + 20 + 160)
    assert scatter.bytes == 20 + 160 + 2 * 160
    assert scatter.vector_flops == 40


def test_reductions_count_their_input():
    cost = estimate(
        """\
%max (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] maximum(%a, %b)
}

"""
        + entry(
            "%x = f32[10,20]{1,0} parameter(0)",
            "%c = f32[] constant(0)",
            "%r = f32[10]{0} reduce(%x, %c), dimensions={1}, to_apply=%max",
            "ROOT %w = f32[10]{0} reduce-window(%r, %c), window={size=3 pad=1_1}, to_apply=%max",
        )
    )
    assert [kernel.vector_flops for kernel in cost.kernels] == [200, 30]


CUBLAS = (
    "%a = bf16[4,8,16]{2,1,0} parameter(0)",
    "%b = bf16[4,16,32]{2,1,0} parameter(1)",
    "%g = (bf16[4,8,32]{2,1,0}, s8[4194304]{0}) custom-call(%a, %b),"
    ' custom_call_target="TARGET", backend_config={"gemm_backend_config":'
    '{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],'
    '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":["0"]}}}',
    "ROOT %o = bf16[4,8,32]{2,1,0} get-tuple-element(%g), index=0",
)


@pytest.mark.parametrize("target", ["__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"])
def test_cublas_matmul(target):
    cost = estimate(entry(*CUBLAS).replace("TARGET", target))
    assert cost.flops == 2 * 4 * 8 * 32 * 16
    assert cost.bytes == 2 * (4 * 8 * 16 + 4 * 16 * 32 + 4 * 8 * 32)  # the workspace is not moved
    assert cost.kernels[0].opcode == f"custom-call:{target}"
    assert not cost.unknown


# x: batch 2, 8x8, 6 features in 2 groups; y: 4x4, 10 features; window 3x3, stride 2.
CONV_SHAPES = {"x": "f32[2,8,8,6]", "k": "f32[10,3,3,3]", "y": "f32[2,4,4,10]"}
CONV_FLOPS = 2 * (2 * 4 * 4 * 10) * (3 * 3) * 3


@pytest.mark.parametrize(
    ("target", "lhs", "rhs", "out"),
    [
        ("__cudnn$convForward", "x", "k", "y"),
        ("__cudnn$convBiasActivationForward", "x", "k", "y"),
        ("__cudnn$convBackwardInput", "y", "k", "x"),
        ("__cudnn$convBackwardFilter", "x", "y", "k"),
    ],
)
def test_cudnn_convolutions_have_their_forward_flops(target, lhs, rhs, out):
    cost = estimate(
        entry(
            f"%a = {CONV_SHAPES[lhs]}{{3,2,1,0}} parameter(0)",
            f"%b = {CONV_SHAPES[rhs]}{{3,2,1,0}} parameter(1)",
            f"ROOT %c = ({CONV_SHAPES[out]}{{3,2,1,0}}, u8[512]{{0}}) custom-call(%a, %b),"
            " window={size=3x3 stride=2x2 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f,"
            f' feature_group_count=2, custom_call_target="{target}"',
        )
    )
    assert cost.flops == CONV_FLOPS
    assert cost.bytes == 4 * (2 * 8 * 8 * 6 + 10 * 3 * 3 * 3 + 2 * 4 * 4 * 10)
    assert not cost.unknown


def test_unknown_operations_are_named_and_their_bytes_counted():
    cost = estimate(
        entry(
            "%x = f32[100]{0} parameter(0)",
            '%c = f32[100]{0} custom-call(%x), custom_call_target="mystery"',
            "%f = c64[51]{0} fft(%c), fft_type=RFFT, fft_length={100}",
            "%r = f32[100]{0} all-reduce(%c), replica_groups={}",
            "ROOT %t = (c64[51]{0}, f32[100]{0}) tuple(%f, %r)",
        )
    )
    assert dict(cost.unknown) == {"custom-call:mystery": 1, "all-reduce": 1}
    assert [kernel.bytes for kernel in cost.kernels] == [800, 400 + 408, 800]


LOOP = """\
%body (s: (s32[], f32[10])) -> (s32[], f32[10]) {
  %s = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %one = s32[] constant(STEP)
  %next = s32[] add(%i, %one)
  %v = f32[10]{0} get-tuple-element(%s), index=1
  %w = f32[10]{0} tanh(%v)
  ROOT %t = (s32[], f32[10]{0}) tuple(%next, %w)
}

%cond (s: (s32[], f32[10])) -> pred[] {
  %s.1 = (s32[], f32[10]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %n = s32[] constant(7)
  ROOT %lt = pred[] compare(%i.1, %n), direction=DIRECTION
}

""" + entry(
    "%x = f32[10]{0} parameter(0)",
    "%z = s32[] constant(1)",
    "%init = (s32[], f32[10]{0}) tuple(%z, %x)",
    "%loop = (s32[], f32[10]{0}) while(%init), condition=%cond, body=%bodyKNOWN",
    "ROOT %o = f32[10]{0} get-tuple-element(%loop), index=1",
)


@pytest.mark.parametrize(
    ("step", "direction", "known", "trips"),
    [
        ("1", "LT", "", 6),
        ("1", "LE", "", 7),
        ("4", "LT", "", 2),
        ("1", "NE", "", None),
        ("0", "LT", "", None),
        ("1", "NE", ', backend_config={"known_trip_count":{"n":"5"}}', 5),
    ],
)
def test_loops_run_as_often_as_the_text_tells(step, direction, known, trips):
    text = LOOP.replace("STEP", step).replace("DIRECTION", direction).replace("KNOWN", known)
    module = parse_hlo(text)
    assert trip_count(module, module.entry, module.entry["loop"]) == trips
    cost = estimate(text)
    times = trips or 1
    assert cost.vector_flops == times * (1 + 10 * 16)
    assert {kernel.executions for kernel in cost.kernels} == {times}
    assert cost.bytes == times * (8 + 4 + 80)
    assert dict(cost.unknown) == ({} if trips else {"while": 1})
    assert cost.time_s == pytest.approx(times * (1 / 1e4 + 160 / 1e4 + 2e-3))


def test_conditional_takes_the_dearest_branch():
    branch = """\
%{name} (a: f32[{n}]) -> f32[{n}] {{
  %a = f32[{n}]{{0}} parameter(0)
  ROOT %r = f32[{n}]{{0}} {opcode}(%a)
}}

"""
    cost = estimate(
        branch.format(name="cheap", n=10, opcode="negate")
        + branch.format(name="dear", n=10, opcode="tanh")
        + entry(
            "%p = pred[] parameter(0)",
            "%x = f32[10]{0} parameter(1)",
            "ROOT %c = f32[10]{0} conditional(%p, %x, %x), branch_computations={%cheap, %dear}",
        )
    )
    assert cost.vector_flops == 160
    assert len(cost.kernels) == 1


def test_async_fusion_costs_once():
    cost = estimate(
        """\
%fused (p0: f32[100]) -> f32[10] {
  %p0 = f32[100]{0} parameter(0)
  ROOT %s = f32[10]{0} slice(%p0), slice={[0:10]}
}

"""
        + entry(
            "%x = f32[100]{0} parameter(0)",
            "%s = ((f32[100]{0}), f32[10]{0}, u32[]) fusion-start(%x), kind=kLoop, calls=%fused",
            "ROOT %d = f32[10]{0} fusion-done(%s)",
        )
    )
    assert cost.bytes == pytest.approx(40 + 40)
    assert len(cost.kernels) == 1


# --- compiled programs ----------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_matmul(target):
    cost = compiled(target, lambda x, w: x @ w, aval(256, 128), aval(128, 512))
    assert cost.flops == 2 * 256 * 512 * 128
    assert cost.bytes >= 4 * (256 * 128 + 128 * 512 + 256 * 512)


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_batched_dot_and_its_gradient(target):
    def loss(q, k):
        return (jnp.einsum("bqd,bkd->bqk", q, k) ** 2).sum()

    cost = compiled(target, jax.grad(loss, (0, 1)), aval(4, 64, 32), aval(4, 128, 32))
    assert cost.flops == 3 * 2 * 4 * 64 * 128 * 32


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_convolution_and_its_gradient(target):
    def loss(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum()

    cost = compiled(target, jax.grad(loss, (0, 1)), aval(2, 16, 16, 8), aval(3, 3, 8, 24))
    assert cost.flops == 3 * 2 * (2 * 16 * 16 * 24) * 9 * 8
    assert not cost.unknown


def test_compiled_strided_convolution_gradient_skips_the_holes():
    def loss(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum()

    cost = compiled("cpu", jax.grad(loss, (0, 1)), aval(2, 16, 16, 8), aval(3, 3, 8, 24))
    assert cost.flops == 3 * 2 * (2 * 8 * 8 * 24) * 9 * 8


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_scan_multiplies_by_its_length(target):
    def run(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    cost = compiled(target, run, aval(128, 128), aval(30, 128, 128))
    assert cost.flops == 30 * 2 * 128**3
    assert not cost.unknown
    assert {kernel.executions for kernel in cost.kernels if kernel.flops} == {30}
    # One layer's weights are read a turn; all thirty would be twice as much as allowed here.
    assert cost.bytes < 30 * 25 * 4 * 128**2


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_elementwise_chain_is_one_pass(target):
    cost = compiled(target, lambda x, y: jnp.exp(x * 2 + y) - x, aval(1000, 100), aval(1000, 100))
    assert cost.bytes == pytest.approx(3 * 4 * 100_000, rel=1e-4)
    assert cost.vector_flops == 100_000 * (1 + 1 + 8 + 1)
    assert len(cost.kernels) == 1


@pytest.mark.parametrize("target", TARGETS)
def test_compiled_dynamic_slice_reads_the_slice(target):
    def take(x, i):
        return jnp.sin(jax.lax.dynamic_slice(x, (i, 0), (4, 256)))

    cost = compiled(target, take, aval(1000, 256), aval(dtype=jnp.int32))
    assert cost.bytes == pytest.approx(2 * 4 * 4 * 256, rel=0.02)
