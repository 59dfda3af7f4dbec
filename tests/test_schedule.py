"""The root program against every selection there is, as `predict` prices them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from integer_program import fastest_of_columns
from tracing import trace_loss

from jax_hremat._cost.option import Option, Origin
from jax_hremat._cost.option_cost import LiveRange, OptionCost, Phase
from jax_hremat._partition.tree import block_tree
from jax_hremat._plan.region import Region
from jax_hremat._solve.assumed_reuse import NO_REUSE
from jax_hremat._solve.backend import SolverConfig, Status
from jax_hremat._solve.chain import BoundaryValue, Chain, Group, PartialGradient, Selection
from jax_hremat._solve.groups import group_columns, single_columns
from jax_hremat._solve.keeping import keeping_columns
from jax_hremat._solve.nests import nest_columns
from jax_hremat._solve.output_reuse import Result
from jax_hremat._solve.prediction import Prediction, predict
from jax_hremat._solve.regions import selection_region
from jax_hremat._solve.schedule import Schedules
from jax_hremat._trace.graph import build_graph

MIB = 2**20
EXACT = SolverConfig(relative_gap=0.0)
# The solver counts in MiB and meets a row within 1e-6 of them, about one byte; a binary within
# 1e-6 of 1 may hide as much of each of a schedule's few values.
ROUNDING_BYTES = 64
QUICK = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def option(
    forward_ms: float,
    backward_ms: float,
    kept: int,
    forward_peak: int,
    backward_peak: int,
    origin: Origin = "plain",
) -> Option:
    """An option from times in ms and sizes in MiB."""
    cost = OptionCost(
        forward_s=forward_ms * 1e-3,
        backward_s=backward_ms * 1e-3,
        kept_bytes=kept * MIB,
        kept_inputs=(),
        kept_outputs=(),
        forward_peak_bytes=forward_peak * MIB,
        backward_peak_bytes=backward_peak * MIB,
    )
    return Option(Region(0, 4), cost, origin)


def at_the_end(one: Option, backward_peak: int) -> Option:
    """The option, where that is the peak of its backward, in MiB, at the end of a group."""
    return replace(one, at_end=replace(one.cost, backward_peak_bytes=backward_peak * MIB))


def make(
    options: list[list[Option]],
    recompute_ms: list[float],
    boundary_values: list[BoundaryValue],
    fixed: int = 10,
    last_recompute_ms: list[list[float]] | None = None,
    shared: list[int] | None = None,
) -> Chain:
    return Chain(
        starts=tuple(4 * k for k in range(len(options))),
        options=tuple(map(tuple, options)),
        recompute_s=tuple(r * 1e-3 for r in recompute_ms),
        handing_on_bytes=tuple(
            min(option.cost.forward_peak_bytes for option in opts) for opts in options
        ),
        handing_on=(Phase(),) * len(options),
        last_recompute_s=(
            tuple(
                tuple(r * 1e-3 for _ in opts) for r, opts in zip(recompute_ms, options, strict=True)
            )
            if last_recompute_ms is None
            else tuple(tuple(r * 1e-3 for r in row) for row in last_recompute_ms)
        ),
        shared_bytes=tuple(s * MIB for s in shared or [0] * len(options)),
        boundary_values=tuple(boundary_values),
        fixed_bytes=fixed * MIB,
    )


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Three to five blocks; a stream from each to the next and up to four skips."""
    num_blocks = draw(st.integers(3, 5))
    most = 2 if num_blocks < 5 else 1
    size, time_ms = st.integers(0, 12), st.integers(0, 9)
    others = st.sampled_from(["checkpointed", "names", "names"])
    options = [
        [
            at_the_end(
                option(*(draw(time_ms) for _ in range(2)), *(draw(size) for _ in range(3)), origin),
                draw(size),
            )
            for origin in ("plain", *(draw(others) for _ in range(draw(st.integers(0, most)))))
        ]
        for _ in range(num_blocks)
    ]
    ends = [(k, (k + 1,)) for k in range(num_blocks - 1)]
    for _ in range(draw(st.integers(0, 4))):
        producer = draw(st.integers(0, num_blocks - 2))
        later = st.integers(producer + 1, num_blocks - 1)
        ends.append((producer, tuple(sorted(draw(st.sets(later, min_size=1))))))
    boundary_values = []
    for producer, readers in ends:
        pairs = [(k, o) for k in (producer, *readers) for o in range(len(options[k]))]
        boundary_values.append(
            BoundaryValue(
                size_bytes=draw(size) * MIB,
                producer=producer,
                readers=readers,
                active=draw(st.booleans()),
                needed=frozenset(draw(st.sets(st.sampled_from(pairs)))),
            )
        )
    recompute_ms = [draw(st.integers(0, 3)) for _ in options]
    last_ms = [
        [draw(st.integers(0, r)) for _ in opts]
        for r, opts in zip(recompute_ms, options, strict=True)
    ]
    shared = [draw(st.sampled_from([0, 0, 3])) for _ in options]
    chain = make(options, recompute_ms, boundary_values, draw(size), last_ms, shared)
    effectful = draw(st.sampled_from([frozenset(), frozenset(), frozenset({1})]))
    waits = draw(st.sampled_from([range(0), range(num_blocks - 1), range(1, num_blocks - 1)]))
    partial = PartialGradient(draw(size) * MIB, waits)
    chain = replace(chain, effectful=effectful, partial_gradients=(partial,))
    return with_listed(chain)


def with_listed(chain: Chain) -> Chain:
    """The chain with all groups that keep something and all nests."""
    nests = nest_columns(chain, block_tree(range(len(chain))), handed_up=1000)
    return replace(chain, listed=(*keeping_columns(chain), *nests))


def group_sets(chain: Chain) -> list[tuple[Group, ...]]:
    """All sets of groups of at least two blocks, without the block at the loss, disjoint or one
    inside the other."""

    def nests(first: int, last: int, outer: Group | None) -> Iterator[tuple[Group, ...]]:
        """Those of the blocks from `first` to `last`, the group `outer` not among them."""
        yield ()
        for a in range(first, last):
            for b in range(a + 1, last + 1):
                if (a, b) != outer and chain.effectful.isdisjoint(range(a, b + 1)):
                    for inside in nests(a, b, (a, b)):
                        for rest in nests(b + 1, last, None):
                            yield ((a, b), *inside, *rest)

    return list(dict.fromkeys(nests(0, len(chain) - 2, None)))


def all_predictions(
    chain: Chain, *, groups: bool = True, results: Sequence[Result] = ()
) -> list[Prediction]:
    sets = group_sets(chain) if groups else [()]
    picks = list(itertools.product(*(range(len(o)) for o in chain.options)))
    return [
        predict(chain, Selection(pick, groups, keeps), results)
        for pick, groups in itertools.product(picks, sets)
        for keeps in all_keeps(chain, pick, groups)
    ]


def all_keeps(
    chain: Chain, pick: Sequence[int], groups: Sequence[Group]
) -> Iterator[tuple[tuple[int, int], ...]]:
    """All choices of what groups keep of their blocks: nothing, or, of those whose blocks are all
    left as they are and that neither have a group inside nor are in one, what options by name do.
    """

    def by_name(group: Group) -> list[tuple[tuple[int, int], ...]]:
        blocks = range(group[0], group[1] + 1)
        others = {b for other in groups if other != group for b in range(other[0], other[1] + 1)}
        if not others.isdisjoint(blocks):
            return [()]
        if any(chain.options[b][pick[b]].origin != "plain" for b in blocks):
            return [()]
        named = (
            [(), *(((b, o),) for o, opt in enumerate(chain.options[b]) if opt.origin == "names")]
            for b in blocks
        )
        return [tuple(itertools.chain(*some)) for some in itertools.product(*named)]

    for chosen in itertools.product(*map(by_name, groups)):
        yield tuple(itertools.chain(*chosen))


def alike(num_blocks: int) -> Chain:
    """Equal blocks, plain or checkpointed, the stream needed by every backward."""
    blocks = [[option(2, 3, 9, 10, 14), option(2, 5, 0, 3, 14)] for _ in range(num_blocks)]
    boundary_values = [
        BoundaryValue(2 * MIB, k, (k + 1,), True, frozenset({(k + 1, 0), (k + 1, 1)}))
        for k in range(num_blocks - 1)
    ]
    return make(blocks, [2.0] * num_blocks, boundary_values)


def test_predict_by_hand() -> None:
    chain = alike(4)
    # The last backward: three blocks' 9 kept, three streams of 2, its own 14, 10 fixed.
    plain = predict(chain, Selection((0, 0, 0, 0)))
    assert plain.peak_bytes == (10 + 27 + 6 + 14) * MIB
    assert (plain.peak.block, plain.peak.in_backward) == (3, True)
    assert plain.time_s == pytest.approx(20e-3)
    checkpointed = predict(chain, Selection((1, 1, 1, 1)))
    assert checkpointed.peak_bytes == (10 + 6 + 14) * MIB
    assert checkpointed.time_s == pytest.approx(28e-3)
    # A group of the first three keeps nothing (block 0 reads no stream), so that the last block
    # is alone with its input; in the group the third backward is the worst.
    grouped = predict(chain, Selection((0, 0, 0, 0), ((0, 2),)))
    assert grouped.peak_bytes == (10 + 18 + 4 + 14) * MIB
    assert (grouped.peak.block, grouped.peak.in_backward) == (2, True)
    assert grouped.time_s == pytest.approx(26e-3)
    # A group of the second and third holds its own input, but not what is handed on inside.
    assert predict(chain, Selection((1, 1, 1, 1), ((1, 2),))).peak_bytes == (10 + 4 + 14) * MIB


def test_predict_counts_skips_and_pending_cotangents() -> None:
    blocks = [[option(1, 1, 0, 1, 1)] for _ in range(4)]
    skip = BoundaryValue(50 * MIB, 0, (3,), True, frozenset())
    # Nothing needs the skip's value, but its cotangent waits from block 3 to block 0, and the
    # value itself from block 0 to block 3.
    for active, peak_block, in_backward in [(True, 1, False), (False, 1, False)]:
        chain = make(blocks, [1.0] * 4, [replace(skip, active=active)], 0)
        found = predict(chain, Selection((0,) * 4))
        assert (found.peak.block, found.peak.in_backward) == (peak_block, in_backward)
        assert found.peak_bytes == 51 * MIB
        assert chain.pending_cotangent_bytes(2) == (50 * MIB if active else 0)
        assert chain.pending_cotangent_bytes(0) == chain.pending_cotangent_bytes(3) == 0


@given(chains(), st.data(), st.booleans())
@QUICK
def test_fastest_within_is_what_enumeration_finds(
    chain: Chain, data: st.DataObject, groups: bool
) -> None:
    everything = all_predictions(chain, groups=groups)
    peaks = sorted({p.peak_bytes for p in everything})
    # All peaks are whole MiB: a limit is met exactly, or missed by half a MiB.
    limits = [p - missed for p in peaks for missed in (0, MIB // 2)]
    for limit in sorted(data.draw(st.sets(st.sampled_from(limits), min_size=2, max_size=3))):
        within = [p.time_s for p in everything if p.peak_bytes <= limit]
        found = Schedules(chain).fastest_within(limit, EXACT, groups=groups)
        assert (found.selection is None) == (not within)
        if found.selection is None:
            assert found.outcome.status is Status.INFEASIBLE
            continue
        prediction = predict(chain, found.selection)
        assert prediction.time_s == pytest.approx(min(within), abs=1e-9)
        assert prediction.peak_bytes <= limit + ROUNDING_BYTES
        assert found.bound_s == pytest.approx(min(within), abs=1e-6)
        assert found.outcome.status is Status.OPTIMAL
        fastest_s = sum(min(o.cost.time_s for o in opts) for opts in chain.options)
        assert found.outcome.objective == pytest.approx(
            1e3 * (prediction.time_s - fastest_s), abs=1e-5
        )


@given(chains(), st.data())
@QUICK
def test_no_schedule_is_faster_than_possible(chain: Chain, data: st.DataObject) -> None:
    everything = all_predictions(chain, groups=True)
    peaks = sorted({p.peak_bytes for p in everything})
    limit = data.draw(st.sampled_from([p - missed for p in peaks for missed in (0, MIB // 2)]))
    within = [p.time_s for p in everything if p.peak_bytes <= limit]
    schedules = Schedules(chain)
    least_s = schedules.least_possible_s(limit, EXACT, NO_REUSE)
    assert math.isinf(least_s) if not within else least_s <= min(within) + 1e-9
    assert schedules.least_possible_s(limit, EXACT, NO_REUSE) == least_s


def test_the_fastest_possible_is_reached_where_no_value_skips_a_block() -> None:
    schedules = Schedules(alike(4))
    peaks = sorted({p.peak_bytes for p in all_predictions(alike(4), groups=True)})
    for peak_bytes in peaks:
        found = schedules.fastest_within(peak_bytes, EXACT)
        least_s = schedules.least_possible_s(peak_bytes, EXACT, NO_REUSE)
        assert least_s == pytest.approx(found.bound_s, abs=1e-9)
    assert len({schedules.least_possible_s(p, EXACT, NO_REUSE) for p in peaks}) > 2


def uneven() -> Chain:
    """Six blocks that differ, with skips into, out of and across any group, where groups pay."""
    blocks = [
        [option(1, 2, 8 + k % 3, 12, 9 + k % 2), option(1, 4, k % 2, 5 + k % 4, 11)]
        for k in range(6)
    ]
    ends = [(k, (k + 1,)) for k in range(5)] + [(0, (2, 4)), (1, (5,)), (2, (3, 5))]
    boundary_values = [
        BoundaryValue(
            (2 + i % 3) * MIB, a, b, i % 2 == 0, frozenset((k, 0) for k in b) | {(b[0], 1)}
        )
        for i, (a, b) in enumerate(ends)
    ]
    return with_listed(make(blocks, [0.5] * 6, boundary_values, 3, shared=[0, 1, 2, 0, 0, 0]))


@pytest.mark.slow
def test_every_limit_of_a_chain_where_groups_pay() -> None:
    chain = uneven()
    everything = all_predictions(chain)
    without = min(p.peak_bytes for p in all_predictions(chain, groups=False))
    limits = sorted({p.peak_bytes for p in everything})
    assert limits[0] < without
    schedules = Schedules(chain)
    grouped = 0
    for limit in limits:
        best = min(p.time_s for p in everything if p.peak_bytes <= limit)
        found = schedules.fastest_within(limit, EXACT)
        assert found.bound_s <= best + 1e-9
        assert predict(chain, found.selection).time_s == pytest.approx(best, abs=1e-9)
        grouped += bool(found.selection.groups)
    assert grouped > 3
    assert Schedules(chain).fastest_within(limits[0] - MIB // 2, EXACT).selection is None


def test_a_group_that_keeps_something_is_chosen_where_it_pays() -> None:
    # The third option keeps a product of the block, which is most of what there is to recompute.
    ways = [
        (2, 3, 9, 6, 14, "plain"),
        (2, 5, 0, 3, 14, "checkpointed"),
        (2, 3.2, 2, 4, 14, "names"),
    ]
    blocks = [[option(*way) for way in ways]] * 5
    stream = [
        BoundaryValue(4 * MIB, k, (k + 1,), True, frozenset((k + 1, o) for o in range(3)))
        for k in range(4)
    ]
    chain = make(blocks, [2.0] * 5, stream)
    chain = with_listed(chain)
    everything = all_predictions(chain)
    chosen = 0
    for limit in sorted({p.peak_bytes for p in everything}):
        selection = Schedules(chain).fastest_within(limit, EXACT).selection
        best_s = min(p.time_s for p in everything if p.peak_bytes <= limit)
        assert predict(chain, selection).time_s == pytest.approx(best_s, abs=1e-9)
        chosen += bool(selection.keeps)
    assert chosen


def test_options_that_are_alike_but_at_the_end_of_a_group_are_told_apart() -> None:
    alone = option(2, 3, 9, 10, 14)
    blocks = [[at_the_end(alone, 30), at_the_end(alone, 12)]] * 6
    stream = [
        BoundaryValue(8 * MIB, k, (k + 1,), True, frozenset({(k + 1, 0), (k + 1, 1)}))
        for k in range(5)
    ]
    chain = make(blocks, [2.0] * 6, stream)
    columns = group_columns(chain)
    columns += nest_columns(chain, block_tree(range(6)))
    assert any(column.inner for column in columns)
    for column in columns:
        for _, last in ((column.first, column.last), *column.inner):
            assert column.options[last - column.first] == 1
        if not column.inner:
            # Of the blocks before the last, each keeps 9 and its input.
            assert column.backward_bytes == (17 * (column.last - column.first) + 12) * MIB


def test_the_last_block_of_a_group_takes_what_it_takes_with_the_values_kept_of_it() -> None:
    blocks = [[option(2, 3, 9, 10, 14), option(2, 4, 2, 6, 99, "names")]] * 4
    chain = make(blocks, [2.0] * 4, [])
    for block, working in ((2, 99), (1, 14)):
        peak = predict(chain, Selection((0,) * 4, ((0, 2),), ((block, 1),))).peak
        assert peak.working_bytes == working * MIB


@given(chains(), st.data())
@QUICK
def test_what_a_group_that_keeps_something_takes_is_what_is_predicted(
    chain: Chain, data: st.DataObject
) -> None:
    columns = keeping_columns(chain)
    assume(columns)
    column = data.draw(st.sampled_from(columns))
    inside = range(column.first, column.last + 1)
    options = tuple(
        column.options[b - column.first] if b in inside else 0 for b in range(len(chain))
    )
    group = Selection(options, ((column.first, column.last),), column.keeps)
    found = predict(chain, group)
    singles = {(p.first, p.options): p for p in single_columns(chain)}
    others = [singles[b, (0,)] for b in range(len(chain)) if b not in inside]
    for less_bytes, fits in ((0, True), (2 * ROUNDING_BYTES, False)):
        peak_bytes = found.peak_bytes - less_bytes
        selection = fastest_of_columns(chain, [column, *others], peak_bytes, EXACT)
        assert selection == (group if fits else None)


def test_what_a_group_keeps_is_gone_in_the_backwards_of_earlier_blocks() -> None:
    # The first block's backward sets the peak; what the second kept is not alive by then.
    blocks = [
        [option(1, 1, 28, 1, 45)],
        [option(1, 1, 0, 1, 1), option(1, 1, 0, 1, 1, "names")],
        [option(1, 1, 0, 1, 20)],
    ]
    kept = BoundaryValue(10 * MIB, 1, (2,), False, frozenset({(1, 1)}))
    stream = BoundaryValue(0, 0, (1,), True, frozenset())
    chain = with_listed(make(blocks, [1, 5, 1], [stream, kept], 0))
    selection = Selection((0, 0, 0), ((0, 1),), ((1, 1),))
    assert predict(chain, selection).peak_bytes == 45 * MIB
    assert Schedules(chain).fastest_within(45 * MIB, EXACT).selection == selection


@pytest.mark.parametrize("first", ["plain", "checkpointed"])
def test_a_group_that_keeps_something_may_begin_with_a_block_of_one_option(first: str) -> None:
    ways = [(2, 3, 9, 6, 14, "plain"), (2, 3.2, 2, 4, 14, "names")]
    blocks = [[option(2, 3, 0, 3, 14, first)], *[[option(*way) for way in ways]] * 3]
    listed = keeping_columns(make(blocks, [2.0] * 4, []))
    assert {column.first for column in listed} == {0, 1}
    # Two options, of which none runs the block as it is.
    blocks[0] = [option(2, 3, 0, 3, 14, kind) for kind in ("checkpointed", "names")]
    assert {column.first for column in keeping_columns(make(blocks, [2.0] * 4, []))} == {1}


@given(chains(), st.booleans())
@QUICK
def test_least_peak_is_what_enumeration_finds(chain: Chain, groups: bool) -> None:
    everything = all_predictions(chain, groups=groups)
    least = min(p.peak_bytes for p in everything)
    found = Schedules(chain).least_peak(EXACT, groups=groups)
    prediction = predict(chain, found.selection)
    assert prediction.peak_bytes == pytest.approx(least, abs=ROUNDING_BYTES)
    # Of the schedules with that peak it is the fastest.
    fastest_s = min(p.time_s for p in everything if p.peak_bytes <= least)
    assert prediction.time_s == pytest.approx(fastest_s, abs=1e-9)


def test_a_least_peak_is_found_where_constants_made_ahead_set_the_prediction() -> None:
    # The forwards make zeros of one size, all at once with the first: predicted, and not counted.
    zeros = Phase((LiveRange(10 * MIB, of_constants=True),), (10 * MIB,))
    after = Phase((LiveRange(MIB),), (MIB,))
    one = option(1, 1, 0, 10, 1)
    one = replace(one, cost=replace(one.cost, forward=zeros, backward=after))
    stream = [BoundaryValue(MIB, k, (k + 1,), True, frozenset()) for k in range(2)]
    chain = replace(make([[one]] * 3, [1.0] * 3, stream, 0), handing_on=(zeros,) * 3)
    selection = Schedules(chain).least_peak(EXACT).selection
    assert selection is not None and predict(chain, selection).peak_bytes == 30 * MIB


@pytest.mark.parametrize("groups", [True, False])
def test_more_memory_never_gives_a_slower_schedule(groups: bool) -> None:
    chain = alike(9)
    floor = predict(chain, Schedules(chain).least_peak(EXACT, groups=groups).selection).peak_bytes
    ceiling = predict(chain, Selection((0,) * 9)).peak_bytes
    assert Schedules(chain).fastest_within(floor - MIB // 2, EXACT, groups=groups).selection is None
    times = []
    for limit in range(floor, ceiling + 1, (ceiling - floor) // 8):
        found = Schedules(chain).fastest_within(limit, EXACT, groups=groups)
        times.append(predict(chain, found.selection).time_s)
    assert all(a >= b - 1e-9 for a, b in itertools.pairwise(times))
    assert times[-1] < times[0]


def test_groups_reach_a_lower_peak_and_cost_nothing_where_they_do_not_help() -> None:
    chain = alike(12)
    floors = [
        predict(chain, Schedules(chain).least_peak(EXACT, groups=groups).selection).peak_bytes
        for groups in (False, True)
    ]
    assert floors[1] < floors[0]
    limits = range(floors[0], predict(chain, Selection((0,) * 12)).peak_bytes, 20 * MIB)
    for limit in limits:
        without, allowed = (
            predict(
                chain, Schedules(chain).fastest_within(limit, EXACT, groups=groups).selection
            ).time_s
            for groups in (False, True)
        )
        assert allowed <= without + 1e-9


def test_the_gap_is_kept_and_told() -> None:
    chain = alike(12)
    limit = 70 * MIB
    best = predict(chain, Schedules(chain).fastest_within(limit, EXACT).selection).time_s
    found = Schedules(chain).fastest_within(limit, SolverConfig(relative_gap=0.05))
    assert predict(chain, found.selection).time_s <= best / (1 - 0.051)
    assert found.bound_s <= best + 1e-9
    assert 0 <= found.outcome.gap <= 0.051


def test_the_same_chain_gives_the_same_schedule() -> None:
    answers = {
        Schedules(alike(8)).fastest_within(60 * MIB, SolverConfig()).selection for _ in range(3)
    }
    assert len(answers) == 1
    assert len({Schedules(alike(8)).least_peak(SolverConfig()).selection for _ in range(2)}) == 1


def test_a_limit_below_the_arguments_is_infeasible() -> None:
    for peak in (0, 10 * MIB):
        found = Schedules(alike(4)).fastest_within(peak, EXACT)
        assert found.selection is None
        assert found.outcome.objective == math.inf


@given(chains(), st.data())
@QUICK
def test_the_integer_program_finds_the_same(chain: Chain, data: st.DataObject) -> None:
    """The root program as rows, over every column, solved by HiGHS."""
    columns = [*single_columns(chain), *group_columns(chain)]
    schedules = Schedules(chain)
    least_bytes = predict(chain, schedules.least_peak(EXACT).selection).peak_bytes
    limit = least_bytes + data.draw(st.integers(0, 20)) * MIB
    found = fastest_of_columns(chain, columns, limit, EXACT)
    assert found is not None
    best = schedules.fastest_within(limit, EXACT).selection
    assert predict(chain, found).time_s == pytest.approx(predict(chain, best).time_s, abs=1e-8)
    assert fastest_of_columns(chain, columns, least_bytes - MIB // 2, EXACT) is None


@given(chains(), st.data())
@QUICK
def test_a_guess_of_the_time_changes_nothing(chain: Chain, data: st.DataObject) -> None:
    schedules = Schedules(chain)
    least_bytes = predict(chain, schedules.least_peak(EXACT).selection).peak_bytes
    limit = least_bytes + data.draw(st.integers(0, 20)) * MIB
    found = schedules.fastest_within(limit, EXACT)
    again = schedules.fastest_within(
        limit, EXACT, guess_s=data.draw(st.floats(0.0, 2 * found.bound_s))
    )
    assert again.selection == found.selection
    assert again.bound_s == found.bound_s


@given(chains(), st.data())
@QUICK
def test_too_few_labels_are_no_proof(chain: Chain, data: st.DataObject) -> None:
    everything = all_predictions(chain)
    limit = data.draw(st.sampled_from(sorted({p.peak_bytes for p in everything})))
    best_s = min(p.time_s for p in everything if p.peak_bytes <= limit)
    found = Schedules(chain).fastest_within(limit, SolverConfig(max_labels=1, relative_gap=0.0))
    if found.selection is None:
        assert found.outcome.status is Status.UNDECIDED
        return
    prediction = predict(chain, found.selection)
    assert prediction.peak_bytes <= limit and found.bound_s <= best_s + 1e-9
    if found.outcome.status is Status.OPTIMAL:
        assert prediction.time_s == pytest.approx(best_s, abs=1e-9)


def test_a_chain_of_one_block() -> None:
    chain = make([[option(1, 1, 5, 5, 9), option(1, 2, 0, 5, 7)]], [1.0], [])
    assert Schedules(chain).fastest_within(19 * MIB, EXACT).selection == Selection((0,))
    assert Schedules(chain).fastest_within(18 * MIB, EXACT).selection == Selection((1,))
    assert Schedules(chain).least_peak(EXACT).selection == Selection((1,))


def test_the_regions_of_a_selection() -> None:
    def loss(x: jax.Array) -> jax.Array:
        for _ in range(15):
            x = jnp.sin(x)
        return x.sum()

    graph = build_graph(trace_loss(loss, (jnp.ones(4),)))
    assert len(graph.operations) == 16
    run = Region(0, 4, children=(Region(1, 3, checkpointed=True),))
    whole = Region(0, 4, checkpointed=True, saved=((2, 0),))
    modes = [[replace(option(1, 1, 0, 0, 0), region=m) for m in (Region(0, 4), run, whole)]] * 4
    chain = make(modes, [1.0] * 4, [])
    inside = (Region(5, 7, checkpointed=True), whole.shifted(8))
    single = selection_region(graph, chain, Selection((0, 1, 2, 0)))
    assert single == Region(0, 16, children=inside)
    grouped = selection_region(graph, chain, Selection((0, 1, 2, 0), ((1, 2),)))
    group = Region(4, 12, checkpointed=True, children=inside)
    assert grouped == Region(0, 16, children=(group,))
    assert grouped.num_checkpointed == 3
    assert grouped.depth == 2
