"""The program as a chain of blocks with options, of which a schedule selects."""

from __future__ import annotations

from dataclasses import dataclass

from jax_hremat._cost.option import Option
from jax_hremat._solve.column import Column

# First and last block.
Group = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BoundaryValue:
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
class Chain:
    """Blocks in program order, each with its options, and what passes between them.

    Attributes:
        starts: First operation of each block.
        options: Options of each block.
        recompute_s: Seconds of one more forward of each block, one that keeps nothing.
        last_recompute_s: For each option of each block, the seconds its recompute takes where
            the block is the last of a group: what only makes its outputs is not run again,
            for nothing reads them.
        shared_bytes: What each block keeps from its forward to its backward whatever is checkpointed
            around it: arrays of constants, which XLA finds again in the recompute and makes once.
        boundary values: Values that cross a boundary.
        fixed_bytes: Arguments and outputs of the step.
        effectful: Blocks with an effect, which must run exactly once: they are in no group.
        keeping: The groups that may keep something, as columns; all others keep nothing.
    """

    starts: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    recompute_s: tuple[float, ...]
    last_recompute_s: tuple[tuple[float, ...], ...]
    shared_bytes: tuple[int, ...]
    boundary_values: tuple[BoundaryValue, ...]
    fixed_bytes: int
    effectful: frozenset[int] = frozenset()
    keeping: tuple[Column, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    def needs(self) -> list[list[list[int]]]:
        """For each block and option, the boundary values that its backward reads."""
        needs: list[list[list[int]]] = [[[] for _ in options] for options in self.options]
        for v, value in enumerate(self.boundary_values):
            for block, option in sorted(value.needed):
                needs[block][option].append(v)
        return needs

    def pending_cotangents(self, block: int) -> list[int]:
        """Bytes of each of the cotangents made by later blocks that wait, during this block's
        backward, for a block further ahead in it."""
        return [
            c.size_bytes
            for c in self.boundary_values
            if c.active and c.producer < block and c.readers[-1] > block
        ]

    def pending_cotangent_bytes(self, block: int) -> int:
        """The sum of them."""
        return sum(self.pending_cotangents(block))


@dataclass(frozen=True, slots=True)
class Selection:
    """One option for each block, and the groups of consecutive blocks checkpointed together.

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
