"""Selections that checkpoint consecutive blocks together."""

from __future__ import annotations

from collections.abc import Iterable

from jax_hremat._solve.chain import Chain, Group, Selection


def with_groups(chain: Chain, groups: Iterable[Group]) -> Selection:
    """The selection in which these groups are checkpointed, and every block in them is plain.

    A group of one block is that block's last option, checkpointed. A group is left out if a block
    in it has an effect, which must not be repeated.

    Args:
        chain: Blocks, each with its plain option first and its checkpointed one last.
        groups: First and last blocks; any two groups are disjoint, or one is inside the other.
    """
    allowed = [g for g in groups if chain.effectful.isdisjoint(range(g[0], g[1] + 1))]
    alone = {first for first, last in allowed if first == last}
    return Selection(
        options=tuple(
            len(options) - 1 if block in alone else 0 for block, options in enumerate(chain.options)
        ),
        groups=tuple(
            sorted({g for g in allowed if g[0] < g[1]}, key=lambda g: (g[0], -g[1])),
        ),
    )


def weights_bytes(chain: Chain) -> list[int]:
    """What each block holds for its backward when it is plain: its residuals and the values that it
    makes for later blocks."""
    made = [0] * len(chain)
    for value in chain.boundary_values:
        made[value.producer] += value.size_bytes
    return [options[0].cost.kept_bytes + m for options, m in zip(chain.options, made, strict=True)]


def even_segments(weights: list[int], first: int, count: int) -> list[Group]:
    """At most `count` segments of consecutive blocks, of nearly the same weight.

    Args:
        weights: The weight of each block.
        first: The position of the first of these blocks.
        count: How many segments, at least 1.
    """
    total, before, segments = max(sum(weights), 1), 0, {}
    for block, weight in enumerate(weights, start=first):
        # The segment that the block's middle lies in, where all are equally long.
        segment = min(count - 1, int(count * (before + weight / 2) / total))
        begun = segments.get(segment, (block, block))
        segments[segment] = (begun[0], block)
        before += weight
    return list(segments.values())
