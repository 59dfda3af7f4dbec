"""What strategies find for a graph and a budget, as a table and as figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.schedule import Schedule
from jax_hremat._schedules.simulate import Simulation, simulate, without_recompute
from jax_hremat._schedules.strategy import Strategy
from jax_hremat._shared.errors import SolverError
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_percent
from jax_hremat._shared.text import plain_table, plain_text


@dataclass(frozen=True, slots=True)
class Found:
    """What one strategy found.

    Attributes:
        strategy: Its name.
        schedule: None if it found none within the peak.
        run: The schedule, simulated; without a schedule that of its least peak, and None if it
            found nothing at all.
        why: Why it found nothing at all.
    """

    strategy: str
    schedule: Schedule | None
    run: Simulation | None
    why: str = ""


def find(graph: Graph, strategy: Strategy, peak_bytes: int) -> Found:
    """Ask one strategy."""
    try:
        schedule = strategy.schedule(graph, peak_bytes)
        shown = strategy.lowest(graph) if schedule is None else schedule
    except SolverError as error:
        return Found(strategy.name, None, None, str(error))
    return Found(strategy.name, schedule, simulate(graph, shown))


def check_some(graph: Graph, found: Sequence[Found], budget_bytes: int) -> None:
    """Refuse a budget within which no strategy found a schedule.

    Raises:
        InfeasibleBudgetError: With the least peak that one of them found.
        SolverError: None of them found anything at all.
    """
    if any(one.schedule is not None for one in found):
        return
    least = [(one.run, one.strategy) for one in found if one.run is not None]
    if not least:
        raise SolverError("; ".join(f"{one.strategy}: {one.why}" for one in found))
    run, name = min(least, key=lambda pair: pair[0].peak_bytes)
    raise InfeasibleBudgetError(
        min_budget_bytes=run.peak_bytes,
        budget_bytes=budget_bytes,
        bottleneck=f"what is there while {graph.operations[run.peak_operation].name!r} runs, in "
        f"the schedule of least peak of the strategy {name!r}",
        advice="make the outputs of operations smaller",
    )


def fastest(found: Sequence[Found]) -> Schedule:
    """The fastest schedule; of equally fast ones the first."""
    best = min(
        (one for one in found if one.schedule is not None and one.run is not None),
        key=lambda one: one.run.time_s if one.run else 0.0,
    )
    assert best.schedule is not None, "`check_some` has refused the budget"
    return best.schedule


def figures(graph: Graph, found: Sequence[Found], budget_bytes: int) -> dict[str, Any]:
    """What a script may want to know."""
    whole = simulate(graph, without_recompute(graph))
    return {
        "budget_bytes": budget_bytes,
        "no_remat_peak_bytes": whole.peak_bytes,
        "no_remat_time_s": whole.time_s,
        "strategies": [_figures(one) for one in found],
    }


def _figures(one: Found) -> dict[str, Any]:
    run, schedule = one.run, one.schedule
    return {
        "strategy": one.strategy,
        "peak_bytes": run.peak_bytes if run and schedule else None,
        "time_s": run.time_s if run and schedule else None,
        "num_computations": run.num_computations if run and schedule else None,
        "bound_s": schedule.bound_s if schedule else None,
        "least_peak_bytes": run.peak_bytes if run and not schedule else None,
    }


def table(graph: Graph, found: Sequence[Found], budget_bytes: int) -> str:
    """The same for readers."""
    whole = simulate(graph, without_recompute(graph))
    rows = plain_table()
    for column in ("strategy", "peak", "time", "added", "computations", "to bound"):
        rows.add_column(column, justify="left" if column == "strategy" else "right")
    peak, time = format_bytes(whole.peak_bytes), format_seconds(whole.time_s)
    rows.add_row("no recomputation", peak, time, "", str(whole.num_computations), "")
    notes = []
    for one in found:
        if one.run is None:
            notes.append(f"{one.strategy} found nothing: {one.why}.")
        elif one.schedule is None:
            least = format_bytes(one.run.peak_bytes)
            notes.append(f"{one.strategy} found no schedule within the budget; least peak {least}.")
        else:
            rows.add_row(*_cells(one.strategy, one.schedule, one.run, whole))
    title = f"{len(graph)} operations within {format_bytes(budget_bytes)}"
    return plain_text(title, rows, *notes)


def _cells(name: str, schedule: Schedule, run: Simulation, whole: Simulation) -> list[str]:
    added = format_signed_percent(run.time_s / whole.time_s - 1) if whole.time_s else ""
    gap = ""
    if schedule.bound_s:
        gap = format_signed_percent(max(0.0, run.time_s / schedule.bound_s - 1))
    peak, time = format_bytes(run.peak_bytes), format_seconds(run.time_s)
    return [name, peak, time, added, str(run.num_computations), gap]
