"""Columns of the root program: the options it selects from, of single blocks and of groups."""

from __future__ import annotations

from dataclasses import dataclass

# Blocks of a group.
MAX_GROUP = 8
MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class Column:
    """A block in one option, or a group of blocks with the option of each.

    Attributes:
        first: First block.
        last: Last block.
        options: Position of the option of each block.
        added_ms: Time over the fastest options, the group's second forward included.
        kept_bytes: Kept until its backward, without the values that cross a boundary.
        forward_bytes: Peak of each block's forward, with what the group keeps of those before it.
        backward_bytes: Peak of its backward, pending cotangents included, and all a group holds
            from its recompute on.
        holds: For a value that it holds from the forward on, (its boundary value, as of which block).
        keeps: What a group keeps of its blocks, as `Selection.keeps`.
    """

    first: int
    last: int
    options: tuple[int, ...]
    added_ms: float
    kept_bytes: int
    forward_bytes: tuple[int, ...]
    backward_bytes: int
    holds: tuple[tuple[int, int], ...]
    keeps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Prices:
    """What the rows of the root program charge a piece, in ms (and ms per MiB).

    Attributes:
        cover: For covering each block; negative where a piece is wanted.
        forward: For the forward peak of each block.
        backward: For the backward peak of each block.
        hold: For holding a boundary value as of a block.
    """

    cover: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hold: dict[tuple[int, int], float]

    def reduced_ms(self, column: Column) -> float:
        """The piece's time and what it is charged: its reduced cost."""
        inside = range(column.first, column.last + 1)
        charged = sum(
            self.cover[k] + (self.forward[k] * f + self.backward[k] * column.backward_bytes) / MIB
            for k, f in zip(inside, column.forward_bytes, strict=True)
        )
        later = sum(self.forward[column.last + 1 :]) + sum(self.backward[column.last + 1 :])
        charged += later * column.kept_bytes / MIB
        return column.added_ms + charged + sum(self.hold[key] for key in column.holds)
