"""Planning of programs with scans: what is tried, and that budgets are kept and used."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import normal
from tracing import trace_loss

import jax_hremat
from jax_hremat import InfeasibleBudgetError, PlannerConfig, RematPlan, SearchConfig, SolverConfig
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._emit.step import own_step
from jax_hremat._options.inner import BodySearch, near_divisor
from jax_hremat._options.loop_options import _segments
from jax_hremat._options.runs import Run
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.context import PlanningContext, prepare
from jax_hremat._planner.goals import Terms, plan_for
from jax_hremat._shared.units import parse_budget
from jax_hremat._solve.chain import Selection
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._trace.bodies import Body, Scan, bodies_of
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import get_target

QUICK = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1, max_segments=3, max_workers=2),
    max_rounds=2,
)
STEPS, WIDTH, BATCH = 24, 16, 64


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def stack(params: Any, x: jax.Array) -> jax.Array:
    """Residual layers under one scan, between two products of their own."""

    def layer(x: jax.Array, w: Any) -> Any:
        h = jax.nn.gelu(x @ w["in"])
        return x + jnp.tanh(h * h) @ w["out"], None

    x, _ = jax.lax.scan(layer, x @ params["first"], params["layers"])
    return ((x @ params["last"]) ** 2).mean()


STACK = (
    {
        "first": struct(WIDTH, WIDTH),
        "layers": {"in": struct(STEPS, WIDTH, 4 * WIDTH), "out": struct(STEPS, 4 * WIDTH, WIDTH)},
        "last": struct(WIDTH, WIDTH),
    },
    struct(BATCH, WIDTH),
)


def recurrent(w: jax.Array, xs: jax.Array) -> jax.Array:
    """One cell over many steps, of which only the last state is read."""

    def cell(state: Any, x: jax.Array) -> Any:
        h, c = state
        a, b = jnp.split(jnp.tanh((h + x) @ w), 2, axis=-1)
        c = jax.nn.sigmoid(a) * c + b
        return (jnp.tanh(c), c), None

    start = jnp.zeros_like(xs[0])
    (h, _), _ = jax.lax.scan(cell, (start, start), xs)
    return (h * h).mean()


def two_deep(ws: jax.Array, x: jax.Array) -> jax.Array:
    """A scan of scans, every step of the inner one with the same weights."""

    def outer(x: jax.Array, w: jax.Array) -> Any:
        def inner(h: jax.Array, _: None) -> Any:
            return jnp.tanh(jnp.sin(h) @ w), None

        return jax.lax.scan(inner, x, None, length=8)[0], None

    return (jax.lax.scan(outer, x, ws)[0] ** 2).mean()


def workbench(fun: Any, *args: Any) -> PlanningContext:
    program = trace_loss(fun, args)
    return prepare(own_step(program), get_target("cpu"), QUICK, 0.0, lambda *_: None)


def plan_of(context: PlanningContext, budget: int | float) -> RematPlan:
    return plan_for(Candidates(context, lambda *_: None), parse_budget(budget), Terms((0,)))


def floor_of(context: PlanningContext) -> int:
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_of(context, 0.01)
    return caught.value.min_budget_bytes


@pytest.fixture(scope="module")
def stacked() -> PlanningContext:
    return workbench(stack, *STACK)


def loops_of(plan: RematPlan) -> list[Any]:
    return [r.loop for _, r in plan.root.walk() if r.loop is not None]


def test_a_scan_is_a_block_of_its_own() -> None:
    program = trace_loss(stack, STACK)
    graph = build_graph(program)
    at = next(op.id for op in graph.operations if op.primitive == "scan")
    assert (at, at + 1) in [
        (b.start, b.stop) for b in partition_graph(graph, partition_by_width).blocks
    ]


def bodies(fun: Any, *args: Any) -> tuple[Program, Any]:
    program = trace_loss(fun, args)
    return program, bodies_of(program, build_graph(program))


def test_activity_goes_round_the_carry() -> None:
    def swapped(w: jax.Array, x: jax.Array) -> jax.Array:
        # `b` is active from the second step on only, `c` never.
        def step(carry: Any, _: None) -> Any:
            a, b, c = carry
            return (a * w, a + b, c * 2.0), None

        (a, b, c), _ = jax.lax.scan(step, (w, x, x), None, length=5)
        return a + b + c

    _, found = bodies(swapped, jnp.ones(()), jnp.ones(()))
    (loop,) = found.values()
    names = [loop.body.graph.values[v].active for v in loop.body.graph.arguments]
    # The constant w, then the carry (a, b, c).
    assert (loop.trips, names) == (5, [True, True, True, False])


def test_scans_inside_scans_are_found_and_scans_without_a_backward_left_out() -> None:
    _, found = bodies(two_deep, struct(4, 8, 8), struct(2, 8))
    (outer,) = found.values()
    (inner,) = outer.body.inner.values()
    assert (outer.trips, inner.trips, dict(inner.body.inner)) == (4, 8, {})

    def still(w: jax.Array, x: jax.Array) -> jax.Array:
        noise, _ = jax.lax.scan(lambda c, _: (c * 1.5, None), x, None, length=3)
        once, _ = jax.lax.scan(lambda c, _: (c * w, None), x, None, length=1)
        return (w * noise * once).sum()

    assert bodies(still, jnp.ones(()), jnp.ones((2,)))[1] == {}


@pytest.mark.parametrize("budget", [1.0, 0.7, 0.4])
def test_a_scanned_stack_keeps_its_budget(stacked: PlanningContext, budget: float) -> None:
    plan = plan_of(stacked, budget)
    assert plan.certificate.holds
    assert RematPlan.from_json(plan.to_json()) == plan
    if budget < 1:
        assert loops_of(plan)
        assert f"scan of {STEPS} steps, each" in str(plan)


def test_a_scanned_stack_is_no_slower_than_by_hand(stacked: PlanningContext) -> None:
    by_hand = stacked.standard_plans()
    assert len(by_hand) >= 3
    for chain, selection in by_hand:
        step = stacked.compile_step(
            selection_region(stacked.costs.graph, chain, selection, Barriers.NONE)
        )
        plan = plan_of(stacked, step.memory.peak_bytes)
        assert plan.estimated_step_s <= step.step_s


def test_predicted_peaks_of_scans_are_near(stacked: PlanningContext) -> None:
    for chain, selection in stacked.standard_plans():
        predicted = predict(chain, selection).peak_bytes
        root = selection_region(stacked.costs.graph, chain, selection, Barriers.NONE)
        assert predicted == pytest.approx(stacked.compile_step(root).memory.peak_bytes, rel=0.2)


def test_a_planned_scan_computes_the_same(stacked: PlanningContext) -> None:
    seeds = itertools.count()
    args = jax.tree.map(lambda s: 0.3 * normal(next(seeds), *s.shape), STACK)
    plan = plan_of(stacked, 0.5)
    options = jax_hremat.compiler_options("cpu")
    steps = [
        jax.jit(jax.value_and_grad(f), compiler_options=options)
        for f in (stack, jax_hremat.apply_plan(stack, plan))
    ]
    plain, planned = (step(*args) for step in steps)
    assert loops_of(plan)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(planned), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_long_recurrence_goes_below_one_state_per_step() -> None:
    steps = 256
    context = workbench(recurrent, struct(32, 64), struct(steps, 16, 32))
    chain = context.chain(lambda o: (o.under_policy("block"),))
    every_step = selection_region(
        context.costs.graph, chain, Selection((0,) * len(chain)), Barriers.NONE
    )
    hand = context.compile_step(every_step).memory.peak_bytes
    floor = floor_of(context)
    # Beyond what no plan can change, a state for each of about 2 √n steps and no more.
    assert floor - context.fixed_bytes < 0.35 * (hand - context.fixed_bytes)
    plan = plan_of(context, floor)
    assert plan.certificate.holds
    assert any(loop.segments for loop in loops_of(plan))


@pytest.mark.slow
def test_a_scan_of_scans_is_planned_inside() -> None:
    context = workbench(two_deep, struct(8, 32, 32), struct(64, 32))
    plan = plan_of(context, floor_of(context))
    assert plan.certificate.peak_bytes < 0.6 * context.baseline.memory.peak_bytes
    assert loops_of(plan)


def test_segment_lengths() -> None:
    assert _segments(32, 5) == [(2,), (4,), (8,), (16,), (8, 4)]
    assert near_divisor(45, 2048) in (32, 64)
    assert near_divisor(6, 13) == 6
    for trips in (2, 3, 13, 27, 100, 2048):
        for segments in _segments(trips, 5):
            lengths = (trips, *segments)
            assert list(lengths) == sorted(set(lengths), reverse=True)
            assert segments[-1] > 1
    assert _segments(2, 5) == []


def test_what_lasts_is_kept_once_and_comes_after_what_changes() -> None:
    """A weight's cast is the same in every step: a hundredth of it is a step's, so that runs which
    free what changes alone are tried, however little that is beside the weight."""
    width, steps = 256, 100

    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            pre = h @ w.astype(jnp.bfloat16) + x
            return (h * jnp.exp(jnp.sin(pre) * jnp.tanh(pre))).astype(h.dtype), None

        start = jnp.ones((2, width), jnp.bfloat16)
        return jax.lax.scan(step, start, xs)[0].astype(jnp.float32).sum()

    xs = jax.ShapeDtypeStruct((steps, 2, width), jnp.bfloat16)
    program = trace_loss(loss, (struct(width, width), xs))
    (scan,) = bodies_of(program, build_graph(program)).values()
    assert isinstance(scan, Scan)
    true, kept = scan.body.graph, scan.body.kept
    shares = {
        v.text: v.size_bytes / k.size_bytes for v, k in zip(true.values, kept.values, strict=True)
    }
    assert shares == {
        "f32[256,256]": pytest.approx(steps, rel=0.01),
        "bf16[256,256]": pytest.approx(steps, rel=0.02),
        "bf16[2,256]": 1,
    }
    product = next(op.id for op in true.operations if op.primitive == "dot_general")

    def best_run(body: Body) -> Run:
        """The run that frees most in the time that it adds."""
        search = BodySearch(body, rates(get_target("cpu")), SearchConfig(), SolverConfig())
        _, model = search.models({})
        return max((r for r in model.runs if r.added_s), key=lambda r: r.freed_bytes / r.added_s)

    search = BodySearch(
        scan.body, rates(get_target("cpu")), SearchConfig(max_saved_sets=0), SolverConfig()
    )
    measured = {search.plain: OptionCost(0.0, 0.0, 0, (), (), 0, 0)}
    runs = [mode.children[0] for mode in search.first_wave(measured) if mode.children]
    assert any(run.start > product for run in runs)
    assert best_run(scan.body).start > product
    # By its whole size the cast would be worth as much.
    assert best_run(replace(scan.body, kept=true)).start <= product
