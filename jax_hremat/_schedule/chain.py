"""The program as a chain of blocks with options: what the root program is about.

`predict` says what a selection of options costs, step by step and without a solver; the root
program (`_schedule/schedule.py`) is the same arithmetic as constraints, and tests hold the two
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from jax_hremat._cost.mode_cost import ModeCost
from jax_hremat._modes.block_modes import BlockOptions
from jax_hremat._modes.option import Option
from jax_hremat._partition.blocks import Partition, has_deferrable_input, make_block
from jax_hremat._program.graph import Graph
from jax_hremat._program.region import Region
from jax_hremat._schedule.results import Result, lent_bytes

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


@dataclass(frozen=True, slots=True)
class Moment:
    """What is predicted to be alive at most while one block runs, arguments and results apart.

    Attributes:
        block: The block.
        in_backward: Whether it is its backward.
        kept_bytes: What blocks hold for their backwards.
        passed_bytes: Values that pass from block to block, and their cotangents.
        working_bytes: What the block itself takes.
        lent_bytes: Of all that, what lies in the memory of results that are not there yet.
    """

    block: int
    in_backward: bool
    kept_bytes: int
    passed_bytes: int
    working_bytes: int
    lent_bytes: int = 0

    @property
    def live_bytes(self) -> int:
        """What is alive, in memory of its own."""
        return self.kept_bytes + self.passed_bytes + self.working_bytes - self.lent_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a selection costs.

    Attributes:
        time_s: Sum over the blocks, and one more forward of each for each group around it, as far
            as the backwards need it.
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


def gradients_of(graph: Graph, partition: Partition) -> tuple[Result, ...]:
    """Gradients of the program's arguments, each complete in the backward of the first block that
    reads the argument."""
    block_of = {
        op: index
        for index, block in enumerate(partition.blocks)
        for op in range(block.start, block.stop)
    }
    return tuple(
        Result(min(block_of[op] for op in value.users), value.size_bytes)
        for value in graph.values
        if value.kind == "argument" and value.active and value.users
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


def predict(chain: Chain, selection: Selection, results: Sequence[Result] = ()) -> Prediction:
    """Walk the step: forward through the blocks, then backward, each group recomputed before the
    backward of its blocks, and a group in it again before that of its own.

    Args:
        chain: Blocks and their options.
        selection: What was chosen.
        results: Results that lend their memory until they are there; the root program knows of
            none.
    """
    costs = [chain.options[b][o].cost for b, o in enumerate(selection.options)]
    keeps = {b: chain.options[b][o].cost for b, o in selection.keeps}
    around = _groups_around(chain, selection)
    holders = [_holders(selection, crossing, around) for crossing in chain.crossings]

    def held(v: int, block: int, inside: frozenset[Group] = frozenset()) -> bool:
        """Whether a crossing waits for the backward of some block up to `block`, seen from
        inside some groups."""
        return any(h.block <= block and h.groups <= inside for h in holders[v])

    def seen(block: int, inside: frozenset[Group]) -> ModeCost | None:
        """What a block keeps, seen from inside some groups; None if only constants."""
        if inside.issuperset(around[block]):
            return costs[block]
        return keeps.get(block) if inside.isdisjoint(around[block]) else None

    def moment(block: int, inside: frozenset[Group], passed: list[int], *, back: bool) -> Moment:
        before = [seen(b, inside) for b in range(block)]
        kept = (
            s if c is None else c.kept_bytes
            for c, s in zip(before, chain.shared_bytes[:block], strict=True)
        )
        own = costs[block] if back else keeps.get(block, costs[block])
        lent = 0
        if results:
            sizes = [size for cost in before if cost is not None for size in cost.kept_sizes]
            sizes += own.backward_sizes if back else own.forward_sizes
            idle = (r.size_bytes for r in results if not back or r.block < block)
            lent = lent_bytes((*sizes, *passed), idle)
        return Moment(
            block=block,
            in_backward=back,
            kept_bytes=sum(kept),
            passed_bytes=sum(passed),
            working_bytes=own.backward_peak_bytes if back else own.forward_peak_bytes,
            lent_bytes=lent,
        )

    forwards, backwards = [], []
    for block in range(len(chain)):
        waiting = [
            c.size_bytes
            for v, c in enumerate(chain.crossings)
            if c.producer < block <= c.readers[-1] or held(v, block - 1)
        ]
        forwards.append(moment(block, frozenset(), waiting, back=False))

        inside = frozenset(around[block])
        passed = [c.size_bytes for v, c in enumerate(chain.crossings) if held(v, block, inside)]
        passed += chain.pending_cotangents(block)
        backwards.append(moment(block, inside, passed, back=True))
    moments = (*forwards, *reversed(backwards))
    peak = max(moments, key=lambda m: m.live_bytes)
    return Prediction(
        time_s=sum(c.time_s for c in costs) + sum(recompute_s(chain, selection)),
        peak_bytes=chain.fixed_bytes + peak.live_bytes,
        peak=peak,
        moments=moments,
    )


def recompute_s(chain: Chain, selection: Selection) -> list[float]:
    """For each block, the seconds of its forwards in the recomputes of the groups around it.

    A group that another ends with is not run again in the recompute of that other: nothing reads
    what it makes. Of a block of which a group keeps values, it runs again what the block alone
    would if it kept them.
    """
    keeps = dict(selection.keeps)

    def again_s(block: int, group: Group, *, outermost: bool) -> float:
        option = selection.options[block]
        if outermost and block in keeps:
            kept_s, run_s = (chain.options[block][o].cost.time_s for o in (keeps[block], option))
            return max(kept_s - run_s, 0.0)
        if block == group[1]:
            return chain.last_recompute_s[block][option]
        return chain.recompute_s[block]

    return [
        sum(
            again_s(block, group, outermost=depth == 0)
            for depth, group in enumerate(groups)
            if all(inner[1] != group[1] for inner in groups[depth + 1 :])
        )
        for block, groups in enumerate(_groups_around(chain, selection))
    ]


def _groups_around(chain: Chain, selection: Selection) -> list[list[Group]]:
    """The groups that each block is in, from the outermost in."""
    around: list[list[Group]] = [[] for _ in range(len(chain))]
    for group in selection.groups:
        for block in range(group[0], group[1] + 1):
            around[block].append(group)
    return around


class _Holder(NamedTuple):
    """Who holds a value for a backward: a block whose option reads it, or a group that reads it
    from before itself; as of which block, and the groups around the holder."""

    block: int
    groups: frozenset[Group]


def _holders(
    selection: Selection, crossing: Crossing, around: Sequence[Sequence[Group]]
) -> list[_Holder]:
    blocks = [
        _Holder(block, frozenset(around[block]))
        for block, option in crossing.needed
        if selection.options[block] == option
    ]
    blocks += [
        _Holder(block, frozenset())
        for block, option in selection.keeps
        if block == crossing.producer and (block, option) in crossing.needed
    ]
    groups = [
        _Holder(group[0], frozenset(around[reader][:depth]))
        for reader in crossing.readers
        for depth, group in enumerate(around[reader])
        if crossing.producer < group[0]
    ]
    return blocks + groups


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

    saved = {b: chain.options[b][o].mode.shifted(chain.starts[b]).saved for b, o in selection.keeps}

    def flat(mode: Region) -> tuple[Region, ...]:
        return (mode,) if mode.wrapped else mode.children

    def regions(
        first: int, last: int, groups: Sequence[Group], *, outermost: bool = True
    ) -> tuple[Region, ...]:
        """Of the blocks from first to last, with the groups in them."""
        found: list[Region] = []
        block = first
        while block <= last:
            group = next((g for g in groups if g[0] == block), None)
            if group is None:
                found += flat(modes[block])
                block += 1
                continue
            own = [g for g in groups if group[0] <= g[0] <= group[1] and g != group]
            start, stop = modes[group[0]].start, modes[group[1]].stop
            tied = has_deferrable_input(graph, make_block(graph, start, stop), start, stop)
            inner = regions(*group, own, outermost=False)
            kept = [ref for b in range(group[0], group[1] + 1) for ref in saved.get(b, ())]
            keeps = tuple(kept) if outermost else ()
            found.append(Region(start, stop, wrapped=True, saved=keeps, children=inner, tied=tied))
            block = group[1] + 1
        return tuple(found)

    last = len(modes) - 1
    children = regions(0, last, selection.groups)
    alone = all(group[1] != last for group in selection.groups)
    if ties is Ties.LOSS_TOO and alone and not modes[last].wrapped:
        children = (*regions(0, last - 1, selection.groups), replace(modes[last], tied=True))
    root = Region(0, len(graph.operations), children=children)
    return root.untied() if ties is Ties.NONE else root
