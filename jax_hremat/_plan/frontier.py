"""`Frontier`: the trade-off between memory and time of one program, as a table and a plot."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._plan.notebook import frontier_html
from jax_hremat._plan.plan import RematPlan
from jax_hremat._shared.files import write_whole
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_percent
from jax_hremat._shared.text import plain_table, plain_text
from jax_hremat._shared.units import parse_budget

_GIB = 2.0**30
_LEGEND = (
    "Peaks are certified, times estimated. Share and added time: compared with the step without "
    "rematerialization. Time per GiB: saved per step for each further GiB, up to the next plan."
)
_COLUMNS = ("peak_bytes", "budget_bytes", "step_s", "slowdown", "s_per_gib", "checkpoints")


@dataclass(frozen=True)
class Frontier:
    """Certified plans of one program, none of which another beats in both peak and step time.

    Of plans whose peaks are within a thousandth of each other, only the fastest is listed, and the
    one of least peak. It is a sequence of its plans, lowest peak (and longest step) first.

    Attributes:
        plans: The plans; the budget of each is the memory it takes, headroom included.
    """

    plans: tuple[RematPlan, ...]

    def __len__(self) -> int:
        return len(self.plans)

    def __getitem__(self, index: int) -> RematPlan:
        return self.plans[index]

    def __iter__(self) -> Iterator[RematPlan]:
        return iter(self.plans)

    @property
    def no_remat(self) -> tuple[int, float]:
        """Peak in bytes and step in seconds without rematerialization."""
        return self.plans[0].baseline_peak_bytes, self.plans[0].baseline_step_s

    def within(self, budget: int | float | str) -> RematPlan:
        """The fastest plan within a budget, which is given in any form `plan_remat` takes.

        Raises:
            BudgetFormatError: The budget cannot be read.
            InfeasibleBudgetError: The budget is below that of the first plan.
        """
        headroom_bytes = self.plans[0].certificate.headroom_bytes
        whole_bytes = self.plans[0].baseline_peak_bytes + headroom_bytes
        budget_bytes = parse_budget(budget).resolve_bytes(whole_bytes)
        fitting = [p for p in self.plans if p.certificate.budget_bytes <= budget_bytes]
        if not fitting:
            lowest = self.plans[0].certificate.budget_bytes
            raise InfeasibleBudgetError(
                min_budget_bytes=lowest,
                budget_bytes=budget_bytes,
                bottleneck="the first plan of this frontier",
                advice="plan for less with `plan_remat`",
                plan=self.plans[0],
                headroom_bytes=headroom_bytes,
            )
        return min(fitting, key=lambda plan: plan.estimated_step_s)

    def s_per_byte(self, index: int) -> float | None:
        """The price of memory at a plan: seconds saved per step for each additional byte, up to the
        next plan; None for the last plan."""
        if index + 1 >= len(self.plans):
            return None
        here, there = self.plans[index], self.plans[index + 1]
        more_bytes = there.certificate.peak_bytes - here.certificate.peak_bytes
        return (here.estimated_step_s - there.estimated_step_s) / more_bytes

    def __str__(self) -> str:
        table = plain_table()
        for column in ("peak", "share", "step", "added time", "time per GiB", "checkpoints"):
            table.add_column(column, justify="right")
        peak_bytes, step_s = self.no_remat
        for index, plan in enumerate(self.plans):
            price = self.s_per_byte(index)
            table.add_row(
                format_bytes(plan.certificate.peak_bytes),
                f"{100 * plan.certificate.peak_bytes / peak_bytes:.0f} %",
                format_seconds(plan.estimated_step_s),
                format_signed_percent(plan.slowdown - 1),
                "" if price is None else format_seconds(price * _GIB),
                str(plan.root.num_checkpointed),
            )
        title = f"Without rematerialization: {format_bytes(peak_bytes)}, {format_seconds(step_s)}"
        return plain_text(Text(title), Text(), table, Text(), Text(_LEGEND))

    def _repr_html_(self) -> str:
        return frontier_html(self)

    def __repr__(self) -> str:
        low, high = self.plans[0], self.plans[-1]
        return (
            f"Frontier({len(self)} plans, {low.certificate.peak_bytes} bytes at "
            f"{low.slowdown:.3f}x the step to {high.certificate.peak_bytes} at "
            f"{high.slowdown:.3f}x)"
        )

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the table, in bytes and seconds; the file appears whole or not at all."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(_COLUMNS)
        for index, plan in enumerate(self.plans):
            price = self.s_per_byte(index)
            writer.writerow(
                (
                    plan.certificate.peak_bytes,
                    plan.certificate.budget_bytes,
                    plan.estimated_step_s,
                    plan.slowdown,
                    "" if price is None else price * _GIB,
                    plan.root.num_checkpointed,
                )
            )
        write_whole(Path(path), text.getvalue().encode())

    def plot(self, ax: Any = None) -> Any:
        """Plot added time over peak with matplotlib (the `plot` extra).

        Args:
            ax: Where to draw; a new figure's axes if None.

        Returns:
            The axes; `ax.figure.savefig(path)` writes the plot to a file.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            _, ax = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
        peaks_gib = [plan.certificate.peak_bytes / _GIB for plan in self.plans]
        added = [100 * (plan.slowdown - 1) for plan in self.plans]
        # Between the peaks of two plans, the plan with the lower peak is the one that fits.
        ax.step(peaks_gib, added, where="post", color="#1f6feb", linewidth=1, alpha=0.5)
        ax.plot(peaks_gib, added, "o", color="#1f6feb", markersize=5, label="certified plans")
        no_remat_gib = self.no_remat[0] / _GIB
        ax.plot([no_remat_gib], [0], "s", color="#57606a", label="no rematerialization")
        ax.set_xlabel("peak of the compiled step (GiB)")
        ax.set_ylabel("added step time (%)")
        ax.set_xlim(left=0)
        ax.grid(alpha=0.25)
        ax.legend(frameon=False)
        return ax
