"""The predicted time and peak memory of a selection, computed block by block without a solver.

The root program (`_solve/root_program.py`) states the same arithmetic as constraints; tests check
that the two agree.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

from jax_hremat._cost.option_cost import LiveRange
from jax_hremat._plan.peak import Moment
from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._solve.heap import gaps_bytes
from jax_hremat._solve.lifetimes import Memory, groups_around, timeline
from jax_hremat._solve.output_reuse import Result, placed_in_results


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a selection.

    Attributes:
        time_s: Sum of the blocks' times, plus one more forward of each block for each group around
            it, as far as the backwards need that forward.
        peak_bytes: Largest sum of live bytes, arguments and outputs included.
        peak: The moment with the largest sum.
        moments: The moments of the step in time order: all forwards, then all backwards.
        at_peak_bytes: Sizes of the buffers alive at the peak, as far as they are known.
        buffers: The buffers of the step that are not in the memory of results, as far as they are
            known.
    """

    time_s: float
    peak_bytes: int
    peak: Moment
    moments: tuple[Moment, ...]
    at_peak_bytes: tuple[int, ...] = ()
    buffers: Sequence[LiveRange] = field(default=(), repr=False, compare=False)

    @functools.cached_property
    def gaps_bytes(self) -> int:
        """Bytes of the gaps between the buffers, which the peak does not include. Found when asked
        for: it takes longer than the rest of a prediction."""
        return gaps_bytes(self.buffers)


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
    again_s = recompute_s(chain, selection)
    memory = Memory(chain, selection)
    blocks = range(len(chain))
    alive = [
        *(memory.in_forward(block) for block in blocks),
        *(memory.in_backward(block) for block in reversed(blocks)),
    ]
    step = timeline(alive)
    reused, others = placed_in_results(step, results, len(chain))
    moments: list[Moment] = []
    positions: list[int] = []
    for held, begin in zip(alive, step.begins, strict=False):
        at = slice(begin, begin + len(held.working_bytes))
        working = [*map(operator.add, held.working_bytes, step.early_bytes[at])]
        position = _highest(working, reused[at])
        cost = costs[held.block]
        backward_s = cost.backward_s + again_s[held.block]
        positions.append(position)
        moments.append(
            Moment(
                block=held.block,
                in_backward=held.in_backward,
                kept_bytes=held.kept_bytes,
                passed_bytes=held.passed_bytes,
                working_bytes=working[position],
                reused_bytes=reused[begin + position],
                duration_s=backward_s if held.in_backward else cost.forward_s,
            )
        )
    number = max(range(len(moments)), key=lambda number: moments[number].live_bytes)
    buffers = itertools.chain.from_iterable(alive[number].buffers.values())
    return Prediction(
        time_s=_step_s(chain, selection, again_s),
        peak_bytes=chain.fixed_bytes + moments[number].live_bytes,
        peak=moments[number],
        moments=tuple(moments),
        at_peak_bytes=tuple(b.size_bytes for b in buffers if b.is_alive(positions[number])),
        buffers=others,
    )


def step_s(chain: Chain, selection: Selection) -> float:
    """The predicted time of a selection alone, which is found much faster."""
    return _step_s(chain, selection, recompute_s(chain, selection))


def _step_s(chain: Chain, selection: Selection, again_s: Sequence[float]) -> float:
    costs = (chain.options[b][o].cost for b, o in enumerate(selection.options))
    return sum(cost.time_s for cost in costs) + sum(again_s)


def _highest(working_bytes: Sequence[int], reused_bytes: Sequence[int]) -> int:
    """The first position of a moment with most bytes outside the memory of results."""
    outside = [*map(operator.sub, working_bytes, reused_bytes)]
    return outside.index(max(outside))


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
            zip(selection.options, groups_around(chain, selection), strict=True)
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
