"""What a chain counts at prices (`_solve/assumed_reuse.py`), and by how much less than it takes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from itertools import chain as joined
from typing import TypeAlias

import numpy as np

from jax_hremat._solve.assumed_reuse import Prices
from jax_hremat._solve.chain import Chain

# The bytes of buffers.
_Sizes: TypeAlias = tuple[int, ...]


def priced_chain(chain: Chain, prices: Prices) -> Chain:
    """The chain, with what its boundary values count as their sizes."""
    values = (
        replace(value, size_bytes=prices.counted_bytes(value.size_bytes))
        for value in chain.boundary_values
    )
    return replace(chain, boundary_values=tuple(values))


class Positions:
    """The options of all blocks of a chain in one row, and after them the blocks, each standing for
    its forward where a group keeps nothing of it.

    Attributes:
        of_option: For each block, the position of its first option.
        of_block: The position of the first block.
    """

    def __init__(self, chain: Chain) -> None:
        *before, count = accumulate(map(len, chain.options), initial=0)
        self.of_option = np.array(before)
        self.of_block = count


class Spared:
    """By how many bytes what runs and is kept counts less at prices than it takes, at each of the
    chain's `Positions`.

    Attributes:
        kept: Of what is kept.
        kept_by_group: Of what a group keeps of a block that is not its last.
        kept_inside: Of what is kept in a group, which may end with the block.
        forward: Of what is live at the forward's peak.
        backward: Of what is live at the backward's peak, pending cotangents included.
        backward_inside: The same in a group, which may end with the block.
        made_before: For each block, and after the last, of the boundary values made before it.
    """

    def __init__(self, chain: Chain, prices: Prices) -> None:
        spared = functools.cache(prices.spared_bytes)

        def each(of_options: Iterable[_Sizes], of_blocks: Iterable[_Sizes]) -> np.ndarray:
            return np.array([spared(sizes) for sizes in joined(of_options, of_blocks)], float)

        options = [*joined.from_iterable(chain.options)]
        none = [()] * len(chain)
        self.kept = each((o.cost.kept_sizes for o in options), none)
        self.kept_by_group = each(((*o.cost.kept_sizes, o.outputs_bytes) for o in options), none)
        self.forward = each(
            (o.cost.forward_sizes for o in options),
            [phase.sizes_at_peak for phase in chain.handing_on],
        )
        waiting = [
            pending
            for block, some in enumerate(chain.options)
            for pending in [tuple(chain.pending_cotangents(block))] * len(some)
        ]
        self.backward, ending = (
            each(((*c.backward_sizes, *w) for c, w in zip(costs, waiting, strict=True)), none)
            for costs in ([o.cost for o in options], [o.ending for o in options])
        )
        self.backward_inside = np.maximum(self.backward, ending)
        self.kept_inside = np.maximum(self.kept, each((o.ending.kept_sizes for o in options), none))
        made = [0] * len(chain)
        for value in chain.boundary_values:
            made[value.producer] += spared((value.size_bytes,))
        self.made_before = np.array([*accumulate(made, initial=0)], float)
