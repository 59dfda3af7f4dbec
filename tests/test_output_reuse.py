"""Output-buffer reuse: how much there is, what is predicted of it, and what the solver makes of
it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import EXACT, MIB, QUICK, ROUNDING_BYTES, all_predictions, chains, make, option
from tracing import trace_loss

import jax_hremat
from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import LiveRange, Phase
from jax_hremat._emit.step import own_step
from jax_hremat._planner.candidates import NO_SOLVE, Candidates
from jax_hremat._planner.context import PlanningContext, prepare, uniform
from jax_hremat._solve.assumed_reuse import (
    AssumedReuse,
    Prices,
    at_prices,
    most_reused,
    shown_prices,
)
from jax_hremat._solve.backend import Status
from jax_hremat._solve.chain import BoundaryValue, Chain, PartialGradient, Schedule, Selection
from jax_hremat._solve.lifetimes import Timeline
from jax_hremat._solve.output_reuse import Result, placed_in_results
from jax_hremat._solve.prediction import Prediction, predict
from jax_hremat._solve.regions import Barriers
from jax_hremat._solve.schedule import Schedules
from jax_hremat._solve.with_reuse import fastest_with_reuse
from jax_hremat._xla.target import get_target


@pytest.mark.parametrize(
    ("sizes", "idle", "reused"),
    [
        ([], [5], 0),
        ([5], [], 0),
        ([5], [4], 0),
        ([5], [5], 5),
        ([5, 5, 3], [6], 5),
        # The largest takes the smallest that it fits in, and leaves the larger one.
        ([3, 4], [5, 3], 7),
        ([10, 5, 5, 3], [5, 6], 10),
    ],
)
def test_each_buffer_goes_to_the_smallest_idle_result(
    sizes: list[int], idle: list[int], reused: int
) -> None:
    step = moments([LiveRange(size, 0, 0) for size in sizes], 2)
    assert reused_in(step, [Result(0, size) for size in idle], 1) == [reused, 0]


def reused_in(step: Timeline, results: Sequence[Result], num_blocks: int) -> Sequence[int]:
    return placed_in_results(step, results, num_blocks).reused_bytes


def moments(buffers: Sequence[LiveRange], count: int) -> Timeline:
    """A step whose moments have one position each."""
    return Timeline(buffers, range(count + 1), [0] * count)


def test_a_buffer_must_be_dead_before_its_result_is_written() -> None:
    # Two blocks: moments 0 and 1 are forwards, 2 is the backward of block 1, 3 that of block 0.
    result = [Result(1, 8)]
    assert reused_in(moments([LiveRange(8, 0, 1)], 4), result, 2) == [8, 8, 0, 0]
    assert reused_in(moments([LiveRange(8, 0, 2)], 4), result, 2) == [0, 0, 0, 0]
    assert reused_in(moments([LiveRange(8, 0, 2)], 4), [Result(0, 8)], 2) == [8, 8, 8, 0]


def test_a_result_holds_one_buffer_at_a_time() -> None:
    result = [Result(0, 8)]
    one, after, larger = LiveRange(6, 0, 0), LiveRange(5, 1, 2), LiveRange(7, 0, 1)
    assert reused_in(moments([after, one], 4), result, 2) == [6, 5, 5, 0]
    assert reused_in(moments([after, one, larger], 4), result, 2) == [7, 7, 0, 0]


def test_of_equal_results_the_last_output_holds_the_first_buffer() -> None:
    # The 6 fits in either result. The 5 meets it, and is read when the first result is written.
    first, then = LiveRange(6, 0, 1), LiveRange(5, 1, 2)
    early, late = Result(1, 8), Result(0, 8)
    assert reused_in(moments([first, then], 4), [late, early], 2) == [6, 11, 5, 0]
    assert reused_in(moments([first, then], 4), [early, late], 2) == [6, 6, 0, 0]


def test_a_result_holds_buffers_that_a_block_needs_one_after_the_other() -> None:
    # One block, whose forward has three positions.
    step = Timeline(
        [LiveRange(6, 0, 1), LiveRange(5, 2, 2), LiveRange(4, 1, 2)], (0, 3, 4), [0] * 4
    )
    assert reused_in(step, [Result(0, 8)], 1) == [6, 6, 5, 0]


def test_the_order_in_which_buffers_are_given_changes_nothing() -> None:
    # All alike but for when they live.
    buffers = [LiveRange(6, 0, 0), LiveRange(6, 0, 1), LiveRange(6, 1, 1)]
    results = [Result(0, 8)]
    found = {tuple(reused_in(moments(order, 4), results, 2)) for order in permutations(buffers)}
    assert found == {(6, 6, 0, 0)}


def with_buffers(
    found: Option, *, kept: Sequence[int], forward: Sequence[int] = (), backward: Sequence[int] = ()
) -> Option:
    """The same option with buffers of known sizes, all alive throughout."""
    cost = found.cost
    return replace(
        found,
        cost=replace(
            cost,
            kept_buffers=tuple(map(LiveRange, kept)),
            forward=Phase(tuple(map(LiveRange, forward)), (cost.forward_peak_bytes,)),
            backward=Phase(tuple(map(LiveRange, backward)), (cost.backward_peak_bytes,)),
        ),
    )


def three_blocks() -> Chain:
    one = with_buffers(option(1, 2, 9, 2, 13), kept=(6 * MIB, 3 * MIB), backward=(4 * MIB,))
    stream = [BoundaryValue(2 * MIB, k, (k + 1,), True, frozenset({(k + 1, 0)})) for k in range(2)]
    return make([[one]] * 3, [1.0] * 3, stream, fixed=20)


def test_a_result_lends_until_its_own_backward() -> None:
    chain, selection = three_blocks(), Selection((0, 0, 0))
    results = [Result(0, 7 * MIB), Result(1, 3 * MIB)]
    plain, with_reuse = predict(chain, selection), predict(chain, selection, results)
    # The last backward: 18 kept before, two streams of 2, 13 of its own. The 6 of the second block
    # go into 7: those of the first are read after all results are begun. The 3 of the last block go
    # into 3: those of the second are read in the backward in which that result is written.
    assert plain.peak_bytes == (20 + 18 + 4 + 13) * MIB
    last = next(m for m in with_reuse.moments if m.block == 2 and m.in_backward)
    assert last.reused_bytes == 9 * MIB
    assert last.live_bytes == (18 + 4 + 13 - 9) * MIB
    # The second result is written in the backward of the second block, the first in the first's.
    reused = {m.block: m.reused_bytes for m in with_reuse.moments if m.in_backward}
    assert (reused[1], reused[0]) == (6 * MIB, 0)
    assert with_reuse.time_s == plain.time_s


def test_the_peak_is_where_most_is_outside_of_results() -> None:
    # The backward has 8 MiB that fit in the result, then 7 more, then the 7 alone.
    first, then = LiveRange(8 * MIB, 0, 1), LiveRange(7 * MIB, 1, 2)
    phase = Phase((first, then), (8 * MIB, 15 * MIB, 9 * MIB))
    one = option(1, 2, 0, 0, 15)
    chain = make([[replace(one, cost=replace(one.cost, backward=phase))]] * 2, [1.0] * 2, [])
    step = predict(chain, Selection((0, 0)), [Result(0, 8 * MIB)])
    # The last block's backward has the result, and so is highest at the end; the first's has none.
    last, other = (m for m in step.moments if m.in_backward)
    assert (last.working_bytes, last.reused_bytes) == (9 * MIB, 0)
    assert (other.working_bytes, other.reused_bytes) == (15 * MIB, 0)
    assert step.at_peak_bytes == (8 * MIB, 7 * MIB)


def test_what_the_last_block_needs_in_its_forward_is_not_what_its_backward_needs() -> None:
    one = with_buffers(option(1, 2, 0, 8, 7), kept=(), forward=(8 * MIB,), backward=(7 * MIB,))
    step = predict(make([[one]] * 2, [1.0] * 2, []), Selection((0, 0)), [Result(0, 8 * MIB)])
    assert [m.reused_bytes for m in step.moments] == [8 * MIB, 8 * MIB, 7 * MIB, 0]


def fits(found: Prediction, reused: AssumedReuse, limit_bytes: int) -> bool:
    return all(
        m.live_bytes
        <= limit_bytes + (reused.backward if m.in_backward else reused.forward)[m.block]
        for m in found.moments
    )


@given(chains(), st.data())
@QUICK
def test_the_root_program_takes_what_is_reused_as_given(chain: Chain, data: st.DataObject) -> None:
    some = st.lists(
        st.integers(0, 9).map(lambda n: n * MIB), min_size=len(chain), max_size=len(chain)
    )
    reused = AssumedReuse(tuple(data.draw(some)), tuple(data.draw(some)))
    everything = all_predictions(chain, groups=False)
    peak_bytes = data.draw(st.sampled_from(sorted({p.peak_bytes for p in everything})))
    limit_bytes = peak_bytes - chain.fixed_bytes
    fitting = [p.time_s for p in everything if fits(p, reused, limit_bytes)]
    found = (
        Schedules(chain).fastest_within(peak_bytes, EXACT, groups=False, reused=reused).selection
    )
    assert (found is None) == (not fitting)
    if found is not None:
        assert predict(chain, found).time_s == pytest.approx(min(fitting), abs=1e-9)
    grouped = Schedules(chain).fastest_within(peak_bytes, EXACT, reused=reused).selection
    if grouped is not None:
        promise = predict(chain, grouped)
        assert fits(promise, reused, limit_bytes + ROUNDING_BYTES)
        assert found is None or promise.time_s <= predict(chain, found).time_s + 1e-9


def equal_layers(count: int) -> tuple[Chain, list[Result]]:
    """Layers that keep two buffers of 3 MiB, or recompute them; their gradients take 3 MiB each,
    the last layer's first."""
    keeps = option(1, 2, 6, 6, 6)
    keeps = with_buffers(keeps, kept=(3 * MIB, 3 * MIB))
    stream = [
        BoundaryValue(MIB, k, (k + 1,), True, frozenset({(k + 1, 0), (k + 1, 1)}))
        for k in range(count - 1)
    ]
    chain = make([[keeps, option(1, 3, 0, 6, 6)]] * count, [1.0] * count, stream, fixed=9)
    return chain, [Result(k, 3 * MIB) for k in reversed(range(count))]


def with_reuse(
    chain: Chain,
    peak_bytes: int,
    results: Sequence[Result],
    *,
    groups: bool = False,
    assumed: list[AssumedReuse] | None = None,
) -> Schedule:
    """The fastest schedule within a peak; what was assumed on the way is added to `assumed`."""
    schedules = Schedules(chain)
    if assumed is not None:
        schedules = Recorded(chain, assumed)
    return fastest_with_reuse(schedules, peak_bytes, results, EXACT, groups=groups)


class Recorded(Schedules):
    """Schedules that record what is assumed of reuse when they are asked for."""

    def __init__(self, chain: Chain, assumed: list[AssumedReuse]) -> None:
        super().__init__(chain)
        self._assumed = assumed

    def fastest_within(self, *args: Any, reused: AssumedReuse, **kwargs: Any) -> Schedule:
        self._assumed.append(reused)
        return super().fastest_within(*args, reused=reused, **kwargs)


def nearly(chain: Chain, peak_bytes: int) -> float:
    """The most that a schedule found within a peak is predicted to take."""
    return peak_bytes + 0.001 * (peak_bytes - chain.fixed_bytes) + ROUNDING_BYTES


def test_what_is_kept_goes_into_gradients_of_earlier_layers() -> None:
    chain, results = equal_layers(8)
    recomputed = predict(chain, Selection((1,) * 8), results)
    limit_bytes = recomputed.peak_bytes + 8 * MIB
    found = with_reuse(chain, limit_bytes, results)
    assert found.selection is not None
    promise = predict(chain, found.selection, results)
    assert promise.peak_bytes <= nearly(chain, limit_bytes)
    every = all_predictions(chain, groups=False, results=results)
    best_s = min(p.time_s for p in every if p.peak_bytes <= limit_bytes)
    assert found.bound_s - 1e-9 <= best_s <= promise.time_s + 1e-9
    assert promise.time_s - best_s <= 0.5 * (recomputed.time_s - best_s)


def two_buffers_a_layer(count: int) -> tuple[Chain, list[Result]]:
    """Layers that keep a buffer of 6 MiB, or one of 2 MiB, or both, or none; their gradients take
    6 MiB each. The one to be written last is the last output, in which buffers are placed first."""

    def way(added_s: float, *kept: int) -> Option:
        most = 4 + sum(kept)
        found = option(1, 2 + added_s, sum(kept), most, most)
        return with_buffers(found, kept=[size * MIB for size in kept])

    ways = [way(0, 6, 2), way(0.3, 6), way(0.5, 2), way(1)]
    stream = [
        BoundaryValue(MIB, k, (k + 1,), True, frozenset({(k + 1, o) for o in range(4)}))
        for k in range(count - 1)
    ]
    return make([ways] * count, [1.0] * count, stream, fixed=9), [
        Result(k, 6 * MIB) for k in reversed(range(count))
    ]


@pytest.mark.parametrize(
    ("spare", "num_solves"),
    [
        (0, 4),
        *(pytest.param(*some, marks=pytest.mark.slow) for some in [(1, 4), (2, 4), (3, 3), (4, 2)]),
    ],
)
def test_prices_find_the_best_schedule(spare: int, num_solves: int) -> None:
    chain, results = two_buffers_a_layer(6)
    every = all_predictions(chain, groups=False, results=results)
    limit_bytes = min(p.peak_bytes for p in every) + spare * MIB
    assumed: list[AssumedReuse] = []
    found = with_reuse(chain, limit_bytes, results, assumed=assumed)
    has_prices = [bool(reused.prices.sizes_bytes) for reused in assumed]
    # No numbers are corrected.
    assert not has_prices[0] and all(has_prices[1:])
    # At the least peaks they are halfway between those of two schedules.
    assert len(has_prices) == num_solves
    assert found.selection is not None
    promise = predict(chain, found.selection, results)
    assert promise.peak_bytes <= limit_bytes
    best_s = min(p.time_s for p in every if p.peak_bytes <= limit_bytes)
    assert promise.time_s == pytest.approx(best_s)
    assert found.bound_s == pytest.approx(best_s)


@st.composite
def many_sizes(draw: st.DrawFn) -> tuple[Chain, list[Result]]:
    """Layers that keep three buffers of some sizes, or some of them, or none, and gradients of
    other sizes."""
    count = draw(st.integers(4, 5))
    sizes = draw(st.tuples(*[st.sampled_from([2, 3, 4, 5, 6, 8])] * 3))

    def way(added_s: float, *kept: int) -> Option:
        most = 4 + sum(kept)
        found = option(1, 2 + added_s, sum(kept), most, most)
        return with_buffers(found, kept=[size * MIB for size in kept])

    ways = [way(0, *sizes), way(0.3, *sizes[:2]), way(0.5, sizes[2]), way(1)]
    stream = [
        BoundaryValue(MIB, k, (k + 1,), True, frozenset({(k + 1, o) for o in range(4)}))
        for k in range(count - 1)
    ]
    gradients = draw(st.tuples(*[st.sampled_from([2, 4, 6, 7])] * count))
    results = [Result(k, size * MIB) for k, size in enumerate(gradients)]
    return make([ways] * count, [1.0] * count, stream, fixed=9), results


@given(many_sizes(), st.integers(0, 8))
@QUICK
def test_near_the_least_peak_a_schedule_is_found(
    case: tuple[Chain, list[Result]], spare: int
) -> None:
    chain, results = case
    every = all_predictions(chain, groups=False, results=results)
    limit_bytes = min(p.peak_bytes for p in every) + spare * MIB
    found = with_reuse(chain, limit_bytes, results)
    assert found.selection is not None
    promise = predict(chain, found.selection, results)
    assert promise.peak_bytes <= nearly(chain, limit_bytes)
    best_s = min(p.time_s for p in every if p.peak_bytes <= limit_bytes)
    assert found.bound_s <= best_s + 1e-9
    assert found.outcome.gap >= 0
    assert promise.time_s <= 1.06 * best_s


def test_the_less_is_reused_the_slower_the_schedule() -> None:
    chain, results = equal_layers(4)
    limit_bytes = predict(chain, Selection((1,) * 4), results).peak_bytes + MIB
    most = most_reused(results, chain)

    def fastest_s(part: float) -> float:
        reused = AssumedReuse(
            tuple(int(part * size) for size in most.forward),
            tuple(int(part * size) for size in most.backward),
        )
        selection = Schedules(chain).fastest_within(limit_bytes, EXACT, reused=reused).selection
        return math.inf if selection is None else predict(chain, selection).time_s

    times_s = [fastest_s(part) for part in (1.0, 0.7, 0.3, 0.0)]
    assert times_s == sorted(times_s) and times_s[0] < times_s[-1]


def with_sizes(option: Option) -> Option:
    """The same option, its bytes in buffers: half of what it keeps and all else in one each."""
    cost = option.cost
    half = cost.kept_bytes // 2
    return with_buffers(
        option,
        kept=(half, cost.kept_bytes - half),
        forward=(cost.forward_peak_bytes,),
        backward=(cost.backward_peak_bytes,),
    )


def in_buffers(chain: Chain) -> Chain:
    """The same chain, all its bytes in buffers."""
    return replace(
        chain,
        options=tuple(tuple(map(with_sizes, some)) for some in chain.options),
        handing_on=tuple(Phase((LiveRange(size),), (size,)) for size in chain.handing_on_bytes),
    )


def some_results(chain: Chain, data: st.DataObject) -> list[Result]:
    size = st.integers(1, 12).map(lambda n: n * MIB)
    block = st.integers(0, len(chain) - 1)
    return [Result(data.draw(block), data.draw(size)) for _ in range(3)]


@given(chains(), st.data())
@QUICK
def test_no_schedule_reuses_more_than_the_most(chain: Chain, data: st.DataObject) -> None:
    chain = in_buffers(chain)
    results = some_results(chain, data)
    most = most_reused(results, chain)
    for found in all_predictions(chain, results=results):
        for m in found.moments:
            assert m.reused_bytes <= (most.backward if m.in_backward else most.forward)[m.block]
        possible_s = Schedules(chain).least_possible_s(found.peak_bytes, EXACT, most)
        assert possible_s <= found.time_s + 1e-9


@given(chains(), st.data())
@QUICK
def test_no_schedule_is_excluded_at_prices(chain: Chain, data: st.DataObject) -> None:
    chain = in_buffers(chain)
    results = some_results(chain, data)
    everything = all_predictions(chain, results=results)
    one, other = (
        shown_prices(results, found)
        for found in data.draw(st.tuples(st.sampled_from(everything), st.sampled_from(everything)))
    )
    prices = data.draw(st.sampled_from([one, one.halfway_to(other)]))
    reused = at_prices(results, prices, len(chain))
    peak_bytes = data.draw(st.sampled_from(sorted({p.peak_bytes for p in everything})))
    found = Schedules(chain).fastest_within(peak_bytes, EXACT, reused=reused)
    assert found.selection is not None
    within = [p.time_s for p in everything if p.peak_bytes <= peak_bytes]
    assert found.bound_s <= min(within) + 1e-6


def test_a_partial_gradient_waits_in_the_memory_of_results() -> None:
    # An embedding that the first and the last block read, much larger than what blocks need.
    small = with_buffers(option(1, 1, 0, 2, 2), kept=(), forward=(2 * MIB,), backward=(2 * MIB,))
    stream = [BoundaryValue(MIB, k, (k + 1,), True, frozenset()) for k in range(2)]
    chain = make([[small]] * 3, [1.0] * 3, stream, fixed=0)
    chain = replace(chain, partial_gradients=(PartialGradient(64 * MIB, range(1, 2)),))
    results = [Result(0, 64 * MIB)]
    plain = Selection((0, 0, 0))
    peak_bytes = predict(chain, plain, results).peak_bytes
    assert peak_bytes < 64 * MIB
    assert with_reuse(chain, peak_bytes, results, groups=True).selection == plain


def test_the_last_block_of_a_group_reuses_what_it_needs_there() -> None:
    # Alone the block keeps 40 MiB in one buffer; at the end of a group its backward has one of 30.
    light = with_buffers(option(1, 1, 0, 2, 2), kept=(), forward=(2 * MIB,), backward=(2 * MIB,))
    alone = with_buffers(
        option(1, 1, 40, 42, 60), kept=(40 * MIB,), forward=(2 * MIB,), backward=(20 * MIB,)
    )
    ending = with_buffers(
        option(1, 2, 0, 2, 31), kept=(), forward=(2 * MIB,), backward=(30 * MIB, MIB)
    )
    alone = replace(alone, at_end=ending.cost)
    stream = [BoundaryValue(MIB, k, (k + 1,), True, frozenset()) for k in range(2)]
    chain = replace(
        make([[light], [alone], [light]], [1.0] * 3, stream, fixed=0),
        handing_on_bytes=(2 * MIB,) * 3,
        handing_on=(light.cost.forward,) * 3,
    )
    results = [Result(0, 30 * MIB)]
    group = Selection((0, 0, 0), ((0, 1),))
    peak_bytes = predict(chain, group, results).peak_bytes
    assert with_reuse(chain, peak_bytes, results, groups=True).selection == group
    for price in (0, 10, 20):
        reused = at_prices(results, Prices((30 * MIB,), (price * MIB,)), len(chain))
        assert Schedules(chain).fastest_within(peak_bytes, EXACT, reused=reused).selection == group


def test_prices_are_those_of_the_largest_buffers_without_a_result() -> None:
    chain, results = equal_layers(4)
    # The last forward: the other layers keep six buffers of 3 MiB, for four results.
    shown = predict(chain, Selection((0,) * 4), results)
    assert (shown.peak.block, shown.peak.in_backward) == (3, False)
    found = at_prices(results, shown_prices(results, shown), len(chain))
    assert found.prices == Prices((3 * MIB,), (3 * MIB,))
    assert found.forward == (12 * MIB,) * 4
    assert found.backward == (0, 3 * MIB, 6 * MIB, 9 * MIB)
    # Nothing is kept: results are worth no more than a boundary value.
    cheap = predict(chain, Selection((1,) * 4), results)
    assert shown_prices(results, cheap) == Prices((3 * MIB,), (0,))
    assert [found.prices.counted_bytes(n * MIB) for n in (2, 3, 4)] == [2 * MIB, 3 * MIB, 4 * MIB]
    assert Prices((3, 8), (2, 5)).spared_bytes((1, 3, 6, 9)) == 0 + 1 + 1 + 0


def some_question(chain: Chain, data: st.DataObject) -> tuple[list[Result], int]:
    """Results, and the peak of some selection without them."""
    results = some_results(chain, data)
    peaks = sorted({p.peak_bytes for p in all_predictions(chain)})
    return results, data.draw(st.sampled_from(peaks))


@given(chains(), st.data())
@QUICK
def test_what_is_found_with_reuse_fits(chain: Chain, data: st.DataObject) -> None:
    results, peak_bytes = some_question(chain, data)
    found = with_reuse(chain, peak_bytes, results, groups=True)
    assert found.selection is not None
    assert predict(chain, found.selection, results).peak_bytes <= nearly(chain, peak_bytes)
    everything = all_predictions(chain, results=results)
    assert all(found.bound_s <= p.time_s + 1e-6 for p in everything if p.peak_bytes <= peak_bytes)


@given(chains(), st.data())
@QUICK
def test_what_is_told_of_an_answer_with_reuse_is_proven(chain: Chain, data: st.DataObject) -> None:
    chain = in_buffers(chain)
    results = some_results(chain, data)
    everything = all_predictions(chain, results=results)
    peak_bytes = data.draw(st.sampled_from(sorted({p.peak_bytes for p in everything})))
    found = with_reuse(chain, peak_bytes, results, groups=True)
    outcome = found.outcome
    if found.selection is None:
        # Some schedule fits, so that there is no proof of the opposite.
        assert outcome.status is Status.NOT_FOUND and math.isfinite(found.bound_s)
        return
    time_s = predict(chain, found.selection, results).time_s
    assert found.bound_s >= (1 - outcome.gap) * time_s - 1e-9
    proven = outcome.gap <= EXACT.relative_gap
    assert outcome.status is (Status.OPTIMAL if proven else Status.LIMIT)
    if proven:
        fitting_s = (p.time_s for p in everything if p.peak_bytes <= peak_bytes)
        assert time_s <= min(fitting_s) + 1e-6


def heavy(weights: list[Any], x: jax.Array) -> jax.Array:
    """Weights as large as activations."""
    for w_in, w_out in weights:
        x = x + jnp.sin(jax.nn.gelu(x @ w_in) @ w_out)
    return (x * x).mean()


@pytest.fixture(scope="module")
def context() -> PlanningContext:
    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    program = trace_loss(heavy, ([(struct(64, 128), struct(128, 64))] * 8, struct(128, 64)))
    config = jax_hremat.PlannerConfig(
        search=jax_hremat.SearchConfig(max_packings=1, max_saved_sets=1)
    )
    return prepare(own_step(program), get_target("cpu"), config, 0.0, lambda *_: None)


def test_the_memory_of_a_block_is_known_position_by_position(context: PlanningContext) -> None:
    costs = [option.cost for options in context.chain().options for option in options]
    assert any(len(cost.backward.live_bytes) > 3 for cost in costs)
    for cost in costs:
        assert sum(cost.kept_sizes) == cost.kept_bytes
        assert max(cost.forward.live_bytes) == cost.forward_peak_bytes
        assert max(cost.backward.live_bytes) == cost.backward_peak_bytes
        assert sum(cost.forward_sizes) == cost.forward_peak_bytes
        assert sum(cost.backward_sizes) == cost.backward_peak_bytes
        # There are no loops, so buffers are all there is.
        for position, live_bytes in enumerate(cost.forward.live_bytes):
            alive = [b for b in cost.forward.buffers if b.is_alive(position)]
            alive += [b for b in cost.kept_buffers if b.first <= position]
            assert sum(b.size_bytes for b in alive) == live_bytes
        for position, live_bytes in enumerate(cost.backward.live_bytes):
            passed = (b for _, b in (*cost.backward.cotangents, *cost.backward.gradients))
            alive = [b for b in (*cost.backward.buffers, *passed) if b.is_alive(position)]
            alive += [b for b in cost.kept_buffers if position <= b.last]
            assert sum(b.size_bytes for b in alive) == live_bytes


def test_peaks_of_heavy_weights_are_predicted(context: PlanningContext) -> None:
    assert sum(r.size_bytes for r in context.results) == 8 * 2 * 64 * 128 * 4
    candidates = Candidates(context, lambda *_: None)
    checkpointed = uniform(context.chain(lambda o: (o.checkpointed,)))
    tight = candidates.solve(
        candidates.chains.full, int(0.85 * candidates.plain.peak_bytes), context.config.solver
    )
    assert tight.selection is not None
    for chain, selection in (checkpointed, (candidates.chains.full, tight.selection)):
        found = candidates.add(chain, selection, NO_SOLVE, Barriers.USUAL)
        assert found.prediction.peak_bytes == pytest.approx(found.peak_bytes, rel=0.05)
    linear = predict(*uniform(context.chain(lambda o: (o.plain,))))
    assert linear.peak_bytes > 1.15 * candidates.plain.peak_bytes
