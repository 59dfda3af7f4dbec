"""A chain and its columns as buffers count at prices (`_solve/assumed_reuse.py`).

What a group counts in its backward is its peak, less the most by which its own buffers may count
less at any moment of it. Which options the columns of a group are made of is not chosen anew.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from jax_hremat._solve.assumed_reuse import Prices
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import Column


def priced_chain(chain: Chain, prices: Prices) -> Chain:
    """The chain, with what its boundary values count as their sizes."""
    values = (
        replace(value, size_bytes=prices.counted_bytes(value.size_bytes))
        for value in chain.boundary_values
    )
    return replace(chain, boundary_values=tuple(values))


def priced_columns(chain: Chain, columns: Sequence[Column], prices: Prices) -> list[Column]:
    """What the columns of a chain count."""
    spared = _Spared(chain, prices)
    return [spared.column(p) if p.first == p.last else spared.group(p) for p in columns]


class _Spared:
    """By how many bytes what runs and is kept counts less, for each block and option."""

    def __init__(self, chain: Chain, prices: Prices) -> None:
        spared = functools.cache(prices.spared_bytes)
        self._kept, self._forward, self._backward, self._kept_by_group = (
            [[spared(sizes) for sizes in of_block] for of_block in of_chain]
            for of_chain in (
                [[o.cost.kept_sizes for o in some] for some in chain.options],
                [[o.cost.forward_sizes for o in some] for some in chain.options],
                [
                    [(*o.cost.backward_sizes, *waiting) for o in some]
                    for some, waiting in zip(chain.options, _waiting(chain), strict=True)
                ],
                [[(*o.cost.kept_sizes, o.outputs_bytes) for o in some] for some in chain.options],
            )
        )
        made = [0] * len(chain)
        for value in chain.boundary_values:
            made[value.producer] += spared((value.size_bytes,))
        self._made_before = list(accumulate(made, initial=0))

    def column(self, p: Column) -> Column:
        """A column of a single block."""
        block, (option,) = p.first, p.options
        (forward_bytes,) = p.forward_bytes
        return replace(
            p,
            kept_bytes=p.kept_bytes - self._kept[block][option],
            forward_bytes=(max(forward_bytes - self._forward[block][option], 0),),
            backward_bytes=max(p.backward_bytes - self._backward[block][option], 0),
        )

    def group(self, p: Column) -> Column:
        """A column of several blocks."""
        keeps = dict(p.keeps)
        kept = inside = own = 0
        forward_bytes: list[int] = []
        blocks = range(p.first, p.last + 1)
        for block, option, peak_bytes in zip(blocks, p.options, p.forward_bytes, strict=True):
            keep = keeps.get(block)
            runs = self._forward[block][option if keep is None else keep]
            forward_bytes.append(max(peak_bytes - runs - kept, 0))
            if keep is not None:
                of_group = self._kept if block == p.last else self._kept_by_group
                kept += of_group[block][keep]
            inside += self._kept[block][option]
            own = max(own, self._backward[block][option])
        inside += kept + own + self._made_before[p.last + 1] - self._made_before[p.first]
        return Column(
            first=p.first,
            last=p.last,
            options=p.options,
            added_ms=p.added_ms,
            kept_bytes=p.kept_bytes - kept,
            forward_bytes=tuple(forward_bytes),
            backward_bytes=max(p.backward_bytes - inside, 0),
            holds=p.holds,
            keeps=p.keeps,
            inner=p.inner,
        )


def _waiting(chain: Chain) -> Iterator[tuple[int, ...]]:
    """For each block, the sizes of the cotangents that wait during its backward."""
    for block in range(len(chain)):
        yield tuple(size for _, size in chain.pending_cotangents(block))
