"""A chain of blocks as a graph of operations, for strategies that schedule graphs.

Every block is plain. The graph has these operations of a block; values of a block with the same
readers, forward and backward, are one value:

    operation   seconds      bytes of its value           reads
    constants   0            C = min(shared, kept)
    forward     forward_s    R = kept − C, the residuals  constants, boundary values
    boundary    0            sizes of boundary values     forward
    backward    backward_s   0                            constants, residuals, boundary values
                                                          needed, cotangents of its outputs
    cotangent   0            sizes of boundary values     backward

where kept, forward_s and so on are those of the plain option (`OptionCost`), shared is
`Chain.shared_bytes`, and the backward reads the boundary values whose `needed` has the plain
option. Constants and boundary values are read if they are there. A cotangent is that of the active
values which the block is the last to read; it waits for the backward of the block that made them.
The workspaces are what the peaks leave besides these values:

    forward     max(0, forward_peak − kept)
    backward    max(0, backward_peak − kept − cotangents of its outputs)

The operations stand in the order of the step: all forwards, then all backwards. A block's boundary
values are made by its forward, so they are computed only together with it (`Operations.part_of`);
otherwise they could be made of the residuals in no time. Constants, backwards, cotangents and
forwards with an effect run once. All forwards are one stage, so none runs again before the first
backward; every backward, with its cotangents, is a stage.

Where nothing is computed again, the simulated time is that which `predict` has for the plain
selection. So is the simulated peak, wherever a block's forward peak is at least what it keeps and
hands on, and its backward peak at least what it keeps with the cotangents of its outputs, and at
least the cotangents that it hands on. Where one of them is less, the simulated peak is higher. It
knows nothing of memory that results share with other buffers (`_solve/output_reuse.py`).

Where blocks are computed again, the two differ: here a forward that runs again takes as long as the
first time and writes its residuals, even if they are dropped at once; `predict` has for it what the
checkpointed block took.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace

from jax_hremat._schedules.checkmate import operations_of
from jax_hremat._schedules.graph import Graph, Operation
from jax_hremat._solve.chain import BoundaryValue, Chain
from jax_hremat._solve.checkmate import Operations


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The training step of a chain, as a graph.

    Attributes:
        graph: The operations.
        operations: The same for Checkmate's program. Its stages are the forwards together, then
            the backward of each block, from the last block to the first.
        forward: For each block, the position of its forward.
    """

    graph: Graph
    operations: Operations
    forward: tuple[int, ...]


def step_graph(chain: Chain) -> StepGraph:
    """The graph of a chain, as this module's text says.

    Args:
        chain: Blocks, each with its plain option first.
    """
    builder = _Builder(chain)
    for block in range(len(chain)):
        builder.add_forward(block)
    builder.end_stage()
    for block in reversed(range(len(chain))):
        builder.add_backward(block)
        builder.end_stage()
    return builder.built()


class _Builder:
    """The operations so far."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._operations: list[Operation] = []
        self._ends: list[int] = []
        self._once: set[int] = set()
        self._part_of: dict[int, int] = {}
        self._forward: dict[int, int] = {}
        self._constants: dict[int, int] = {}
        # Positions of boundary values and cotangents, each with one of the values that it stands
        # for.
        self._boundary: dict[int, BoundaryValue] = {}
        self._cotangents: dict[int, BoundaryValue] = {}

    def add_forward(self, block: int) -> None:
        cost = self._chain.options[block][0].cost
        constant_bytes = min(self._chain.shared_bytes[block], cost.kept_bytes)
        reads = [at for at, value in self._boundary.items() if block in value.readers]
        if constant_bytes:
            self._constants[block] = self._add(f"{block}.constants", output_bytes=constant_bytes)
            self._once.add(self._constants[block])
            reads.append(self._constants[block])
        forward = self._forward[block] = self._add(
            f"{block}.forward",
            time_s=cost.forward_s,
            output_bytes=cost.kept_bytes - constant_bytes,
            reads=tuple(reads),
            workspace_bytes=max(0, cost.forward_peak_bytes - cost.kept_bytes),
        )
        if block in self._chain.effectful:
            self._once.add(forward)
        made = [value for value in self._chain.boundary_values if value.producer == block]
        for alike in _alike(made, lambda value: (value.readers, _needing(value))):
            name = f"{block}.boundary{len(self._boundary)}"
            at = self._add(name, output_bytes=_bytes(alike), reads=(forward,))
            self._boundary[at] = alike[0]
            self._part_of[at] = forward

    def add_backward(self, block: int) -> None:
        cost = self._chain.options[block][0].cost
        forward = self._forward[block]
        arriving = [at for at, value in self._cotangents.items() if value.producer == block]
        reads = [at for at, value in self._boundary.items() if block in _needing(value)]
        if block in self._constants:
            reads.append(self._constants[block])
        if self._operations[forward].output_bytes:
            reads.append(forward)
        held_bytes = sum(self._operations[at].output_bytes for at in arriving) + cost.kept_bytes
        backward = self._add(
            f"{block}.backward",
            time_s=cost.backward_s,
            reads=(*reads, *arriving),
            workspace_bytes=max(0, cost.backward_peak_bytes - held_bytes),
            backward_of=forward,
        )
        active = [value for value in self._chain.boundary_values if value.active]
        leaving = [value for value in active if value.readers[-1] == block]
        for alike in _alike(leaving, lambda value: value.producer):
            name = f"{block}.cotangent{len(self._cotangents)}"
            at = self._add(name, output_bytes=_bytes(alike), reads=(backward,))
            self._cotangents[at] = alike[0]
        self._once.update(range(backward, len(self._operations)))

    def end_stage(self) -> None:
        self._ends.append(len(self._operations) - 1)

    def built(self) -> StepGraph:
        graph = Graph(tuple(self._operations), constant_bytes=self._chain.fixed_bytes)
        operations = replace(
            operations_of(graph),
            once=frozenset(self._once),
            part_of=self._part_of,
            ends=tuple(self._ends),
        )
        return StepGraph(graph, operations, tuple(self._forward.values()))

    def _add(
        self,
        name: str,
        *,
        time_s: float = 0.0,
        output_bytes: int = 0,
        reads: tuple[int, ...] = (),
        workspace_bytes: int = 0,
        backward_of: int | None = None,
    ) -> int:
        self._operations.append(
            Operation(
                name=name,
                time_s=time_s,
                output_bytes=output_bytes,
                reads=reads,
                workspace_bytes=workspace_bytes,
                backward_of=backward_of,
            )
        )
        return len(self._operations) - 1


def _needing(value: BoundaryValue) -> frozenset[int]:
    """The blocks whose backward reads the value if they are plain."""
    return frozenset(block for block, option in value.needed if option == 0)


def _alike(
    values: Iterable[BoundaryValue], key: Callable[[BoundaryValue], Hashable]
) -> list[list[BoundaryValue]]:
    """The values, those with equal keys together, in the order of the first ones."""
    found: dict[Hashable, list[BoundaryValue]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return list(found.values())


def _bytes(values: Iterable[BoundaryValue]) -> int:
    return sum(value.size_bytes for value in values)
