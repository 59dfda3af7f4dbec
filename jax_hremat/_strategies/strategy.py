"""What a strategy is: a published method as a way to choose a plan, beside the library's own.

A strategy decides three things: where the program is cut into blocks, which options of each kind of
block are priced, and which selection of them is the plan for a budget. Everything else is the same
for all of them: the costs of the options, the emitted `jax.checkpoint`s, the compiler, and the
certificate. So plans of different strategies can be compared.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

from jax_hremat._cost.option import Option
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.config import SearchConfig
from jax_hremat._partition.blocks import Partitioner
from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.prediction import Prediction, predict


class Choices(Protocol):
    """The selections of one chain that a strategy chooses from."""

    def fastest(self, peak_bytes: int) -> Selection | None:
        """The fastest selection whose predicted peak is at most `peak_bytes`; None if there is
        none."""
        ...

    def lowest(self) -> Selection:
        """The selection of least predicted peak."""
        ...


@runtime_checkable
class FreeChoices(Choices, Protocol):
    """The choices of a strategy whose own schedules nested checkpoints cannot express."""

    def free(self, peak_bytes: int) -> FreeSchedule | None:
        """The fastest of the strategy's own schedules found whose simulated peak is at most
        `peak_bytes`; None if there is none."""
        ...


class Strategy(ABC):
    """A way to choose a plan. A subclass says where it comes from, and overrides `choices`.

    Attributes:
        name: The name by which `PlannerConfig(strategy=…)` knows it.
        summary: One line: what it does.
        source: The paper and what of it is implemented.
        leaves_out: What of the paper is not, or not as written there.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    leaves_out: ClassVar[str]

    def partitioner(self, default: Partitioner) -> Partitioner:
        """Where the program is cut into blocks, given the configuration's partitioner."""
        return default

    def search(self, config: SearchConfig) -> SearchConfig:
        """Which options of a kind of block are priced, given the configuration's limits. By
        default, only the block plain and checkpointed."""
        return SearchConfig(
            max_packings=0,
            max_saved_sets=0,
            max_segments=0,
            policies=False,
            max_workers=config.max_workers,
        )

    def options(self, kind: BlockOptions) -> Sequence[Option]:
        """The options of a kind of block that selections choose from: the plain one first, the
        checkpointed one (of a scan, the scan with each step checkpointed) last."""
        return (kind.plain, kind.under_policy("block"))

    @abstractmethod
    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        """What can be chosen of a chain.

        Args:
            chain: The blocks, each with the options that `options` returns (equal ones once).
            solver: Limits of each mixed-integer program.
        """

    def __repr__(self) -> str:
        return f"<strategy {self.name!r}: {self.summary}>"


class Curve:
    """The choices of a strategy that lists its selections, whatever the budget."""

    def __init__(self, chain: Chain, selections: Iterable[Selection]) -> None:
        self._chain = chain
        self._selections = tuple(dict.fromkeys(selections))

    def __len__(self) -> int:
        return len(self._selections)

    @functools.cached_property
    def _points(self) -> list[tuple[Prediction, Selection]]:
        return [(predict(self._chain, s), s) for s in self._selections]

    def fastest(self, peak_bytes: int) -> Selection | None:
        """The fastest selection whose predicted peak is at most `peak_bytes`, of equally fast ones
        that of least peak; None if there is none."""
        fitting = [p for p in self._points if p[0].peak_bytes <= peak_bytes]
        best = min(fitting, key=lambda p: (p[0].time_s, p[0].peak_bytes), default=None)
        return None if best is None else best[1]

    def lowest(self) -> Selection:
        """The selection of least predicted peak, of equal ones the fastest."""
        return min(self._points, key=lambda p: (p[0].peak_bytes, p[0].time_s))[1]
