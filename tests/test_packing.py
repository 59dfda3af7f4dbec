"""The block's program against every set of disjoint runs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_hremat._options.packing import pareto_packings
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
        itertools.combinations(candidates, n) for n in range(len(candidates) + 1)
    )
    return [s for s in sets if not any(a.overlaps(b) for a, b in itertools.combinations(s, 2))]


@given(runs(), st.integers(1, 4))
@QUICK
def test_every_bound_is_met_as_fast_as_enumeration_can(candidates: list[Run], count: int) -> None:
    useful = [r for r in candidates if r.freed_bytes > 0 or r.added_s < 0]
    choices = [
        (sum(r.freed_bytes for r in s), sum(r.added_s for r in s)) for s in disjoint_sets(useful)
    ]
    # Wrapping nothing is always possible, and never among the answers.
    answers = pareto_packings(candidates, count)
    found = [(0, 0.0), *((p.freed_bytes, p.added_s) for p in answers)]
    most = max(freed for freed, _ in choices)
    for step in range(count + 1):
        bound = most * step / count * (1 - 1e-6) if step else -float("inf")
        best = min(added for freed, added in choices if freed >= bound)
        # A MiB is worth a nanosecond, so that equal times are settled by the bytes.
        assert min(a for f, a in found if f >= bound) == pytest.approx(best, abs=1e-7)


@given(runs())
@QUICK
def test_runs_are_disjoint_and_sums_are_theirs(candidates: list[Run]) -> None:
    answers = pareto_packings(candidates, 3)
    for packing in answers:
        assert packing.runs
        assert set(packing.runs) <= set(candidates)
        assert all(a.stop <= b.start for a, b in itertools.pairwise(packing.runs))
        assert packing.freed_bytes == sum(r.freed_bytes for r in packing.runs)
        assert packing.added_s == pytest.approx(sum(r.added_s for r in packing.runs))
    assert len({p.runs for p in answers}) == len(answers)
    assert pareto_packings(candidates, 3) == answers


def test_runs_that_make_the_step_faster_are_in_every_answer() -> None:
    faster, dear, alone = run(0, 4, 1, -2.0), run(4, 8, 30, 5.0), run(2, 3, 40, 90.0)
    answers = pareto_packings([faster, dear, alone], 4)
    assert answers[0].runs == (faster,)
    assert answers[1].runs == (faster, dear)
    # Freeing the most takes the run that overlaps the fast one.
    assert answers[-1].runs == (alone, dear)


def test_a_run_that_is_faster_but_frees_nothing_is_still_taken() -> None:
    free = run(0, 2, 0, -1.0)
    assert pareto_packings([free], 2)[0].runs == (free,)


def test_useless_runs_give_no_packing() -> None:
    assert pareto_packings([], 3) == ()
    assert pareto_packings([run(0, 2, 0, 1.0), run(3, 4, -5, 0.0)], 3) == ()


@pytest.mark.parametrize(
    ("other", "overlap"),
    [((3, 5), True), ((0, 9), True), ((5, 7), False), ((0, 2), False), ((2, 3), True)],
)
def test_overlap(other: tuple[int, int], overlap: bool) -> None:
    a, b = run(2, 5, 1, 1), run(*other, 1, 1)
    assert a.overlaps(b) == b.overlaps(a) == overlap
