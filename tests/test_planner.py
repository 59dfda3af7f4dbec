"""Planning from end to end on the CPU, and every wrong input with its message."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from programs import jit_peak_bytes, plain_layers
from tracing import trace_loss

import jax_hremat
from jax_hremat import (
    BudgetFormatError,
    InfeasibleBudgetError,
    PlannerConfig,
    RematPlan,
    SearchConfig,
    StalePlanError,
    UnknownTargetError,
    UnsupportedConfigError,
    UnsupportedProgramError,
)
from jax_hremat._emit.checkpoint import checkpoint
from jax_hremat._emit.step import own_step
from jax_hremat._plan.region import Region
from jax_hremat._planner.budget_search import BudgetSearch
from jax_hremat._planner.candidates import NO_SOLVE, Candidates
from jax_hremat._planner.context import PlanningContext, prepare
from jax_hremat._planner.goals import Terms, plan_for
from jax_hremat._shared.units import parse_budget
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._xla.certify import _scope, compile_step
from jax_hremat._xla.target import get_target

WIDE, BATCH, LENGTH = 16, 4, 64
QUICK = PlannerConfig(
    search=SearchConfig(max_packings=2, max_saved_sets=1, max_workers=2),
    max_rounds=2,
)
TINY = dataclasses.replace(
    QUICK, search=SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2)
)
BUDGETS = (1.0, 0.85, 0.7, 0.5)


def struct(*shape: int, dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def layer(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = (x @ p[name] for name in "qkv")
    x = x + jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 4.0) @ v
    return x + jax.nn.gelu(x @ p["in"]) @ p["out"]


def transformer(params: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for i, p in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = layer(p, x)
    return (x * x).mean()


def mlp(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jax.nn.gelu(x @ w) @ w.T
    return (x * x).mean()


LAYER = {
    **{name: struct(WIDE, WIDE) for name in "qkv"},
    "in": struct(WIDE, 4 * WIDE),
    "out": struct(4 * WIDE, WIDE),
}
TRANSFORMER = ([LAYER] * 3, struct(BATCH, LENGTH, WIDE))
MLP = ([struct(8, 32)] * 3, struct(256, 8))


def quiet(stage: str, done: int, total: int) -> None:
    assert 0 <= done <= total or total == 0


@pytest.fixture(scope="module")
def context() -> PlanningContext:
    program = trace_loss(transformer, TRANSFORMER)
    return prepare(own_step(program), get_target("cpu"), QUICK, 0.0, quiet)


def plan_of(context: PlanningContext, budget: int | float, headroom_bytes: int = 0) -> RematPlan:
    terms = Terms((0,), False, headroom_bytes)
    return plan_for(Candidates(context, quiet), parse_budget(budget), terms)


@pytest.fixture(scope="module")
def plans(context: PlanningContext) -> dict[float, RematPlan]:
    return {budget: plan_of(context, budget) for budget in BUDGETS}


@pytest.fixture(scope="module")
def floor_bytes(context: PlanningContext) -> int:
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_of(context, 0.01)
    return caught.value.min_budget_bytes


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_certificate_holds(plans: dict[float, RematPlan], budget: float) -> None:
    plan = plans[budget]
    certificate = plan.certificate
    assert certificate.holds
    assert certificate.peak_bytes <= certificate.budget_bytes
    assert certificate.budget_bytes == int(budget * plan.baseline_peak_bytes)
    given_bytes = certificate.argument_bytes + certificate.output_bytes
    assert certificate.peak_bytes <= (
        given_bytes + certificate.temp_bytes + certificate.constant_bytes
    )
    assert certificate.target == "cpu"
    assert plan.bound_step_s is not None
    assert 0 < plan.bound_step_s <= plan.predicted_step_s
    # Where the whole budget of no rematerialization is given, there is nothing to do.
    assert (plan.root.num_checkpointed == 0) == (budget == 1.0)


def test_less_memory_is_never_faster(plans: dict[float, RematPlan]) -> None:
    times = [plans[budget].estimated_step_s for budget in BUDGETS]
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert plans[1.0].slowdown <= 1.0


def test_more_than_the_baseline_is_never_slower_than_no_remat(context: PlanningContext) -> None:
    plan = plan_of(context, 10 * context.baseline.memory.peak_bytes)
    assert plan.estimated_step_s <= plan.baseline_step_s
    assert plan.certificate.holds


def test_a_plan_that_only_the_search_for_the_floor_finds_is_returned(
    context: PlanningContext, floor_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BudgetSearch, "fastest", lambda self: None)
    budget_bytes = int(1.05 * floor_bytes)
    found = Candidates(context, quiet)
    plan = plan_for(found, parse_budget(budget_bytes), Terms())
    assert plan.certificate.peak_bytes <= budget_bytes
    assert plan.estimated_step_s == min(c.step_s for c in found.within(budget_bytes))


@pytest.mark.slow
def test_where_the_solver_finds_nothing_a_plan_by_hand_that_fits_is_returned(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = Candidates(context, quiet)
    least = min(
        (
            by_hand.add(plan.chain, plan.selection, NO_SOLVE, Barriers.NONE)
            for plan in by_hand.chains.standard
        ),
        key=lambda c: c.peak_bytes,
    )
    monkeypatch.setattr(BudgetSearch, "_solve_rounds", lambda self, chain: None)
    best = BudgetSearch(Candidates(context, quiet), least.peak_bytes).fastest()
    assert best is not None
    assert best.peak_bytes <= least.peak_bytes
    assert best.step_s <= least.step_s


@pytest.mark.slow
def test_plain_dense_layers_are_planned_no_worse_than_checkpointed_by_hand() -> None:
    def dense(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.gelu(x @ w)

    args = ([struct(WIDE, WIDE)] * 6, struct(64 * BATCH, WIDE))
    by_hand = trace_loss(plain_layers(checkpoint(dense, prevent_cse=True)), args)
    hand = compile_step(own_step(by_hand), Region(0, by_hand.num_operations), get_target("cpu"))
    plan = jax_hremat.plan_remat(
        plain_layers(dense), budget=hand.memory.peak_bytes, target="cpu", config=QUICK
    )(*args)
    assert plan.certificate.peak_bytes <= hand.memory.peak_bytes
    assert plan.estimated_step_s <= hand.step_s


SLOWLY = [pytest.param(margin, 1, marks=pytest.mark.slow) for margin in (1.0, 1.06)]


@pytest.mark.parametrize(
    ("margin", "every"), [pytest.param(1.0, 4, marks=pytest.mark.slow), *SLOWLY]
)
def test_where_a_standard_plan_fits_it_is_not_faster(
    context: PlanningContext, margin: float, every: int
) -> None:
    for chain, selection in context.standard_plans()[::every]:
        by_hand = selection_region(context.costs.graph, chain, selection, Barriers.NONE)
        step = context.compile_step(by_hand)
        limit = int(margin * step.memory.peak_bytes)
        assert plan_of(context, limit).estimated_step_s <= step.step_s, selection


def test_the_smallest_budget_is_feasible_and_a_hundredth_below_is_not(
    context: PlanningContext, floor_bytes: int
) -> None:
    assert floor_bytes < 0.5 * context.baseline.memory.peak_bytes
    plan = plan_of(context, floor_bytes)
    assert plan.certificate.holds
    with pytest.raises(InfeasibleBudgetError, match=str(floor_bytes)) as caught:
        plan_of(context, int(0.99 * floor_bytes))
    error = caught.value
    assert (error.min_budget_bytes, error.budget_bytes) == (floor_bytes, int(0.99 * floor_bytes))
    assert error.plan is not None and error.plan.certificate.holds
    assert error.plan.certificate.peak_bytes == error.plan.certificate.budget_bytes == floor_bytes
    # It says what is in the way: a buffer, how large, and where.
    assert "f32[" in error.bottleneck
    assert "layer_" in error.bottleneck


def test_where_nothing_can_be_gained_the_smallest_budget_is_feasible() -> None:
    # Buffers of a few bytes: fragmentation is more than what is asked for.
    def solution(w: jax.Array) -> jax.Array:
        return (jnp.linalg.solve(w + 3 * jnp.eye(7), jnp.sin(w[0])) ** 2).sum()

    w = jax.random.normal(jax.random.key(0), (7, 7))
    with pytest.raises(InfeasibleBudgetError) as refusal:
        jax_hremat.plan_remat(solution, budget=0.9)(w)
    least_bytes = refusal.value.min_budget_bytes
    assert jax_hremat.plan_remat(solution, budget=least_bytes)(w).certificate.holds


@pytest.mark.parametrize(
    "partitioner",
    [
        jax_hremat.partition_by_repeats,
        pytest.param(jax_hremat.partition_by_score, marks=pytest.mark.slow),
        pytest.param(jax_hremat.partition_flat, marks=pytest.mark.slow),
    ],
)
def test_any_partitioner_gives_certified_budgets(partitioner: Any) -> None:
    program = trace_loss(mlp, MLP)
    config = dataclasses.replace(TINY, partitioner=partitioner)
    context = prepare(own_step(program), get_target("cpu"), config, 0.0, quiet)
    for budget in (0.9, 0.7):
        plan = plan_of(context, budget)
        assert plan.certificate.holds
        assert plan.certificate.budget_bytes == int(budget * context.baseline.memory.peak_bytes)


def test_headroom_is_taken_off_first(context: PlanningContext, floor_bytes: int) -> None:
    headroom = 12345
    plan = plan_of(context, 0.7, headroom)
    assert plan.certificate.headroom_bytes == headroom
    assert plan.certificate.holds
    # A fraction is one of the peak and the headroom together.
    assert plan.certificate.budget_bytes == int(0.7 * (plan.baseline_peak_bytes + headroom))
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_of(context, floor_bytes, headroom)
    assert caught.value.min_budget_bytes == floor_bytes + headroom


def test_the_certified_peak_is_that_of_the_users_own_jit(plans: dict[float, RematPlan]) -> None:
    plan = plans[0.5]
    step = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(transformer, plan)))
    options = jax_hremat.compiler_options("cpu")
    peak_bytes = jit_peak_bytes(step, *TRANSFORMER, compiler_options=options)
    assert peak_bytes == plan.certificate.peak_bytes


def test_a_plan_says_what_it_does(plans: dict[float, RematPlan]) -> None:
    plan = plans[0.5]
    assert plan.blocks[0].start == 0
    assert all(a.stop == b.start for a, b in itertools.pairwise(plan.blocks))
    assert plan.blocks[-1].stop == plan.root.stop
    assert any(b.recomputed for b in plan.blocks)
    assert sum(b.kept_bytes for b in plan.blocks) < sum(b.plain_bytes for b in plan.blocks)
    assert plan.buffers
    assert {"trace", "partition", "cost", "solve", "certify"} <= plan.timings_s.keys()
    text = str(plan)
    assert "layer_0" in text and "layer_2" in text
    assert "certified peak" in text and "budget" in text


def test_the_same_input_gives_the_same_plan() -> None:
    make = jax_hremat.plan_remat(mlp, budget=0.8, target="cpu", config=TINY)
    # Arrays and shapes alike.
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), MLP)
    first, second = make(*MLP), make(*arrays)
    assert first.root.num_checkpointed > 0
    assert first.to_json() == second.to_json()


# Wrong inputs.


def refuse(fun: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Plan what must be refused before anything is compiled."""
    options = {"budget": 0.5, "target": "cpu", "config": TINY} | options
    jax_hremat.plan_remat(fun, **options)(*args)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("70G", 'did you mean "70GiB"'),
        ("lots", "not a positive number"),
        ("-1GiB", "not a positive number"),
        (2.0, "at most 1; for bytes, write int"),
        (0, "budget=0"),
        (0.0, "not positive"),
        (float("nan"), "not finite"),
        (None, "no budget was given"),
        (True, "True"),
    ],
)
@pytest.mark.parametrize("entry", [jax_hremat.plan_remat, jax_hremat.hremat])
def test_a_malformed_budget(entry: Callable[..., Any], budget: Any, message: str) -> None:
    with pytest.raises(BudgetFormatError, match=message):
        entry(mlp, budget=budget, target="cpu")


@pytest.mark.parametrize("entry", [jax_hremat.plan_remat, jax_hremat.hremat])
def test_an_unknown_target(entry: Callable[..., Any]) -> None:
    with pytest.raises(UnknownTargetError, match="h20(?s:.*)h200"):
        entry(mlp, budget=0.5, target="h20")


def test_a_plan_for_another_program(plans: dict[float, RematPlan]) -> None:
    plan = plans[0.5]
    params, x = TRANSFORMER
    applied = jax_hremat.apply_plan(transformer, plan)
    wide = struct(2 * BATCH, LENGTH, WIDE)
    with pytest.raises(StalePlanError, match=r"`transformer`.*input args\[1\]: .* became .*8,64"):
        jax.eval_shape(applied, params, wide)

    def other(params: Any, x: jax.Array) -> jax.Array:
        return transformer(params, jnp.sin(x))

    with pytest.raises(StalePlanError, match=r"`other`.*operation 0 was dot_general.* is sin"):
        jax.eval_shape(jax_hremat.apply_plan(other, plan), *TRANSFORMER)
    with pytest.raises(StalePlanError, match="Make it again with `jax_hremat.plan_remat`"):
        jax.eval_shape(applied, params[:2], x)


def ordered_print(w: jax.Array, x: jax.Array) -> jax.Array:
    jax.debug.print("{}", x.sum(), ordered=True)
    return (w * x).sum()


def ordered_callback(w: jax.Array, x: jax.Array) -> jax.Array:
    seen = io_callback(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x.sum(), ordered=True)
    return (w * x).sum() + seen


@pytest.mark.parametrize("fun", [ordered_print, ordered_callback])
def test_an_ordered_effect(fun: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedProgramError, match=r"ordered effects \(.*`ordered=False`"):
        refuse(fun, struct(4), struct(4))


@pytest.mark.parametrize(
    ("fun", "options", "message"),
    [
        (lambda w, x: w * x, {}, "must return a real floating scalar; it returned float32"),
        (lambda w, x: (w * x).sum().astype(int), {}, "real floating scalar; it returned int32"),
        (lambda w, x: (w * x).sum() + 0j, {}, "real floating scalar; it returned complex64"),
        (lambda w, x: ((w * x).sum(), x), {}, "one scalar loss.*`has_aux=True`"),
        (lambda w, x: (w * x).sum(), {"has_aux": True}, r"a pair `\(loss, aux\)`"),
        (lambda w, x: (w * x, x), {"has_aux": True}, "real floating scalar"),
        (
            lambda w, x: {"loss": (w * x).sum()},
            {},
            r"one scalar loss; it returned PyTreeDef\({'loss",
        ),
        (lambda w, x: [(w * x).sum()], {}, "one scalar loss"),
        (lambda w, x: ([(w * x).sum()], x), {"has_aux": True}, r"a pair `\(loss, aux\)`"),
    ],
)
def test_no_scalar_loss(fun: Callable[..., Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedProgramError, match=message):
        refuse(fun, struct(4), struct(4), **options)


def test_integer_parameters() -> None:
    def fun(params: Any, x: jax.Array) -> jax.Array:
        return sum(p.sum() for p in jax.tree.leaves(params)) * x.sum()

    integers = struct(4, dtype=np.int32)
    with pytest.raises(UnsupportedProgramError, match="nothing to differentiate.*int32.*Cast"):
        refuse(fun, {"a": integers, "b": integers}, struct(4))
    # As with `allow_int`, or a filter, integers among floating parameters have no gradient.
    plan = jax_hremat.plan_remat(fun, budget=1.0, target="cpu")(
        {"a": struct(4), "b": integers}, struct(4)
    )
    assert plan.fingerprint.inputs[0].endswith("*") and not plan.fingerprint.inputs[1].endswith("*")
    with pytest.raises(UnsupportedProgramError, match=r"hold no arrays.*are in args\[1\]; point"):
        refuse(fun, {}, struct(4))


@pytest.mark.parametrize("argnums", [2, -3, (0, 5)])
def test_argnums_out_of_range(argnums: Any) -> None:
    with pytest.raises(UnsupportedProgramError, match="names argument .* passed by position"):
        refuse(lambda w, x: (w * x).sum(), struct(4), struct(4), argnums=argnums)


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(f)/jvp(Model)/layer_0/tanh", "Model/layer_0/tanh"),
        ("jit(f)/transpose(jvp(Model))/rematted_computation/dot", "Model/(recomputed)/dot"),
        ("jit(f)/while/body/mul", "(loop)/mul"),
        ("jit(f)/Model/add;jit(f)/Model/mul", "Model/add"),
        ("jit(f)/(jvp()/shard_map/psum:transpose(jvp())/shard_map/psum)", "shard_map/psum"),
    ],
)
def test_the_scopes_of_an_instruction(op_name: str, scope: str) -> None:
    assert _scope(op_name) == scope


def test_captured_arrays_are_pointed_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    for size, is_large in ((256, True), (2, False)):
        captured = jnp.asarray(np.random.default_rng(0).normal(size=(size, size)), jnp.float32)

        def loss(w: jax.Array, captured: jax.Array = captured) -> jax.Array:
            return (jnp.sin(w[:, : len(captured)] @ captured)).sum()

        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="jax_hremat"):
            plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu")(struct(256, 256))
        assert ("captures arrays of 256.00 KiB" in caplog.text) == is_large
        certificate = plan.certificate
        assert certificate.constant_bytes >= captured.nbytes
        step = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(loss, plan)))
        assert jit_peak_bytes(step, struct(256, 256)) == certificate.peak_bytes
        assert ("captured arrays and other constants" in " ".join(str(plan).split())) == is_large
        constants = [b.size_bytes for b in plan.buffers if b.kind == "constant"]
        assert (256 * 2**10 in constants) == is_large


def test_argnums_as_numpy_integers() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.sin(w) * x).sum()

    for argnums in (np.int64(1), [np.int64(0), np.int64(1)]):
        plan = jax_hremat.plan_remat(loss, budget=1.0, argnums=argnums, target="cpu")(  # pyright: ignore[reportArgumentType]
            struct(4), struct(4)
        )
        assert plan.argnums in ((1,), (0, 1))


@pytest.fixture
def remat3() -> Iterator[None]:
    if not hasattr(jax.config, "jax_remat3"):
        pytest.skip("this version of JAX has no `jax_remat3`")
    before = jax.config.jax_remat3
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", before)


def test_remat3_is_refused(remat3: None) -> None:
    with pytest.raises(UnsupportedConfigError, match=r"config.update\('jax_remat3', False\)"):
        refuse(mlp, *MLP)
    with pytest.raises(UnsupportedConfigError, match="jax_remat3"):
        jax_hremat.hremat(mlp, budget=0.5, target="cpu")(*jax.tree.map(jnp.zeros_like, MLP))


def test_without_rounds_for_the_floor_a_refusal_names_what_was_found_first(
    context: PlanningContext, floor_bytes: int
) -> None:
    hasty = dataclasses.replace(context, config=dataclasses.replace(context.config, floor_rounds=0))
    with pytest.raises(InfeasibleBudgetError) as caught:
        plan_of(hasty, 1)
    assert caught.value.min_budget_bytes >= floor_bytes
    assert plan_of(context, caught.value.min_budget_bytes).certificate.holds


@pytest.mark.parametrize("width", [pytest.param(16, marks=pytest.mark.slow), 64])
@pytest.mark.parametrize("fun", [lambda w, x: (jnp.tanh(w) ** 2).sum(), jax.nn.gelu])
def test_the_floor_is_never_above_no_rematerialization(fun: Any, width: int) -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return fun(x @ w).sum() if fun is jax.nn.gelu else fun(w, x)

    config = PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)
    make = functools.partial(jax_hremat.plan_remat, loss, target="cpu", config=config)
    args = struct(width, width), struct(4 * width, width)
    with pytest.raises(InfeasibleBudgetError) as caught:
        make(budget=1)(*args)
    floor_bytes = caught.value.min_budget_bytes
    plan = make(budget=floor_bytes)(*args)
    assert plan.certificate.peak_bytes == floor_bytes <= plan.baseline_peak_bytes


CONSTANT = jnp.float32(3)


@pytest.mark.parametrize("cost", ["compiled", "analytic", "measured"])
@pytest.mark.parametrize(
    ("fun", "args", "has_aux"),
    [
        (lambda w: w, (jnp.float32(2),), False),
        (lambda w: CONSTANT, (jnp.ones(3),), False),
        (lambda w: 1.0, (jnp.ones(3),), False),
        (lambda w, x: x, (jnp.ones(3), jnp.float32(2)), False),
        (lambda w, x: (w, {"x": x}), (jnp.float32(2), jnp.ones(3)), True),
    ],
)
def test_a_loss_of_no_operations(fun: Any, args: Any, has_aux: bool, cost: Any) -> None:
    config = dataclasses.replace(QUICK, cost=cost)
    options: dict[str, Any] = dict(has_aux=has_aux, target="cpu", config=config)
    plan = jax_hremat.plan_remat(fun, budget=1.0, **options)(*args)
    assert plan.certificate.holds
    assert plan == RematPlan.from_json(plan.to_json())
    assert "peak" in str(plan)
    step = jax.value_and_grad(jax_hremat.apply_plan(fun, plan), has_aux=has_aux)
    expected = jax.value_and_grad(fun, has_aux=has_aux)(*args)
    assert jax.tree.all(jax.tree.map(np.array_equal, jax.jit(step)(*args), expected))
    with pytest.raises(InfeasibleBudgetError) as caught:
        jax_hremat.plan_remat(fun, budget=1, **options)(*args)
    assert caught.value.min_budget_bytes == plan.certificate.peak_bytes
