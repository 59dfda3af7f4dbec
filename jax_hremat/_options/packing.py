"""Which measured runs of a block to checkpoint together: weighted interval scheduling.

The effects of runs that do not overlap add up (measured: docs/explanation/costs.md). So each set of
disjoint runs is a point (bytes freed, seconds added), and few of these points are Pareto-optimal.

Glossary
    m_i     bytes that run i frees alone
    t_i     seconds that run i adds alone; may be negative
    B       bytes that a set must free

Program, for each B of a sweep:

    min Σ_{i in S} t_i   over sets S of disjoint runs with   Σ_{i in S} m_i ≥ B

With the runs ordered by their ends, the Pareto-optimal sets of the first i runs are among those of
the first i − 1 runs, and those of the runs that end before run i begins, each extended by run i.
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
        runs: The runs, in program order.
        freed_bytes: Sum over the runs, of what each frees alone.
        added_s: Sum over the runs, of what each adds alone; may be negative.
    """

    runs: tuple[Run, ...] = ()
    freed_bytes: int = 0
    added_s: float = 0.0

    def extended(self, run: Run) -> Packing:
        """The set with one more run, which comes after all runs of the set."""
        return Packing(
            (*self.runs, run), self.freed_bytes + run.freed_bytes, self.added_s + run.added_s
        )


def pareto_packings(runs: Sequence[Run], count: int) -> tuple[Packing, ...]:
    """The sets of least added time for a sweep of bytes to free, from none to the most possible.

    The first answer has no byte bound: it contains the runs whose checkpointing makes the step
    faster.

    Args:
        runs: The runs, each with what it frees and adds alone.
        count: How many byte bounds to sweep, besides the first without a bound.
    """
    useful = sorted(
        (r for r in runs if r.freed_bytes > 0 or r.added_s < 0), key=lambda r: (r.stop, r.start)
    )
    stops = [run.stop for run in useful]
    # best[i]: the Pareto-optimal sets of the first i runs.
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
    """The Pareto-optimal sets in bytes freed and seconds added, fastest first."""
    kept: list[Packing] = []
    for packing in sorted(packings, key=lambda p: (p.added_s, -p.freed_bytes)):
        if not kept or packing.freed_bytes > kept[-1].freed_bytes:
            kept.append(packing)
    return kept
