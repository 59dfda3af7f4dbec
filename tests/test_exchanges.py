"""Exchanges of columns: all that make a schedule faster and fit, and what they are good for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_ahead import some_schedule
from test_output_reuse import equal_layers, nearly, some_question, with_reuse
from test_schedule import MIB, QUICK, all_predictions, chains

from jax_hremat._solve import with_reuse as search
from jax_hremat._solve.ahead import ROUNDING_MS, Room
from jax_hremat._solve.assumed_reuse import NO_PRICES, NO_REUSE, Prices
from jax_hremat._solve.chain import Chain, selection_of
from jax_hremat._solve.column import Column
from jax_hremat._solve.exchanges import exchanges
from jax_hremat._solve.groups import group_columns, single_columns
from jax_hremat._solve.label_search import Columns
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.spans import spans


def columns_of(chain: Chain, prices: Prices = NO_PRICES) -> Columns:
    every = [*single_columns(chain), *group_columns(chain)]
    return Columns(chain, spans(chain, every), prices)


@given(chains(), st.data())
@QUICK
def test_all_exchanges_that_fit_and_save_time_are_found(chain: Chain, data: st.DataObject) -> None:
    columns = columns_of(chain)
    schedule = some_schedule(data, columns.families)
    peaks = sorted({p.peak_bytes for p in all_predictions(chain)})
    limit_bytes = data.draw(st.sampled_from(peaks)) - chain.fixed_bytes
    found = exchanges(schedule, columns.families, Room(columns.values, limit_bytes, NO_REUSE))
    before = predict(chain, selection_of(schedule))
    expected: set[tuple[Column, ...]] = set()
    for at, first in enumerate(schedule):
        for num_replaced in (1, 2):
            replaced = schedule[at : at + num_replaced]
            for column in (p for some in columns.families[first.first] for p in some.columns):
                if column.last != replaced[-1].last or len(replaced) < num_replaced:
                    continue
                new = (*schedule[:at], column, *schedule[at + num_replaced :])
                promise = predict(chain, selection_of(new))
                saved_ms = 1e3 * (before.time_s - promise.time_s)
                if promise.peak_bytes <= chain.fixed_bytes + limit_bytes and saved_ms > 1e-6:
                    expected.add(new)
    assert {exchange.made_in(schedule) for exchange in found} == expected
    for exchange in found:
        after = predict(chain, selection_of(exchange.made_in(schedule)))
        assert 1e3 * (before.time_s - after.time_s) == pytest.approx(exchange.saved_ms, abs=1e-6)
    saved_ms = [exchange.saved_ms for exchange in found]
    assert saved_ms == sorted(saved_ms, reverse=True)
    assert all(each > ROUNDING_MS for each in saved_ms)


@given(chains(), st.data())
@QUICK
def test_a_column_counts_at_prices_what_its_family_counts(
    chain: Chain, data: st.DataObject
) -> None:
    prices = Prices((3 * MIB, 8 * MIB), (MIB, 2 * MIB))
    plain, priced = columns_of(chain), columns_of(chain, prices)
    schedule = some_schedule(data, priced.families)
    counted = {
        column: some.column(position)
        for each in priced.families
        for some in each
        for position, column in enumerate(some.columns)
    }
    assert priced.counted(schedule) == [counted[column] for column in schedule]
    assert plain.counted(schedule) == schedule


def test_exchanges_find_what_programs_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, results = equal_layers(8)
    peak_bytes = chain.fixed_bytes + int(8.8 * MIB)
    found = with_reuse(chain, peak_bytes, results, groups=True)
    monkeypatch.setattr(search, "_MAX_PREDICTED_BLOCKS", 0)
    without = with_reuse(chain, peak_bytes, results, groups=True)
    assert found.selection is not None
    assert without.selection is not None
    promise, other = (predict(chain, each.selection, results) for each in (found, without))
    assert promise.time_s < other.time_s
    assert promise.peak_bytes <= nearly(chain, peak_bytes)
    assert found.outcome.objective == pytest.approx(1e3 * promise.time_s - chain.fastest_ms)


@given(chains(), st.data())
@QUICK
def test_exchanges_never_make_a_schedule_slower(chain: Chain, data: st.DataObject) -> None:
    results, peak_bytes = some_question(chain, data)
    found = with_reuse(chain, peak_bytes, results, groups=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "_MAX_PREDICTED_BLOCKS", 0)
        without = with_reuse(chain, peak_bytes, results, groups=True)
    assert found.selection is not None
    assert without.selection is not None
    promise, other = (predict(chain, each.selection, results) for each in (found, without))
    assert promise.time_s <= other.time_s + 1e-9
    assert promise.peak_bytes <= nearly(chain, peak_bytes)
