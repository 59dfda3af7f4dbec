"""A hierarchy of parts, an integer program at each level of it, several options handed up."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.grouping import ByScore, Node, Partitioner
from jax_hremat._schedules.line import Line, line_of
from jax_hremat._schedules.parts import (
    bytes_of,
    made_for_others,
    needed,
    peak_bytes_of,
    read_first,
    read_from_others,
    time_s_of,
)
from jax_hremat._schedules.persistent import Option
from jax_hremat._schedules.strategy import Family
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.hierarchy import Level, Part, PartOption, Run, fastest_runs

# The runs of a level, given bounds on its peak and on what it keeps.
Fastest = Callable[[Level, int, int | None], tuple[Sequence[Run], Sequence[Run]] | None]


@dataclass(frozen=True, slots=True)
class HRockmate(Family):
    """Group the forward into parts, and parts into larger ones, by a score; solve each part for
    several bounds on its peak and on what it keeps, given the options of those inside it.

    Attributes:
        partitioner: What groups.
        max_parts: Most parts on the highest level.
        max_children: Most parts that are grouped into one.
        num_peaks: Bounds on a part's peak, evenly spaced up to that of keeping all.
        num_kept: For each, bounds on what a part keeps, evenly spaced up to all.
        max_options: Most options that a part hands up.
        num_budgets: Bounds on the peak on the highest level, evenly spaced.
        solver: The solver's limits for one program.
    """

    name = "hrockmate"
    summary = "parts made by a score, a program at each level"
    source = (
        'Gusak et al.: "HiRemate", ICML 2025, which was "H-Rockmate", 2023: its score and its '
        "program (see `_solve/hierarchy.py`)"
    )
    leaves_out = (
        "groups that are not consecutive; a backward runs once; "
        "corrections of a part's peak for what the level above drops; the highest level is solved "
        "for evenly spaced peaks, not for the one asked for; PyTorch's hidden saved tensors"
    )

    partitioner: Partitioner = ByScore()
    max_parts: int = 6
    max_children: int = 4
    num_peaks: int = 2
    num_kept: int = 3
    max_options: int = 5
    num_budgets: int = 10
    solver: SolverConfig = SolverConfig(max_nodes=200, relative_gap=0.01)

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        line = line_of(graph)
        yield range(len(graph))
        nodes = self.partitioner(graph, line, self.max_parts, self.max_children)
        view = _View(graph, line, Node(0, len(line.forward), nodes))
        # Equal levels with equal bounds, such as those of equal layers, are solved once.
        fastest = functools.cache(functools.partial(fastest_runs, config=self.solver))
        options = [self._options(graph, line, node, fastest) for node in nodes]
        level = view.level(options, is_root=True)
        whole_bytes = view.whole_bytes()
        for k in range(1, self.num_budgets + 1):
            peak_bytes = whole_bytes * k // self.num_budgets
            runs = fastest(level, peak_bytes, None)
            if runs is not None:
                yield tuple(i for half in runs for i in view.order(half, options))

    def _options(
        self, graph: Graph, line: Line, node: Node, fastest: Fastest
    ) -> tuple[Option, ...]:
        """Options of a part, the fastest first."""
        view = _View(graph, line, node)
        found = {Option(view.forward, view.backward): None}
        if node.children and view.backward:
            options = [self._options(graph, line, child, fastest) for child in node.children]
            level = view.level(options, is_root=False)
            keeping = view.priced(next(iter(found)))
            whole_bytes = view.whole_bytes()
            for p in range(1, self.num_peaks + 1):
                for k in range(self.num_kept):
                    runs = fastest(
                        level,
                        whole_bytes * p // self.num_peaks,
                        keeping.kept_bytes * k // self.num_kept,
                    )
                    if runs is not None:
                        forward, backward = (tuple(view.order(half, options)) for half in runs)
                        found[Option(forward, backward)] = None
        return self._few([(view.priced(option), option) for option in found])

    def _few(self, priced: Sequence[tuple[PartOption, Option]]) -> tuple[Option, ...]:
        """The options that no other is at least as good as in all figures; if these are too many,
        some of them, evenly spaced in the order of their times."""
        best: list[tuple[tuple[float, ...], Option]] = []
        for figures, option in sorted(
            ((_figures(option), o) for option, o in priced), key=lambda p: p[0]
        ):
            if not any(all(map(operator.le, other, figures)) for other, _ in best):
                best.append((figures, option))
        count = min(len(best), self.max_options)
        steps = [k * (len(best) - 1) // max(count - 1, 1) for k in range(count)]
        return tuple(best[step][1] for step in steps)


def _figures(option: PartOption) -> tuple[float, ...]:
    return (
        option.forward_s + option.backward_s,
        option.kept_bytes,
        option.forward_peak_bytes,
        option.backward_peak_bytes,
        len(option.backward_reads),
    )


class _View:
    """What a part is made of, and what passes into and out of it."""

    def __init__(self, graph: Graph, line: Line, node: Node) -> None:
        self._graph, self._line, self._node = graph, line, node
        self.forward = line.forward[node.start : node.stop]
        self.backward = tuple(
            sorted(i for own in line.backward[node.start : node.stop] for i in own)
        )
        self._own = {*self.forward, *self.backward}

    def inputs(self) -> set[int]:
        """The forward values that its operations read and others make."""
        read = read_from_others(self._graph, self._own)
        return {i for i in read if not self._line.is_backward[i]}

    def outputs(self) -> set[int]:
        """The forward values that it makes, and that others read or that are results."""
        return made_for_others(self._graph, self.forward, self._own)

    def gradients(self) -> set[int]:
        """The backward values that it makes, and that others read or that are results."""
        return made_for_others(self._graph, self.backward, self._own)

    def whole_bytes(self) -> int:
        """The peak if nothing is recomputed, and gradients from behind are there from the start."""
        graph = self._graph
        behind = self._from_behind()
        return peak_bytes_of(
            graph,
            (*self.forward, *self.backward),
            self._own | behind,
            behind,
            self.outputs() | self.gradients(),
        )

    def hand_on(self) -> tuple[int, ...]:
        """The forward that only makes the outputs."""
        return needed(self._graph, self.forward, self.outputs())

    def priced(self, option: Option) -> PartOption:
        """What an option takes, as the program of the level above sees it."""
        graph, own = self._graph, set(self.forward)
        outputs = self.outputs()
        first = read_first(graph, option.backward, own)
        inside = first - outputs
        counted = (self._own - first) | inside
        return PartOption(
            forward_s=time_s_of(graph, option.forward),
            forward_peak_bytes=peak_bytes_of(graph, option.forward, own, (), inside | outputs),
            kept_bytes=bytes_of(graph, inside),
            keeps=bool(inside),
            backward_s=time_s_of(graph, option.backward),
            backward_peak_bytes=peak_bytes_of(
                graph, option.backward, counted, inside, self.gradients()
            ),
            backward_reads=tuple(
                sorted((first & outputs) | (self.inputs() & self._read_by(option.backward)))
            ),
        )

    def level(self, options: Sequence[Sequence[Option]], *, is_root: bool) -> Level:
        """The program of the parts inside it."""
        graph = self._graph
        views = self._children()
        numbers = {i: n for n, i in enumerate(i for view in views for i in sorted(view.outputs()))}
        parts = []
        for view, some in zip(views, options, strict=True):
            priced = tuple(map(view.priced, some)) if view.backward else ()
            hand_on = view.hand_on()
            parts.append(
                Part(
                    reads=_numbered(numbers, view.inputs() & view._read_by(view.forward)),
                    makes=_numbered(numbers, view.outputs()),
                    hand_on_s=time_s_of(graph, hand_on),
                    hand_on_peak_bytes=peak_bytes_of(
                        graph, hand_on, view.forward, (), view.outputs()
                    ),
                    options=tuple(
                        replace(o, backward_reads=_numbered(numbers, set(o.backward_reads)))
                        for o in priced
                    ),
                    gradient_bytes=bytes_of(graph, self._gradients_at(view)),
                )
            )
        results = {i for i in numbers if i in graph.results}
        return Level(
            parts=tuple(parts),
            value_bytes=tuple(graph.operations[i].output_bytes for i in numbers),
            handed_on=frozenset() if is_root else frozenset(_numbered(numbers, self.outputs())),
            results=frozenset(_numbered(numbers, results)) if is_root else frozenset(),
        )

    def order(self, runs: Sequence[Run], options: Sequence[Sequence[Option]]) -> Iterator[int]:
        """The computations of runs of the parts inside it."""
        views = self._children()
        for run in runs:
            if run.option is None:
                yield from views[run.part].hand_on()
            elif run.is_backward:
                yield from options[run.part][run.option].backward
            else:
                yield from options[run.part][run.option].forward

    def _children(self) -> list[_View]:
        return [_View(self._graph, self._line, child) for child in self._node.children]

    def _read_by(self, operations: Sequence[int]) -> set[int]:
        return {j for i in operations for j in self._graph.operations[i].reads}

    def _from_behind(self) -> set[int]:
        """The gradients that it reads and later parts make."""
        read = self._read_by(self.backward) - self._own
        return {i for i in read if self._line.is_backward[i]}

    def _gradients_at(self, child: _View) -> set[int]:
        """The gradients that are there while the backward of a part inside it runs, made behind
        that part: to be read by it or by parts in front of it, or results."""
        graph, places = self._graph, self._line.places
        later = {i for own in self._line.backward[child._node.stop : self._node.stop] for i in own}
        waiting = {
            i
            for i in later
            if i in graph.results or any(places[r] < child._node.stop for r in graph.readers[i])
        }
        ahead = {i for own in self._line.backward[self._node.start : child._node.stop] for i in own}
        behind = {i for i in self._from_behind() if not ahead.isdisjoint(graph.readers[i])}
        return waiting | behind


def _numbered(numbers: dict[int, int], values: set[int]) -> tuple[int, ...]:
    """The numbers of the values that the level knows; others come from outside it."""
    return tuple(sorted(numbers[i] for i in values if i in numbers))
