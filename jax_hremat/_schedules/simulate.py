"""The rules of schedules: what each step needs, and what memory and time it takes.

1. At the start only the constants are there.
2. An operation can be computed if every value that it reads is there, and its own is not. Its
   output and its workspace are allocated before anything is freed, so while it runs, memory holds
   what is there, its output and its workspace. Then the workspace is freed.
3. A value can be dropped if it is there. It may be computed again, any number of times.
4. At the end every result is there.

The peak is the largest memory at any moment, constants included. The time is the sum of the times
of all computations; dropping takes none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.schedule import Compute, Drop, Schedule, with_drops
from jax_hremat._shared.errors import InvalidScheduleError


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a schedule takes.

    Attributes:
        time_s: Seconds of all computations.
        peak_bytes: The largest memory, constants included.
        peak_step: The first step at which it is reached.
        peak_operation: The operation that this step computes.
        num_computations: Computations, repetitions included.
        memory_bytes: Memory after each step, constants included.
    """

    time_s: float
    peak_bytes: int
    peak_step: int
    peak_operation: int
    num_computations: int
    memory_bytes: tuple[int, ...]


def simulate(graph: Graph, schedule: Schedule) -> Simulation:
    """Follow a schedule step by step, by the rules of this module.

    Raises:
        InvalidScheduleError: A step breaks a rule, or a result is missing at the end; the message
            has the step's number and what was missing.
    """
    present: set[int] = set()
    memory = graph.constant_bytes
    peak, peak_step = -1, 0
    after: list[int] = []
    counts = [0] * len(graph)
    for number, step in enumerate(schedule.steps):
        _check(graph, present, number, step)
        operation = graph.operations[step.operation]
        if isinstance(step, Compute):
            memory += operation.output_bytes
            if memory + operation.workspace_bytes > peak:
                peak, peak_step = memory + operation.workspace_bytes, number
            present.add(step.operation)
            counts[step.operation] += 1
        else:
            memory -= operation.output_bytes
            present.remove(step.operation)
        after.append(memory)
    missing = [graph.operations[i].name for i in graph.results if i not in present]
    if missing:
        raise InvalidScheduleError(
            f"after all {len(schedule.steps)} steps, {_these(missing)} not there, and must be: "
            f"compute results, and do not drop them after they are computed for the last time"
        )
    times = zip(counts, graph.operations, strict=True)
    return Simulation(
        # By operation, so that the order of the computations makes no difference.
        time_s=math.fsum(count * operation.time_s for count, operation in times),
        peak_bytes=peak,
        peak_step=peak_step,
        peak_operation=schedule.steps[peak_step].operation,
        num_computations=sum(counts),
        memory_bytes=tuple(after),
    )


def without_recompute(graph: Graph) -> Schedule:
    """Every operation once, in the graph's order; each value is dropped after its last reader."""
    return with_drops(graph, range(len(graph)))


def _check(graph: Graph, present: set[int], number: int, step: Compute | Drop) -> None:
    if not 0 <= step.operation < len(graph):
        raise InvalidScheduleError(
            f"step {number} is {step}, and the graph has {len(graph)} operations"
        )
    operation = graph.operations[step.operation]
    if isinstance(step, Drop):
        if step.operation not in present:
            raise InvalidScheduleError(
                f"step {number} drops the value of {operation.name!r}, which is not there"
            )
        return
    if step.operation in present:
        raise InvalidScheduleError(
            f"step {number} computes {operation.name!r}, whose value is there already; drop it "
            f"first, or leave the step out"
        )
    missing = [graph.operations[j].name for j in operation.reads if j not in present]
    if missing:
        raise InvalidScheduleError(
            f"step {number} computes {operation.name!r}, and {_these(missing)} not there; compute "
            f"what is missing before it, or drop it later"
        )


def _these(names: list[str]) -> str:
    return ", ".join(map(repr, names)) + (" is" if len(names) == 1 else " are")
