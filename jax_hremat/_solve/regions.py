"""The region tree of a selection, which the emitter turns into `jax.checkpoint` calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Flag, auto

from jax_hremat._partition.blocks import has_deferrable_input, make_block, makes_of_arguments
from jax_hremat._plan.region import Region
from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._trace.graph import Graph


class Barriers(Flag):
    """Which regions are behind barriers, by which the compiler can delay or advance less.

    Attributes:
        NONE: No region, as in a function with `jax.checkpoint` written by hand.
        CHECKPOINTED: Of the cotangents (`Region.barrier`): the checkpointed regions part of whose
            backward the compiler could delay.
        LATE_ARGUMENTS: Of the arguments (`Region.late_arguments`): the blocks and groups that make
            anything of arguments alone.
        PLAIN: Of the cotangents and of the gradients of arguments: every plain block in a group, so
            that what its backward reads, which is recomputed, can be dropped after it; plain blocks
            in no group that make many cotangents wait; and that at the loss, so that its backward
            ends before any other begins.
        GRADIENTS: The same of every checkpointed block, in a group or in none.
        USUAL: Those that usually take next to no time.
        ALL: All of these.
    """

    NONE = 0
    CHECKPOINTED = auto()
    LATE_ARGUMENTS = auto()
    PLAIN = auto()
    GRADIENTS = auto()
    USUAL = CHECKPOINTED | LATE_ARGUMENTS
    ALL = USUAL | PLAIN | GRADIENTS


def selection_region(
    graph: Graph,
    chain: Chain,
    selection: Selection,
    barriers: Barriers = Barriers.USUAL,
    waiting_bytes: int = 1,
) -> Region:
    """The region tree of a selection over the whole program.

    Args:
        graph: The program's graph.
        chain: Its blocks and their options.
        selection: The selection.
        barriers: Which regions are behind barriers.
        waiting_bytes: For `Barriers.PLAIN`: a plain block in no group has one only if
            cotangents of at least so many bytes, made in its backward, wait for those of earlier
            blocks.
    """

    def of_option(block: int, option: int) -> Region:
        region = chain.options[block][option].region.shifted(chain.starts[block])
        return region if Barriers.CHECKPOINTED in barriers else region.without_barriers()

    blocks = [of_option(b, o) for b, o in enumerate(selection.options)]
    saved = {b: of_option(b, o).saved for b, o in selection.keeps}
    last_block = len(blocks) - 1

    def is_late(start: int, stop: int) -> bool:
        return Barriers.LATE_ARGUMENTS in barriers and makes_of_arguments(graph, start, stop)

    def of_block(block: int, *, in_group: bool) -> tuple[Region, ...]:
        region = blocks[block]
        late = not in_group and is_late(region.start, region.stop)
        if region.checkpointed:
            if Barriers.GRADIENTS not in barriers:
                return (replace(region, late_arguments=late),)
            # A barrier around a checkpoint takes in the gradients of arguments, too.
            around = Region(region.start, region.stop, children=(replace(region, barrier=False),))
            return (replace(around, barrier=True, late_arguments=late),)
        behind = Barriers.PLAIN in barriers and (
            in_group or block == last_block or chain.made_to_wait_bytes(block) >= waiting_bytes
        )
        if not behind and not late:
            return region.children
        return (replace(region, barrier=behind, late_arguments=late),)

    def regions(
        first: int, last: int, groups: Sequence[Group], *, outermost: bool = True
    ) -> tuple[Region, ...]:
        """The regions of the blocks from first to last, with the groups among them."""
        found: list[Region] = []
        block = first
        while block <= last:
            group = next((g for g in groups if g[0] == block), None)
            if group is None:
                found += of_block(block, in_group=not outermost)
                block += 1
                continue
            own = [g for g in groups if group[0] <= g[0] <= group[1] and g != group]
            start, stop = blocks[group[0]].start, blocks[group[1]].stop
            whole = make_block(graph, start, stop)
            deferrable = has_deferrable_input(graph, whole, start, stop)
            inner = regions(*group, own, outermost=False)
            kept = [ref for b in range(group[0], group[1] + 1) for ref in saved.get(b, ())]
            keeps = tuple(kept) if outermost else ()
            found.append(
                Region(
                    start,
                    stop,
                    checkpointed=True,
                    saved=keeps,
                    children=inner,
                    barrier=Barriers.CHECKPOINTED in barriers and deferrable,
                    # Inside, what holds arguments back would be recomputed with them.
                    late_arguments=outermost and is_late(start, stop),
                )
            )
            block = group[1] + 1
        return tuple(found)

    children = regions(0, last_block, selection.groups)
    return Region(0, len(graph.operations), children=children)
