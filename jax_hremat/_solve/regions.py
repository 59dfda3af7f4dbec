"""The region tree of a selection, which the emitter turns into `jax.checkpoint` calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from jax_hremat._partition.blocks import has_deferrable_input, make_block
from jax_hremat._plan.region import Region
from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._trace.graph import Graph


class Barriers(Enum):
    """Which regions are behind a cotangent barrier (`Region.barrier`).

    Attributes:
        NONE: No region, as in a function with `jax.checkpoint` written by hand.
        CHECKPOINTED: The checkpointed regions part of whose backward the compiler could delay.
        LOSS_TOO: The plain block at the loss as well, so that its backward ends before any other
            begins.
    """

    NONE = "none"
    CHECKPOINTED = "checkpointed"
    LOSS_TOO = "loss too"


def selection_region(
    graph: Graph, chain: Chain, selection: Selection, barriers: Barriers = Barriers.CHECKPOINTED
) -> Region:
    """The region tree of a selection over the whole program."""
    modes = [
        chain.options[b][o].region.shifted(chain.starts[b]) for b, o in enumerate(selection.options)
    ]

    saved = {
        b: chain.options[b][o].region.shifted(chain.starts[b]).saved for b, o in selection.keeps
    }

    def flat(mode: Region) -> tuple[Region, ...]:
        return (mode,) if mode.checkpointed else mode.children

    def regions(
        first: int, last: int, groups: Sequence[Group], *, outermost: bool = True
    ) -> tuple[Region, ...]:
        """The regions of the blocks from first to last, with the groups among them."""
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
            barrier = has_deferrable_input(graph, make_block(graph, start, stop), start, stop)
            inner = regions(*group, own, outermost=False)
            kept = [ref for b in range(group[0], group[1] + 1) for ref in saved.get(b, ())]
            keeps = tuple(kept) if outermost else ()
            found.append(
                Region(start, stop, checkpointed=True, saved=keeps, children=inner, barrier=barrier)
            )
            block = group[1] + 1
        return tuple(found)

    last = len(modes) - 1
    children = regions(0, last, selection.groups)
    alone = all(group[1] != last for group in selection.groups)
    if barriers is Barriers.LOSS_TOO and alone and not modes[last].checkpointed:
        children = (*regions(0, last - 1, selection.groups), replace(modes[last], barrier=True))
    root = Region(0, len(graph.operations), children=children)
    return root.without_barriers() if barriers is Barriers.NONE else root
