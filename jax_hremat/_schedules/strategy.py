"""What a strategy is: from a graph and a peak to a schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.schedule import Schedule, with_drops, without_unread
from jax_hremat._schedules.simulate import Simulation, simulate


class Strategy(ABC):
    """A way to choose a schedule.

    A strategy is a value: equal ones give equal schedules for equal graphs, whatever was asked
    before. Its laws, which `tests/strategy_laws.py` checks for any strategy: schedules are valid
    and within the peak; there is one within the peak of `lowest`; more memory never gives a
    slower one, but for what a strategy that states a bound leaves unproven.

    Attributes:
        name: What it is called on the command line.
        summary: What it does, in one line.
        source: The paper, and what of it is implemented.
        leaves_out: What of the paper is not, and where this differs from it.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    leaves_out: ClassVar[str]

    @abstractmethod
    def schedule(self, graph: Graph, peak_bytes: int) -> Schedule | None:
        """The fastest schedule it finds whose simulated peak is at most `peak_bytes`, constants
        included; None if it finds none."""

    def schedules(self, graph: Graph, peaks_bytes: Sequence[int]) -> list[Schedule | None]:
        """The same for several peaks, which may take less time than one after the other."""
        return [self.schedule(graph, peak_bytes) for peak_bytes in peaks_bytes]

    @abstractmethod
    def lowest(self, graph: Graph) -> Schedule:
        """The schedule of the least simulated peak it finds; of those with that peak, the
        fastest."""


class Family(Strategy):
    """A strategy that has some orders for a graph, whatever the peak, and takes the best of them.

    A subclass says only which orders. Computations that nothing reads are left out, and every value
    is dropped as early as possible.
    """

    @abstractmethod
    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        """Orders in which to compute the operations, repetitions included; at least one."""

    def schedule(self, graph: Graph, peak_bytes: int) -> Schedule | None:
        return self.schedules(graph, [peak_bytes])[0]

    def schedules(self, graph: Graph, peaks_bytes: Sequence[int]) -> list[Schedule | None]:
        best: list[tuple[tuple[float, int], Schedule] | None] = [None] * len(peaks_bytes)
        for schedule, run in self._candidates(graph):
            figures = run.time_s, run.peak_bytes
            for k, peak_bytes in enumerate(peaks_bytes):
                before = best[k]
                if run.peak_bytes <= peak_bytes and (before is None or figures < before[0]):
                    best[k] = figures, schedule
        return [None if one is None else one[1] for one in best]

    def lowest(self, graph: Graph) -> Schedule:
        return min(self._candidates(graph), key=lambda f: (f[1].peak_bytes, f[1].time_s))[0]

    def _candidates(self, graph: Graph) -> Iterator[tuple[Schedule, Simulation]]:
        """One after the other: all of them would take much memory on a large graph."""
        for order in self.orders(graph):
            schedule = with_drops(graph, without_unread(graph, order))
            yield schedule, simulate(graph, schedule)
