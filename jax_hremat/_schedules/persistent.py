"""Persistent schedules of a chain of segments: as trees of decisions, and the fastest for each size
of memory.

A segment is the part of a line (`line.py`) from one neck to the next. A run of segments is
processed when the gradient behind it and the value in front of it are there. A persistent schedule
keeps what it stores until the backward that it is stored for, so it processes a run in one of two
ways. Either it keeps the first segment in one of its options, processes the rest, and runs the
segment's backward. Or it hands on a value through the first segments, stores it in front of a later
one, processes the run from there on, and then the segments in front.

The fastest of them comes from the recursion of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova
("Optimal checkpointing for heterogeneous chains: how to train deep neural networks with limited
memory", 2019), with several options for a segment as in Rockmate (Zhao et al., ICML 2023).

Glossary
  indices
    s, t        the run from segment s to segment t
    j           the segment in front of which a value is stored, s < j ≤ t
    o           options of segment s
  data
    x_j         bytes of the value that segment j hands on
    g_t         bytes that the backwards behind segment t leave: gradients to be read, and results
    h_j, H_j    time and peak of the forward of segment j that only hands on
    f_o, F_o    time and peak of the forward of option o
    k_o         bytes that option o keeps, the value handed on included
    b_o, B_o    time and peak of the backward of option o
  unknown
    T(s, t, m)  least time to process the run in m bytes, besides the value in front of it

    T(s, t, m) = min of
        f_o + b_o + T(s + 1, t, m − k_o)                     if g_t + F_o ≤ m and B_o ≤ m
        h_s + … + h_(j−1) + T(j, t, m − x_(j−1)) + T(s, j − 1, m)
                                                             if g_t + H_s ≤ m, …, g_t + H_(j−1) ≤ m

Without a rest, s = t, the first line has neither T(s + 1, t, …) nor the value handed on.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.line import Line
from jax_hremat._schedules.parts import bytes_of, needed, peak_bytes_of, read_first, time_s_of
from jax_hremat._shared.errors import SolverError


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a segment forward and backward.

    Attributes:
        forward: Order of the forward that keeps what the backward reads, and hands on.
        backward: Order of the backward, recomputations included.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a line from one neck to the next.

    Attributes:
        forward: Its forward operations; later segments read only the value of the last.
        backward: What runs after the backwards of all later segments, in order.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def keeping(self) -> Option:
        """Every operation once, all that the backward reads being kept."""
        return Option(self.forward, self.backward)


def segments_of(line: Line) -> tuple[Segment, ...]:
    """The segments of a line."""
    ends = (0, *line.necks, len(line.forward))
    return tuple(
        Segment(line.forward[a:b], tuple(sorted(i for own in line.backward[a:b] for i in own)))
        for a, b in itertools.pairwise(ends)
    )


def check_count(segments: Sequence[Segment], max_segments: int) -> None:
    """Refuse a chain for which the recursion would be too large.

    Raises:
        SolverError: It has more segments than that.
    """
    if len(segments) > max_segments:
        raise SolverError(
            f"the graph has {len(segments)} segments, and the recursion, the time of which grows "
            f"with their cube and the memory with their square, takes at most {max_segments}; "
            f"choose another strategy, or raise max_segments"
        )


class Persistent:
    """The fastest persistent schedules of one chain, for every size of memory.

    Sizes are counted in units, each rounded up to whole units; so no schedule takes more than its
    units say.

    Args:
        graph: The graph.
        segments: Its segments.
        options: For each segment, the ways to run it.
        unit_bytes: The size of a unit.
    """

    def __init__(
        self,
        graph: Graph,
        segments: Sequence[Segment],
        options: Sequence[Sequence[Option]],
        unit_bytes: int,
    ) -> None:
        self._segments = segments
        self._options = options
        self._costs = _costs(graph, segments, options, unit_bytes)
        self._most = _most_units(self._costs)
        # T and the decision behind it, for each run an array over m. A decision is an option, or
        # the number of options plus the place of j.
        self._time_s: dict[tuple[int, int], np.ndarray] = {}
        self._decision: dict[tuple[int, int], np.ndarray] = {}
        for length in range(len(segments)):
            for s in range(len(segments) - length):
                self._process(s, s + length)

    def orders(self) -> Iterator[tuple[int, ...]]:
        """One order for each time that some size of memory makes possible, the fastest first."""
        last = len(self._segments) - 1
        times_s = self._time_s[0, last]
        slower = math.inf
        found = []
        for m in np.flatnonzero(np.isfinite(times_s)):
            if times_s[m] < slower:
                slower = times_s[m]
                found.append(int(m))
        for m in reversed(found):
            yield tuple(self._order(last, m))

    def _process(self, s: int, t: int) -> None:
        costs = self._costs
        behind = costs.behind[t]
        m = np.arange(self._most + 1)
        best_s = np.full(self._most + 1, np.inf)
        decision = np.zeros(self._most + 1, dtype=np.int32)

        def consider(number: int, time_s: np.ndarray, least: int) -> None:
            better = (time_s < best_s) & (m >= least)
            best_s[better] = time_s[better]
            decision[better] = number

        for number, one in enumerate(costs.options[s]):
            if s == t:
                least = max(behind + one.alone_peak, one.backward_peak)
                consider(number, np.full(self._most + 1, one.alone_s), least)
            else:
                rest_s = _less(self._time_s[s + 1, t], one.kept)
                least = max(behind + one.forward_peak, one.backward_peak)
                consider(number, one.time_s + rest_s, least)
        swept_s, least = 0.0, 0
        for j in range(s + 1, t + 1):
            passed = costs.hand_on[j - 1]
            swept_s += passed.time_s
            least = max(least, behind + (passed.first_peak if j == s + 1 else passed.later_peak))
            later_s = _less(self._time_s[j, t], passed.value)
            number = len(costs.options[s]) + j - s - 1
            consider(number, swept_s + later_s + self._time_s[s, j - 1], least)
        self._time_s[s, t] = best_s
        self._decision[s, t] = decision

    def _order(self, last: int, units: int) -> Iterator[int]:
        # What is left to do, the next at the end: runs in so many units, and backwards. Runs may be
        # nested as deeply as there are segments, which is too deep for a recursion.
        left: list[tuple[int, int, int] | Option] = [(0, last, units)]
        while left:
            following = left.pop()
            if isinstance(following, Option):
                yield from following.backward
                continue
            s, t, m = following
            decision = int(self._decision[s, t][m])
            options = self._options[s]
            if decision < len(options):
                yield from options[decision].forward
                left.append(options[decision])
                if s < t:
                    left.append((s + 1, t, m - self._costs.options[s][decision].kept))
                continue
            j = s + 1 + decision - len(options)
            for i in range(s, j):
                yield from self._costs.hand_on[i].order
            left += [(s, j - 1, m), (j, t, m - self._costs.hand_on[j - 1].value)]


@dataclass(frozen=True, slots=True)
class _HandOn:
    """The forward of a segment that only makes the value for the next: its order and seconds, and
    in units its peak without and with the value that it reads, and the value that it makes."""

    order: tuple[int, ...]
    time_s: float
    first_peak: int
    later_peak: int
    value: int


@dataclass(frozen=True, slots=True)
class _OptionCost:
    """Seconds and units of an option, with a rest of the run behind it, and alone."""

    time_s: float
    forward_peak: int
    kept: int
    alone_s: float
    alone_peak: int
    backward_peak: int


@dataclass(frozen=True, slots=True)
class _Costs:
    hand_on: tuple[_HandOn, ...]
    options: tuple[tuple[_OptionCost, ...], ...]
    behind: tuple[int, ...]


def _costs(
    graph: Graph,
    segments: Sequence[Segment],
    options: Sequence[Sequence[Option]],
    unit_bytes: int,
) -> _Costs:
    def units(count_bytes: int) -> int:
        return -(-count_bytes // unit_bytes)

    results = set(graph.results)
    hand_on: list[_HandOn] = []
    costs: list[tuple[_OptionCost, ...]] = []
    behind: list[int] = []
    handed: set[int] = set()
    for s, segment in enumerate(segments):
        own = {*segment.forward}
        end = segment.forward[-1:] if s + 1 < len(segments) else ()
        order = needed(graph, segment.forward, end)
        hand_on.append(
            _HandOn(
                order=order,
                time_s=time_s_of(graph, order),
                first_peak=units(peak_bytes_of(graph, order, own, (), end)),
                later_peak=units(peak_bytes_of(graph, order, own | handed, handed, end)),
                value=units(bytes_of(graph, end)),
            )
        )
        left = _left_behind(graph, segments[s + 1 :])
        behind.append(units(bytes_of(graph, left)))
        some = []
        for option in options[s]:
            # Of its own values, those that the backward reads before it makes them again, and the
            # results that it does not make.
            kept = read_first(graph, option.backward, own) | (own & results - {*option.backward})
            held = {*kept, *end}
            alone = needed(graph, option.forward, kept)
            ending = _left_behind(graph, segments[s:])
            counted = own | {*segment.backward} | left
            backward = option.backward
            some.append(
                _OptionCost(
                    time_s=time_s_of(graph, (*option.forward, *backward)),
                    forward_peak=units(peak_bytes_of(graph, option.forward, own, (), held)),
                    kept=units(bytes_of(graph, held)),
                    alone_s=time_s_of(graph, (*alone, *backward)),
                    alone_peak=units(peak_bytes_of(graph, alone, own, (), kept)),
                    backward_peak=units(
                        peak_bytes_of(graph, backward, counted, kept | left, ending)
                    ),
                )
            )
        costs.append(tuple(some))
        handed = set(end)
    return _Costs(tuple(hand_on), tuple(costs), tuple(behind))


def _most_units(costs: _Costs) -> int:
    """Enough for a schedule that keeps every segment in its first option."""
    kept = sum(options[0].kept for options in costs.options)
    peaks = [max(o.forward_peak, o.alone_peak, o.backward_peak) for o, *_ in costs.options]
    return kept + max(peaks) + max(costs.behind)


def _less(times_s: np.ndarray, units: int) -> np.ndarray:
    """The times with so many units less."""
    shifted = np.full_like(times_s, np.inf)
    if units < len(times_s):
        shifted[units:] = times_s[: len(times_s) - units]
    return shifted


def _left_behind(graph: Graph, segments: Sequence[Segment]) -> set[int]:
    """The values that the processed segments leave: their results, and what is still to be read."""
    made = {i for segment in segments for i in segment.backward}
    forward = {i for segment in segments for i in segment.forward}
    results = set(graph.results)
    return {i for i in made if i in results or not made.issuperset(graph.readers[i])} | (
        forward & results
    )
