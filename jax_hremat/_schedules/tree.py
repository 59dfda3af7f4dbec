"""The library's own programs on a schedule: checkpoints around runs of operations that keep what the
solver likes, and checkpoints in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._plan.region import Region
from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.line import Line, line_of
from jax_hremat._schedules.schedule import Schedule, with_drops, without_unread
from jax_hremat._schedules.simulate import Simulation, simulate
from jax_hremat._schedules.strategy import Strategy
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import BoundaryValue, Chain, Selection
from jax_hremat._solve.keeping import keeping_columns
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.schedule import fastest_within, least_peak

# What the options of a block are: its value is held where a backward reads it, or it is named, so
# that a checkpoint around it keeps it, or it is computed again for its own backward.
_PLAIN, _NAMED, _AGAIN = range(3)


@dataclass(frozen=True, slots=True)
class Tree(Strategy):
    """Nested checkpoints, chosen by the root program of the planner.

    Each forward operation is a block. The peak that the program counts differs a little from the
    simulated one, so it is solved a few times with its limit corrected.

    Attributes:
        solver: Limits of each program.
        max_rounds: How many programs are solved for one peak.
    """

    name = "tree"
    summary = "nested checkpoints that keep any values, by the planner's own program"
    source = "this library; docs/explanation/milp.md"
    leaves_out = (
        "orders that nested checkpoints cannot express; checkpoints around more than eight "
        "operations"
    )

    solver: SolverConfig = SolverConfig()
    max_rounds: int = 8

    def schedule(self, graph: Graph, peak_bytes: int) -> Schedule | None:
        found = [one for one in self._found(graph, peak_bytes) if one[1].peak_bytes <= peak_bytes]
        return min(found, key=lambda f: (f[1].time_s, f[1].peak_bytes))[0] if found else None

    def lowest(self, graph: Graph) -> Schedule:
        found = self._found(graph, 0)
        return min(found, key=lambda f: (f[1].peak_bytes, f[1].time_s))[0]

    def _found(self, graph: Graph, peak_bytes: int) -> Iterator[tuple[Schedule, Simulation]]:
        """Schedules for one peak, within it or not: that of every value kept, that of the least
        counted peak, and, by bisection, the fastest ones for the counted peaks that come out
        nearest to the simulated peak asked for."""
        line = line_of(graph)
        chain = _chain(graph, line)
        kept = Selection((_PLAIN,) * len(chain))
        lowest = least_peak(chain, self.solver).selection
        assert lowest is not None, "without a peak bound a selection exists"
        yield _simulated(graph, range(len(graph)))
        yield _simulated(graph, _order(line, lowest))
        low, high = (predict(chain, selection).peak_bytes for selection in (lowest, kept))
        for _ in range(self.max_rounds):
            limit = (low + high) // 2
            selection = fastest_within(chain, limit, self.solver).selection
            if selection is None:
                low = limit
                continue
            one = _simulated(graph, _order(line, selection))
            yield one
            if one[1].peak_bytes <= peak_bytes:
                low = limit
            else:
                high = min(limit, predict(chain, selection).peak_bytes) - 1


def _simulated(graph: Graph, order: Iterable[int]) -> tuple[Schedule, Simulation]:
    schedule = with_drops(graph, without_unread(graph, tuple(order)))
    return schedule, simulate(graph, schedule)


def _chain(graph: Graph, line: Line) -> Chain:
    """The forward operations as blocks of a chain."""
    place = {i: p for p, i in enumerate(line.forward)}
    values = []
    for p, i in enumerate(line.forward):
        size = graph.operations[i].output_bytes
        forward = sorted({place[r] for r in graph.readers[i] if r in place})
        backward = [b for b, ops in enumerate(line.backward) if any(i in graph.operations[o].reads for o in ops)]
        readers = sorted({q for q in (*forward, *backward) if q > p})
        needed = {(b, o) for b in backward for o in (_PLAIN, _NAMED, _AGAIN) if (b, o) != (p, _AGAIN)}
        # Read when this block is computed again for its own backward.
        needed |= {(q, _AGAIN) for q in forward}
        needed.add((p, _NAMED))
        values.append(
            BoundaryValue(
                size_bytes=size,
                producer=p,
                readers=tuple(readers or [p + 1] if p + 1 < len(line.forward) else readers),
                active=bool(line.backward[p]),
                needed=frozenset(needed),
            )
        )
    read_back = [{j for b in ops for j in graph.operations[b].reads} for ops in line.backward]
    forward_s = [graph.operations[i].time_s for i in line.forward]
    chain = Chain(
        starts=tuple(range(len(line.forward))),
        options=tuple(_options(graph, i, line.backward[p]) for p, i in enumerate(line.forward)),
        recompute_s=tuple(forward_s),
        last_recompute_s=tuple(
            (s if i in own else 0.0, s if i in own else 0.0, 0.0)
            for s, i, own in zip(forward_s, line.forward, read_back, strict=True)
        ),
        shared_bytes=(0,) * len(line.forward),
        boundary_values=tuple(v for v in values if v.readers),
        fixed_bytes=graph.constant_bytes,
    )
    return replace(chain, keeping=keeping_columns(chain))


def _options(graph: Graph, forward: int, backward: Sequence[int]) -> tuple[Option, ...]:
    operation = graph.operations[forward]
    backward_s = sum(graph.operations[b].time_s for b in backward)
    most = max(
        (graph.operations[b].output_bytes + graph.operations[b].workspace_bytes for b in backward),
        default=0,
    )
    plain = OptionCost(
        forward_s=operation.time_s,
        backward_s=backward_s,
        kept_bytes=0,
        kept_inputs=(),
        kept_outputs=(),
        forward_peak_bytes=operation.output_bytes + operation.workspace_bytes,
        # The gradient that is read, and the one that is made.
        backward_peak_bytes=operation.output_bytes + most,
    )
    again = replace(plain, backward_s=backward_s + operation.time_s)
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
