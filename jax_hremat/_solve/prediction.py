"""The predicted time and peak memory of a selection, computed block by block without a solver.

The root program (`_solve/root_program.py`) states the same arithmetic as constraints; tests check
that the two agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._plan.peak import Moment
from jax_hremat._solve.chain import BoundaryValue, Chain, Group, Selection
from jax_hremat._solve.output_reuse import Buffer, Result, reused_bytes

# What a buffer holds: kind, block or boundary value, and position among the buffers of the block.
_Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted cost of a selection.

    Attributes:
        time_s: Sum of the blocks' times, plus one more forward of each block for each group around
            it, as far as the backwards need that forward.
        peak_bytes: Largest sum of live bytes, arguments and outputs included.
        peak: The moment with the largest sum.
        moments: The moments of the step in time order: all forwards, then all backwards.
        at_peak_bytes: Sizes of the buffers alive at the peak, as far as they are known; empty if
            there are no results.
    """

    time_s: float
    peak_bytes: int
    peak: Moment
    moments: tuple[Moment, ...]
    at_peak_bytes: tuple[int, ...] = ()


def predict(chain: Chain, selection: Selection, results: Sequence[Result] = ()) -> Prediction:
    """Walk through the step: forward through the blocks, then backward. Each group is recomputed
    before the backward of its blocks; a group inside it is recomputed once more, before the
    backward of its own blocks.

    Args:
        chain: Blocks and their options.
        selection: The selection to predict.
        results: Results whose memory holds other buffers until they are written (output-buffer
            reuse). The root program does not model them.
    """
    costs = [chain.options[b][o].cost for b, o in enumerate(selection.options)]
    around = _groups_around(chain, selection)
    keeps = {b: kept_cost(chain, around[b][0], b, o) for b, o in selection.keeps}
    again_s = recompute_s(chain, selection)
    holders = [
        _holders(selection, boundary_value, around) for boundary_value in chain.boundary_values
    ]

    alive: list[Mapping[_Key, int]] = [{}] * (2 * len(chain))

    def buffers(of: str, block: int, sizes: Sequence[int]) -> dict[_Key, int]:
        return {(of, block, number): size for number, size in enumerate(sizes)}

    of_block = [buffers("kept", b, cost.kept_sizes) for b, cost in enumerate(costs)]
    of_group = {b: buffers("kept by the group", b, cost.kept_sizes) for b, cost in keeps.items()}

    def held(v: int, block: int, inside: frozenset[Group] = frozenset()) -> bool:
        """Whether a boundary value is held for the backward of some block up to `block`, seen from
        inside the groups `inside`."""
        return any(h.block <= block and h.groups <= inside for h in holders[v])

    def seen(block: int, inside: frozenset[Group]) -> OptionCost | None:
        """The cost that says what a block keeps, seen from inside the groups `inside`; None if the
        block keeps only its shared constants."""
        if inside.issuperset(around[block]):
            return costs[block]
        return keeps.get(block) if inside.isdisjoint(around[block]) else None

    def moment(
        block: int, inside: frozenset[Group], passed: Mapping[_Key, int], back: bool
    ) -> Moment:
        before = [seen(b, inside) for b in range(block)]
        kept = (
            s if c is None else c.kept_bytes
            for c, s in zip(before, chain.shared_bytes[:block], strict=True)
        )
        runs = costs[block] if back else keeps.get(block, costs[block])
        working_bytes, sizes = runs.forward_peak_bytes, runs.forward_sizes
        if back:
            working_bytes, sizes = runs.backward_peak_bytes, runs.backward_sizes
        elif around[block] and block not in keeps:
            working_bytes, sizes = chain.handing_on_bytes[block], chain.handing_on_sizes[block]
        if results:
            named = {**passed, **buffers("working", block, sizes)}
            for b, cost in enumerate(before):
                if cost is not None:
                    named |= of_block[b] if cost is costs[b] else of_group[b]
            alive[2 * len(chain) - 1 - block if back else block] = named
        return Moment(
            block=block,
            in_backward=back,
            kept_bytes=sum(kept),
            passed_bytes=sum(passed.values()),
            working_bytes=working_bytes,
            reused_bytes=0,
            duration_s=costs[block].backward_s + again_s[block] if back else costs[block].forward_s,
        )

    forwards, backwards = [], []
    for block in range(len(chain)):
        waiting = {
            ("value", v, 0): c.size_bytes
            for v, c in enumerate(chain.boundary_values)
            if c.producer < block <= c.readers[-1] or held(v, block - 1)
        }
        forwards.append(moment(block, frozenset(), waiting, back=False))

        inside = frozenset(around[block])
        passed = {
            ("value", v, 0): c.size_bytes
            for v, c in enumerate(chain.boundary_values)
            if held(v, block, inside)
        }
        passed |= {("cotangent", v, 0): size for v, size in chain.pending_cotangents(block)}
        backwards.append(moment(block, inside, passed, back=True))
    moments = (*forwards, *reversed(backwards))
    if results:
        reused = reused_bytes(_runs(alive), results, len(chain))
        moments = tuple(replace(m, reused_bytes=r) for m, r in zip(moments, reused, strict=True))
    peak = max(moments, key=lambda m: m.live_bytes)
    return Prediction(
        time_s=sum(c.time_s for c in costs) + sum(again_s),
        peak_bytes=chain.fixed_bytes + peak.live_bytes,
        peak=peak,
        moments=moments,
        at_peak_bytes=tuple(alive[moments.index(peak)].values()),
    )


def _runs(alive: Sequence[Mapping[_Key, int]]) -> list[Buffer]:
    """The buffers of a step, of which those alive at each moment are given: one for each run of
    moments at which the same is alive."""
    buffers: list[Buffer] = []
    begun: dict[_Key, int] = {}
    for moment, (before, now) in enumerate(pairwise(({}, *alive, {}))):
        for key in (key for key in before if key not in now):
            last = moment - 1
            end = last + 1 if key[0] == "kept" else last
            buffers.append(Buffer(before[key], begun.pop(key), last, end))
        begun |= {key: moment for key in now if key not in before}
    return buffers


def recompute_s(chain: Chain, selection: Selection) -> list[float]:
    """For each block, the seconds of its forwards in the recomputes of the groups around it.

    The recompute of an outer group does not run an inner group that ends with the same block:
    nothing would read what the inner group makes.
    """
    keeps = dict(selection.keeps)
    return [
        sum(
            block_recompute_s(chain, group, block, option, keeps.get(block) if depth == 0 else None)
            for depth, group in enumerate(groups)
            if all(inner[1] != group[1] for inner in groups[depth + 1 :])
        )
        for block, (option, groups) in enumerate(
            zip(selection.options, _groups_around(chain, selection), strict=True)
        )
    ]


def block_recompute_s(
    chain: Chain, group: Group, block: int, option: int, kept: int | None
) -> float:
    """Seconds that a block takes in a group's recompute.

    Args:
        chain: Blocks and their options.
        group: The group.
        block: A block of the group.
        option: Position of the option with which the recompute runs the block.
        kept: Position of the option whose saved values the group keeps, if any. The group then
            recomputes what the block alone would recompute if it kept these values.
    """
    if kept is not None:
        saving, run = (chain.options[block][o] for o in (kept, option))
        for_outputs_s = 0.0 if block == group[1] else saving.outputs_s
        return max(saving.cost.time_s - run.cost.time_s, 0.0) + for_outputs_s
    if block == group[1]:
        return chain.last_recompute_s[block][option]
    return chain.recompute_s[block]


def kept_cost(chain: Chain, group: Group, block: int, option: int) -> OptionCost:
    """The cost of a block of a group that keeps the values an option saves, with those among the
    kept bytes that are kept only to make the block's outputs again; nothing reads the outputs of
    the last block."""
    saving = chain.options[block][option]
    if block == group[1] or not saving.outputs_bytes:
        return saving.cost
    return replace(
        saving.cost,
        kept_bytes=saving.cost.kept_bytes + saving.outputs_bytes,
        kept_sizes=(*saving.cost.kept_sizes, saving.outputs_bytes),
    )


def _groups_around(chain: Chain, selection: Selection) -> list[list[Group]]:
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
