"""Pareto fronts of memory and time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")

# A peak that is higher by at most this part is as good.
_AS_GOOD = 0.001


def pareto_front(
    items: Iterable[Item], peak_and_time: Callable[[Item], tuple[float, float]]
) -> list[Item]:
    """The items that no other beats in both peak and time, lowest peak first.

    Where the peaks of some are within a thousandth, only the fastest is on the front
    (ε-dominance: Laumanns, Thiele, Deb and Zitzler, Evolutionary Computation 10(3), 2002). The item
    of least peak always is, for no other fits less memory.
    """

    def time_and_peak(item: Item) -> tuple[float, float]:
        peak, time = peak_and_time(item)
        return time, peak

    def peak(item: Item) -> float:
        return peak_and_time(item)[0]

    unbeaten: list[Item] = []
    for item in sorted(items, key=time_and_peak):
        if not unbeaten or peak(item) < peak(unbeaten[-1]):
            unbeaten.append(item)
    front: list[Item] = []
    for item in unbeaten:
        is_lower = not front or (1 + _AS_GOOD) * peak(item) < peak(front[-1])
        if is_lower or item is unbeaten[-1]:
            front.append(item)
    return front[::-1]
