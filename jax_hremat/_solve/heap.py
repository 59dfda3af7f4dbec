"""The gaps in the memory of a step's buffers.

XLA places all temporary buffers of a step in one allocation before the step runs: twice, in two
orders, of which it keeps the one that needs less. A buffer gets the smallest gap that is free as
long as it is alive; where there is none, the allocation grows. How large it gets is the most that
is alive at a time, and the gaps that no buffer could use: the fragmentation.

Follows `GlobalDecreasingSizeBestFitHeap` and `ChooseBestHeapAlgorithm` in XLA's heap simulator.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jax_hremat._cost.option_cost import LiveRange


def gaps_bytes(buffers: Sequence[LiveRange]) -> int:
    """Bytes by which the allocation of buffers exceeds the most that are alive at a time.

    Args:
        buffers: Sizes, and the first and last of the positions at which each is alive.

    Unchecked: alignment; buffers that share memory although both are alive, as where a kernel
    overwrites its operand.
    """
    if not buffers:
        return 0
    sizes, first, last = np.array([b[:3] for b in buffers], np.int64).T
    lengths = last - first
    by_size = np.lexsort((first, -lengths, -sizes))
    by_length = np.lexsort((first, -sizes, -lengths))
    live_bytes = _most_alive(sizes, first, last)
    heap_bytes = min(
        _heap_bytes(sizes[order], first[order], last[order]) for order in (by_size, by_length)
    )
    return heap_bytes - live_bytes


def _most_alive(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> int:
    change = np.zeros(last.max() + 2, np.int64)
    np.add.at(change, first, sizes)
    np.subtract.at(change, last + 1, sizes)
    return int(np.cumsum(change).max())


def _heap_bytes(sizes: np.ndarray, first: np.ndarray, last: np.ndarray) -> int:
    """The size of the allocation if the buffers are placed in this order."""
    begins, ends = np.zeros_like(sizes), np.zeros_like(sizes)
    for number, size in enumerate(sizes):
        meets = (first[:number] <= last[number]) & (first[number] <= last[:number])
        begins[number] = _place(begins[:number][meets], ends[:number][meets], size)
        ends[number] = begins[number] + size
    return int(ends.max())


def _place(begins: np.ndarray, ends: np.ndarray, size: int) -> int:
    """Where a buffer is placed among others: in the smallest gap that it fits in, the first of
    equal ones; after all others if it fits in none."""
    order = np.argsort(begins)
    free_from = np.maximum.accumulate(np.concatenate(([0], ends[order])))
    gaps = begins[order] - free_from[:-1]
    fitting = np.flatnonzero(gaps >= size)
    if not fitting.size:
        return int(free_from[-1])
    return int(free_from[fitting[np.argmin(gaps[fitting])]])
