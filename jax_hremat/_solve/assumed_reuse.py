"""What the root program assumes of output-buffer reuse.

How many bytes are placed in the memory of results depends on the whole schedule
(`_solve/output_reuse.py`). The root program, whose rows are linear, takes it in two parts: prices
of buffers, and bytes for each moment.

A result holds one buffer at a time, so that buffers compete for results. Let a result of size σ_j
have the price π_j ≥ 0, no lower for larger results, and π(s) be the price of the smallest results
that a buffer of s bytes fits in. At any moment with n_j results still to be written, at most

    Σ_i max(s_i − π(s_i), 0) + Σ_j n_j π_j

bytes of the buffers i alive are in results: the dual of assigning buffers to results. So with
prices, a buffer counts min(s, π(s)) bytes, and Σ_j n_j π_j bytes are saved at each moment, whatever
the schedule is; the program bounds all schedules. The bound is exact where the price is what one
more result would save: the size of the largest buffer that would go there.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.output_reuse import Result
from jax_hremat._solve.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Prices:
    """The bytes that buffers count that fit in results.

    Attributes:
        sizes_bytes: The sizes of results, ascending, each once.
        prices_bytes: The price of each, no lower for larger ones.
    """

    sizes_bytes: tuple[int, ...] = ()
    prices_bytes: tuple[int, ...] = ()

    def counted_bytes(self, size_bytes: int) -> int:
        """What a buffer of that size counts."""
        at = bisect_left(self.sizes_bytes, size_bytes)
        return size_bytes if at == len(self.sizes_bytes) else min(size_bytes, self.prices_bytes[at])

    def spared_bytes(self, sizes_bytes: Iterable[int]) -> int:
        """What buffers of these sizes count less than they take."""
        return sum(size - self.counted_bytes(size) for size in sizes_bytes)

    def halfway_to(self, other: Prices) -> Prices:
        """The prices in the middle between these and others of the same results."""
        pairs = zip(self.prices_bytes, other.prices_bytes, strict=True)
        return Prices(self.sizes_bytes, tuple((a + b) // 2 for a, b in pairs))


NO_PRICES = Prices()


class AssumedReuse(NamedTuple):
    """What the root program assumes; empty tuples where nothing is saved.

    Attributes:
        forward: Bytes saved in the forward of each block.
        backward: Bytes saved in the backward of each block.
        prices: What buffers count.
        is_strict: Whether at each block of a group no more is saved than there. If not, it is as
            much as at the last, whose backward comes first, when fewest results are written: the
            program has one peak for the backward of a group, wherever it is.
    """

    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    prices: Prices = NO_PRICES
    is_strict: bool = False

    def in_backward(self, blocks: range) -> np.ndarray:
        """Bytes saved in the backward of each block of a column."""
        if not self.backward:
            return np.zeros(len(blocks))
        saved = np.array(self.backward[blocks.start : blocks.stop], float)
        return saved if self.is_strict else np.full(len(blocks), saved[-1])


NO_REUSE = AssumedReuse()


def most_reused(results: Sequence[Result], chain: Chain) -> AssumedReuse:
    """The most that any schedule reuses: in each result still to be written the largest buffer that
    fits."""
    anywhere = {0, *(value.size_bytes for value in chain.boundary_values)}
    # No group contains the last block.
    in_forward = {size for phase in chain.handing_on[:-1] for size in phase.sizes_at_peak}
    in_backward = {*chain.cotangent_bytes}
    for option in itertools.chain.from_iterable(chain.options):
        anywhere |= {*option.cost.kept_sizes, *option.ending.kept_sizes, option.outputs_bytes}
        in_forward |= {*option.cost.forward_sizes}
        in_backward |= {*option.cost.backward_sizes, *option.ending.backward_sizes}

    def saved(sizes: Iterable[int]) -> AssumedReuse:
        ascending = sorted(sizes)
        most = [ascending[bisect_right(ascending, r.size_bytes) - 1] for r in results]
        return _saved(results, most, len(chain), NO_PRICES)

    backward = saved(anywhere | in_backward).backward
    return saved(anywhere | in_forward)._replace(backward=backward)


def reuse_shown_by(promise: Prediction, results: Sequence[Result], num_blocks: int) -> AssumedReuse:
    """What is reused at the prices that a schedule shows at its peak."""
    return at_prices(results, shown_prices(results, promise), num_blocks)


def shown_prices(results: Sequence[Result], promise: Prediction) -> Prices:
    """The prices that a schedule shows at its peak: the price of a result is the size of the
    largest buffer there that would go into one more. Buffers are given to results that are still to
    be written, the largest first, whatever becomes of them at other moments."""
    peak = promise.peak
    idle = sorted(r.size_bytes for r in results if not peak.in_backward or r.block < peak.block)
    others = [0]
    for size in sorted(promise.at_peak_bytes, reverse=True):
        at = bisect_left(idle, size)
        if at < len(idle):
            del idle[at]
        else:
            others.append(size)
    others.sort()
    sizes = sorted({r.size_bytes for r in results})
    return Prices(tuple(sizes), tuple(others[bisect_right(others, size) - 1] for size in sizes))


def at_prices(results: Sequence[Result], prices: Prices, num_blocks: int) -> AssumedReuse:
    """What is assumed at prices: each result saves its own until it is written."""
    price = dict(zip(prices.sizes_bytes, prices.prices_bytes, strict=True))
    return _saved(results, [price[r.size_bytes] for r in results], num_blocks, prices)


def _saved(
    results: Sequence[Result], saved_bytes: Sequence[int], num_blocks: int, prices: Prices
) -> AssumedReuse:
    """What is saved if each result saves so many bytes until it is written: in the forward of a
    block all of them, in its backward those that earlier blocks complete."""
    of_block = [0] * num_blocks
    for result, saved in zip(results, saved_bytes, strict=True):
        of_block[result.block] += saved
    before = tuple(itertools.accumulate(of_block, initial=0))
    return AssumedReuse((before[-1],) * num_blocks, before[:-1], prices)
