"""`Comparison`: plans of several strategies for the same program and budgets, as a table and a
plot."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from jax_hremat._plan.notebook import comparison_html
from jax_hremat._plan.plan import RematPlan
from jax_hremat._shared.files import write_whole
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_percent
from jax_hremat._shared.text import plain_table, plain_text

_GIB = 2.0**30
_LEGEND = (
    "Peaks are certified, times estimated. Added time: compared with the step without "
    "rematerialization. Planning: for all budgets together."
)
_FREE_LEGEND = (
    "Free schedule: what the strategy's own schedule takes for this budget, as simulated. "
    "Checkpoints cannot express it; the plan is the nest nearest to such a schedule."
)
_COLUMNS = (
    "strategy",
    "budget_bytes",
    "fits",
    "peak_bytes",
    "step_s",
    "slowdown",
    "planning_s",
    "free_simulated_peak_bytes",
    "free_simulated_step_s",
    "free_simulated_slowdown",
    "free_found_by",
)
# Enough for all strategies of the library; told apart by people who do not see red and green alike.
_COLOURS = ("#1f6feb", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c564b")


@dataclass(frozen=True)
class StrategyPlan:
    """What one strategy found for one budget.

    Attributes:
        strategy: The strategy's name.
        budget_bytes: The budget that was asked for, headroom included.
        plan: The plan; if none fits, the plan of the strategy's least budget.
    """

    strategy: str
    budget_bytes: int
    plan: RematPlan

    @property
    def fits(self) -> bool:
        """Whether the plan is within the budget."""
        certificate = self.plan.certificate
        return certificate.peak_bytes + certificate.headroom_bytes <= self.budget_bytes

    @property
    def free_slowdown(self) -> float | None:
        """Predicted step time of the plan's free schedule, divided by that without
        rematerialization; None if it has none."""
        free = self.plan.free_schedule
        return None if free is None else free.step_s / self.plan.baseline_step_s

    @property
    def free_words(self) -> str:
        """The simulated peak and added time of the plan's free schedule; empty if it has none."""
        if self.plan.free_schedule is None or self.free_slowdown is None:
            return ""
        added = format_signed_percent(self.free_slowdown - 1)
        return f"{format_bytes(self.plan.free_schedule.peak_bytes)}, {added}"


@dataclass(frozen=True)
class Comparison:
    """Certified plans of several strategies for the same program and budgets.

    Attributes:
        found: One for each strategy and budget, the strategies in the order asked for.
        planning_s: Seconds that each strategy took for all budgets, compilation included; less
            where the cache held some of it.
    """

    found: tuple[StrategyPlan, ...]
    planning_s: Mapping[str, float]

    @property
    def no_remat(self) -> tuple[int, float]:
        """Peak in bytes and step in seconds without rematerialization."""
        plan = self.found[0].plan
        return plan.baseline_peak_bytes, plan.baseline_step_s

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names of the strategies, in the order asked for."""
        return tuple(self.planning_s)

    @property
    def budgets_bytes(self) -> tuple[int, ...]:
        """The budgets in bytes, the largest first."""
        return tuple(sorted({one.budget_bytes for one in self.found}, reverse=True))

    @property
    def has_free_schedules(self) -> bool:
        """Whether some strategy has a schedule that checkpoints cannot express."""
        return any(one.plan.free_schedule is not None for one in self.found)

    def at(self, budget_bytes: int) -> list[StrategyPlan]:
        """What the strategies found for one budget: the plans that fit, fastest first, then the
        others, least peak first."""
        return sorted(
            (one for one in self.found if one.budget_bytes == budget_bytes),
            key=lambda one: (
                not one.fits,
                one.plan.estimated_step_s if one.fits else one.plan.certificate.peak_bytes,
            ),
        )

    def __str__(self) -> str:
        table = plain_table()
        table.add_column("budget", justify="right")
        table.add_column("strategy")
        for column in ("peak", "step", "added time", "planning"):
            table.add_column(column, justify="right")
        if self.has_free_schedules:
            table.add_column("free schedule,\nsimulated", justify="right")
        for budget_bytes in self.budgets_bytes:
            for i, one in enumerate(self.at(budget_bytes)):
                plan = one.plan
                cells = [
                    format_seconds(plan.estimated_step_s),
                    format_signed_percent(plan.slowdown - 1),
                    format_seconds(self.planning_s[one.strategy]),
                    *([one.free_words] if self.has_free_schedules else []),
                ]
                table.add_row(
                    "" if i else format_bytes(budget_bytes),
                    one.strategy,
                    format_bytes(plan.certificate.peak_bytes) + ("" if one.fits else " *"),
                    *cells,
                )
        peak_bytes, step_s = self.no_remat
        title = f"Without rematerialization: {format_bytes(peak_bytes)}, {format_seconds(step_s)}"
        legend = [_LEGEND]
        if not all(one.fits for one in self.found):
            legend.insert(0, "*: above the budget; the least peak that the strategy found.")
        if self.has_free_schedules:
            legend.append(_FREE_LEGEND)
        return plain_text(Text(title), Text(), table, Text(), *map(Text, legend))

    def _repr_html_(self) -> str:
        return comparison_html(self)

    def __repr__(self) -> str:
        return (
            f"Comparison({len(self.strategies)} strategies, {len(self.budgets_bytes)} budgets: "
            f"{', '.join(self.strategies)})"
        )

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table, in bytes and seconds; the file appears whole or not at all. The columns
        of free schedules are empty for strategies without."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(_COLUMNS)
        for one in self.found:
            plan, free = one.plan, one.plan.free_schedule
            writer.writerow(
                (
                    one.strategy,
                    one.budget_bytes,
                    one.fits,
                    plan.certificate.peak_bytes,
                    plan.estimated_step_s,
                    plan.slowdown,
                    self.planning_s[one.strategy],
                    *(
                        ("", "", "", "")
                        if free is None
                        else (free.peak_bytes, free.step_s, one.free_slowdown, free.found_by)
                    ),
                )
            )
        write_whole(Path(path), text.getvalue().encode())

    def plot(self, ax: Any = None) -> Any:
        """Plot added time over peak with matplotlib (the `plot` extra), one colour a strategy.

        Args:
            ax: Where to draw; a new figure's axes if None.

        Returns:
            The axes; `ax.figure.savefig(path)` writes the plot to a file.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        for i, name in enumerate(self.strategies):
            # The first on top of the others.
            style = dict(color=_COLOURS[i % len(_COLOURS)], zorder=3 - i / len(self.strategies))
            points = sorted(
                {
                    (one.plan.certificate.peak_bytes / _GIB, 100 * (one.plan.slowdown - 1))
                    for one in self.found
                    if one.strategy == name
                }
            )
            ax.plot(*zip(*points, strict=True), "o-", markersize=4, label=name, **style)
        ax.plot([self.no_remat[0] / _GIB], [0], "s", color="#57606a", label="no rematerialization")
        ax.set_xlabel("peak of the compiled step (GiB)")
        ax.set_ylabel("added step time (%)")
        ax.set_xlim(left=0)
        ax.grid(alpha=0.25)
        ax.legend(frameon=False, fontsize="small")
        return ax
