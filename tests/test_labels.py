"""Which beginnings of schedules are kept, and what the relaxation charges them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_schedule import EXACT, MIB, QUICK, all_predictions, chains, make, option

from jax_hremat._solve.assumed_reuse import NO_REUSE
from jax_hremat._solve.chain import BoundaryValue, Chain, selection_of
from jax_hremat._solve.families import Values
from jax_hremat._solve.groups import group_columns, single_columns
from jax_hremat._solve.label_search import Columns, Search
from jax_hremat._solve.labels import Labels, together, undominated
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.relaxation import Relaxation
from jax_hremat._solve.schedule import Schedules
from jax_hremat._solve.spans import spans

SIZES = (3, 1, 2)


def values() -> Values:
    """Three boundary values that are all held until the last block."""
    skips = [BoundaryValue(size, k, (4,), False, frozenset()) for k, size in enumerate(SIZES)]
    return Values(make([[option(1, 1, 0, 0, 0)]] * 5, [1.0] * 5, skips))


@st.composite
def some_labels(draw: st.DrawFn) -> Labels:
    sets = np.array([[bool(code >> bit & 1) for bit in range(3)] for code in range(8)])
    count = draw(st.integers(1, 40))
    rows = [[draw(st.integers(0, top)) for top in (6, 6, 7)] for _ in range(count)]
    stock, added, held = np.array(rows).T
    none = np.zeros(count)
    origin = np.zeros((count, 4), int)
    origin[:, 1] = np.arange(count)
    return Labels(stock.astype(float), added.astype(float), none, held, sets, origin)


@given(some_labels())
@QUICK
def test_what_is_left_out_is_dominated_by_what_is_kept(labels: Labels) -> None:
    kept = undominated(labels, values())
    for row in range(len(labels)):
        extra = kept.sets[kept.held] & ~labels.sets[labels.held[row]]
        fits = kept.stock_bytes + extra @ np.array(SIZES) <= labels.stock_bytes[row]
        assert np.any(fits & (kept.added_ms <= labels.added_ms[row]))
    # Of those that hold the same, none is as good as another.
    for row in range(len(kept)):
        alike = kept.held == kept.held[row]
        as_good = (kept.stock_bytes <= kept.stock_bytes[row]) & (
            kept.added_ms <= kept.added_ms[row]
        )
        assert np.flatnonzero(alike & as_good).tolist() == [row]


@given(some_labels(), some_labels())
@QUICK
def test_labels_hold_the_same_after_they_are_put_together(one: Labels, other: Labels) -> None:
    both = together([one, other])
    held = np.concatenate([one.sets[one.held], other.sets[other.held]])
    assert np.array_equal(both.sets[both.held], held)
    assert len(np.unique(both.sets, axis=0)) == len(both.sets)


@given(chains(), st.data())
@QUICK
def test_no_schedule_adds_less_than_it_is_charged(chain: Chain, data: st.DataObject) -> None:
    everything = all_predictions(chain)
    limit = data.draw(st.sampled_from(sorted({p.peak_bytes for p in everything})))
    columns = [*single_columns(chain), *group_columns(chain)]
    some = Columns(chain, spans(chain, columns)).families
    inside = limit - chain.fixed_bytes
    charges = Relaxation(chain, some).charges(inside, EXACT, NO_REUSE)
    assert charges is not None
    fastest_s = sum(min(o.cost.time_s for o in opts) for opts in chain.options)
    best_s = min(p.time_s for p in everything if p.peak_bytes <= limit)
    assert charges.least_ms <= 1e3 * (best_s - fastest_s) + 1e-9
    # A schedule is a path of families, each in one of its columns.
    block, charged_ms, chosen = 0, charges.value_ms, []
    while block < len(chain):
        number = data.draw(st.integers(0, len(some[block]) - 1))
        alike = some[block][number]
        position = data.draw(st.integers(0, len(alike.columns) - 1))
        charged_ms += charges.reduced_ms[block][number][position]
        chosen.append(alike.columns[position])
        block = alike.blocks.stop
        assert charged_ms + charges.ahead_ms[block] >= charges.least_ms - 1e-9
    if predict(chain, selection_of(chosen)).peak_bytes <= limit:
        assert charged_ms <= sum(p.added_ms for p in chosen) + 1e-9


def test_where_nothing_skips_the_first_bound_is_the_time_itself() -> None:
    stream = [
        BoundaryValue(2 * MIB, k, (k + 1,), True, frozenset({(k + 1, 0), (k + 1, 1)}))
        for k in range(7)
    ]
    blocks = [[option(2, 3, 9, 10, 14), option(2, 5, 0, 3, 14)] for _ in range(8)]
    chain = make(blocks, [2.0] * 8, stream)
    schedules = Schedules(chain)
    columns = Columns(chain, spans(chain, [*single_columns(chain), *group_columns(chain)]))
    for limit in range(50 * MIB, 100 * MIB, 5 * MIB):
        found = schedules.fastest_within(limit, EXACT)
        if found.selection is not None:
            search = Search(columns, limit - chain.fixed_bytes, EXACT.max_labels, NO_REUSE)
            least_ms = search.least_ms(math.inf)
            assert least_ms == pytest.approx(1e3 * found.bound_s - chain.fastest_ms, abs=1e-6)
