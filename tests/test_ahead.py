"""What may follow before each block, and how fast beginnings may be at least."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import QUICK, all_predictions, chains

from jax_hremat._solve.ahead import Ahead, Beginnings, ByBlock, Room, what_may_follow
from jax_hremat._solve.assumed_reuse import NO_REUSE
from jax_hremat._solve.chain import Chain, selection_of
from jax_hremat._solve.column import Column
from jax_hremat._solve.families import Values
from jax_hremat._solve.groups import group_columns, single_columns
from jax_hremat._solve.label_search import Columns
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.spans import spans

_ROUNDING_MS = 1e-9


def by_block(chain: Chain) -> tuple[Values, ByBlock]:
    columns = Columns(chain, spans(chain, [*single_columns(chain), *group_columns(chain)]))
    return columns.values, columns.families


def some_schedule(data: st.DataObject, some: ByBlock) -> list[Column]:
    chosen: list[Column] = []
    block = 0
    while block < len(some):
        chosen.append(data.draw(st.sampled_from(data.draw(st.sampled_from(some[block])).columns)))
        block = chosen[-1].last + 1
    return chosen


def stocks(values: Values, chosen: list[Column]) -> list[tuple[int, float, float]]:
    """Before each column of a schedule and after the last: the block, the stock, the time added."""
    block, stock_bytes, added_ms, held = 0, 0.0, 0.0, values.none
    found = [(block, stock_bytes, added_ms)]
    for column in chosen:
        met = values.effects_of(column, held)
        stock_bytes += float(met.stock_bytes[0, 0])
        added_ms += column.added_ms
        held, block = met.held[0], column.last + 1
        found.append((block, stock_bytes, added_ms))
    return found


@given(chains(), st.data())
@QUICK
def test_no_beginning_is_faster_than_its_bound(chain: Chain, data: st.DataObject) -> None:
    values, some = by_block(chain)
    beginnings = Beginnings(some)
    for block, stock_bytes, added_ms in stocks(values, some_schedule(data, some)):
        assert beginnings.least_ms(block, np.array([stock_bytes]))[0] <= added_ms + _ROUNDING_MS


@given(chains(), st.data())
@QUICK
def test_the_bound_of_a_beginning_falls_with_its_stock(chain: Chain, data: st.DataObject) -> None:
    _, some = by_block(chain)
    beginnings = Beginnings(some)
    ascending = np.array(sorted(data.draw(st.lists(st.integers(0, 2**40), min_size=2))), float)
    for block in range(len(chain) + 1):
        least_ms = beginnings.least_ms(block, ascending)
        assert np.all(np.diff(least_ms) <= _ROUNDING_MS)


@given(chains(), st.data())
@QUICK
def test_what_may_follow_leaves_out_no_schedule_that_is_asked_for(
    chain: Chain, data: st.DataObject
) -> None:
    values, some = by_block(chain)
    chosen = some_schedule(data, some)
    limit = predict(chain, selection_of(chosen)).peak_bytes - chain.fixed_bytes
    whole_ms = sum(column.added_ms for column in chosen)
    room = Room(values, limit, NO_REUSE)
    ahead = what_may_follow(some, Beginnings(some), room, whole_ms)
    for block, stock_bytes, added_ms in stocks(values, chosen):
        after_ms = float(ahead[block].least_ms(np.array([stock_bytes]))[0])
        assert added_ms + after_ms <= whole_ms + _ROUNDING_MS


@given(chains(), st.data())
@QUICK
def test_what_may_follow_is_the_least_there_is(chain: Chain, data: st.DataObject) -> None:
    values, some = by_block(chain)
    peaks = sorted({p.peak_bytes for p in all_predictions(chain)})
    room = Room(values, data.draw(st.sampled_from(peaks)) - chain.fixed_bytes, NO_REUSE)
    beginnings = Beginnings(some)
    everything = what_may_follow(some, beginnings, room, math.inf)

    def least_ms(block: int, stock_bytes: float) -> float:
        found_ms = math.inf
        for each in some[block]:
            met, most_bytes, room_bytes = room.of(each, values.none)
            after = everything[each.blocks.stop]
            for column, family in zip(each.columns, each.family.tolist(), strict=True):
                fits = stock_bytes <= most_bytes[family, 0]
                if fits and stock_bytes + column.backward_bytes <= room_bytes[family, 0]:
                    then_bytes = stock_bytes + met.stock_bytes[family]
                    found_ms = min(found_ms, column.added_ms + after.least_ms(then_bytes)[0])
        return found_ms

    for block in range(len(chain)):
        steps = everything[block].stock_bytes
        at = np.unique(np.concatenate(([0.0], steps, steps + 1, np.maximum(steps - 1, 0.0))))
        wanted = [least_ms(block, stock_bytes) for stock_bytes in at.tolist()]
        assert everything[block].least_ms(at).tolist() == wanted

    # Up to some time: the same, but for what does not matter.
    within_ms = data.draw(st.sampled_from([0.0, *everything[0].added_ms[:-1].tolist()]))
    for block, less in enumerate(what_may_follow(some, beginnings, room, within_ms)[:-1]):
        _agrees(beginnings, block, less, everything[block], within_ms)


def _agrees(
    beginnings: Beginnings, block: int, less: Ahead, everything: Ahead, within_ms: float
) -> None:
    at = everything.stock_bytes
    whole_ms = beginnings.least_ms(block, at) + everything.added_ms[:-1]
    matters = whole_ms <= within_ms
    assert np.array_equal(less.least_ms(at)[matters], everything.added_ms[:-1][matters])
    assert np.all(less.least_ms(at) >= everything.added_ms[:-1])
