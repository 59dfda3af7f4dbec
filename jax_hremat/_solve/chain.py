"""The program as a chain of blocks, each with options; a schedule selects one option per block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import Phase
from jax_hremat._solve.backend import Outcome
from jax_hremat._solve.column import Column

# The first and last block of a group.
Group = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """A value made in one block and read in later ones.

    Attributes:
        size_bytes: Size of the value.
        producer: The block that makes the value.
        readers: Later blocks whose forward reads the value, in order.
        active: Whether the value has a cotangent.
        needed: Each (block, option) whose backward reads the value.
        output: Where the value is among the outputs of the producer; None if that is not known.
        input: Where it is among the inputs of the last reader; None if that is not known.
    """

    size_bytes: int
    producer: int
    readers: tuple[int, ...]
    active: bool
    needed: frozenset[tuple[int, int]]
    output: int | None = None
    input: int | None = None


class PartialGradient(NamedTuple):
    """A part of an argument's gradient, which waits for parts from the backwards of earlier blocks.

    Attributes:
        size_bytes: Its size.
        waits: The blocks during whose backwards it waits.
        position: Where the argument is among the inputs of the block after these, whose backward
            makes it; None if that is not known.
    """

    size_bytes: int
    waits: range
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Chain:
    """Blocks in program order, each with its options, and what passes between them.

    Attributes:
        starts: First operation of each block.
        options: Options of each block.
        recompute_s: For each block, the seconds of one more forward, which keeps no residuals.
        handing_on_bytes: For each block, the peak of such a forward. The first forward of every
            block of a group is one, whatever the block's option, for only the recompute follows
            the option.
        handing_on: For each block, such a forward position by position, as far as it is known.
        last_recompute_s: For each option of each block, the seconds of the block's recompute
            where it is the last block of a group. Operations that only make the block's outputs
            are then not recomputed, because nothing reads those outputs.
        shared_bytes: Bytes that each block keeps from its forward to its backward even inside a
            checkpoint: constant arrays, which XLA also finds in the recompute and makes only once.
        boundary_values: Values made in one block and read in later ones.
        fixed_bytes: Arguments, outputs and constants of the step.
        effectful: Blocks with an effect. They must run exactly once, so they are in no group.
        listed: The groups with kept values, and those with smaller groups inside, that may be
            chosen, as columns of the root program. Of the others, which keep nothing and are
            made of blocks alone, all may be chosen.
        partial_gradients: The gradients of arguments that several blocks read, before they are
            complete.
    """

    starts: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    recompute_s: tuple[float, ...]
    handing_on_bytes: tuple[int, ...]
    handing_on: tuple[Phase, ...]
    last_recompute_s: tuple[tuple[float, ...], ...]
    shared_bytes: tuple[int, ...]
    boundary_values: tuple[BoundaryValue, ...]
    fixed_bytes: int
    effectful: frozenset[int] = frozenset()
    listed: tuple[Column, ...] = ()
    partial_gradients: tuple[PartialGradient, ...] = ()

    def __len__(self) -> int:
        return len(self.starts)

    def fastest_s(self, block: int) -> float:
        """The time of a block's fastest option."""
        return min(option.cost.time_s for option in self.options[block])

    @property
    def fastest_ms(self) -> float:
        """The time of all blocks in their fastest options, to which columns add theirs."""
        return 1e3 * sum(map(self.fastest_s, range(len(self))))

    def needs(self) -> list[list[list[int]]]:
        """For each block and option, the boundary values that the block's backward reads."""
        needs: list[list[list[int]]] = [[[] for _ in options] for options in self.options]
        for v, value in enumerate(self.boundary_values):
            for block, option in sorted(value.needed):
                needs[block][option].append(v)
        return needs

    def read_from_before(self, blocks: range) -> list[int]:
        """The boundary values made before a group of these blocks and read in it."""
        return [
            v
            for v, c in enumerate(self.boundary_values)
            if c.producer < blocks.start and any(r in blocks for r in c.readers)
        ]

    def held_throughout(self, values: Iterable[int], blocks: range) -> tuple[tuple[int, int], ...]:
        """What a group of these blocks holds if it holds some values from before it from its first
        block on, in the form of `Column.holds`."""
        lasts = {v: self.boundary_values[v].readers[-1] for v in values}
        return tuple(sorted({(v, min(k, last)) for v, last in lasts.items() for k in blocks}))

    def handing_on_peaks(self, blocks: range) -> tuple[int, ...]:
        """The peak of each block's forward in a group of these blocks that keeps nothing, plus what
        the group keeps of the blocks before."""
        before = accumulate((self.shared_bytes[k] for k in blocks), initial=0)
        pairs = zip(blocks, before, strict=False)
        return tuple(self.handing_on_bytes[k] + kept_bytes for k, kept_bytes in pairs)

    @property
    def cotangent_bytes(self) -> list[int]:
        """Bytes of all that may wait in backwards: of each boundary value's cotangent, then of each
        partial gradient."""
        partial = (p.size_bytes for p in self.partial_gradients)
        return [*(value.size_bytes for value in self.boundary_values), *partial]

    @property
    def cotangent_waits(self) -> list[range]:
        """The blocks during whose backwards each of these waits: later blocks have contributed to
        it, and the backward of an earlier block that made the value, or reads the argument, is to
        come."""
        values = (
            range(c.producer + 1, c.readers[-1]) if c.active else range(0)
            for c in self.boundary_values
        )
        return [*values, *(p.waits for p in self.partial_gradients)]

    def pending_cotangents(self, block: int) -> list[int]:
        """The bytes of each that waits during this block's backward."""
        pairs = zip(self.cotangent_bytes, self.cotangent_waits, strict=True)
        return [size for size, waits in pairs if block in waits]

    def made_to_wait_bytes(self, block: int) -> int:
        """Bytes of the cotangents that this block's backward is the first to contribute to, and
        that wait while those of other blocks run."""
        return sum(
            c.size_bytes
            for c in self.boundary_values
            if c.active and c.readers[-1] == block and c.producer + 1 < block
        )

    def pending_cotangent_bytes(self, block: int) -> int:
        """Sum of the bytes of the pending cotangents."""
        return sum(self.pending_cotangents(block))


@dataclass(frozen=True, slots=True)
class Selection:
    """One option for each block, and the groups of consecutive blocks checkpointed together.

    Attributes:
        options: Position of the option in `Chain.options[block]`.
        groups: In order of their first blocks, an outer group before the groups inside it. Any
            two groups are disjoint, or one is strictly inside the other.
        keeps: (block, position of an option) pairs: of these blocks the group around them (the
            outermost, if groups are nested) keeps the values that the option saves.
    """

    options: tuple[int, ...]
    groups: tuple[Group, ...] = ()
    keeps: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """An answer of the root program.

    Attributes:
        columns: The columns chosen, as they are without prices, in order; None if the budget is
            infeasible or the limit was reached first.
        outcome: What was proved. The objective is in ms over the fastest options
            (`fastest_within`), or in MiB without arguments and outputs (`least_peak`); the gap is
            relative to the whole time, or to that peak.
        bound_s: No schedule of these options and groups within the peak takes less predicted time;
            infinite if there is none (`fastest_within`).
        forward_bytes: What the root program counts in the forward of each block, arguments,
            outputs and what is assumed to be saved not included.
        backward_bytes: The same in the backward of each block.
    """

    columns: tuple[Column, ...] | None
    outcome: Outcome
    bound_s: float = 0.0
    forward_bytes: tuple[int, ...] = ()
    backward_bytes: tuple[int, ...] = ()

    @property
    def selection(self) -> Selection | None:
        """The options and groups chosen, if there are any."""
        return None if self.columns is None else selection_of(self.columns)


def selection_of(columns: Sequence[Column]) -> Selection:
    """The selection that a schedule's columns are."""
    ordered = sorted(columns, key=lambda p: p.first)
    return Selection(
        options=tuple(o for p in ordered for o in p.options),
        groups=tuple(
            group for p in ordered if p.last > p.first for group in ((p.first, p.last), *p.inner)
        ),
        keeps=tuple(keep for p in ordered for keep in p.keeps),
    )
