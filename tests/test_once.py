"""What must run exactly once: how it is told, and that no plan runs it again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback, pallas
from programs import normal
from tracing import emit, loss_call, trace_loss

import jax_hremat
from jax_hremat import InfeasibleBudgetError, PlannerConfig
from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._cost.source import block_prices
from jax_hremat._options.block_search import BlockSearch
from jax_hremat._options.branch_options import BranchSearch
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._options.config import Negligible, SearchConfig
from jax_hremat._options.inner import BodySearch
from jax_hremat._options.loop_options import LoopSearch
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._plan.region import Region
from jax_hremat._planner.reports import once_words
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._trace.bodies import Body, Cond, Scan, bodies_of
from jax_hremat._trace.graph import build_graph
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import get_target

QUICK = PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)
W = normal(0, 16, 16) / 4
X = normal(1, 64, 16)


def least_memory(loss: Callable[..., Any], ws: list[jax.Array], **options: Any) -> Any:
    """The plan of the least memory found."""
    options |= {"target": "cpu", "config": QUICK}
    return jax_hremat.plan_remat(loss, max_slowdown=100.0, **options)(ws, X)


def wrap(start: int, stop: int) -> Region:
    return Region(start, stop, checkpointed=True)


def drawn(x: jax.Array) -> jax.Array:
    return lax.rng_uniform(jnp.float32(0), jnp.float32(1), x.shape)


def in_jit(x: jax.Array) -> jax.Array:
    return jax.jit(drawn)(x)


def in_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda c, _: (c * drawn(c), None), x, None, length=3)[0]


def in_cond(x: jax.Array) -> jax.Array:
    return lax.cond(x[0, 0] > 0, lambda x: x * drawn(x), jnp.sin, x)


def in_checkpoint(x: jax.Array) -> jax.Array:
    return jax.checkpoint(lambda x: jnp.sin(x) * drawn(x))(x)


@jax.custom_vjp
def in_function(x: jax.Array) -> jax.Array:
    return x * drawn(x)


in_function.defvjp(lambda x: (x * 0.5, None), lambda _, g: (g * 0.5,))


@jax.custom_vjp
def in_forward_rule(x: jax.Array) -> jax.Array:
    return x * 0.5


def _forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mask = drawn(x)
    return x * mask, mask


in_forward_rule.defvjp(_forward, lambda mask, g: (g * mask,))


@jax.custom_jvp
def in_tangent_rule(x: jax.Array) -> jax.Array:
    return x * 0.5


in_tangent_rule.defjvp(lambda x, t: ((y := x[0] * drawn(x[0])), t[0] * y))


def told_outside(x: jax.Array) -> jax.Array:
    io_callback(lambda _: None, None, lax.stop_gradient(x))
    return x


def by_foreign_call(x: jax.Array) -> jax.Array:
    jax.ffi.ffi_call("anything", (), has_side_effect=True)(lax.stop_gradient(x))
    return x


def debugged(x: jax.Array) -> jax.Array:
    jax.debug.callback(lambda _: None, x)
    return x


def printed(x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x[0, 0])
    return x


def by_bit_generator(x: jax.Array) -> jax.Array:
    bits = lax.rng_bit_generator(jnp.zeros(4, "uint32"), x.shape)[1]
    return x * (bits > jnp.uint32(2**31))


def by_pure_callback(x: jax.Array) -> jax.Array:
    fixed = lax.stop_gradient(x)
    return x * jax.pure_callback(np.sin, jax.typeof(fixed), fixed)


def by_a_kernel(x: jax.Array) -> jax.Array:
    def kernel(x_ref: Any, y_ref: Any) -> None:
        y_ref[...] = jnp.sin(x_ref[...])
        pallas.debug_print("{}", x_ref[0, 0])

    fixed = lax.stop_gradient(x)
    return x * pallas.pallas_call(kernel, out_shape=jax.typeof(fixed), interpret=True)(fixed)


def with_a_ref_inside(x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        ref = jax.new_ref(jnp.sin(carry))
        ref[0] = carry[1]
        return ref[...], None

    return lax.scan(step, x, None, length=3)[0]


@pytest.mark.parametrize(
    ("fun", "once"),
    [
        *((f, "rng_uniform") for f in (drawn, in_jit, in_scan, in_cond, in_checkpoint)),
        *((f, "rng_uniform") for f in (in_function, in_forward_rule, in_tangent_rule)),
        (told_outside, "io_callback"),
        (by_foreign_call, "ffi_call"),
        *((f, "") for f in (debugged, printed, by_bit_generator, by_pure_callback, by_a_kernel)),
        (with_a_ref_inside, ""),
    ],
)
def test_what_must_run_once(fun: Callable[[jax.Array], jax.Array], once: str) -> None:
    graph = build_graph(trace_loss(lambda x: (jnp.sin(x) * fun(x)).sum(), [X]))
    effectful = [op for op in graph.operations if op.effectful]
    assert len(effectful) == bool(once)
    for op in effectful:
        # It is named with the line it stands in.
        assert op.once.startswith(f"`{once}` at ")
        assert "test_once.py" in op.once


def dropout_layers(ws: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    masks = []
    for w in ws:
        masks.append(drawn(x))
        x = jnp.sin(jnp.tanh(x @ w) * masks[-1] @ w.T)
    return (x * x).sum(), masks


def dropout_scan(ws: list[jax.Array], x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    def step(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        mask = drawn(x)
        return jnp.sin(jnp.tanh(x @ w) * mask @ w.T), mask

    x, masks = lax.scan(step, x, jnp.stack(ws))
    return (x * x).sum(), list(masks)


def same_masks(ws: list[jax.Array], x: jax.Array, masks: list[jax.Array]) -> jax.Array:
    for w, mask in zip(ws, masks, strict=True):
        x = jnp.sin(jnp.tanh(x @ w) * mask @ w.T)
    return (x * x).sum()


def check_gradients(planned: Callable[..., Any]) -> None:
    """Of the numbers that were drawn for the value."""
    ws = [W, 2 * W]
    step = jax.jit(
        jax.value_and_grad(planned, has_aux=True),
        compiler_options=jax_hremat.compiler_options("cpu"),
    )
    (value, masks), gradients = step(ws, X)
    expected, expected_gradients = jax.value_and_grad(same_masks)(ws, X, masks)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("loss", [dropout_layers, dropout_scan])
def test_gradients_around_numbers_drawn(loss: Callable[..., Any]) -> None:
    call = loss_call(loss, [[W, 2 * W], X], has_aux=True)
    program = call.program
    whole = checkpoint_all(build_graph(program), Region(0, program.num_operations), wrap)
    assert whole.num_checkpointed
    check_gradients(emit(call, whole))


def test_gradients_of_a_planned_scan_that_draws_numbers() -> None:
    plan = least_memory(dropout_scan, [W, 2 * W], has_aux=True)
    assert plan.root.num_checkpointed
    check_gradients(jax_hremat.apply_plan(dropout_scan, plan))


def nested(x: jax.Array) -> jax.Array:
    """Scans in scans and conds in scans, with and without numbers drawn."""

    def pure(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(c @ W), None

    def random(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(c @ W) * drawn(c), None

    def branch(c: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.sin(c @ W) * drawn(c) @ W)

    def outer(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = lax.scan(pure, c, None, length=5)[0]
        c = lax.scan(random, jnp.tanh(c @ W), None, length=5)[0]
        return lax.cond(c[0, 0] > 0, branch, lambda c: jnp.tanh(jnp.sin(c @ W)), c), None

    x = lax.scan(outer, x, None, length=4)[0]
    x = lax.cond(x[0, 0] > 0, branch, lambda x: jnp.tanh(jnp.sin(x)), x)
    return (jnp.tanh(x @ W) * drawn(x) @ W).sum()


def wrapped_once(body: Body, region: Region, checkpointed: bool = False) -> Iterator[str]:
    """What a region runs again of that which must run once."""
    checkpointed = checkpointed or region.checkpointed
    if checkpointed:
        operations = body.graph.operations[region.start : region.stop]
        yield from (op.once for op in operations if op.effectful)
    for child in region.children:
        yield from wrapped_once(body, child, checkpointed)
    inside = body.inner.get(region.start)
    if region.loop is not None:
        assert isinstance(inside, Scan)
        yield from wrapped_once(
            inside.body, region.loop.body, checkpointed or bool(region.loop.segments)
        )
    if region.branches:
        assert isinstance(inside, Cond)
        for branch, mode in zip(inside.branches, region.branches, strict=True):
            yield from wrapped_once(branch, mode, checkpointed)


def test_no_region_checkpoints_what_must_run_once() -> None:
    program = trace_loss(nested, [X])
    graph = build_graph(program)
    whole = Body(graph, graph, bodies_of(program, graph))
    partition = partition_graph(graph, partition_by_width)
    target_rates, config, solver = rates(get_target("h200")), SearchConfig(), SolverConfig()
    times_s = operation_times_s(graph, target_rates)
    num_modes = 0
    with block_prices("analytic", program, graph, get_target("h200"), None) as price:
        measured = {
            region: price(block, region)
            for block in partition.blocks
            for region in [Region(block.start, block.stop)]
        }
    for block in partition.blocks:
        inside = whole.inner.get(block.start) if len(block) == 1 else None
        if isinstance(inside, Scan):
            search: Any = LoopSearch(graph, block, inside, target_rates, config, solver)
        elif isinstance(inside, Cond):
            search = BranchSearch(graph, block, inside, target_rates, config, solver)
        else:
            search = BlockSearch(graph, block, {}, times_s, config, solver, Negligible())
            effectful = [op for op in graph.operations[block.start : block.stop] if op.effectful]
            assert not effectful or len(block) == 1
        plain = {search.plain: measured[search.plain]}
        modes = [*search.plain_regions(), *search.first_wave(plain)]
        assert not [once for mode in modes for once in wrapped_once(whole, mode)]
        num_modes += len(modes)
    assert num_modes > 20


def test_a_body_is_checkpointed_around_what_must_run_once() -> None:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = jnp.tanh(jnp.sin(c @ W))
        c = jnp.tanh(jnp.sin(c * drawn(c)))
        return lax.scan(inner_step, c, None, length=4)[0], None

    def inner_step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        c = jnp.tanh(c @ W)
        return jnp.sin(c) * drawn(c), None

    program = trace_loss(lambda x: lax.scan(step, x, None, length=6)[0].sum(), [X])
    (scan,) = bodies_of(program, build_graph(program)).values()
    assert isinstance(scan, Scan)
    operations = scan.body.graph.operations
    once = [op.id for op in operations if op.effectful]
    assert len(once) == 2
    search = BodySearch(scan.body, rates(get_target("h200")), SearchConfig(), SolverConfig())
    children = search.checkpointed.children
    assert not search.checkpointed.checkpointed
    assert all(child.checkpointed for child in children)
    covered = {op for child in children for op in range(child.start, child.stop)}
    assert covered == {op.id for op in operations if op.active} - set(once)
    # With the inner scan's own body in the same way, and in no segments.
    (inner,) = {c.loop for mode in search.nested_regions() for c in mode.children if c.loop}
    assert inner is not None and not inner.segments
    assert [child.checkpointed for child in inner.body.children] == [True, True]


def layers_with(seen: Callable[[jax.Array], Any]) -> Callable[..., jax.Array]:
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jnp.tanh(x @ w)
            seen(x)
            x = x + jnp.sin(jnp.tanh(x @ w.T))
        return (x * x).mean()

    return loss


def test_debugging_callbacks_run_again_as_under_checkpoint() -> None:
    calls: list[None] = []
    loss = layers_with(lambda x: jax.debug.callback(lambda _: calls.append(None), x))
    call = loss_call(loss, [[W] * 4, X])
    program = call.program
    whole = checkpoint_all(build_graph(program), Region(0, program.num_operations), wrap)
    assert whole.checkpointed

    def count(fun: Callable[..., Any]) -> int:
        calls.clear()
        jax.block_until_ready(jax.jit(jax.grad(fun))([W] * 4, X))
        jax.effects_barrier()
        return len(calls)

    assert count(loss) == 4
    assert count(jax.checkpoint(loss)) == count(emit(call, whole)) == 8


def test_a_refusal_names_what_must_run_once() -> None:
    with pytest.raises(InfeasibleBudgetError) as refusal:
        loss = layers_with(told_outside)
        jax_hremat.plan_remat(loss, budget=1, target="cpu", config=QUICK)([W] * 2, X)
    assert "exactly once" in refusal.value.bottleneck
    assert "`io_callback` at" in refusal.value.bottleneck
    assert "test_once.py" in str(refusal.value)


def test_only_what_must_run_once_is_named() -> None:
    graph = build_graph(trace_loss(layers_with(debugged), [[W], X]))
    assert once_words(graph) == ""
