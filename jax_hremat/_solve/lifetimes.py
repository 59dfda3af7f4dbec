"""What is alive at each moment of a step under a selection, and the lifetimes of its buffers.

A step has moments, all forwards and then all backwards, and a moment has the positions of its
block's phase (`_cost/option_cost.py`). Two buffers that a block needs at different positions may be
placed in the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, islice, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np

from jax_hremat._cost.option_cost import TO_THE_END, LiveRange, OptionCost
from jax_hremat._solve.chain import BoundaryValue, Chain, Group, Selection

# What some buffers hold: their kind, and the block or boundary value.
_Key: TypeAlias = tuple[str, int]
_Buffers: TypeAlias = tuple[_Key, Sequence[LiveRange]]


class Held(NamedTuple):
    """What is alive while one block runs.

    Attributes:
        block: The block.
        in_backward: Whether its backward runs, rather than its forward.
        kept_bytes: What earlier blocks keep for their backwards.
        passed_bytes: Boundary values and cotangents that wait.
        working_bytes: At each position, the bytes alive in the block itself; the peak alone if that
            is all that is known.
        buffers: All these buffers, as far as they are known.
    """

    block: int
    in_backward: bool
    kept_bytes: int
    passed_bytes: int
    working_bytes: Sequence[int]
    buffers: Mapping[_Key, Sequence[LiveRange]]


class _KeptBefore(NamedTuple):
    """What blocks keep from their forwards to their backwards.

    Attributes:
        buffers: What blocks keep, the first block first, as far as it is known.
        counts: For each block, and after the last, how many of these are of blocks before it.
        kept_bytes: For each block, and after the last, the bytes that blocks before it keep.
    """

    buffers: Sequence[_Buffers]
    counts: Sequence[int]
    kept_bytes: Sequence[int]


class Memory:
    """What is alive at each moment of a step under a selection."""

    def __init__(self, chain: Chain, selection: Selection) -> None:
        around = groups_around(chain, selection)
        self._chain = chain
        self._around = [frozenset(groups) for groups in around]
        self._costs = _backward_costs(chain, selection, around)
        self._of_group = {b: kept_cost(chain, around[b][0], b, o) for b, o in selection.keeps}
        values = chain.boundary_values
        self._holders = [_holders(selection, value, around) for value in values]
        # The blocks during whose forwards each boundary value waits, and during whose backwards
        # each cotangent and partial gradient does.
        self._value_waits = _Waits([range(v.producer + 1, v.readers[-1] + 1) for v in values])
        self._cotangent_waits = _Waits(chain.cotangent_waits)
        self._sizes = chain.cotangent_bytes
        self._as_values = _whole("value", [value.size_bytes for value in values])
        self._as_cotangents = _whole("cotangent", self._sizes)
        # Where each cotangent and partial gradient is first made, the block and the position among
        # its inputs, and where a cotangent is last read, the block and the position among its
        # outputs.
        self._made = {
            **{(value.readers[-1], value.input): v for v, value in enumerate(values)},
            **{
                (partial.waits.stop, partial.position): n
                for n, partial in enumerate(chain.partial_gradients, start=len(values))
            },
        }
        self._read = {(value.producer, value.output): v for v, value in enumerate(values)}
        # For each set of groups inside which a block runs:
        self._first_holders: dict[frozenset[Group], np.ndarray] = {}
        self._kept: dict[frozenset[Group], _KeptBefore] = {}
        # What blocks keep, as it is seen in all moments but their own.
        self._kept_throughout: dict[_Key, _Buffers] = {}

    def in_forward(self, block: int) -> Held:
        """What is alive in the forward of a block."""
        chain, outside = self._chain, frozenset[Group]()
        values = _numbers(self._value_waits.during(block) | (self._held_from(outside) < block))
        runs = self._of_group.get(block) if self._around[block] else self._costs[block]
        if runs is None:
            phase, peak_bytes, kept = chain.handing_on[block], chain.handing_on_bytes[block], ()
        else:
            phase, peak_bytes, kept = runs.forward, runs.forward_peak_bytes, runs.kept_buffers
        working = {
            ("forward", block): phase.buffers,
            self._kept_key(block, runs): [b._replace(last=TO_THE_END) for b in kept],
        }
        working_bytes = phase.live_bytes or (peak_bytes,)
        return self._held(block, False, outside, values, (), working_bytes, working)

    def in_backward(self, block: int) -> Held:
        """What is alive in the backward of a block."""
        inside, cost = self._around[block], self._costs[block]
        values = _numbers(self._held_from(inside) <= block)
        cotangents = _numbers(self._cotangent_waits.during(block))
        working = {
            ("backward", block): cost.backward.buffers,
            self._kept_key(block, cost): [b._replace(first=0) for b in cost.kept_buffers],
        }
        # What the last block that reads a value makes is one buffer with what waits, and with what
        # the producer reads.
        for passed, numbers in (
            (cost.backward.gradients, self._made),
            (cost.backward.cotangents, self._read),
        ):
            for position, buffer in passed:
                number = numbers.get((block, position))
                key = ("passed", block) if number is None else ("cotangent", number)
                working[key] = (*working.get(key, ()), buffer)
        working_bytes = cost.backward.live_bytes or (cost.backward_peak_bytes,)
        return self._held(block, True, inside, values, cotangents, working_bytes, working)

    def _held(
        self,
        block: int,
        in_backward: bool,
        inside: frozenset[Group],
        values: Sequence[int],
        cotangents: Sequence[int],
        working_bytes: Sequence[int],
        working: Mapping[_Key, Sequence[LiveRange]],
    ) -> Held:
        """What is alive while a block runs, seen from inside some groups, given the boundary values
        and cotangents that wait meanwhile, and what is its own."""
        kept = self._kept_before(inside)
        buffers = dict(map(self._as_values.__getitem__, values))
        buffers.update(map(self._as_cotangents.__getitem__, cotangents))
        buffers.update(islice(kept.buffers, kept.counts[block]))
        buffers.update(working)
        passed_bytes = sum(map(self._sizes.__getitem__, (*values, *cotangents)))
        return Held(
            block, in_backward, kept.kept_bytes[block], passed_bytes, working_bytes, buffers
        )

    def _kept_before(self, inside: frozenset[Group]) -> _KeptBefore:
        """What the blocks before each one keep, seen from inside some groups."""
        if inside not in self._kept:
            buffers: list[_Buffers] = []
            counts, kept_bytes = [0], [0]
            for block in range(len(self._chain)):
                cost = self._seen(block, inside)
                if cost is None:
                    kept_bytes.append(kept_bytes[-1] + self._chain.shared_bytes[block])
                else:
                    kept_bytes.append(kept_bytes[-1] + cost.kept_bytes)
                    buffers.append(self._throughout(block, cost))
                counts.append(len(buffers))
            self._kept[inside] = _KeptBefore(buffers, counts, kept_bytes)
        return self._kept[inside]

    def _throughout(self, block: int, cost: OptionCost) -> _Buffers:
        """What a block keeps, alive throughout a moment."""
        key = self._kept_key(block, cost)
        if key not in self._kept_throughout:
            whole = [LiveRange(buffer.size_bytes) for buffer in cost.kept_buffers]
            self._kept_throughout[key] = key, whole
        return self._kept_throughout[key]

    def _seen(self, block: int, inside: frozenset[Group]) -> OptionCost | None:
        """The cost that says what a block keeps, seen from inside some groups; None if it keeps
        only its shared constants."""
        around = self._around[block]
        if around <= inside:
            return self._costs[block]
        return self._of_group.get(block) if around.isdisjoint(inside) else None

    def _kept_key(self, block: int, cost: OptionCost | None) -> _Key:
        return ("kept" if cost is self._costs[block] else "kept by the group"), block

    def _held_from(self, inside: frozenset[Group]) -> np.ndarray:
        """For each boundary value, the first block for whose backward it is held, seen from inside
        some groups; infinite if there is none."""
        if inside not in self._first_holders:
            firsts = (
                min((h.block for h in some if h.groups <= inside), default=math.inf)
                for some in self._holders
            )
            self._first_holders[inside] = np.fromiter(firsts, float)
        return self._first_holders[inside]


class _Waits:
    """During which blocks each of some values waits."""

    def __init__(self, waits: Sequence[range]) -> None:
        self._start = np.array([blocks.start for blocks in waits], int)
        self._stop = np.array([blocks.stop for blocks in waits], int)

    def during(self, block: int) -> np.ndarray:
        """Whether each waits during a block."""
        return (self._start <= block) & (block < self._stop)


def _numbers(chosen: np.ndarray) -> list[int]:
    """The numbers of those that are chosen."""
    return np.flatnonzero(chosen).tolist()


def _whole(kind: str, sizes_bytes: Sequence[int]) -> list[_Buffers]:
    """One buffer for each size, alive throughout a moment."""
    return [((kind, v), (LiveRange(size),)) for v, size in enumerate(sizes_bytes)]


class Timeline(NamedTuple):
    """The buffers of a step.

    Attributes:
        buffers: The buffers, at positions of the whole step.
        begins: The first position of each moment, and at the end the number of positions.
        early_bytes: At each position, the bytes of buffers whose block has not begun to need them:
            those that forwards make of the same constants are made all at once, with the first.
            Recomputes make theirs when they run.
    """

    buffers: Sequence[LiveRange]
    begins: Sequence[int]
    early_bytes: Sequence[int]


def timeline(alive: Sequence[Held]) -> Timeline:
    """The buffers of a step, of which those alive at each moment are given: what has the same key
    at consecutive moments is one."""
    begins = [*accumulate((len(held.working_bytes) for held in alive), initial=0)]
    buffers: list[LiveRange] = []
    # The first position of the moment at which each began, and what was known of it then.
    begun: dict[_Key, tuple[int, Sequence[LiveRange]]] = {}
    everything = pairwise(({}, *(held.buffers for held in alive), {}))
    for moment, (before, now) in enumerate(everything):
        for key in (key for key in before if key not in now):
            begin, parts = begun.pop(key)
            for (size, first, _, of_constants), ending in zip(parts, before[key], strict=True):
                last = min(begins[moment - 1] + ending.last, begins[moment] - 1)
                buffers.append(LiveRange(size, begin + first, last, of_constants))
        for key in (key for key in now if key not in before):
            begun[key] = begins[moment], now[key]
    num_forward = sum(len(held.working_bytes) for held in alive if not held.in_backward)
    return _made_at_once(buffers, begins, num_forward)


def _made_at_once(
    buffers: Sequence[LiveRange], begins: Sequence[int], num_forward: int
) -> Timeline:
    """The timeline of these buffers, of those that forwards, the first `num_forward` positions,
    make of constants all of one size from when the first is made."""
    first_of: dict[int, int] = {}
    for size, first, _, of_constants in buffers:
        if of_constants and first < num_forward:
            first_of[size] = min(first, first_of.get(size, first))
    change = [0] * (begins[-1] + 1)
    moved: list[LiveRange] = []
    for buffer in buffers:
        size, first, last, of_constants = buffer
        if of_constants and first < num_forward:
            change[first_of[size]] += size
            change[first] -= size
            buffer = LiveRange(size, first_of[size], last, of_constants)
        moved.append(buffer)
    return Timeline(moved, begins, [*accumulate(change[:-1])])


def kept_cost(chain: Chain, group: Group, block: int, option: int) -> OptionCost:
    """The cost of a block of a group that keeps the values an option saves, with those among the
    kept bytes that are kept only to make the block's outputs again; nothing reads the outputs of
    the last block."""
    saving = chain.options[block][option]
    if block == group[1] or not saving.outputs_bytes:
        return saving.cost
    # From after the forward, where they are among its own buffers.
    outputs = LiveRange(saving.outputs_bytes, max(len(saving.cost.forward.live_bytes), 1))
    return replace(
        saving.cost,
        kept_bytes=saving.cost.kept_bytes + saving.outputs_bytes,
        kept_buffers=(*saving.cost.kept_buffers, outputs),
    )


def _backward_costs(
    chain: Chain, selection: Selection, around: Sequence[Sequence[Group]]
) -> list[OptionCost]:
    """For each block, the cost that says what is alive in its backward."""
    keeps = dict(selection.keeps)
    costs = []
    for block, (option, groups) in enumerate(zip(selection.options, around, strict=True)):
        if groups and block == groups[-1][1]:
            kept = keeps.get(block) if len(groups) == 1 else None
            costs.append(ending_cost(chain, block, option, kept))
        else:
            costs.append(chain.options[block][option].cost)
    return costs


def ending_cost(chain: Chain, block: int, option: int, kept: int | None) -> OptionCost:
    """The cost of the last block of a group.

    Args:
        chain: Blocks and their options.
        block: The block.
        option: Position of the option with which the group's recompute runs it.
        kept: Position of the option whose saved values the group keeps, if any. The block then
            takes what it takes under that option, with a checkpoint of its own.
    """
    if kept is not None:
        return chain.options[block][kept].cost
    return chain.options[block][option].ending


def groups_around(chain: Chain, selection: Selection) -> list[list[Group]]:
    """For each block, the groups around it, outermost first."""
    around: list[list[Group]] = [[] for _ in range(len(chain))]
    for group in selection.groups:
        for block in range(group[0], group[1] + 1):
            around[block].append(group)
    return around


class _Holder(NamedTuple):
    """A reason to hold a value for a backward: a block whose option reads the value in its
    backward, a group that keeps the value, or a group that reads it and begins after its producer.

    Attributes:
        block: The first block whose backward the value is held for.
        groups: The groups around the holder.
    """

    block: int
    groups: frozenset[Group]


def _holders(
    selection: Selection, boundary_value: BoundaryValue, around: Sequence[Sequence[Group]]
) -> list[_Holder]:
    blocks = [
        _Holder(block, frozenset(around[block]))
        for block, option in boundary_value.needed
        if selection.options[block] == option
    ]
    blocks += [
        _Holder(block, frozenset())
        for block, option in selection.keeps
        if block == boundary_value.producer and (block, option) in boundary_value.needed
    ]
    groups = [
        _Holder(group[0], frozenset(around[reader][:depth]))
        for reader in boundary_value.readers
        for depth, group in enumerate(around[reader])
        if boundary_value.producer < group[0]
    ]
    return blocks + groups
