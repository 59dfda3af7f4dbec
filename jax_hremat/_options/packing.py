"""Which runs of a block to checkpoint together: weighted interval scheduling.

The effects of runs that do not overlap add up (measured: docs/explanation/costs.md). So each set
of disjoint runs is a point (bytes freed, seconds added). At a price of memory, the best set is a
vertex of the lower convex hull of these points, and the sets that a plan of many blocks takes are
such vertices, since what one block frees can be freed in another.

Glossary
    m_i     bytes that run i frees alone
    t_i     seconds that run i adds alone; may be negative
    p       price of memory: seconds that a freed byte is worth

Program, for each price:

    min Σ_{i in S} (t_i − p · m_i)   over sets S of disjoint runs

The prices are found as in the dichotomic scheme of Aneja and Nair ("Bicriteria Transportation
Problem", Management Science 25, 1979): between two vertices that are known, that at which the two
are worth the same; what is best there is another vertex between them, or there is none.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from jax_hremat._options.runs import Run


@dataclass(frozen=True, slots=True)
class Packing:
    """A set of disjoint runs.

    Attributes:
        runs: The runs, in program order.
        freed_bytes: Sum over the runs, of what each frees alone.
        added_s: Sum over the runs, of what each adds alone; may be negative.
        unwritten_bytes: Sum over the runs, of what each leaves unwritten.
    """

    runs: tuple[Run, ...] = ()
    freed_bytes: int = 0
    added_s: float = 0.0
    unwritten_bytes: int = 0

    def extended(self, run: Run) -> Packing:
        """The set with one more run, which comes after all runs of the set."""
        return Packing(
            (*self.runs, run),
            self.freed_bytes + run.freed_bytes,
            self.added_s + run.added_s,
            self.unwritten_bytes + run.unwritten_bytes,
        )

    def worth(self, price_s: float) -> tuple[float, float, int, int]:
        """What the set is worth at a price in seconds per byte. Of sets that are worth the same,
        that is better which frees more, or at an infinite price that which adds less; then that
        which leaves less unwritten, and that with fewer operations."""
        length = sum(run.stop - run.start for run in self.runs)
        ties = (-self.unwritten_bytes, -length)
        if price_s == math.inf:
            return self.freed_bytes, -self.added_s, *ties
        return price_s * self.freed_bytes - self.added_s, self.freed_bytes, *ties


def best_packing(runs: Sequence[Run], price_s: float) -> Packing:
    """The set of disjoint runs that is worth most at a price of memory, in seconds per byte, by
    dynamic programming over the ends of the runs.

    Args:
        runs: The runs, each with what it frees and adds alone, ordered by their ends.
        price_s: The price; infinity for the most bytes freed.
    """
    stops = [run.stop for run in runs]
    # best[i]: the best set of the first i runs.
    best = [Packing()]
    for run in runs:
        taken = best[bisect_right(stops, run.start, hi=len(best) - 1)].extended(run)
        best.append(max(best[-1], taken, key=lambda packing: packing.worth(price_s)))
    return best[-1]


def packings_of_hull(runs: Sequence[Run], count: int, least_s: float) -> tuple[Packing, ...]:
    """The sets of runs on the lower convex hull of seconds added over bytes freed, those first that
    lower the hull most; none for no runs.

    Args:
        runs: The runs, each with what it frees and adds alone.
        count: The most sets to return.
        least_s: A set that lowers the hull of those before it by less is left out.
    """
    useful = sorted(
        (r for r in runs if r.freed_bytes > 0 or r.added_s < 0), key=lambda r: (r.stop, r.start)
    )
    most, fastest = (best_packing(useful, price_s) for price_s in (math.inf, 0.0))
    if fastest.added_s > -least_s:
        fastest = Packing()
    found = [packing for packing in dict.fromkeys((most, fastest)) if packing.runs]
    gaps: list[tuple[float, int, Packing, Packing, Packing]] = []
    order = itertools.count()

    def look_between(less: Packing, more: Packing) -> None:
        freed_bytes = more.freed_bytes - less.freed_bytes
        if freed_bytes <= 0:
            return
        price_s = (more.added_s - less.added_s) / freed_bytes
        best = best_packing(useful, price_s)
        gain_s = best.worth(price_s)[0] - less.worth(price_s)[0]
        if gain_s > least_s and best not in (less, more):
            heapq.heappush(gaps, (-gain_s, next(order), less, best, more))

    look_between(fastest, most)
    while gaps and len(found) < count:
        *_, less, best, more = heapq.heappop(gaps)
        found.append(best)
        look_between(less, best)
        look_between(best, more)
    return tuple(found[:count])
