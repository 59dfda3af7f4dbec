"""Kernels that XLA only calls: what they cost in the compiled step, and in the traced one.

`custom_calls.txt` holds calls as XLA compiled them for the H200, cut down to what is read.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.gpu import attention as pallas_attention
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._cost.kernels import kernel_book
from jax_hremat._emit.step import own_step
from jax_hremat._jax.cudnn import cudnn_version
from jax_hremat._primitives.formulas import num_scores
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._primitives.primitives import equation_work
from jax_hremat._primitives.work import Call, Work
from jax_hremat._shared.errors import TargetUnavailableError
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import Roofline, estimate_step
from jax_hremat._xla.rates import Rates, rates
from jax_hremat._xla.target import get_target

H200 = rates(get_target("h200"))
# Before JAX is asked for the version, which it remembers not to have found.
HAS_CUDNN = jax_hremat.load_cudnn() and cudnn_version() is not None
QUICK = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1),
    cost="analytic",
    max_rounds=0,
)


def _modules() -> dict[str, str]:
    text = (Path(__file__).parent / "custom_calls.txt").read_text(encoding="utf-8")
    parts = re.split(r"^== (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


MODULES = _modules()


def estimate(name: str, book: KernelBook | None = None, of: Rates = H200) -> Roofline:
    own = Rates(
        of.flops_per_s,
        of.vector_flops_per_s,
        of.bytes_per_s,
        of.launch_s,
        kernels=book or KernelBook(),
    )
    return estimate_step(parse_hlo(MODULES[name]), own)


def struct(*dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


# --- libraries, as compiled -----------------------------------------------------------

# Eight sequences of 2048, 16 heads of 128: two products of the whole square of scores.
SQUARE = 4 * 8 * 16 * 2048**2 * 128
WINDOW = 256**2 / 2 + (2048 - 256) * 256
MATRIX = {
    "attention forward": SQUARE / 2,
    "attention backward": 2.5 * SQUARE / 2,
    "windowed attention": 4 * 8 * 16 * WINDOW * 128,
    "attention with dropout": SQUARE,
    "attention with dropout backward": 2.5 * SQUARE,
    "attention with bias backward": 2.5 * SQUARE,
    "attention, heads first": 4 * 2 * 16 * 512 * 1024 * 128,
    "convolution": 2 * 8 * 32 * 32 * 64 * 9 * 64,
    "convolution backward": 2 * 8 * 32 * 32 * 64 * 9 * 64,
    "convolution filter": 2 * 8 * 32 * 32 * 64 * 9 * 64,
    "product with gelu": 2 * 1024 * 512 * 2048,
    "product with bias": 2 * 1024 * 512 * 2048,
    "f8 product": 2 * 1024 * 512 * 1024,
}
VECTOR = {
    "convolution": 2 * 8 * 32 * 32 * 64,
    "product with gelu": 17 * 1024 * 2048,
    "product with bias": 1024 * 2048,
    "norm": 8 * 8192 * 512,
    "cholesky": 4 * 64**3 / 3,
    "qr": 4 * 2 * 32**2 * (64 - 32 / 3),
    "reflectors": 4 * (4 * 64 * 32 * 32 - 2 * 96 * 32**2 + 4 * 32**3 / 3),
    "svd": 4 * (4 * 64**2 * 32 + 8 * 64 * 32**2 + 9 * 32**3),
    "eigh": 4 * 9 * 64**3,
    "lu": 4 * 2 * 64**3 / 3,
    "pivots": 0,
    "triangular solve": 4 * 64**2 * 16,
    "top k": 64 * 4096 * 12,
}


@pytest.mark.parametrize("name", sorted({*MATRIX, *VECTOR}))
def test_a_library_call_costs_what_its_configuration_says(name: str) -> None:
    found = estimate(name)
    assert not found.unknown and not found.unpriced_kernels
    assert found.flops == pytest.approx(MATRIX.get(name, 0))
    if name in VECTOR:
        assert found.vector_flops == pytest.approx(VECTOR[name])
    assert found.bytes > 0


@pytest.mark.parametrize("name", [n for n in MATRIX if "attention" in n])
def test_attention_takes_its_flops_over_the_rate_of_products(name: str) -> None:
    # The rest runs beside the products, at these head sizes within their time.
    (kernel,) = estimate(name).kernels
    flops_s = MATRIX[name] / H200.flops_per_s["bf16"]
    assert kernel.time_s == pytest.approx(flops_s + H200.launch_s, rel=1e-6)


def test_dropout_costs_more_where_heads_are_small() -> None:
    slow = Rates({"bf16": 1e15}, vector_flops_per_s=1e10, bytes_per_s=1e18, launch_s=0.0)
    with_dropout, without = (
        estimate(name, of=slow).time_s for name in ("attention with dropout", "attention forward")
    )
    # Half of the scores are masked away without dropout.
    assert with_dropout > 2.5 * without


@pytest.mark.parametrize(
    ("queries", "keys", "causal", "window", "expected"),
    [
        (8, 8, False, 0, 64),
        (8, 4, False, 0, 32),
        (8, 8, True, 0, 32),
        (4, 8, True, 0, 8),
        (8, 4, True, 0, 8 + 16),
        (8, 8, True, 2, 2 + 12),
        (8, 8, True, 100, 32),
    ],
)
def test_scores_that_are_computed(
    queries: int, keys: int, causal: bool, window: int, expected: float
) -> None:
    found = num_scores(queries, keys, causal=causal, window=window)
    assert found == expected
    if causal:
        rows = (min(i + 1, keys, window or keys) for i in range(queries))
        # Half a score a row of those that still rise is not counted.
        assert sum(rows) - min(queries, keys, window or keys) / 2 == expected


def test_nothing_known_is_its_bytes_and_is_named() -> None:
    for name, target in (("triton", "__gpu$xla.gpu.triton"), ("mosaic", "mosaic_gpu_v2")):
        found = estimate(name)
        assert dict(found.unknown) == {f"custom-call:{target}": 1}
        assert found.unpriced_kernels == (target,)
        (kernel,) = found.kernels
        assert kernel.time_s == pytest.approx(kernel.bytes / H200.bytes_per_s + H200.launch_s)


# --- the user's prices ----------------------------------------------------------------


@pytest.mark.parametrize("name", ["__gpu$xla.gpu.triton", "mha_forward", "pallas_call"])
def test_a_price_of_the_users_by_target_by_kernel_or_by_primitive(name: str) -> None:
    seen: list[Any] = []

    def cost(operands: Any, results: Any) -> tuple[float, float]:
        seen.append((operands, results))
        return 1e12, 5.0

    found = estimate("triton", KernelBook(priced={name: cost}))
    heads = struct(2, 512, 4, 64, dtype=jnp.bfloat16)
    assert seen == [([heads] * 3, [heads])]
    assert (found.flops, found.bytes, dict(found.unknown)) == (1e12, 5.0, {})
    assert found.time_s == pytest.approx(1e12 / H200.flops_per_s["bf16"] + H200.launch_s)
    # Before what is known otherwise.
    priced = KernelBook(priced={"__cudnn$fmhaSoftmax": cost})
    assert estimate("attention forward", priced).flops == 1e12


@pytest.mark.parametrize("said", [None, 3.0, (1.0,), (-1.0, 0.0), (float("nan"), 0.0), ("a", 1)])
def test_a_price_that_is_none_is_refused_by_name(said: Any) -> None:
    with pytest.raises(ValueError, match="kernel_costs.*'mha_forward'.*pair"):
        estimate("triton", KernelBook(priced={"mha_forward": lambda operands, results: said}))


def test_a_price_that_is_no_function_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="kernel_costs.*'mine'"):
        PlannerConfig(kernel_costs={"mine": 3.0})  # pyright: ignore[reportArgumentType]


# --- Pallas ---------------------------------------------------------------------------


def attention_program(length: int = 512, causal: bool = True) -> Any:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = pallas_attention.mha(q, k, v, None, causal=causal)
        return out.astype(jnp.float32).sum()

    heads = struct(2, length, 4, 64, dtype=jnp.bfloat16)
    return trace_loss(loss, (heads,) * 3)


def calls_of(program: Any) -> dict[str, Work]:
    book = kernel_book(own_step(program), {})
    return {call.names[0]: call.work or Work() for call in book.traced}


def test_a_pallas_kernel_is_its_jaxpr_at_each_point_of_its_grid() -> None:
    # Blocks of 128: two products each; causal, block-row i reads i + 1 blocks.
    block = 2 * 2 * 128 * 128 * 64
    heads = 2 * 4
    causal, whole = (
        calls_of(attention_program(causal=c))["mha_forward"].matrix_flops for c in (True, False)
    )
    assert whole == heads * 4 * 4 * block
    assert causal == heads * (1 + 2 + 3 + 4) * block


def test_of_a_large_grid_a_few_points_stand_for_all() -> None:
    length = 128 * 300
    found = calls_of(attention_program(length))["mha_forward"].matrix_flops
    # The diagonal blocks count whole.
    scores = num_scores(length, length, causal=True)
    assert found == pytest.approx(4 * 2 * 4 * scores * 64, rel=0.02)


def test_the_compiled_call_is_the_traced_one() -> None:
    book = kernel_book(own_step(attention_program()), {})
    forward = next(call for call in book.traced if call.names[0] == "mha_forward")
    # The step's forward also returns what its backward reads; the call of the text does not.
    primal = Call(forward.names, forward.operands, forward.results[:1], 0.0, forward.work)
    found = estimate("triton", KernelBook((primal,)))
    assert not found.unknown
    assert found.flops == 8 * 10 * 2 * 2 * 128 * 128 * 64
    other = Call(("else",), forward.operands, forward.results[:1], 0.0, forward.work)
    assert estimate("triton", KernelBook((other,))).unknown


def doubled(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.exp(x_ref[...]) * 2.0


def until_small(x_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jax.lax.while_loop(lambda x: x.sum() > 1.0, lambda x: x / 2, x_ref[...])


def pallas_work(kernel: Any, estimate: pl.CostEstimate | None = None) -> Call:
    def fun(x: jax.Array) -> Any:
        block = pl.BlockSpec((128,), lambda i: i)
        return pl.pallas_call(
            kernel,
            out_shape=x,
            grid=(8,),
            in_specs=[block],
            out_specs=block,
            cost_estimate=estimate,
            name="mine",
        )(x)

    (call,) = equation_work(jax.make_jaxpr(fun)(struct(1024)).eqns[0]).calls
    assert call.names == ("mine", "pallas_call")
    return call


def test_what_the_author_estimates_goes_before_the_kernel() -> None:
    own = pallas_work(doubled).work
    assert own is not None
    # An exponential counts eight flops, the product one.
    assert (own.vector_flops, own.bytes, own.flops) == (9 * 1024, 2 * 4 * 1024, ())
    said = pallas_work(doubled, pl.CostEstimate(flops=7, transcendentals=2, bytes_accessed=99)).work
    assert said is not None
    assert (said.vector_flops, said.bytes) == (7 + 2 * 8, 99)


def test_a_kernel_with_a_loop_of_unknown_length_is_not_known() -> None:
    assert pallas_work(until_small).work is None


# --- the traced program beside the compiled one ---------------------------------------

ANALYTIC = {
    "cholesky": (jnp.linalg.cholesky, [(4, 24, 24)]),
    "qr": (lambda x: jnp.linalg.qr(x)[0], [(4, 24, 16)]),
    "eigh": (lambda x: jnp.linalg.eigh(x)[1], [(4, 24, 24)]),
    "svd": (lambda x: jnp.linalg.svd(x, full_matrices=False)[0], [(4, 24, 16)]),
    "lu": (lambda x: jax.lax.linalg.lu(x)[0], [(4, 24, 24)]),
    "triangular solve": (
        lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True),
        [(4, 24, 24), (4, 24, 8)],
    ),
    "fft": (lambda x: jnp.real(jnp.fft.rfft2(x)), [(4, 32, 32)]),
    "sort": (jnp.sort, [(4096,)]),
    "ragged dot": (
        lambda a, b: jax.lax.ragged_dot(a, b, jnp.full(4, 16, jnp.int32)),
        [(64, 32), (4, 32, 48)],
    ),
    "window": (
        lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 8), (1, 1), "SAME"),
        [(256, 256)],
    ),
}


@pytest.mark.parametrize("name", ANALYTIC)
def test_an_equation_costs_what_the_compiled_kernel_does(name: str) -> None:
    function, shapes = ANALYTIC[name]
    avals = [struct(*dims) for dims in shapes]
    program = jax.make_jaxpr(function)(*avals)
    traced = sum(equation_work(eqn).total_flops for eqn in program.eqns)
    text = compile_flat(function, avals, get_target("cpu")).hlo_text
    found = estimate_step(parse_hlo(text), rates(get_target("cpu")))
    assert not found.unknown
    assert traced == pytest.approx(found.flops + found.vector_flops, rel=0.25)


@pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
def test_traced_attention_costs_what_its_configuration_says() -> None:
    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    query = struct(8, 2048, 16, 128, dtype=jnp.bfloat16)
    key = struct(8, 2048, 8, 128, dtype=jnp.bfloat16)
    found = calls_of(trace_loss(loss, (query, key, key)))
    for name, work in found.items():
        way = "backward" if "bwd" in name else "forward"
        assert work.matrix_flops == MATRIX[f"attention {way}"]
        assert H200.busy_s(work) == pytest.approx(estimate(f"attention {way}").time_s, rel=0.01)
    assert len(found) == 2


# --- whole plans ----------------------------------------------------------------------

WIDTH, ROWS = 32, 64
CALLBACK = re.compile(r"xla\w*python_cpu_callback")


def on_host(name: str) -> Any:
    """A product that runs outside XLA, with a gradient that does so too."""

    def times(x: jax.Array, w: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype)
        return jax.pure_callback(lambda a, b: np.asarray(a) @ np.asarray(b), out, x, w)

    @jax.custom_vjp
    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w if name == "known" else times(x, w)

    product.defvjp(
        lambda x, w: (times(x, w), (x, w)),
        lambda kept, g: (times(g, kept[1].T), times(kept[0].T, g)),
    )
    return product


def planned(name: str, **config: Any) -> tuple[Any, list[str]]:
    product = on_host(name)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(product(x, w))
        return (x**2).mean()

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("jax_hremat")
    logger.addHandler(handler)
    try:
        how = PlannerConfig(**{**vars_of(QUICK), **config})
        plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=how)(
            struct(WIDTH, WIDTH), struct(ROWS, WIDTH)
        )
    finally:
        logger.removeHandler(handler)
    return plan, [text for text in said if "nothing is known" in text]


def vars_of(config: PlannerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("search", "cost", "max_rounds")}


def test_an_unpriced_kernel_is_warned_of_and_a_price_of_the_users_is_taken() -> None:
    free, (warning,) = planned("unknown")
    (name,) = (key for key in free.unpriced if key.startswith("custom-call:"))
    target = name.removeprefix("custom-call:")
    assert CALLBACK.fullmatch(target)
    assert "Python" in warning and "kernel_costs={'pure_callback'" in warning
    # Two forwards, and three in the backward: the batch has no gradient.
    assert free.unpriced[name] == 5
    assert f"5 × {name}" in str(free)

    def cost(operands: Any, results: Any) -> tuple[float, float]:
        (rows, inner), (_, columns) = (o.shape for o in operands[-2:])
        return 2.0 * rows * inner * columns * 1e3, 0.0

    own, warnings = planned("unknown", kernel_costs={"pure_callback": cost})
    assert not warnings and not own.unpriced
    flops = 5 * 2 * ROWS * WIDTH**2 * 1e3
    rate = rates(get_target("cpu")).flops_per_s["f32"]
    assert own.baseline_step_s - free.baseline_step_s == pytest.approx(flops / rate, rel=0.02)


def test_an_unknown_kernel_of_a_custom_rule_costs_what_the_primal_would() -> None:
    plan, warnings = planned("known")
    assert not warnings and not plan.unpriced
    program = trace_loss(
        lambda x, w: on_host("known")(x, w).sum(), (struct(ROWS, WIDTH), struct(WIDTH, WIDTH)), {}
    )
    traced = kernel_book(own_step(program), {}).traced
    flops = [call.work.matrix_flops for call in traced if call.work is not None]
    # The forward's is the primal's; the backward's two share twice that by what they move, of which
    # one has the forward's shapes.
    assert flops == pytest.approx([2 * ROWS * WIDTH * WIDTH] * 2)


# --- cuDNN ----------------------------------------------------------------------------


@pytest.mark.parametrize("message", ["cuDNN not found.", "cuDNN is not detected."])
def test_without_cudnn_the_error_says_what_to_install(message: str) -> None:
    def loss(w: jax.Array) -> jax.Array:
        raise RuntimeError(message)

    with pytest.raises(TargetUnavailableError, match=r"jax_hremat\[gpu-aot-cudnn\]"):
        jax_hremat.plan_remat(loss, budget=1.0, target="cpu")(struct(4))


def test_other_errors_of_the_function_are_its_own() -> None:
    def loss(w: jax.Array) -> jax.Array:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="^mine"):
        jax_hremat.plan_remat(loss, budget=1.0, target="cpu")(struct(4))


@pytest.mark.skipif(not HAS_CUDNN, reason="cuDNN is not installed")
def test_cudnn_is_found_in_the_environment() -> None:
    version = cudnn_version()
    assert version is not None and version >= 90000
