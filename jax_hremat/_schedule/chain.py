"""The program as a chain of blocks with options: what the root program is about.

`predict` says what a selection of options costs, step by step and without a solver; the root
program (`_schedule/schedule.py`) is the same arithmetic as constraints, and tests hold the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from jax_hremat._modes.block_modes import BlockOptions
from jax_hremat._modes.option import Option
from jax_hremat._partition.blocks import Partition, has_deferrable_input, make_block
from jax_hremat._program.graph import Graph
from jax_hremat._program.region import Region


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
class Chain:
    """Blocks in program order, each with its options, and what passes between them.

    Attributes:
        starts: First operation of each block.
        options: Options of each block.
        recompute_s: Seconds of one more forward of each block, one that keeps nothing.
        last_recompute_s: For each option of each block, the seconds its recompute takes where
            the block is the last of a group: what only makes its outputs is not run again,
            for nothing reads them.
        crossings: Values that cross a boundary.
        fixed_bytes: Arguments and outputs of the step.
        pinned: Blocks with an effect, which must run exactly once: they are in no group.
    """

    starts: tuple[int, ...]
    options: tuple[tuple[Option, ...], ...]
    recompute_s: tuple[float, ...]
    last_recompute_s: tuple[tuple[float, ...], ...]
    crossings: tuple[Crossing, ...]
    fixed_bytes: int
    pinned: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.starts)

    def pending_cotangent_bytes(self, block: int) -> int:
        """Cotangents made by later blocks that wait, during this block's backward, for a
        block further ahead in it."""
        return sum(
            c.size_bytes
            for c in self.crossings
            if c.active and c.producer < block and c.readers[-1] > block
        )

    def group_recompute_s(self, block: int, option: int, group: tuple[int, int]) -> float:
        """Seconds that one more forward of a block takes in the recompute of its group."""
        if block == group[1]:
            return self.last_recompute_s[block][option]
        return self.recompute_s[block]


@dataclass(frozen=True, slots=True)
class Selection:
    """One option for each block, and the groups of consecutive blocks wrapped together.

    Attributes:
        options: Position of the option in `Chain.options[block]`.
        groups: Disjoint (first block, last block) pairs, in order.
    """

    options: tuple[int, ...]
    groups: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """What is predicted to be alive at most while one block runs, arguments and results apart.

    Attributes:
        block: The block.
        in_backward: Whether it is its backward.
        kept_bytes: What blocks hold for their backwards.
        passed_bytes: Values that pass from block to block, and their cotangents.
        working_bytes: What the block itself takes.
    """

    block: int
    in_backward: bool
    kept_bytes: int
    passed_bytes: int
    working_bytes: int

    @property
    def live_bytes(self) -> int:
        """All three together."""
        return self.kept_bytes + self.passed_bytes + self.working_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a selection costs.

    Attributes:
        time_s: Sum over the blocks, and one more forward of each grouped one as far as its
            backward needs it.
        peak_bytes: Largest sum of live bytes, arguments and outputs included.
        peak: The moment that sets it.
        moments: The step: all forwards, then all backwards.
    """

    time_s: float
    peak_bytes: int
    peak: Moment
    moments: tuple[Moment, ...]


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


def predict(chain: Chain, selection: Selection) -> Prediction:
    """Walk the step: forward through the blocks, then backward, a group recomputed first."""
    group_of = {b: g for g in selection.groups for b in range(g[0], g[1] + 1)}
    costs = [chain.options[b][o].cost for b, o in enumerate(selection.options)]

    def held(crossing: Crossing, block: int) -> bool:
        """Whether the value waits for the backward of some block up to `block`, seen from
        outside any group."""
        for reader in range(crossing.producer, block + 1):
            group = group_of.get(reader)
            if group is None:
                if (reader, selection.options[reader]) in crossing.needed:
                    return True
            elif crossing.producer < group[0] <= block and any(
                group[0] <= r <= group[1] for r in crossing.readers
            ):
                return True
        return False

    def held_inside(crossing: Crossing, block: int, group: tuple[int, int]) -> bool:
        """The same between the recompute of a group and its blocks' backwards."""
        return crossing.producer >= group[0] and any(
            (reader, selection.options[reader]) in crossing.needed
            for reader in range(crossing.producer, block + 1)
        )

    forwards, backwards = [], []
    for block, cost in enumerate(costs):
        kept = sum(costs[b].kept_bytes for b in range(block) if b not in group_of)
        waiting = sum(
            c.size_bytes
            for c in chain.crossings
            if c.producer < block and (c.readers[-1] >= block or held(c, block - 1))
        )
        forwards.append(Moment(block, False, kept, waiting, cost.forward_peak_bytes))

        group = group_of.get(block)
        passed = chain.pending_cotangent_bytes(block)
        passed += sum(
            c.size_bytes for c in chain.crossings if c.producer <= block and held(c, block)
        )
        if group is not None:
            kept += sum(costs[b].kept_bytes for b in range(group[0], block))
            passed += sum(
                c.size_bytes
                for c in chain.crossings
                if c.producer <= block and not held(c, block) and held_inside(c, block, group)
            )
        backwards.append(Moment(block, True, kept, passed, cost.backward_peak_bytes))
    moments = (*forwards, *reversed(backwards))
    peak = max(moments, key=lambda m: m.live_bytes)
    return Prediction(
        time_s=sum(c.time_s for c in costs)
        + sum(chain.group_recompute_s(b, selection.options[b], g) for b, g in group_of.items()),
        peak_bytes=chain.fixed_bytes + peak.live_bytes,
        peak=peak,
        moments=moments,
    )


class Ties(Enum):
    """Which regions are tied (`Region.tied`).

    Attributes:
        NONE: None, as in a function with `jax.checkpoint` written by hand.
        WRAPPED: The wrapped ones that leave the compiler something to put off.
        LOSS_TOO: The bare block at the loss as well, so that its backward ends first.
    """

    NONE = "none"
    WRAPPED = "wrapped"
    LOSS_TOO = "loss too"


def selection_region(
    graph: Graph, chain: Chain, selection: Selection, ties: Ties = Ties.WRAPPED
) -> Region:
    """The region tree of a selection over the whole program."""
    modes = [
        chain.options[b][o].mode.shifted(chain.starts[b]) for b, o in enumerate(selection.options)
    ]

    def flat(mode: Region) -> tuple[Region, ...]:
        return (mode,) if mode.wrapped else mode.children

    children: list[Region] = []
    block = 0
    groups = dict(selection.groups)
    while block < len(modes):
        last = groups.get(block, block)
        inner = tuple(r for m in modes[block : last + 1] for r in flat(m))
        if last > block:
            start, group_stop = modes[block].start, modes[last].stop
            group = make_block(graph, start, group_stop)
            tied = has_deferrable_input(graph, group, start, group_stop)
            children.append(Region(start, group_stop, wrapped=True, tied=tied, children=inner))
        elif ties is Ties.LOSS_TOO and last == len(modes) - 1 and not modes[last].wrapped:
            children.append(replace(modes[last], tied=True))
        else:
            children += inner
        block = last + 1
    root = Region(0, len(graph.operations), children=tuple(children))
    return root.untied() if ties is Ties.NONE else root
