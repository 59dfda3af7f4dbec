"""What a user could write by hand, as selections: the plans that a planner must not lose to."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from jax_hremat._schedule.chain import Chain, Selection, predict
from jax_hremat._schedule.layers import layer_runs

# Numbers of consecutive blocks wrapped together.
_GROUP_SIZES = (2, 3, 4)


def grouped_selections(chain: Chain, kinds: Sequence[Hashable]) -> Iterator[Selection]:
    """`jax.checkpoint` around consecutive blocks, each in its first option: around each layer
    as the pattern of kinds tells them, and around every two, three or four blocks.

    Args:
        chain: Blocks and their options.
        kinds: The kind of each block; equal kinds are equal blocks.
    """
    layers = _layers(chain, kinds)
    if layers.groups:
        yield layers
    for count in _GROUP_SIZES:
        if count < len(chain):
            phases = (_every(chain, count, first) for first in range(count))
            yield min(phases, key=lambda selection: predict(chain, selection).peak_bytes)


def _layers(chain: Chain, kinds: Sequence[Hashable]) -> Selection:
    """Every layer wrapped; blocks alone are wrapped by another standard plan."""
    return _selection(chain, [g for run in layer_runs(kinds) for g in run if g[1] > g[0]])


def _every(chain: Chain, count: int, first: int) -> Selection:
    """Each `count` blocks from `first` on wrapped together, but for the block at the loss."""
    return _selection(chain, [(a, a + count - 1) for a in range(first, len(chain) - count, count)])


def _selection(chain: Chain, groups: Sequence[tuple[int, int]]) -> Selection:
    """The first option everywhere; blocks with an effect stay in no group."""
    allowed = (g for g in groups if chain.pinned.isdisjoint(range(g[0], g[1] + 1)))
    return Selection((0,) * len(chain), tuple(allowed))
