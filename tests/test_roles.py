"""What products are for, told from what they read, beside what their author calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from tracing import trace_loss

from jax_hremat._emit.barrier import KeptApart
from jax_hremat._emit.step import Step, own_step
from jax_hremat._options.block_search import BlockSearch
from jax_hremat._options.config import Negligible, SearchConfig
from jax_hremat._options.roles import PRESETS, Role, product_roles
from jax_hremat._partition.blocks import make_block
from jax_hremat._plan.region import Region
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.config import PlannerConfig
from jax_hremat._planner.context import prepare
from jax_hremat._planner.goals import Terms, plan_for
from jax_hremat._shared.units import Budget
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._trace.graph import build_graph
from jax_hremat._verify.replay import replay
from jax_hremat._xla.certify import compile_step
from jax_hremat._xla.target import get_target

BATCH, LENGTH, WIDTH, HEADS = 4, 32, 16, 2
X = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
# The names of MaxText's models.
NAMES = {
    "query": Role.QKV,
    "key": Role.QKV,
    "value": Role.QKV,
    "qkv": Role.QKV,
    "scores": Role.SCORES,
    "context": Role.CONTEXT,
    "out_proj": Role.OUT,
    "mlpwi_0": Role.MLP_IN,
    "mlpwi_1": Role.MLP_IN,
    "mlpwo": Role.MLP_OUT,
}


def called(name: str, product: jax.Array) -> jax.Array:
    return checkpoint_name(product, name)


def dense(params: Any, name: str, x: jax.Array) -> jax.Array:
    return called(name, x @ params[name])


def normalized(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    split = (*q.shape[:2], HEADS, -1)
    q, k, v = (a.reshape(split) for a in (q, k, v))
    scores = called("scores", jnp.einsum("bqhd,bkhd->bhqk", q, k))
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(v.dtype)
    context = called("context", jnp.einsum("bhqk,bkhd->bqhd", weights, v))
    return context.reshape(*split[:2], -1)


@jax.custom_vjp
def kernel(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return kernel_forward(q, k, v)[0]


def kernel_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    """One fused kernel, which also returns the logarithms of the weights' sums."""

    def body(q: Any, k: Any, v: Any, context: Any, sums: Any) -> None:
        scores = jnp.einsum("bqd,bkd->bqk", q[...], k[...])
        context[...] = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v[...])
        sums[...] = jax.nn.logsumexp(scores, axis=-1)

    shapes = [jax.ShapeDtypeStruct(shape, q.dtype) for shape in (q.shape, q.shape[:2])]
    context, sums = pl.pallas_call(body, out_shape=shapes, interpret=True)(q, k, v)
    return context, (q, k, v, context, sums)


def kernel_backward(kept: Any, g: jax.Array) -> Any:
    q, k, v, context, sums = kept
    weights = jnp.exp(jnp.einsum("bqd,bkd->bqk", q, k) - sums[..., None])
    shares = (g * context).sum(-1, keepdims=True)
    change = weights * (jnp.einsum("bqd,bkd->bqk", g, v) - shares)
    return (
        jnp.einsum("bqk,bkd->bqd", change, k),
        jnp.einsum("bqk,bqd->bkd", change, q),
        jnp.einsum("bqk,bqd->bkd", weights, g),
    )


kernel.defvjp(kernel_forward, kernel_backward)


def kernel_attention(params: Any, x: jax.Array) -> jax.Array:
    h = normalized(x)
    q, k, v = (dense(params, name, h) for name in ("query", "key", "value"))
    return x + dense(params, "out_proj", called("context", kernel(q, k, v)))


def fused_kernel_attention(params: Any, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(dense(params, "qkv", normalized(x)), 3, axis=-1)
    return x + dense(params, "out_proj", called("context", kernel(q, k, v)))


def self_attention(params: Any, x: jax.Array) -> jax.Array:
    h = normalized(x)
    q, k, v = (dense(params, name, h) for name in ("query", "key", "value"))
    return x + dense(params, "out_proj", attention(q, k, v))


def fused(params: Any, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(dense(params, "qkv", normalized(x)), 3, axis=-1)
    return x + dense(params, "out_proj", attention(q, k, v))


def gated(params: Any, x: jax.Array) -> jax.Array:
    h = normalized(x)
    up = jax.nn.silu(dense(params, "mlpwi_0", h)) * dense(params, "mlpwi_1", h)
    return x + dense(params, "mlpwo", up)


def experts(params: Any, x: jax.Array) -> jax.Array:
    """Every token by every expert."""
    h = called("mlpwi_0", jnp.einsum("btd,edf->ebtf", normalized(x), params["experts_in"]))
    out = jnp.einsum("ebtf,efd->ebtd", jax.nn.gelu(h), params["experts_out"])
    return x + called("mlpwo", out).mean(0)


def mixed(params: Any, x: jax.Array) -> jax.Array:
    """Experts that a router weighs: a product with batch dimensions that is no attention."""
    h = normalized(x)
    weights = jax.nn.softmax(called("mlpwi_1", h @ params["router"]))
    up = called("mlpwi_0", jnp.einsum("btd,edf->btef", h, params["experts_in"]))
    out = called("mlpwo", jnp.einsum("btef,efd->bted", jax.nn.gelu(up), params["experts_out"]))
    return x + called("mlpwo", jnp.einsum("bte,bted->btd", weights, out))


def cross_attention(params: Any, x: jax.Array) -> jax.Array:
    """Over what the program is given, as a decoder over an encoder's output."""
    h = normalized(x)
    q = dense(params, "query", h)
    k, v = (dense(params, name, jnp.cos(x)) for name in ("key", "value"))
    return x + dense(params, "out_proj", attention(q, k, v))


def weights() -> dict[str, jax.ShapeDtypeStruct]:
    wide = 4 * WIDTH
    shapes = {name: (WIDTH, WIDTH) for name in ("query", "key", "value", "out_proj")}
    shapes |= {"qkv": (WIDTH, 3 * WIDTH), "mlpwi_0": (WIDTH, wide), "mlpwi_1": (WIDTH, wide)}
    shapes |= {"mlpwo": (wide, WIDTH), "experts_in": (3, WIDTH, wide)}
    shapes |= {"experts_out": (3, wide, WIDTH), "router": (WIDTH, 3)}
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


Part = Callable[[Any, jax.Array], jax.Array]


@pytest.mark.parametrize(
    "parts",
    [
        (self_attention, gated),
        (fused, gated),
        (self_attention, cross_attention, gated),
        (self_attention, experts),
        (self_attention,),
        (self_attention, mixed),
        (kernel_attention, gated),
        (fused_kernel_attention, self_attention, experts),
    ],
    ids=lambda parts: "-".join(part.__name__ for part in parts),
)
def test_roles_are_those_of_the_names(parts: tuple[Part, ...]) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for part in parts:
            x = part(params, x)
        return jnp.mean(x**2)

    program = trace_loss(loss, (weights(), X))
    graph = build_graph(program)
    roles = product_roles(graph.operations)
    names = {
        graph.values[op.inputs[0]].producer: program.jaxpr.eqns[op.id].params["name"]
        for op in graph.operations
        if op.primitive == "name" and op.inputs[0] is not None
    }
    # A transposition may stand between a product and its name.
    found = {}
    for at, name in names.items():
        while graph.operations[at].primitive not in ("dot_general", "pallas_call"):
            at = graph.values[graph.operations[at].inputs[0]].producer
        found[at] = NAMES[name]
    assert roles == found
    assert len(roles) >= 3


def test_where_there_is_no_attention_there_are_no_roles() -> None:
    program = trace_loss(lambda params, x: jnp.mean(gated(params, x) ** 2), (weights(), X))
    assert product_roles(build_graph(program).operations) == {}


def layers_loss(names: Sequence[str] | None, params: Any, x: jax.Array) -> jax.Array:
    """Of layers that keep values by name; as they are without."""

    def layer(own: Any, x: jax.Array) -> jax.Array:
        return gated(own, self_attention(own, x))

    if names is not None:
        layer = jax.checkpoint(layer, policy=KeptApart(frozenset(names)))
    for own in params:
        x = layer(own, x)
    return jnp.mean(x**2)


PRESET_NAMES = {
    "save_context": ["context"],
    "save_qkv_proj": ["query", "key", "value"],
    "save_out_proj": ["out_proj"],
    "save_dot_except_mlp": ["query", "key", "value", "out_proj"],
    "save_dot_with_context_except_mlp": ["query", "key", "value", "context", "out_proj"],
    "save_dot_except_mlpwi": ["query", "key", "value", "out_proj", "mlpwo"],
    "minimal_with_context": [
        *("query", "key", "value", "context", "out_proj"),
        *("mlpwi_0", "mlpwi_1", "mlpwo"),
    ],
}


# The least and the most that one keeps; the others take their time.
QUICKLY = ("save_qkv_proj", "minimal_with_context")


@pytest.mark.parametrize(
    "presets", [QUICKLY, pytest.param(tuple(PRESETS), marks=pytest.mark.slow)], ids=["two", "all"]
)
def test_presets_are_the_policies_over_the_names(presets: tuple[str, ...]) -> None:
    """Compiled, they take the same memory."""

    def step_of(count: int, names: Sequence[str] | None = None) -> Step:
        loss = functools.partial(layers_loss, names)
        return own_step(trace_loss(loss, ([weights()] * count, X)))

    count, target = 2, get_target("cpu")
    plain, more = step_of(count), step_of(count + 1)
    operations = build_graph(plain.program).operations
    length = more.program.num_operations - plain.program.num_operations
    layers = [range(i * length, (i + 1) * length) for i in range(count)]
    assert PRESET_NAMES.keys() == PRESETS.keys()
    peaks = set()
    for preset in presets:
        names = PRESET_NAMES[preset]
        by_hand = step_of(count, names)
        nothing = Region(0, by_hand.program.num_operations)
        hand = compile_step(by_hand, nothing, target)
        checkpointed = []
        for layer in layers:
            roles = product_roles(operations[layer.start : layer.stop])
            saved = tuple((op, 0) for op, role in roles.items() if role in PRESETS[preset].roles)
            assert len(saved) == len(names)
            checkpointed.append(Region(layer.start, layer.stop, checkpointed=True, saved=saved))
        root = Region(0, len(operations), children=tuple(checkpointed))
        assert compile_step(plain, root, target).memory == hand.memory
        peaks.add(hand.memory.peak_bytes)
    # A context is as large as what an MLP returns.
    assert len(peaks) == min(len(presets), len(PRESETS) - 1)


def test_a_kept_context_spares_its_kernel() -> None:
    """The outputs of the kernel are kept, of which the backward reads both."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(gated(params, kernel_attention(params, x)) ** 2)

    program = trace_loss(loss, (weights(), X))
    graph = build_graph(program)
    block = make_block(graph, 0, len(graph.operations))
    times = [0.0] * len(block)
    roles = product_roles(graph.operations)
    modes = BlockSearch(
        graph, block, roles, times, SearchConfig(), SolverConfig(), Negligible()
    ).hand_regions()
    (at,) = [op.id for op in graph.operations if op.primitive == "pallas_call"]
    for name, mode in modes.items():
        kept = name in PRESETS and Role.CONTEXT in PRESETS[name].roles
        assert ({(at, 0), (at, 1)} <= set(mode.saved)) == kept
        assert (replay(program, mode).recomputed[at] == 0) == kept


@pytest.fixture(scope="module")
def candidates() -> Candidates:
    loss = functools.partial(layers_loss, None)
    program = trace_loss(loss, ([weights()] * 4, X), argnums=(0, 1))
    quick = PlannerConfig(search=SearchConfig(max_packings=1, max_saved_sets=1), max_rounds=1)
    context = prepare(own_step(program), get_target("cpu"), quick, 0.0, lambda *_: None)
    return Candidates(context, lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "preset",
    PRESETS,
)
def test_a_plan_at_a_presets_peak_is_not_slower(candidates: Candidates, preset: str) -> None:
    context = candidates.context
    assert set(PRESETS) <= set(context.costs.policies)
    chain, selection = context.layers_under(preset)
    assert selection.groups or any(selection.options)
    assert (chain, selection) in context.standard_plans()
    root = selection_region(context.costs.graph, chain, selection, Barriers.NONE)
    hand = context.compile_step(root)
    plan = plan_for(candidates, Budget(bytes=hand.memory.peak_bytes), Terms((0, 1), False))
    assert plan.certificate.peak_bytes <= hand.memory.peak_bytes
    assert plan.estimated_step_s <= hand.step_s
