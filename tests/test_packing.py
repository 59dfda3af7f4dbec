"""The block's program against every set of disjoint runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_hremat._options.packing import best_packing, packings_of_hull
from jax_hremat._options.runs import Run

MIB = 2**20
QUICK = settings(max_examples=25, deadline=None, derandomize=True)


def run(start: int, stop: int, freed: int, added_ms: float) -> Run:
    return Run(start, stop, freed * MIB, added_ms * 1e-3)


@st.composite
def runs(draw: st.DrawFn) -> list[Run]:
    """Up to seven different runs of twelve operations; some free nothing, some save time."""
    ranges = draw(st.sets(st.tuples(st.integers(0, 10), st.integers(1, 6)), min_size=1, max_size=7))
    return [
        run(start, start + length, draw(st.integers(-2, 20)), draw(st.integers(-3, 10)))
        for start, length in sorted(ranges)
    ]


def disjoint_sets(candidates: list[Run]) -> list[tuple[Run, ...]]:
    sets = itertools.chain.from_iterable(
        itertools.combinations(sorted(candidates, key=lambda r: r.start), n)
        for n in range(len(candidates) + 1)
    )
    return [s for s in sets if all(a.stop <= b.start for a, b in itertools.pairwise(s))]


@given(runs(), st.floats(0, 10) | st.just(math.inf))
@QUICK
def test_the_best_at_a_price_is_as_good_as_enumeration_can(
    candidates: list[Run], price_ms: float
) -> None:
    def worth(chosen: Sequence[Run]) -> float:
        freed = sum(r.freed_bytes for r in chosen)
        if price_ms == math.inf:
            return freed
        return price_ms * 1e-3 / MIB * freed - sum(r.added_s for r in chosen)

    ordered = sorted(candidates, key=lambda r: (r.stop, r.start))
    best = best_packing(ordered, price_ms * 1e-3 / MIB)
    assert worth(best.runs) == pytest.approx(max(map(worth, disjoint_sets(candidates))))


@given(runs())
@QUICK
def test_the_sets_found_are_the_hull_of_all_sets(candidates: list[Run]) -> None:
    every = [
        (float(sum(r.freed_bytes for r in s)), sum(r.added_s for r in s))
        for s in disjoint_sets(candidates)
    ]
    found = [(0.0, 0.0)]
    found += [(float(p.freed_bytes), p.added_s) for p in packings_of_hull(candidates, 100, 1e-12)]
    assert max(found)[0] == max(every)[0]
    for price_ms in (0.0, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0):
        best, best_found = (
            max(price_ms * 1e-3 / MIB * freed - added for freed, added in points)
            for points in (every, found)
        )
        assert best_found == pytest.approx(best)


@given(runs(), st.integers(0, 4))
@QUICK
def test_runs_are_disjoint_and_sums_are_theirs(candidates: list[Run], count: int) -> None:
    answers = packings_of_hull(candidates, count, 1e-9)
    assert len(answers) <= count
    for packing in answers:
        assert packing.runs
        assert set(packing.runs) <= set(candidates)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(packing.runs))
        assert packing.freed_bytes == sum(r.freed_bytes for r in packing.runs)
        assert packing.added_s == pytest.approx(sum(r.added_s for r in packing.runs))
    assert len({p.runs for p in answers}) == len(answers)
    assert packings_of_hull(candidates, count, 1e-9) == answers
    assert packings_of_hull(candidates, 100, 1e-9)[:count] == answers


def test_those_first_that_lower_the_hull_most() -> None:
    cheap, middling, dear = run(0, 4, 10, 1.0), run(4, 8, 10, 5.0), run(8, 12, 10, 10.0)
    whole, two, one = (p.runs for p in packings_of_hull([cheap, middling, dear], 3, 1e-9))
    # All of them free most. On the line from none to all, one run lies 4.3 ms below, two 4.7 ms.
    assert whole == (cheap, middling, dear)
    assert two == (cheap, middling)
    assert one == (cheap,)
    # From none to two, one run lies 2 ms below.
    assert len(packings_of_hull([cheap, middling, dear], 3, 2.1e-3)) == 2


def test_runs_that_make_the_step_faster_are_among_the_answers() -> None:
    faster, dear, alone = run(0, 4, 1, -2.0), run(4, 8, 30, 5.0), run(2, 3, 40, 90.0)
    answers = [p.runs for p in packings_of_hull([faster, dear, alone], 4, 1e-9)]
    # Freeing the most takes the run that overlaps the fast one.
    assert answers == [(alone, dear), (faster,), (faster, dear)]
    free = run(0, 2, 0, -1.0)
    assert [p.runs for p in packings_of_hull([free], 2, 1e-9)] == [(free,)]


def test_useless_runs_give_no_packing() -> None:
    assert packings_of_hull([], 3, 1e-9) == ()
    assert packings_of_hull([run(0, 2, 0, 1.0), run(3, 4, -5, 0.0)], 3, 1e-9) == ()
