"""A program inside each segment, and a dynamic program over the segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jax_hremat._schedules.checkmate import operations_of, order_of
from jax_hremat._schedules.graph import Graph, Operation
from jax_hremat._schedules.line import line_of
from jax_hremat._schedules.persistent import Option, Persistent, Segment, check_count, segments_of
from jax_hremat._schedules.rotor import unit_bytes
from jax_hremat._schedules.schedule import without_unread
from jax_hremat._schedules.simulate import simulate, without_recompute
from jax_hremat._schedules.strategy import Family
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.checkmate import fastest_stages


@dataclass(frozen=True, slots=True)
class Rockmate(Family):
    """Several ways to run each segment, by Checkmate's program with bounds on its peak and on what
    it keeps until its backward; then rotor's recursion, which chooses one for each segment.

    A chain has one operation in each segment, of which there is nothing to choose, so there this is
    rotor. A graph without a value that all of the forward passes through is one segment.

    Attributes:
        slots: Units of memory in the peak without recomputation, as for `Rotor`.
        num_peaks: Bounds on a segment's peak, evenly spaced up to that of keeping all.
        num_kept: For each, bounds on what a segment keeps, evenly spaced up to all.
        max_segments: Longer chains are refused, as for `Rotor`.
        max_operations: Segments with more operations, backwards included, only keep all.
        solver: The solver's limits for one program.

    Raises:
        SolverError: The graph has too many segments.
    """

    name = "rockmate"
    summary = "Checkmate's program inside segments, rotor's over them"
    source = (
        'Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont: "Rockmate: an Efficient, Fast, '
        'Automatic and Generic Tool for Re-materialization in PyTorch", ICML 2023'
    )
    leaves_out = (
        "what PyTorch saves beside inputs and outputs; a program's answer at its limit of nodes is "
        "an option like any other, and a larger segment has only the option to keep all"
    )

    slots: int = 500
    max_segments: int = 1000
    num_peaks: int = 3
    num_kept: int = 3
    max_operations: int = 40
    solver: SolverConfig = SolverConfig(max_nodes=50, relative_gap=0.01)

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        segments = segments_of(line_of(graph))
        check_count(segments, self.max_segments)
        solved: dict[Graph, tuple[Option, ...]] = {}
        options = []
        for s, segment in enumerate(segments):
            found = [segment.keeping]
            size = len(segment.forward) + len(segment.backward)
            if 1 < len(segment.forward) and size <= self.max_operations:
                alone, members, rest = _alone(graph, segment, is_last=s + 1 == len(segments))
                # Equal segments have equal options, which name operations by their place in them.
                if alone not in solved:
                    solved[alone] = tuple(self._solved(alone, rest))
                for option in solved[alone]:
                    forward = tuple(members[i] for i in option.forward)
                    found.append(Option(forward, tuple(members[i] for i in option.backward)))
            options.append(tuple(dict.fromkeys(found)))
        yield range(len(graph))
        yield from Persistent(graph, segments, options, unit_bytes(graph, self.slots)).orders()

    def _solved(self, alone: Graph, rest: int) -> Iterator[Option]:
        """Options of a segment as a graph of its own, one operation of which stands for the rest of
        the run."""
        rest_bytes = alone.operations[rest].output_bytes
        whole = simulate(alone, without_recompute(alone))
        in_order = without_recompute(alone).steps
        at_rest = next(n for n, step in enumerate(in_order) if step.operation == rest)
        kept = whole.memory_bytes[at_rest] - rest_bytes
        for p in range(1, self.num_peaks + 1):
            peak_bytes = whole.peak_bytes * p // self.num_peaks
            for k in range(1, self.num_kept + 1):
                # A workspace of the rest leaves room for so much besides it.
                workspace_bytes = peak_bytes - rest_bytes - kept * k // self.num_kept
                if workspace_bytes < 0 or (p, k) == (self.num_peaks, self.num_kept):
                    continue
                operations = list(alone.operations)
                operations[rest] = replace(operations[rest], workspace_bytes=workspace_bytes)
                bounded = Graph(tuple(operations), alone.results)
                program = replace(operations_of(bounded), once=(rest,))
                stages = fastest_stages(program, peak_bytes, self.solver)
                if stages.computed is not None:
                    order = without_unread(alone, order_of(stages.computed))
                    middle = order.index(rest)
                    yield Option(order[:middle], order[middle + 1 :])


def _alone(graph: Graph, segment: Segment, *, is_last: bool) -> tuple[Graph, tuple[int, ...], int]:
    """A segment as a graph of its own, its operations as this graph numbers them, and the one of
    these that stands for the rest of the run: it reads the value handed on and makes what comes
    back. What comes from earlier segments is there all the time, and left out."""
    rest = len(segment.forward)
    members = (*segment.forward, -1, *segment.backward)
    place = {i: p for p, i in enumerate(members) if i >= 0}
    # What the backward reads of later backwards.
    back = {
        j
        for i in segment.backward
        for j in graph.operations[i].reads
        if j not in place and j > segment.forward[-1]
    }
    operations: list[Operation] = []
    for p, i in enumerate(members):
        if p == rest:
            size = sum(graph.operations[j].output_bytes for j in back)
            reads = () if is_last else (rest - 1,)
            operations.append(
                Operation(name="the rest of the run", time_s=0.0, output_bytes=size, reads=reads)
            )
            continue
        operation = graph.operations[i]
        reads = {place[j] for j in operation.reads if j in place}
        if back.intersection(operation.reads):
            reads.add(rest)
        operations.append(
            Operation(
                name=str(p),
                time_s=operation.time_s,
                output_bytes=operation.output_bytes,
                reads=tuple(sorted(reads)),
                workspace_bytes=operation.workspace_bytes,
            )
        )
    read = {j for operation in operations for j in operation.reads}
    results = [
        p
        for p, i in enumerate(members)
        if p not in read
        or i in graph.results
        or (p > rest and any(j not in place for j in graph.readers[i]))
    ]
    return Graph(tuple(operations), tuple(results)), members, rest
