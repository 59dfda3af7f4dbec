"""The planner's own program on a graph: checkpoints around runs of operations, which keep what the
solver likes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import OptionCost, Phase
from jax_hremat._plan.region import Region
from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.line import Line, line_of
from jax_hremat._schedules.schedule import Schedule, with_drops, without_unread
from jax_hremat._schedules.simulate import Simulation, simulate
from jax_hremat._schedules.strategy import Strategy
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import BoundaryValue, Chain, Selection
from jax_hremat._solve.keeping import keeping_columns
from jax_hremat._solve.schedule import Schedules

# What the options of a block are: its value is held where a backward reads it, or it is named, so
# that a checkpoint around it keeps it, or it is computed again for its own backward.
_PLAIN, _NAMED, _AGAIN = range(3)


@dataclass(frozen=True, slots=True)
class Tree(Strategy):
    """Checkpoints around consecutive forward operations, each of which keeps what the solver likes.

    Each forward operation is a block with three options: its value is held for the backwards that
    read it, it is computed again for its own backward, or a checkpoint around it keeps it by name.
    Gradients are alive at the same time in all selections. The peak that the program counts is
    seldom below the simulated one; where it is, the program is solved again with a lower limit.

    Attributes:
        solver: Limits of each program.
        max_rounds: The most programs for one peak.
    """

    name = "tree"
    summary = "checkpoints around up to eight operations that keep any values, by one program"
    source = "the root program of this library's planner (docs/explanation/milp.md)"
    leaves_out = (
        "graphs in which a backward has to run before that of a later operation, of which it keeps "
        "all; levels above: checkpoints around checkpoints, and the planner's many operations in a "
        "block; orders that checkpoints cannot express, such as a value that is dropped and "
        "computed again before the loss"
    )

    solver: SolverConfig = SolverConfig(relative_gap=1e-3)
    max_rounds: int = 4

    def schedule(self, graph: Graph, peak_bytes: int) -> Schedule | None:
        line = line_of(graph)
        schedules = _schedules(graph, line)
        found = [*self._always(graph, line, schedules)]
        limit = peak_bytes
        for _ in range(self.max_rounds):
            if schedules is None:
                break
            selection = schedules.fastest_within(limit, self.solver).selection
            if selection is None:
                break
            one = _simulated(graph, _order(line, selection))
            found.append(one)
            excess = one[1].peak_bytes - peak_bytes
            if excess <= 0:
                break
            limit -= excess
        fitting = [one for one in found if one[1].peak_bytes <= peak_bytes]
        return min(fitting, key=lambda f: (f[1].time_s, f[1].peak_bytes))[0] if fitting else None

    def lowest(self, graph: Graph) -> Schedule:
        line = line_of(graph)
        found = self._always(graph, line, _schedules(graph, line))
        return min(found, key=lambda f: (f[1].peak_bytes, f[1].time_s))[0]

    def _always(
        self, graph: Graph, line: Line, schedules: Schedules | None
    ) -> Iterator[tuple[Schedule, Simulation]]:
        """The schedules that are candidates for every peak: everything kept, and the least counted
        peak."""
        yield _simulated(graph, range(len(graph)))
        if schedules is None:
            return
        selection = schedules.least_peak(self.solver).selection
        assert selection is not None, "without a peak bound a selection exists"
        yield _simulated(graph, _order(line, selection))


def _simulated(graph: Graph, order: Iterable[int]) -> tuple[Schedule, Simulation]:
    schedule = with_drops(graph, without_unread(graph, tuple(order)))
    return schedule, simulate(graph, schedule)


def _schedules(graph: Graph, line: Line) -> Schedules | None:
    """The schedules of the forward operations as blocks of a chain; None if these are no blocks,
    because a backward has to run before that of a later operation."""
    if len(line.cuts) + 1 < len(line.forward):
        return None
    place = {i: p for p, i in enumerate(line.forward)}
    values = []
    for p, i in enumerate(line.forward):
        size = graph.operations[i].output_bytes
        forward = sorted({place[r] for r in graph.readers[i] if r in place})
        backward = [
            b
            for b, ops in enumerate(line.backward)
            if any(i in graph.operations[o].reads for o in ops)
        ]
        readers = sorted({q for q in (*forward, *backward) if q > p})
        needed = {
            (b, o) for b in backward for o in (_PLAIN, _NAMED, _AGAIN) if (b, o) != (p, _AGAIN)
        }
        # Read when this block is computed again for its own backward.
        needed |= {(q, _AGAIN) for q in forward}
        needed.add((p, _NAMED))
        values.append(
            BoundaryValue(
                size_bytes=size,
                producer=p,
                readers=tuple(readers or [p + 1] if p + 1 < len(line.forward) else readers),
                # What waits of gradients does not depend on the selection: see `_options`.
                active=False,
                needed=frozenset(needed),
            )
        )
    read_back = [{j for b in ops for j in graph.operations[b].reads} for ops in line.backward]
    forward_s = [graph.operations[i].time_s for i in line.forward]
    chain = Chain(
        starts=tuple(range(len(line.forward))),
        options=tuple(
            _options(graph, i, line.backward[p], waiting)
            for p, (i, waiting) in enumerate(
                zip(line.forward, _gradients(graph, line), strict=True)
            )
        ),
        recompute_s=tuple(forward_s),
        handing_on_bytes=tuple(
            graph.operations[i].output_bytes + graph.operations[i].workspace_bytes
            for i in line.forward
        ),
        handing_on=(Phase(),) * len(line.forward),
        last_recompute_s=tuple(
            (s if i in own else 0.0, s if i in own else 0.0, 0.0)
            for s, i, own in zip(forward_s, line.forward, read_back, strict=True)
        ),
        shared_bytes=(0,) * len(line.forward),
        boundary_values=tuple(v for v in values if v.readers),
        fixed_bytes=graph.constant_bytes,
    )
    return Schedules(replace(chain, listed=keeping_columns(chain)))


def _gradients(graph: Graph, line: Line) -> list[int]:
    """The peak of what the backwards have made, while that of each place runs. It is the same in
    all selections, since backwards run once, in the order of the line."""
    order = [i for place in reversed(line.backward) for i in place]
    own = {*order}
    last = {
        j: step for step, i in enumerate(order) for j in (i, *graph.operations[i].reads) if j in own
    }
    end = len(order)
    last |= {i: end for i in graph.results if i in own}
    peaks: dict[int, int] = {}
    memory = 0
    for step, i in enumerate(order):
        operation = graph.operations[i]
        memory += operation.output_bytes
        peaks[i] = memory + operation.workspace_bytes
        memory -= sum(graph.operations[j].output_bytes for j in own if last[j] == step)
    return [max((peaks[i] for i in place), default=0) for place in line.backward]


def _options(
    graph: Graph, forward: int, backward: Sequence[int], gradients_bytes: int
) -> tuple[Option, ...]:
    operation = graph.operations[forward]
    backward_s = sum(graph.operations[b].time_s for b in backward)
    plain = OptionCost(
        forward_s=operation.time_s,
        backward_s=backward_s,
        kept_bytes=0,
        kept_inputs=(),
        kept_outputs=(),
        forward_peak_bytes=operation.output_bytes + operation.workspace_bytes,
        backward_peak_bytes=gradients_bytes,
    )
    again = replace(
        plain,
        backward_s=backward_s + operation.time_s,
        backward_peak_bytes=gradients_bytes + operation.output_bytes,
    )
    region = Region(0, 1)
    return (
        Option(region, plain, "plain"),
        Option(Region(0, 1, checkpointed=True, saved=((0, 0),)), plain, "names"),
        Option(replace(region, checkpointed=True), again, "checkpointed"),
    )


def _order(line: Line, selection: Selection) -> Iterator[int]:
    """The operations in the order in which a selection computes them."""
    yield from line.forward
    kept = {block for block, _ in selection.keeps}
    for block in reversed(range(len(line.forward))):
        for first, last in selection.groups:
            if last == block:
                yield from (line.forward[b] for b in range(first, last + 1) if b not in kept)
        if selection.options[block] == _AGAIN:
            yield line.forward[block]
        yield from line.backward[block]
