"""The program as a chain of blocks with options, of which a schedule selects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_hremat._cost.option import Option
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._partition.blocks import Partition
from jax_hremat._trace.graph import Graph

# First and last block.
Group = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value made in one block and read in later ones.

    Attributes:
        size_bytes: Its bytes.
        producer: The block that makes it.
        readers: Later blocks whose forward reads it, in order.
        active: Whether a cotangent of it flows back.
        needed: For each (block, option) whose backward reads it.
    """

    size_bytes: int
    producer: int
    readers: tuple[int, ...]
    active: bool
    needed: frozenset[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class KeepingGroup:
    """A group that keeps values made in it, as `jax.checkpoint` under a policy does.

    Attributes:
        first: First block.
        last: Last block.
        options: Position of the option in which each block is run in the recompute.
        keeps: (block, position of an option) for blocks of which the group keeps the values that
            the option saves.
    """

    first: int
    last: int
    options: tuple[int, ...]
    keeps: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in program order, each with its options, and what passes between them.

    Attributes:
        starts: First operation of each block.
        options: Options of each block.
        recompute_s: Seconds of one more forward of each block, one that keeps nothing.
        last_recompute_s: For each option of each block, the seconds its recompute takes where
            the block is the last of a group: what only makes its outputs is not run again,
            for nothing reads them.
        shared_bytes: What each block keeps from its forward to its backward whatever is wrapped
            around it: arrays of constants, which XLA finds again in the recompute and makes once.
        crossings: Values that cross a boundary.
        fixed_bytes: Arguments and outputs of the step.
        pinned: Blocks with an effect, which must run exactly once: they are in no group.
        keeping: Groups that may be chosen and keep something; all others keep nothing.
    """

    starts: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    recompute_s: tuple[float, ...]
    last_recompute_s: tuple[tuple[float, ...], ...]
    shared_bytes: tuple[int, ...]
    crossings: tuple[Crossing, ...]
    fixed_bytes: int
    pinned: frozenset[int] = frozenset()
    keeping: tuple[KeepingGroup, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    def pending_cotangents(self, block: int) -> list[int]:
        """Bytes of each of the cotangents made by later blocks that wait, during this block's
        backward, for a block further ahead in it."""
        return [
            c.size_bytes
            for c in self.crossings
            if c.active and c.producer < block and c.readers[-1] > block
        ]

    def pending_cotangent_bytes(self, block: int) -> int:
        """The sum of them."""
        return sum(self.pending_cotangents(block))


@dataclass(frozen=True, slots=True)
class Selection:
    """One option for each block, and the groups of consecutive blocks wrapped together.

    Attributes:
        options: Position of the option in `Chain.options[block]`.
        groups: In order of their first blocks, an outer one before those in it; two of them are
            disjoint, or one is inside the other and not the same.
        keeps: (block, position of an option) for blocks of which the group around them keeps the
            values that the option saves; where there are groups in groups, the outermost.
    """

    options: tuple[int, ...]
    groups: tuple[Group, ...] = ()
    keeps: tuple[tuple[int, int], ...] = ()


def make_chain(
    graph: Graph,
    partition: Partition,
    options: Mapping[int, BlockOptions],
    fixed_bytes: int,
    *,
    only: Sequence[Sequence[Option]] | None = None,
) -> Chain:
    """Lay the options of each kind along the program.

    Args:
        graph: The program's graph.
        partition: Its blocks.
        options: For each kind of block, its options.
        fixed_bytes: Arguments and outputs of the step.
        only: Options of each block to choose from, instead of all of its kind's.
    """
    block_of: dict[int, int] = {}
    for index, block in enumerate(partition.blocks):
        for op in range(block.start, block.stop):
            block_of[op] = index
    chosen = tuple(
        tuple(only[i]) if only is not None else options[kind].options
        for i, kind in enumerate(partition.kinds)
    )
    needed: dict[int, set[tuple[int, int]]] = {}
    for index, block in enumerate(partition.blocks):
        for o, option in enumerate(chosen[index]):
            for position in option.cost.kept_inputs:
                needed.setdefault(block.inputs[position], set()).add((index, o))
            for position in option.cost.kept_outputs:
                needed.setdefault(block.outputs[position], set()).add((index, o))
    crossings = []
    for index, block in enumerate(partition.blocks):
        for v in block.outputs:
            value = graph.values[v]
            readers = sorted({block_of[u] for u in value.users} - {index})
            if readers:
                crossings.append(
                    Crossing(
                        size_bytes=value.size_bytes,
                        producer=index,
                        readers=tuple(readers),
                        active=value.active,
                        needed=frozenset(needed.get(v, ())),
                    )
                )
    return Chain(
        starts=tuple(b.start for b in partition.blocks),
        options=chosen,
        # The first forward of a group writes no residuals, like that of a wrapped block.
        recompute_s=tuple(options[kind].wrapped.cost.forward_s for kind in partition.kinds),
        last_recompute_s=tuple(
            tuple(_last_recompute_s(options[kind], option) for option in chosen[index])
            for index, kind in enumerate(partition.kinds)
        ),
        # Wrapped, a block keeps nothing else.
        shared_bytes=tuple(options[kind].wrapped.cost.kept_bytes for kind in partition.kinds),
        crossings=tuple(crossings),
        fixed_bytes=fixed_bytes,
        pinned=frozenset(
            index
            for index, block in enumerate(partition.blocks)
            if any(op.pinned for op in graph.operations[block.start : block.stop])
        ),
    )


def _last_recompute_s(options: BlockOptions, option: Option) -> float:
    """What a group's recompute of its last block takes.

    A wrapped block is a group of one, so what it takes over the bare one is the forward as far as
    the backward reads it. What an option that is wrapped as a whole runs again itself, the group
    need not run.
    """
    spared = option if option.mode.wrapped else options.bare
    added_s = options.wrapped.cost.time_s - spared.cost.time_s
    return min(max(added_s, 0.0), options.wrapped.cost.forward_s)
