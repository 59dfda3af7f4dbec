"""The search for one budget, where the compiler delays parts of the backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import normal
from tracing import emit, loss_call, trace_loss

from jax_hremat import PlannerConfig, SearchConfig, partition_by_score
from jax_hremat._cost.option import Option, pareto
from jax_hremat._cost.source import block_prices
from jax_hremat._emit.step import own_step
from jax_hremat._plan.region import Region
from jax_hremat._planner import aims
from jax_hremat._planner.barriers import needed_barriers
from jax_hremat._planner.budget_search import BudgetSearch
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import NO_SOLVE, Candidates
from jax_hremat._planner.context import PlanningContext, prepare
from jax_hremat._planner.corrections import Corrections
from jax_hremat._planner.cost_table import CostTable
from jax_hremat._planner.peak_bound import PeakBound
from jax_hremat._solve.chain import Selection
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._xla.target import get_target

MANY = Barriers.USUAL | Barriers.PLAIN
CONFIG = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2),
    cost="analytic",
)


def larger(candidate: Candidate, more_bytes: int, **changes: Any) -> Candidate:
    """A compiled plan that takes more memory; `changes` are of its step."""
    memory = candidate.step.memory
    more = replace(memory, temp_bytes=memory.temp_bytes + more_bytes)
    return replace(candidate, step=replace(candidate.step, memory=more, **changes))


class Altered(Candidates):
    """Compiled plans, the figures of each of which are altered when it is compiled."""

    def add(self, *given: Any, **options: Any) -> Candidate:
        before = self.num_compiled
        candidate = super().add(*given, **options)
        if self.num_compiled > before:
            candidate = self._found[candidate.root] = self.altered(candidate)
        return candidate

    def altered(self, candidate: Candidate) -> Candidate:
        raise NotImplementedError


class Delaying(Altered):
    """Compiled plans of which those that recompute without a barrier at the loss take more memory
    than predicted."""

    delayed_bytes = 0

    def altered(self, candidate: Candidate) -> Candidate:
        recomputes = any(region.checkpointed for _, region in candidate.root.walk())
        if _is_barrier_at_the_loss(candidate) or not recomputes:
            return candidate
        return larger(candidate, self.delayed_bytes)


def _is_barrier_at_the_loss(candidate: Candidate) -> bool:
    if not candidate.root.children:
        return False
    last = candidate.root.children[-1]
    return last.barrier and not last.checkpointed and last.stop == candidate.root.stop


def mlp(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jax.nn.gelu(x @ w) @ (2 * w.T)
    return (x * x).mean()


@pytest.fixture(scope="module")
def context() -> PlanningContext:
    return of_layers(3)


def of_layers(count: int) -> PlanningContext:
    weights = [jax.ShapeDtypeStruct((8, 32), np.float32)] * count
    args = (weights, jax.ShapeDtypeStruct((256, 8), "f4"))
    program = trace_loss(mlp, args)
    # Compiled costs, by which peaks are predicted to a hundredth.
    config = replace(CONFIG, cost="compiled", cache_dir="")
    found = prepare(own_step(program), get_target("cpu"), config, 0.0, lambda *_: None)
    return replace(found, costs=with_runs_of_gelu(found.costs))


def with_runs_of_gelu(costs: CostTable) -> CostTable:
    """The costs with one more option of each block: all but its products and its sum checkpointed,
    so that these few small blocks have plans for more budgets."""
    options = {}
    with block_prices("compiled", costs.program, costs.graph, get_target("cpu"), None) as price:
        for kind, found in costs.options.items():
            block = costs.partition.blocks[kind]
            if len(block) < 12:  # The loss by itself.
                options[kind] = found
                continue
            run = Region(block.start + 1, block.start + 11, checkpointed=True)
            region = Region(block.start, block.stop, children=(run,))
            cost = price(block, region)
            option = Option(region.shifted(-block.start), cost, "runs")
            options[kind] = replace(found, options=pareto([*found.options, option]))
    return replace(costs, options=options)


def test_a_plan_that_misses_is_compiled_with_a_barrier_at_the_loss(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.75 * context.baseline.memory.peak_bytes)
    # More than predictions usually err, and less than a wide miss.
    monkeypatch.setattr(Delaying, "delayed_bytes", int(0.05 * limit))
    found = Delaying(context, lambda *_: None)
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.peak_bytes <= limit
    assert _is_barrier_at_the_loss(best)
    # The next search begins with these barriers; its best plan is compiled without them as well.
    needed = needed_barriers(found.compiled, best.selection, int(0.9 * limit), found.price_s)
    assert Barriers.PLAIN in needed
    before = set(found._found)
    second = BudgetSearch(found, int(0.9 * limit)).search()
    assert second is not None
    new = [
        c for root, c in found._found.items() if root not in before and c.outcome is not NO_SOLVE
    ]
    assert new[0].barriers == needed
    without = [c for c in new if Barriers.PLAIN not in c.barriers]
    assert {c.selection for c in without} <= {second.selection}


class Dear(Delaying):
    """The same, where the barrier at the loss takes more time than any options."""

    def altered(self, candidate: Candidate) -> Candidate:
        step_s = (2 if _is_barrier_at_the_loss(candidate) else 1) * candidate.step_s
        return larger(super().altered(candidate), 0, step_s=step_s)


def test_a_barrier_that_takes_more_time_than_options_is_left_out(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.75 * context.baseline.memory.peak_bytes)
    monkeypatch.setattr(Delaying, "delayed_bytes", int(0.05 * limit))
    found = Dear(context, lambda *_: None)
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.peak_bytes <= limit
    assert not _is_barrier_at_the_loss(best)
    # It was tried, fitted, and was not tried again.
    tried = [c for c in found.compiled if _is_barrier_at_the_loss(c)]
    assert len(tried) == 1 and tried[0].peak_bytes <= limit
    assert Barriers.PLAIN not in needed_barriers(
        found.compiled, best.selection, limit, found.price_s
    )


def test_a_few_bytes_are_priced_as_a_part_of_more(context: PlanningContext) -> None:
    found = Candidates(context, lambda *_: None)
    most_bytes = context.baseline.memory.peak_bytes
    # Times rise in steps: peaks a hundredth below which the step takes more time.
    prices = {
        peak_bytes: price_s
        for peak_bytes in range(most_bytes // 2, most_bytes, most_bytes // 100)
        if 0 < (price_s := found.price_s(peak_bytes, int(0.01 * peak_bytes))) < math.inf
    }
    assert prices
    for peak_bytes, price_s in prices.items():
        few_bytes = int(0.01 * peak_bytes) // 4
        assert found.price_s(peak_bytes, few_bytes) == pytest.approx(price_s / 4, rel=0.01)
    assert found.price_s(most_bytes, most_bytes) == math.inf


class Idle(Altered):
    """Compiled plans that take less time without barriers at plain blocks, and as much memory."""

    def altered(self, candidate: Candidate) -> Candidate:
        step_s = (1.002 if Barriers.PLAIN in candidate.barriers else 1) * candidate.step_s
        return larger(candidate, 0, step_s=step_s)


def test_what_is_compiled_is_expected_to_fit(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.7 * context.baseline.memory.peak_bytes)

    def first_predicted_bytes(more_bytes: int) -> int:
        """The predicted peak of the first plan compiled, where the nearest plan took as much memory
        as predicted, and those most like the one at hand took more."""

        def expected(_: Corrections, __: Any, prediction: Prediction, *___: Any) -> int:
            return prediction.peak_bytes + more_bytes

        monkeypatch.setattr(Corrections, "excess_near", lambda *_: 0)
        monkeypatch.setattr(Corrections, "expected_bytes", expected)
        found = Candidates(context, lambda *_: None)
        known = set(found.compiled)
        BudgetSearch(found, limit).search()
        first = next(c for c in found.compiled if c not in known)
        return first.prediction.peak_bytes

    assert 0.9 * limit < first_predicted_bytes(0) <= 1.001 * limit
    assert first_predicted_bytes(int(0.2 * limit)) <= 0.801 * limit


def test_barriers_that_take_time_are_left_out_where_a_plan_is_expected_to_fit_without(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.8 * context.baseline.memory.peak_bytes)
    solver = context.config.solver

    def aimed(found: Candidates, more_bytes: int) -> Barriers:
        """The barriers of the next plan, where plans without barriers at plain blocks take more."""

        def peak_without_bytes(
            _: Corrections, some: Barriers, __: Selection, prediction: Prediction, ___: Barriers
        ) -> int:
            return prediction.peak_bytes + (some == Barriers.PLAIN) * more_bytes

        monkeypatch.setattr(Corrections, "peak_without_bytes", peak_without_bytes)
        monkeypatch.setattr(aims, "needed_barriers", lambda *_: MANY)
        chain = found.chains.full
        aim = aims.Aims(found, limit, solver).next(chain, PeakBound(limit, limit), groups=True)
        assert aim is not None
        return aim.barriers

    found = Idle(context, lambda *_: None)
    # What they take is not known yet.
    assert aimed(found, 0) == MANY
    chain = found.chains.full
    selection = found.solve(chain, int(0.9 * limit), solver).selection
    assert selection is not None
    for barriers in (Barriers.USUAL, MANY):
        found.add(chain, selection, NO_SOLVE, barriers)
    assert aimed(found, 0) == Barriers.USUAL
    assert aimed(found, limit) == MANY


def test_a_plan_that_does_not_need_its_barriers_loses_them(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.8 * context.baseline.memory.peak_bytes)
    found = Idle(context, lambda *_: None)
    # As if they had been needed before.
    monkeypatch.setattr(aims, "needed_barriers", lambda *_: MANY)
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.peak_bytes <= limit
    assert Barriers.PLAIN not in best.barriers
    bare = best.root.without_barriers()
    same = [c for c in found.compiled if c.root.without_barriers() == bare]
    assert MANY in {c.barriers for c in same}


def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The limits on predicted peaks that are solved for from now on."""
    limits: list[int] = []
    original = Candidates.solve

    def solve(self: Candidates, chain: Any, peak_bytes: int, *given: Any, **options: Any) -> Any:
        limits.append(peak_bytes)
        return original(self, chain, peak_bytes, *given, **options)

    monkeypatch.setattr(Candidates, "solve", solve)
    return limits


def least_predicted_bytes(found: Candidates) -> int:
    """The least predicted peak of all schedules."""
    full, context = found.chains.full, found.context
    lowest = found.chains.schedules(full).least_peak(context.config.solver).selection
    assert lowest is not None
    return context.predict(full, lowest).peak_bytes


def test_between_a_plan_that_fits_and_one_that_misses_is_one_that_reaches_the_limit(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Candidates(context, lambda *_: None)
    chain, solver = found.chains.full, context.config.solver
    highest = found.solve(chain, int(0.8 * context.baseline.memory.peak_bytes), solver).selection
    assert highest is not None
    limit = context.predict(chain, highest).peak_bytes

    def expected(_: Corrections, __: Any, prediction: Prediction, *___: Any) -> int:
        # What is at the limit exceeds it; the rest is as predicted.
        more_bytes = (prediction.peak_bytes >= limit) * int(0.15 * limit)
        return prediction.peak_bytes + more_bytes

    monkeypatch.setattr(Corrections, "expected_bytes", expected)
    targets = asked_for(monkeypatch)
    aim = aims.Aims(found, limit, solver).next(chain, PeakBound(limit, limit), groups=True)
    assert aim is not None and aim.expected_bytes <= limit
    # As much lower as the first misses, then on the line between the two.
    first, lower, *between = targets
    assert first == limit and between and all(lower < target < first for target in between)


def test_where_nothing_can_be_as_low_as_needed_the_search_goes_halfway(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Candidates(context, lambda *_: None)
    full, solver = found.chains.full, context.config.solver
    least_bytes = least_predicted_bytes(found)

    def is_higher(limit: int) -> bool:
        schedule = found.solve(full, limit, solver)
        return context.predict(full, schedule.selection).peak_bytes > 1.1 * least_bytes

    # How far the next schedule is above the least peak depends on the compiler.
    limit = next(at for at in (int(1.1**n * least_bytes) for n in range(1, 8)) if is_higher(at))

    def expected(_: Corrections, __: Any, prediction: Prediction, *___: Any) -> int:
        # The higher the peak, the larger the error, which is none for the least peak.
        return least_bytes + 3 * (prediction.peak_bytes - least_bytes)

    monkeypatch.setattr(Corrections, "expected_bytes", expected)
    targets = asked_for(monkeypatch)
    target = int(0.9 * least_bytes)
    aim = aims.Aims(found, limit, solver).next(full, PeakBound(limit, target), groups=True)
    # Nothing is within the target; what misses does so by more than it is above the least peak.
    assert targets[:2] == [target, limit]
    assert targets[2] > least_bytes
    assert aim is not None and least_bytes <= aim.promise.peak_bytes < limit
    assert aim.expected_bytes <= limit


def test_a_search_passes_over_schedules_that_gaps_keep_from_fitting(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Candidates(context, lambda *_: None)
    chain, solver = found.chains.full, context.config.solver
    least_bytes = least_predicted_bytes(found)
    limit = int(0.95 * context.baseline.memory.peak_bytes)
    # Above this, gaps are so large that a schedule takes as much as any other up to the limit.
    low = (least_bytes + limit) // 2

    def gaps_bytes(prediction: Prediction) -> int:
        return max(0, int(1.05 * limit) - prediction.peak_bytes) * (prediction.peak_bytes > low)

    def expected(_: Corrections, __: Any, prediction: Prediction, *___: Any) -> int:
        return prediction.peak_bytes + prediction.gaps_bytes

    monkeypatch.setattr(Prediction, "gaps_bytes", property(gaps_bytes))
    monkeypatch.setattr(Corrections, "expected_bytes", expected)
    search = aims.Aims(found, limit, solver)

    def next_aim() -> aims.Aim | None:
        return search.next(chain, PeakBound(limit, limit), groups=True)

    aim = next_aim()
    assert aim is not None and aim.expected_bytes <= limit
    assert 0.8 * low < aim.promise.peak_bytes <= low
    # Once a plan fits that is about as fast, one that would fit without gaps, the fastest. It is
    # compiled if that is much faster.
    found.add(chain, aim.selection, aim.schedule.outcome)
    bold = next_aim()
    assert bold is not None and bold.expected_bytes - bold.promise.gaps_bytes <= limit
    assert low < bold.promise.peak_bytes < limit < bold.expected_bytes
    assert bold.promise.time_s < aim.promise.time_s
    much = found.step_s(bold.promise) <= 0.99 * found.step_s(aim.promise)
    assert search.is_worth_a_risk(bold) == much
    assert not search.is_worth_a_risk(aim)


class Needless(Altered):
    """Compiled plans that take more memory and time with late arguments, and more time with
    barriers of cotangents."""

    def altered(self, candidate: Candidate) -> Candidate:
        regions = [region for _, region in candidate.root.walk()]
        late = any(region.late_arguments for region in regions)
        behind = any(region.barrier for region in regions)
        step_s = (1 + 0.01 * (late + behind)) * candidate.step_s
        return larger(candidate, int(0.01 * late * candidate.peak_bytes), step_s=step_s)


def test_a_barrier_that_lowers_no_peak_is_left_out(context: PlanningContext) -> None:
    limit = int(0.65 * context.baseline.memory.peak_bytes)
    found = Needless(context, lambda *_: None)
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.peak_bytes <= limit
    assert not _is_barrier_at_the_loss(best)
    assert not any(region.late_arguments or region.barrier for _, region in best.root.walk())
    assert Barriers.LATE_ARGUMENTS not in needed_barriers(
        found.compiled, best.selection, limit, found.price_s
    )
    # The first plan shows it; those after it have none, for other budgets either.
    BudgetSearch(found, int(0.6 * context.baseline.memory.peak_bytes)).search()
    first, *others = (c for c in found.compiled if c is not found.plain)
    assert Barriers.LATE_ARGUMENTS in first.barriers
    assert others and not any(Barriers.LATE_ARGUMENTS in c.barriers for c in others)
    assert any(c.root.without_barriers() != first.root.without_barriers() for c in others)


class Early(Altered):
    """Compiled plans that take more memory, and less time, without late arguments."""

    def altered(self, candidate: Candidate) -> Candidate:
        late = any(region.late_arguments for _, region in candidate.root.walk())
        more_bytes = 0 if late else int(0.1 * candidate.peak_bytes)
        step_s = (1.01 if late else 1.0) * candidate.step_s
        return larger(candidate, more_bytes, step_s=step_s)


def test_late_arguments_that_lower_the_peak_stay(context: PlanningContext) -> None:
    limit = int(0.8 * context.baseline.memory.peak_bytes)
    found = Early(context, lambda *_: None)
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.peak_bytes <= limit
    assert any(region.late_arguments for _, region in best.root.walk())
    assert Barriers.LATE_ARGUMENTS in needed_barriers(
        found.compiled, best.selection, limit, found.price_s
    )
    without = Barriers.CHECKPOINTED
    plans = [c for c in found.compiled if c is not found.plain]
    assert sum(c.barriers == without for c in plans) == 1


def u_shaped(params: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """Layers down and up again, each of the latter with a skip connection to one of the former."""
    skips = []
    for w in params[:3]:
        skips.append(x)
        x = jnp.tanh(x @ w) @ (2 * w.T)
    for w, skip in zip(params[3:], skips[::-1], strict=True):
        x = jnp.tanh(jnp.concatenate([x, skip], 1) @ w)
    return (x * x).mean()


def test_plain_blocks_with_a_skip_connection_can_have_barriers() -> None:
    down = [jax.ShapeDtypeStruct((8, 32), np.float32)] * 3
    up = [jax.ShapeDtypeStruct((16, 8), np.float32)] * 3
    args = ([*down, *up], jax.ShapeDtypeStruct((256, 8), "f4"))
    call = loss_call(u_shaped, args)
    program = call.program
    config = replace(CONFIG, partitioner=partition_by_score)
    costs = prepare(own_step(program), get_target("cpu"), config, 0.0, lambda *_: None).costs
    chain = costs.chain(0, lambda o: (o.plain, o.checkpointed))
    skips = {v.readers[-1] for v in chain.boundary_values if v.readers[-1] > v.producer + 1}
    last = len(chain) - 1
    assert skips - {last}
    plain = Selection((0,) * len(chain))
    for barriers, expected in (
        (Barriers.NONE, set()),
        (Barriers.CHECKPOINTED, set()),
        (Barriers.USUAL, set()),
        (MANY, skips | {last}),
    ):
        root = selection_region(costs.graph, chain, plain, barriers)
        assert {chain.starts.index(r.start) for r in root.children if r.barrier} == expected
        assert not any(r.checkpointed for r in root.children)
        # The blocks on the way down double weights, which could be done at any time; the first
        # reads nothing that is made before.
        late = {chain.starts.index(r.start) for r in root.children if r.late_arguments}
        assert bool(late) == (Barriers.LATE_ARGUMENTS in barriers) and 0 not in late
        assert {chain.starts.index(r.start) for r in root.children} == expected | late
    # A checkpointed block has a barrier of its own, or one around it that takes in the gradients of
    # weights, too.
    first, *_ = sorted(skips)
    alone = Selection(tuple(int(k == first) for k in range(len(chain))))
    for barriers in (MANY, Barriers.ALL):
        root = selection_region(costs.graph, chain, alone, barriers)
        (region,) = [r for r in root.children if r.start == chain.starts[first]]
        assert region.barrier
        assert region.checkpointed == (barriers is MANY)
    (checkpointed,) = region.children
    assert checkpointed.checkpointed and not checkpointed.barrier
    assert (checkpointed.start, checkpointed.stop) == (region.start, region.stop)
    assert root.without_barriers() == selection_region(costs.graph, chain, alone, Barriers.NONE)
    # In a group, every plain block has one.
    group = replace(plain, groups=((first, last - 1),))
    with_few = selection_region(costs.graph, chain, group, Barriers.CHECKPOINTED)
    assert not any(r.children for r in with_few.children)
    root = selection_region(costs.graph, chain, group, MANY)
    (inside,) = [r.children for r in root.children if r.checkpointed]
    assert [chain.starts.index(r.start) for r in inside] == [*range(first, last)]
    assert all(r.barrier and not r.checkpointed for r in inside)

    # In 64 bits, so that what XLA rounds otherwise is far below what a wrong gradient would be.
    roots = [selection_region(costs.graph, chain, s, Barriers.ALL) for s in (plain, alone, group)]
    with jax.enable_x64(True):
        *params, x = (
            jnp.asarray(normal(seed, *s.shape), float) for seed, s in enumerate([*args[0], args[1]])
        )
        wide = loss_call(u_shaped, (params, x))
        wanted = jax.tree.leaves(jax.jit(jax.value_and_grad(u_shaped))(params, x))
        for root in roots:
            found = jax.tree.leaves(jax.jit(jax.value_and_grad(emit(wide, root)))(params, x))
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours.dtype == float
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


class Larger(Altered):
    """Compiled plans, each of which exceeds its predicted peak by more than the one before."""

    more_bytes = 0

    def __init__(self, *given: Any) -> None:
        self.num_with_barrier = 0
        super().__init__(*given)

    def altered(self, candidate: Candidate) -> Candidate:
        # The plans of least peak are compiled with all barriers at once.
        if candidate.barriers != Barriers.ALL:
            self.num_with_barrier += _is_barrier_at_the_loss(candidate)
        return larger(candidate, (self.num_compiled - 1) * self.more_bytes)


def test_barriers_that_lowered_no_peak_are_not_tried_again(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.8 * context.baseline.memory.peak_bytes)
    monkeypatch.setattr(Larger, "more_bytes", int(0.08 * limit))
    found = Larger(context, lambda *_: None)
    BudgetSearch(found, limit).search()
    assert found.num_with_barrier == 1
    more = [c.barriers for c in found.compiled if c.barriers != Barriers.ALL]
    for some in (Barriers.PLAIN, Barriers.GRADIENTS):
        assert [barriers for barriers in more if some in barriers] == [Barriers.USUAL | some]
    # Of several plans that missed, all could have been tried with a barrier too.
    missed = [c for c in found.compiled if c.peak_bytes > limit and c.barriers == Barriers.USUAL]
    assert len(missed) >= 2


class Unlucky(Altered):
    """Compiled plans of which those predicted above some peak just miss the limit."""

    limit = 0
    missing_from_bytes = 0

    def altered(self, candidate: Candidate) -> Candidate:
        if self.missing_from_bytes < candidate.prediction.peak_bytes <= self.limit:
            return larger(candidate, int(1.01 * self.limit) - candidate.peak_bytes)
        return candidate


def test_the_search_goes_on_while_no_plan_fits(
    context: PlanningContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = int(0.75 * context.baseline.memory.peak_bytes)
    brief = replace(context, config=replace(context.config, max_rounds=1))
    found = Unlucky(brief, lambda *_: None)
    full, solver = found.chains.full, brief.config.solver
    lowest = found.chains.schedules(full).least_peak(solver).selection
    least_bytes = brief.predict(full, lowest).peak_bytes
    monkeypatch.setattr(Unlucky, "limit", limit)
    monkeypatch.setattr(Unlucky, "missing_from_bytes", int(1.02 * least_bytes))
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.chain is found.chains.full
    missed = {c.root.without_barriers() for c in found.compiled if c.peak_bytes > limit}
    assert len(missed - {found.plain.root.without_barriers()}) > brief.config.max_rounds + 1
    assert max(c.prediction.peak_bytes for c in found.within(limit)) == best.prediction.peak_bytes


class FirstErrs(Altered):
    """Compiled plans of which only the first that recomputes takes more memory than predicted."""

    def altered(self, candidate: Candidate) -> Candidate:
        first = self.num_compiled == 2
        return larger(candidate, int(0.08 * candidate.peak_bytes) if first else 0)


def test_a_search_learns_more_than_the_error_of_the_plan_that_uses_up_the_limit() -> None:
    context = of_layers(8)
    found = FirstErrs(context, lambda *_: None)
    chain, solver = found.chains.full, context.config.solver
    within = found.solve(chain, int(0.6 * found.plain.peak_bytes), solver)
    assert within.selection is not None
    first = found.add(chain, within.selection, within.outcome)
    assert first.peak_bytes > 1.05 * first.prediction.peak_bytes
    best = BudgetSearch(found, first.peak_bytes).search()
    assert best is not None and best.peak_bytes <= first.peak_bytes
    assert best.prediction.peak_bytes > first.prediction.peak_bytes
    assert best.step_s < first.step_s


class ErringBelow(Altered):
    """Compiled plans of which those predicted below a peak take more memory than predicted."""

    exact_from_bytes = math.inf

    def altered(self, candidate: Candidate) -> Candidate:
        errs = candidate.prediction.peak_bytes < self.exact_from_bytes
        return larger(candidate, int(0.08 * candidate.peak_bytes) if errs else 0)


def test_a_plan_that_errs_less_than_all_others_is_found() -> None:
    context = of_layers(8)
    found = ErringBelow(context, lambda *_: None)
    chain, limit = found.chains.full, int(0.6 * found.plain.peak_bytes)
    fastest = found.solve(chain, limit, context.config.solver).selection
    assert fastest is not None
    found.exact_from_bytes = context.predict(chain, fastest).peak_bytes
    best = BudgetSearch(found, limit).search()
    assert best is not None and best.selection == fastest and best.peak_bytes <= limit
    others = [c for c in found.within(limit) if c is not best]
    assert others and min(c.step_s for c in others) > 1.01 * best.step_s


def test_a_compiled_plan_is_expected_to_take_what_it_took() -> None:
    context = of_layers(4)
    found = ErringBelow(context, lambda *_: None)
    chain, limit = found.chains.full, int(0.8 * found.plain.peak_bytes)
    schedule = found.solve(chain, limit, context.config.solver)
    assert schedule.selection is not None
    assert found.known(chain, schedule.selection, Barriers.USUAL) is None
    first = found.add(chain, schedule.selection, schedule.outcome)
    assert found.known(chain, schedule.selection, Barriers.USUAL) is first
    # The compiler delayed part of its backward, which tells nothing about other plans.
    found._found[first.root] = larger(first, first.peak_bytes)
    expected = aims.Aims(found, limit, context.config.solver).uncorrected(chain)
    assert expected is not None and expected.selection == first.selection
    assert expected.expected_bytes == 2 * first.peak_bytes
