"""Which measured runs of a block to checkpoint together: weighted interval scheduling.

Effects of runs that do not overlap add up (measured: docs/devdocs/costs.md), so each set of
disjoint runs is a point of bytes freed and seconds added, and few of them are not dominated.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax_hremat._options.runs import Run


@dataclass(frozen=True, slots=True)
class Packing:
    """A set of disjoint runs.

    Attributes:
        runs: In program order.
        freed_bytes: Sum over the runs, as measured one by one.
        added_s: Sum over the runs; may be negative.
    """

    runs: tuple[Run, ...] = ()
    freed_bytes: int = 0
    added_s: float = 0.0

    def extended(self, run: Run) -> Packing:
        """The set with one more run, after all of its own."""
        return Packing(
            (*self.runs, run), self.freed_bytes + run.freed_bytes, self.added_s + run.added_s
        )


def pareto_packings(runs: Sequence[Run], count: int) -> tuple[Packing, ...]:
    """Least added time for a sweep of bytes to free, from none to as much as can be freed.

    The first answer has no byte bound: where checkpointing a run makes the step faster, it is in
    it.

    Args:
        runs: Each with what it frees and adds alone.
        count: How many byte bounds above none.
    """
    useful = sorted(
        (r for r in runs if r.freed_bytes > 0 or r.added_s < 0), key=lambda r: (r.stop, r.start)
    )
    stops = [run.stop for run in useful]
    # best[i]: the sets of the first i runs that no other one beats.
    best = [[Packing()]]
    for run in useful:
        before = best[bisect_right(stops, run.start)]
        best.append(_undominated([*best[-1], *(packing.extended(run) for packing in before)]))
    most_bytes = max(packing.freed_bytes for packing in best[-1])
    answers: list[Packing] = []
    for step in range(count + 1):
        bound_bytes = most_bytes * step / count if step else -float("inf")
        answer = min(
            (p for p in best[-1] if p.freed_bytes >= bound_bytes),
            key=lambda p: (p.added_s, -p.freed_bytes),
        )
        if answer.runs and answer not in answers:
            answers.append(answer)
    return tuple(answers)


def _undominated(packings: Iterable[Packing]) -> list[Packing]:
    """Those than which no other one frees as much in as little time, fastest first."""
    kept: list[Packing] = []
    for packing in sorted(packings, key=lambda p: (p.added_s, -p.freed_bytes)):
        if not kept or packing.freed_bytes > kept[-1].freed_bytes:
            kept.append(packing)
    return kept
