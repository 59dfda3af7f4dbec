"""From what a schedule runs again to nested checkpoints.

A schedule of a graph may drop and compute values in any order; a selection has checkpointed blocks
and groups. The nearest nest of a schedule is this selection: the backwards are gone through in the
order in which they run, and of the blocks whose forwards run again before one of them, consecutive
ones are one group, which is recomputed before its last backward. Where a block runs again for the
second time, its new group stands inside the one around it, and is cut where it would cross another.
A group of one block is that block checkpointed. All other blocks are plain; forwards that run again
between other forwards have no counterpart, so there the nest keeps values that the schedule drops.

The parts of a nest are itself, and what is left of it when the groups before or behind some block
are left out: they take more memory, and less time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._strategies.segments import with_groups


def nearest_nest(again: Iterable[Collection[int]]) -> list[Group]:
    """The groups of the nest that is nearest to a schedule, as this module's text says.

    Args:
        again: For each backward, in the order in which they run, the blocks whose forwards run
            again before it.
    """
    groups: dict[Group, None] = {}
    for blocks in again:
        around = {block: _innermost(groups, block) for block in blocks}
        groups |= dict.fromkeys(_runs(sorted(blocks), around))
    return list(groups)


def parts(chain: Chain, groups: Sequence[Group]) -> Iterator[Selection]:
    """The parts of a nest as selections, itself first.

    Args:
        chain: Blocks, each with its plain option first and its checkpointed one last.
        groups: Any two are disjoint, or one is inside the other.
    """
    yield with_groups(chain, groups)
    for cut in sorted({first for first, _ in groups}):
        if all(last < cut or first >= cut for first, last in groups):
            yield with_groups(chain, (group for group in groups if group[0] >= cut))
            yield with_groups(chain, (group for group in groups if group[1] < cut))


def _runs(blocks: Sequence[int], around: Mapping[int, Group | None]) -> list[Group]:
    """The runs of consecutive blocks with the same group around them."""
    runs: list[Group] = []
    for block in blocks:
        if runs and runs[-1][1] == block - 1 and around[block - 1] == around[block]:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return runs


def _innermost(groups: Iterable[Group], block: int) -> Group | None:
    """The smallest group around a block."""
    inside = (group for group in groups if group[0] <= block <= group[1])
    return min(inside, key=lambda group: group[1] - group[0], default=None)
