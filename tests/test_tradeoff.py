"""Where the budgets of a frontier are placed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import pytest

from jax_hremat._planner import tradeoff
from jax_hremat._planner.candidates import Candidates
from jax_hremat._shared.hull import above_lower_hull
from jax_hremat._shared.pareto import pareto_front


@dataclass(frozen=True)
class Point:
    """A compiled plan."""

    peak_bytes: int
    step_s: float


class Curve:
    """A program all of whose plans lie on a curve; stands for `Candidates` and the search, which
    also compiles plans that are not the answer, by the budget they are found for, and finds nothing
    for some budgets."""

    def __init__(
        self, points: Sequence[Point], by_the_way: Mapping[int, Point], in_vain: Collection[int]
    ) -> None:
        self.points = sorted(points, key=lambda p: p.peak_bytes)
        self.plain = self.points[-1]
        self.found = {self.plain}
        self.asked: list[int] = []
        self.by_the_way = by_the_way
        self.in_vain = in_vain

    def within(self, peak_bytes: int) -> list[Point]:
        fitting = [p for p in self.found if p.peak_bytes <= peak_bytes]
        return sorted(fitting, key=lambda p: (p.step_s, p.peak_bytes))

    def floor(self) -> Point:
        self.found.add(self.points[0])
        return self.points[0]

    def search(self, limit: int) -> None:
        self.asked.append(limit)
        if limit in self.by_the_way:
            self.found.add(self.by_the_way[limit])
        if limit not in self.in_vain:
            fitting = [p for p in self.points if p.peak_bytes <= limit]
            self.found.add(min(fitting, key=lambda p: p.step_s))


@dataclass(frozen=True)
class CurveSearch:
    curve: Curve
    limit: int

    def floor(self) -> Point:
        return self.curve.floor()

    def search(self) -> None:
        self.curve.search(self.limit)


def spread(
    points: Sequence[Point],
    num_points: int,
    monkeypatch: pytest.MonkeyPatch,
    by_the_way: Mapping[int, Point] = MappingProxyType({}),
    in_vain: Collection[int] = (),
) -> tuple[list[Any], list[int]]:
    monkeypatch.setattr(tradeoff, "search_for", CurveSearch)
    curve = Curve(points, by_the_way, in_vain)
    front = tradeoff.spread(cast(Candidates, curve), num_points)
    return front, curve.asked


def regret(front: Sequence[Any], points: Sequence[Point]) -> float:
    """How much longer the step of the plan that fits is than the best, over all peaks."""
    total = 0.0
    for point in points:
        total += min(p.step_s for p in front if p.peak_bytes <= point.peak_bytes) - point.step_s
    return total / len(points)


def test_budgets_go_where_time_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(peak, 1000 / peak) for peak in range(100, 1101)]
    front, asked = spread(points, 12, monkeypatch)
    assert len(asked) == 12 and len(set(asked)) == 12
    assert front[0].peak_bytes == 100 and front[-1].peak_bytes == 1100
    assert [p.peak_bytes for p in front] == sorted(p.peak_bytes for p in front)
    evenly = [points[round(i * 1000 / 11)] for i in range(12)]
    assert len(evenly) == len(front) == 12
    assert regret(front, points) < 0.7 * regret(evenly, points)
    # Half of the time is saved below a fifth of the memory.
    assert sum(budget < 300 for budget in asked) >= 5


def test_no_budget_is_asked_where_nothing_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    front, asked = spread([Point(10, 2.0), Point(100, 1.0)], 20, monkeypatch)
    # Between the two there is no plan: each budget halves what is open.
    assert asked[:3] == [100, 10, 55] and asked[-1] == 99
    assert [p.peak_bytes for p in front] == [10, 100]
    # The plan of least peak is the fastest; or the only one.
    for points in ([Point(10, 1.0), Point(100, 2.0)], [Point(10, 1.0)]):
        front, asked = spread(points, 20, monkeypatch)
        assert asked == [p.peak_bytes for p in reversed(points)]
        assert front == [Point(10, 1.0)]
    # The fastest plan is neither.
    front, _ = spread([Point(10, 2.0), Point(50, 1.0), Point(100, 1.5)], 20, monkeypatch)
    assert [p.peak_bytes for p in front] == [10, 50]


def test_the_plan_of_least_peak_may_be_slow_for_its_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    lowest, fast, plain = Point(100, 9.0), Point(100, 2.0), Point(200, 1.0)
    front, asked = spread([lowest, fast, plain], 20, monkeypatch)
    assert asked[:2] == [200, 100]
    assert front[0] == fast


def test_a_slow_plan_found_by_the_way_is_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(peak, 1000 / peak) for peak in range(100, 1101)]
    # Compiled for a budget of 600, it took 700; the best of that peak takes 1.43.
    slow, first = Point(700, 1.65), 600
    front, asked = spread(points, 12, monkeypatch, {first: slow})
    assert asked[:4] == [1100, 100, first, 700]
    assert slow not in front and Point(700, 1000 / 700) in front
    # If nothing better is found for its peak, it is not asked for again.
    known = [p for p in points if not 600 < p.peak_bytes <= 700] + [slow]
    front, asked = spread(known, 12, monkeypatch, {first: slow})
    assert slow in front and asked.count(700) == 1
    # Neither is one that is hardly slower.
    near = Point(700, 1.43 + 0.004)
    assert 700 not in spread(points, 12, monkeypatch, {first: near})[1][:4]


def test_a_slow_answer_leaves_open_what_is_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(peak, 1000 / peak) for peak in range(100, 1101)]
    # The least peak takes 10; the best of a peak of 300 takes 3.3, but is not found.
    front, asked = spread(points, 8, monkeypatch, {600: Point(300, 9.9)}, in_vain=[300])
    assert asked[:6] == [1100, 100, 600, 300, 450, 200]
    assert Point(200, 5.0) in front


def front_of(*points: tuple[float, float]) -> list[tuple[float, float]]:
    return pareto_front(points, lambda p: p)


def test_a_front_has_what_no_other_beats() -> None:
    assert front_of() == []
    assert front_of((3, 1.0), (1, 3.0), (2, 2.0), (2, 2.5), (4, 1.0)) == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.0),
    ]


def test_of_nearly_equal_peaks_a_front_has_the_fastest() -> None:
    assert front_of((1000, 9.0), (2000, 3.0), (2001, 2.0)) == [(1000, 9.0), (2001, 2.0)]
    # Each is nearly equal to the next, but not to the one after it.
    chain = [(2000, 4.0), (2001.5, 3.0), (2003, 2.0)]
    assert front_of((1000, 9.0), *chain) == [(1000, 9.0), (2000, 4.0), (2003, 2.0)]
    # Nothing else fits less memory.
    assert front_of((2000, 3.0), (2001, 2.0)) == [(2000, 3.0), (2001, 2.0)]


def test_no_budget_is_asked_for_a_plan_with_a_faster_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [Point(peak, 1e6 / peak) for peak in range(100_000, 1_100_001, 100)]
    slow = Point(599_900, 2.0)
    front, asked = spread(points, 12, monkeypatch, {600_000: slow})
    assert asked[:3] == [1_100_000, 100_000, 600_000] and slow.peak_bytes not in asked
    assert Point(600_000, 1e6 / 600_000) in front and slow not in front


def test_how_far_points_are_above_their_hull() -> None:
    corners = [(0.0, 4.0), (2.0, 1.0), (6.0, 0.0)]
    above = [(1.0, 3.0), (4.0, 0.5), (2.0, 1.5)]
    assert above_lower_hull([*above, *corners]) == [0.5, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert above_lower_hull([(3.0, 2.0)]) == [0.0]
