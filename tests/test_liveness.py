"""Buffer lifetimes: on snippets drawn by hand, and against XLA's own assignment."""

import functools

import jax
import jax.numpy as jnp
import pytest
from xla_assignment import live_temp_bytes, written_to

from jax_hremat._shared.errors import TargetUnavailableError
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.buffer import own_temps
from jax_hremat._xla.hlo.liveness import buffer_timeline, live_at_peak, part_timeline
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.target import get_target

KIB = 1024  # f32[256]


def timeline(body, *, before="", aliases=""):
    head = "HloModule m, is_scheduled=true" + (
        f", input_output_alias={{ {aliases} }}" if aliases else ""
    )
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return buffer_timeline(
        parse_hlo(f"{head}\n\n{before}\nENTRY %main (x: f32[256]) -> f32[256] {{\n{lines}\n}}\n")
    )


def lifetimes(timeline):
    return {b.name: (b.start, b.end, b.kind) for b in timeline.buffers}


def test_lifetimes_run_from_definition_to_last_use():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %a = f32[256]{0} reverse(%x), dimensions={0}, metadata={op_name="first"}
        %b = f32[256]{0} reverse(%a), dimensions={0}
        %unused = f32[2560]{0} broadcast(%x), dimensions={0}
        %c = f32[512]{0} concatenate(%a, %b), dimensions={0}
        ROOT %d = f32[256]{0} slice(%c), slice={[0:256]}
        """
    )
    assert lifetimes(found) == {
        "x": (0, 5, "parameter"),
        "a": (1, 4, "temp"),
        "b": (2, 4, "temp"),
        "unused": (3, 3, "temp"),
        "c": (4, 5, "temp"),
        "d": (5, 5, "output"),
    }
    first = next(b for b in found.buffers if b.name == "a")
    assert (first.nbytes, first.op_name, first.opcode) == (KIB, "first", "reverse")
    # The output is idle until position 5, and "a" fits it exactly.
    assert {b.name: b.inside for b in found.buffers if b.inside} == {"a": "d"}
    assert found.live_temp_bytes == (0, 0, KIB, 11 * KIB, 3 * KIB, 2 * KIB)
    assert found.peak() == (3, 11 * KIB)
    assert {b.name for b in found.live_at(2)} == {"x", "a", "b"}
    with pytest.raises(IndexError):
        found.live_at(6)


def test_parameters_are_numbered_flat():
    found = timeline(
        """
        %p = f32[256]{0} parameter(1)
        %x = (f32[256]{0}, s32[]) parameter(0)
        %c = f32[] constant(0)
        ROOT %r = f32[256]{0} pad(%p, %c), padding=0_0
        """
    )
    assert {b.name: b.parameter_index for b in found.buffers} == {
        "x{0}": 0,
        "x{1}": 1,
        "p": 2,
        "c": None,
        "r": None,
    }
    assert [b.kind for b in found.buffers if b.name == "c"] == ["constant"]


def test_aliases_share_one_buffer():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %a = (f32[256]{0}, f32[512]{0}) custom-call(%x), custom_call_target="two"
        %one = f32[256]{0} get-tuple-element(%a), index=0
        %two = f32[512]{0} get-tuple-element(%a), index=1
        %view = f32[2,256]{1,0} bitcast(%two)
        %t = (f32[2,256]{1,0}, f32[256]{0}) tuple(%view, %one)
        %t2 = (f32[2,256]{1,0}, f32[256]{0}) opt-barrier(%t)
        %back = f32[2,256]{1,0} get-tuple-element(%t2), index=0
        %big = f32[4096]{0} broadcast(%back), dimensions={}
        ROOT %r = f32[256]{0} slice(%big), slice={[0:256]}
        """
    )
    temps = {k: v[:2] for k, v in lifetimes(found).items() if v[2] == "temp"}
    assert temps == {"a{0}": (1, 6), "a{1}": (1, 8), "big": (8, 9)}


FUSED = """\
%elementwise (p0: f32[256], p1: f32[]) -> f32[256] {
  %p0 = f32[256]{0} parameter(0)
  %p1 = f32[] parameter(1)
  %b = f32[256]{0} broadcast(%p1), dimensions={}
  ROOT %m = f32[256]{0} multiply(%p0, %b)
}

%turned (q0: f32[256]) -> f32[256] {
  %q0 = f32[256]{0} parameter(0)
  %n = f32[256]{0} negate(%q0)
  ROOT %v = f32[256]{0} reverse(%n), dimensions={0}
}
"""


@pytest.mark.parametrize(("fused", "in_place"), [("elementwise", True), ("turned", False)])
def test_elementwise_fusions_write_over_a_dying_operand(fused, in_place):
    found = timeline(
        f"""
        %x = f32[256]{{0}} parameter(0)
        %c = f32[] constant(2)
        %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
        %f = f32[256]{{0}} fusion(%a{", %c" if in_place else ""}), kind=kLoop, calls=%{fused}
        %big = f32[512]{{0}} concatenate(%f, %x), dimensions={{0}}
        ROOT %r = f32[128]{{0}} slice(%big), slice={{[0:128]}}
        """,
        before=FUSED,
    )
    assert lifetimes(found)["a"][:2] == (2, 2 if in_place else 3)
    assert found.live_temp_bytes[3] == (1 if in_place else 2) * KIB


@pytest.mark.parametrize(("fourth", "end"), [("ct", 7), ("y", 4)])
def test_what_a_part_is_given_and_makes_for_others_is_temporary(fourth, end):
    module = parse_hlo(
        """HloModule m, is_scheduled=true

%negated (p: f32[256]) -> f32[256] {
  %p = f32[256]{0} parameter(0)
  ROOT %n = f32[256]{0} negate(%p)
}

ENTRY %main (x: f32[256], ct: f32[256]) -> (f32[256], f32[256], f32[256], f32[256]) {
  %x = f32[256]{0} parameter(0)
  %ct = f32[256]{0} parameter(1)
  %a = f32[256]{0} reverse(%x), dimensions={0}
  %y = f32[256]{0} fusion(%a), kind=kLoop, calls=%negated
  %b = f32[256]{0} reverse(%ct), dimensions={0}
  %dx = f32[256]{0} fusion(%ct), kind=kLoop, calls=%negated
  %dw = f32[256]{0} fusion(%b), kind=kLoop, calls=%negated
  ROOT %r = (f32[256]{0}, f32[256]{0}, f32[256]{0}, f32[256]{0}) tuple(%y, %dx, %dw, %fourth)
}
""".replace("fourth", fourth)
    )
    whole = lifetimes(buffer_timeline(module))
    assert [whole[name][2] for name in ("ct", "y", "dx")] == ["parameter", "output", "output"]
    part = part_timeline(module, given={1: 3}, passed_on=(0, 1))
    assert not any(b.inside for b in part.buffers)
    # What the part is given is there from a position on: to the end if it is handed on, else until
    # it is overwritten. An output is written over an operand, the gradient of an argument is not.
    assert lifetimes(part) == {
        "x": (0, 7, "parameter"),
        "ct": (3, end, "temp"),
        "a": (2, 2, "temp"),
        "y": (3, 7, "temp"),
        "b": (4, 6, "temp"),
        "dx": (5, 7, "temp"),
        "dw": (6, 7, "output"),
    }


def test_an_operand_that_lives_on_is_not_written_over():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %c = f32[] constant(2)
        %a = f32[256]{0} reverse(%x), dimensions={0}
        %f = f32[256]{0} fusion(%a, %c), kind=kLoop, calls=%elementwise
        %big = f32[512]{0} concatenate(%f, %a), dimensions={0}
        ROOT %r = f32[128]{0} slice(%big), slice={[0:128]}
        """,
        before=FUSED,
    )
    assert lifetimes(found)["a"][:2] == (2, 4)
    assert found.live_temp_bytes[3] == 2 * KIB


TWO_RESULTS = """\
%both (p0: f32[256], p1: f32[256]) -> (f32[256], f32[256]) {
  %p0 = f32[256]{0} parameter(0)
  %p1 = f32[256]{0} parameter(1)
  %e = f32[256]{0} exponential(%p0)
  %m = f32[256]{0} multiply(%e, %p1)
  ROOT %t = (f32[256]{0}, f32[256]{0}) tuple(%e, %m)
}
"""


@pytest.mark.parametrize(
    ("first_reader", "overwritten"), [(0, {"a", "b"}), (1, {"a"})], ids=["first", "second"]
)
def test_the_result_needed_for_a_shorter_time_chooses_what_it_overwrites(first_reader, overwritten):
    # Only %a may be overwritten by both results, and each takes the first operand that is left.
    found = timeline(
        f"""
        %x = f32[256]{{0}} parameter(0)
        %a = f32[256]{{0}} reverse(%x), dimensions={{0}}
        %b = f32[256]{{0}} reverse(%x), dimensions={{0}}
        %f = (f32[256]{{0}}, f32[256]{{0}}) fusion(%a, %b), kind=kLoop, calls=%both
        %f0 = f32[256]{{0}} get-tuple-element(%f), index=0
        %f1 = f32[256]{{0}} get-tuple-element(%f), index=1
        %early = f32[512]{{0}} concatenate(%f{first_reader}, %x), dimensions={{0}}
        %late = f32[768]{{0}} concatenate(%f{1 - first_reader}, %early), dimensions={{0}}
        ROOT %r = f32[128]{{0}} slice(%late), slice={{[0:128]}}
        """,
        before=TWO_RESULTS,
    )
    assert {name for name in "ab" if lifetimes(found)[name][1] == 2} == overwritten


def test_a_copy_is_not_written_over_what_it_copies():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %a = f32[256]{0} reverse(%x), dimensions={0}
        %c = f32[256]{0} copy(%a)
        %big = f32[512]{0} concatenate(%c, %x), dimensions={0}
        ROOT %r = f32[128]{0} slice(%big), slice={[0:128]}
        """
    )
    assert lifetimes(found)["a"][:2] == (1, 2)


ROWS_REDUCED = """\
%sum (s0: f32[], s1: f32[]) -> f32[] {
  %s0 = f32[] parameter(0)
  %s1 = f32[] parameter(1)
  ROOT %s = f32[] add(%s0, %s1)
}

%once (p: f32[16,16]) -> (f32[16], f32[16,16]) {
  %p = f32[16,16]{1,0} parameter(0)
  %zero = f32[] constant(0)
  %e = f32[16,16]{1,0} exponential(%p)
  %rows = f32[16]{0} reduce(%e, %zero), dimensions={1}, to_apply=%sum
  ROOT %t = (f32[16]{0}, f32[16,16]{1,0}) tuple(%rows, %e)
}

%twice (p: f32[16,16]) -> (f32[16], f32[16,16]) {
  %p.1 = f32[16,16]{1,0} parameter(0)
  %zero.1 = f32[] constant(0)
  %e.1 = f32[16,16]{1,0} exponential(%p.1)
  %rows.1 = f32[16]{0} reduce(%e.1, %zero.1), dimensions={1}, to_apply=%sum
  %others = f32[16]{0} reduce(%p.1, %zero.1), dimensions={1}, to_apply=%sum
  %both = f32[16]{0} add(%rows.1, %others)
  ROOT %t.1 = (f32[16]{0}, f32[16,16]{1,0}) tuple(%both, %e.1)
}
"""


@pytest.mark.parametrize(("fused", "in_place"), [("once", True), ("twice", False)])
def test_a_kernel_that_reduces_rows_writes_over_what_only_its_reduction_reads(fused, in_place):
    found = timeline(
        f"""
        %x = f32[16,16]{{1,0}} parameter(0)
        %a = f32[16,16]{{1,0}} reverse(%x), dimensions={{0}}
        %f = (f32[16]{{0}}, f32[16,16]{{1,0}}) fusion(%a), kind=kInput, calls=%{fused}
        %f1 = f32[16,16]{{1,0}} get-tuple-element(%f), index=1
        %big = f32[32,16]{{1,0}} concatenate(%f1, %x), dimensions={{0}}
        ROOT %r = f32[8,16]{{1,0}} slice(%big), slice={{[0:8], [0:16]}}
        """,
        before=ROWS_REDUCED,
    )
    assert lifetimes(found)["a"][:2] == (1, 1 if in_place else 2)


LOOP = """\
%body (s: (s32[], f32[256])) -> (s32[], f32[256]) {
  %s = (s32[], f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[256]{0} get-tuple-element(%s), index=1
  %wide = f32[1024]{0} broadcast(%i), dimensions={}
  %w = f32[256]{0} slice(%wide), slice={[0:256]}
  %u = f32[256]{0} dynamic-update-slice(%v, %w, %i)
  ROOT %t = (s32[], f32[256]{0}) tuple(%i, %u)
}

%cond (s: (s32[], f32[256])) -> pred[] {
  %s.1 = (s32[], f32[256]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}
"""


def test_loops_keep_their_state_and_add_their_peak():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %z = s32[] constant(0)
        %i = s32[] copy(%z)
        %a = f32[256]{0} reverse(%x), dimensions={0}
        %t = (s32[], f32[256]{0}) tuple(%i, %a)
        %loop = (s32[], f32[256]{0}) while(%t), condition=%cond, body=%body
        %v = f32[256]{0} get-tuple-element(%loop), index=1
        ROOT %r = f32[128]{0} slice(%v), slice={[0:128]}
        """,
        before=LOOP,
    )
    assert lifetimes(found)["a"][:2] == (3, 7)
    assert "loop{1}" not in lifetimes(found)
    # Inside: the wide value and the slice cut from it; the update is in place. The counter
    # fits into the output.
    assert found.live_temp_bytes[5] == KIB + (4 * KIB + KIB)
    assert found.peak()[0] == 5


def test_async_copies_live_from_start_to_their_use():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %s = (f32[256]{0}, f32[256]{0}, u32[]) copy-start(%x)
        %a = f32[2560]{0} broadcast(%x), dimensions={0}
        %d = f32[256]{0} copy-done(%s)
        ROOT %r = f32[2816]{0} concatenate(%a, %d), dimensions={0}
        """
    )
    assert lifetimes(found)["s{0}"][:2] == (1, 4)
    assert "d" not in lifetimes(found) and "s{1}" not in lifetimes(found)


def test_host_memory_is_left_out():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %h = f32[256]{0:S(5)} copy(%x)
        %b = f32[256]{0} copy(%h)
        ROOT %r = f32[512]{0} concatenate(%b, %x), dimensions={0}
        """
    )
    assert "h" not in lifetimes(found)


def test_outputs_borrow_donated_parameters():
    found = timeline(
        """
        %x = f32[256]{0} parameter(0)
        %a = f32[256]{0} reverse(%x), dimensions={0}
        %b = f32[256]{0} reverse(%a), dimensions={0}
        %c = f32[256]{0} reverse(%b), dimensions={0}
        ROOT %r = f32[256]{0} reverse(%c), dimensions={0}
        """,
        aliases="{}: (0, {}, may-alias)",
    )
    borrowed = {b.name: b.inside for b in found.buffers}
    assert lifetimes(found)["x"] == (0, 1, "parameter")
    assert borrowed["r"] == "x" and borrowed["x"] is None
    # Between the parameter's last use and the output, one of two temporaries fits there too.
    assert borrowed["b"] == "x"
    assert found.live_temp_bytes == (0, KIB, KIB, KIB, KIB)


# --- against XLA ------------------------------------------------------------------------


def aval(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def mlp(wrap, dtype):
    layers = 4

    def layer(x, a, b):
        return x + jnp.tanh(x @ a) @ b

    def loss(x, *ws):
        for n in range(layers):
            x = (jax.checkpoint(layer) if wrap else layer)(x, ws[2 * n], ws[2 * n + 1])
        return (x.astype(jnp.float32) ** 2).sum()

    weights = [aval(256, 1024, dtype=dtype), aval(1024, 256, dtype=dtype)] * layers
    return jax.grad(loss, tuple(range(1, 2 * layers + 1))), [aval(1024, 256, dtype=dtype), *weights]


def attention():
    def layer(x, qkv, out):
        q, k, v = jnp.split((x @ qkv).reshape(4, 256, 12, 64), 3, axis=2)
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0)
        return x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(4, 256, 256) @ out

    def loss(x, qkv, out):
        return (layer(layer(x, qkv, out), qkv, out) ** 2).sum()

    return jax.grad(loss, (1, 2)), [aval(4, 256, 256), aval(256, 768), aval(256, 256)]


def convolutions():
    def loss(x, first, second):
        for w in (first, second, second):
            y = jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(y)
        return (x**2).mean()

    return jax.grad(loss, (1, 2)), [aval(8, 32, 32, 8), aval(3, 3, 8, 32), aval(3, 3, 32, 32)]


def scan():
    def loss(x, ws):
        return (jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2).sum()

    return jax.grad(loss, 1), [aval(512, 256), aval(6, 256, 256)]


def softmax_backward():
    """One kernel writes two results and reads two operands for the last time."""

    def gradients(q, k, v, out, row_max, row_sum, row_dot):
        e = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) - row_max)
        row_sum = row_sum.astype(jnp.float32)
        p = (e / row_sum).astype(e.dtype)
        d_p = jnp.einsum("bqd,bkd->bqk", out, v)
        d_s = ((d_p / row_sum).astype(e.dtype) + row_dot) * e
        d_q = jnp.einsum("bqk,bkd->bqd", d_s, k)
        d_k = jnp.einsum("bqk,bqd->bkd", d_s, q)
        return d_q, d_k, jnp.einsum("bqk,bqd->bkd", p, out + d_q)

    rows, heads = (aval(48, 256, size, dtype=jnp.bfloat16) for size in (1, 64))
    return gradients, [heads] * 4 + [rows] * 3


PROGRAMS = {
    "mlp": functools.partial(mlp, False, jnp.float32),
    "mlp bf16": functools.partial(mlp, False, jnp.bfloat16),
    "mlp bf16 checkpoint": functools.partial(mlp, True, jnp.bfloat16),
    "attention": attention,
    "convolutions": convolutions,
    "softmax backward": softmax_backward,
    "scan": scan,
}


@pytest.mark.parametrize("target", ["cpu", "h200"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_lifetimes_agree_with_buffer_assignment(program, target, tmp_path):
    fun, avals = PROGRAMS[program]()
    try:
        compiled = compile_flat(fun, avals, written_to(get_target(target), tmp_path))
    except TargetUnavailableError as error:
        pytest.skip(str(error))
    module = parse_hlo(compiled.hlo_text)
    found = buffer_timeline(module)
    assert compiled.memory.temp_bytes > 1_000_000
    assert found.peak()[1] == pytest.approx(compiled.memory.temp_bytes, rel=0.05)
    if target == "h200" and program != "scan":
        assert list(found.live_temp_bytes) == live_temp_bytes(tmp_path)
    live = [buffer for _, buffer in live_at_peak(module)]
    assert sum(b.nbytes for b in own_temps(live)) == found.peak()[1]
    # Every weight's gradient has a buffer, and no output is counted as a temporary.
    output_bytes = sum(b.nbytes for b in found.buffers if b.kind == "output" and not b.inside)
    assert output_bytes == pytest.approx(compiled.memory.output_bytes, abs=1024)
