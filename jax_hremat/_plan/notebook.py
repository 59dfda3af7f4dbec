"""`RematPlan`, `Frontier`, `Comparison` -> small self-contained HTML, shown below a notebook's
cell."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from jax_hremat._plan.memory import MemoryOverStep, memory_over_step
from jax_hremat._plan.text import devices_words
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_percent
from jax_hremat._shared.frame import Frame
from jax_hremat._shared.ticks import Tick, byte_ticks, percent_ticks

if TYPE_CHECKING:
    from jax_hremat._plan.comparison import Comparison
    from jax_hremat._plan.frontier import Frontier
    from jax_hremat._plan.plan import RematPlan

_BLUE, _RED = "#1f6feb", "#cf222e"
_MOST_TICKS = 5
_CELL = "padding:.1rem .8rem .1rem 0;text-align:left;vertical-align:top"


def plan_html(plan: RematPlan) -> str:
    """The plan's figures and its picture of memory."""
    c = plan.certificate
    checkpoints = plan.root.num_checkpointed
    rows = [
        ("certified peak", format_bytes(c.peak_bytes), f"compiled for {devices_words(c)}"),
        ("budget", format_bytes(c.budget_bytes), "met"),
        (
            "without rematerialization",
            format_bytes(plan.baseline_peak_bytes),
            f"the plan takes {100 * c.peak_bytes / plan.baseline_peak_bytes:.0f} %",
        ),
        (
            "estimated step",
            format_seconds(plan.estimated_step_s),
            f"{100 * (plan.slowdown - 1):+.1f} % over {format_seconds(plan.baseline_step_s)}",
        ),
        ("checkpoints", str(checkpoints), f"nested {plan.root.depth} deep"),
    ]
    memory = memory_over_step(plan)
    picture = "" if memory is None else _memory(memory, c.budget_bytes)
    name = f"rematerialization plan for program {plan.fingerprint.digest[:8]}"
    return _whole(name, _table(rows), picture)


def frontier_html(frontier: Frontier) -> str:
    """The frontier's table and its picture."""
    peak_bytes, step_s = frontier.no_remat
    rows = [("peak", "of no remat", "step", "over no remat", "checkpoints")]
    for plan in frontier:
        peak = plan.certificate.peak_bytes
        rows.append(
            (
                format_bytes(peak),
                f"{100 * peak / peak_bytes:.0f} %",
                format_seconds(plan.estimated_step_s),
                f"{100 * (plan.slowdown - 1):+.1f} %",
                str(plan.root.num_checkpointed),
            )
        )
    name = (
        f"{len(frontier)} certified plans; without rematerialization {format_bytes(peak_bytes)}, "
        f"{format_seconds(step_s)}"
    )
    return _whole(name, _frontier(frontier), _table(rows))


def comparison_html(comparison: Comparison) -> str:
    """The comparison's table, a budget after the other."""
    peak_bytes, step_s = comparison.no_remat
    has_free = comparison.has_free_schedules
    heading = ("budget", "strategy", "peak", "step", "added time", "planning")
    rows: list[tuple[str, ...]] = [(*heading, "free schedule, simulated") if has_free else heading]
    for budget_bytes in comparison.budgets_bytes:
        for i, one in enumerate(comparison.at(budget_bytes)):
            plan = one.plan
            peak = format_bytes(plan.certificate.peak_bytes)
            rows.append(
                (
                    "" if i else format_bytes(budget_bytes),
                    one.strategy,
                    peak if one.fits else f"{peak}, above the budget",
                    format_seconds(plan.estimated_step_s),
                    format_signed_percent(plan.slowdown - 1),
                    format_seconds(comparison.planning_s[one.strategy]),
                    *((one.free_words,) if has_free else ()),
                )
            )
    name = (
        f"{len(comparison.strategies)} strategies; without rematerialization "
        f"{format_bytes(peak_bytes)}, {format_seconds(step_s)}"
    )
    return _whole(name, _table(rows))


def _whole(name: str, *parts: str) -> str:
    inside = "".join(parts)
    return f'<div style="max-width:44rem"><p><b>{escape(name)}</b></p>{inside}</div>'


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = (
        "<tr>" + "".join(f'<td style="{_CELL}">{escape(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f'<table style="border-collapse:collapse">{"".join(lines)}</table>'


def _memory(memory: MemoryOverStep, budget_bytes: int) -> str:
    shown_bytes = memory.shown_bytes(budget_bytes)
    shows_budget, top_bytes = budget_bytes <= shown_bytes, 1.05 * shown_bytes
    count = len(memory.with_plan_bytes)
    frame = Frame(0, count, 0, top_bytes)
    stairs = frame.stairs(memory.with_plan_bytes)
    floor = [f"{frame.right},{frame.bottom}", f"{frame.left},{frame.bottom}"]
    budget_y, middle = frame.y(budget_bytes), frame.x(count / 2)
    most = format_bytes(max(memory.with_plan_bytes))
    plain_most = format_bytes(max(memory.without_bytes))
    marks = [
        *_grid(frame, frame.y_ticks(byte_ticks(top_bytes, _MOST_TICKS))),
        f'<polygon points="{" ".join([*stairs, *floor])}" fill="{_BLUE}" fill-opacity=".7">'
        f"<title>with the plan: predicted {most} at most</title></polygon>",
        f'<polyline points="{" ".join(frame.stairs(memory.without_bytes))}" fill="none" '
        f'stroke="currentColor" stroke-width="1.5">'
        f"<title>without rematerialization: predicted {plain_most} at most</title></polyline>",
        _text(middle - 8, frame.bottom + 20, "end", "← forward"),
        _text(middle + 8, frame.bottom + 20, "start", "backward →"),
    ]
    if shows_budget:
        marks.append(
            f'<line x1="{frame.left}" x2="{frame.right}" y1="{budget_y}" y2="{budget_y}" '
            f'stroke="{_RED}" stroke-dasharray="6 4"/>'
        )
    key = _key(
        (_BLUE, "predicted memory with the plan"),
        ("currentColor", "without rematerialization"),
        (_RED, "budget" if shows_budget else "budget, above the picture"),
    )
    return _svg(frame, "predicted memory over the step", marks) + key


def _frontier(frontier: Frontier) -> str:
    peak_bytes, _ = frontier.no_remat
    added = [plan.slowdown - 1 for plan in frontier]
    low, high = min(0.0, *added), max(0.01, *added)
    margin = 0.08 * (high - low)
    most_bytes = max(peak_bytes, *(plan.certificate.peak_bytes for plan in frontier))
    frame = Frame(0, 1.05 * most_bytes, low - margin, high + margin)
    marks = list(_grid(frame, frame.y_ticks(percent_ticks(frame.y_low, frame.y_high, _MOST_TICKS))))
    for tick in frame.x_ticks(byte_ticks(frame.x_high, _MOST_TICKS)):
        marks.append(_text(tick.value, frame.bottom + 20, "middle", tick.text))
    x, y = frame.x(peak_bytes), frame.y(0)
    marks.append(f'<rect x="{x - 5}" y="{y - 5}" width="10" height="10" fill="currentColor"/>')
    for plan, more in zip(frontier, added, strict=True):
        peak = plan.certificate.peak_bytes
        marks.append(
            f'<circle cx="{frame.x(peak)}" cy="{frame.y(more)}" r="4" fill="{_BLUE}">'
            f"<title>{format_bytes(peak)}, {100 * more:+.1f} %</title></circle>"
        )
    key = _key((_BLUE, "certified plans"), ("currentColor", "no rematerialization"))
    return _svg(frame, "estimated added time over compiled peak", marks) + key


def _grid(frame: Frame, ticks: Iterable[Tick]) -> Iterator[str]:
    for tick in ticks:
        yield (
            f'<line x1="{frame.left}" x2="{frame.right}" y1="{tick.value}" y2="{tick.value}" '
            f'stroke="currentColor" stroke-opacity=".2"/>'
        )
        yield _text(frame.left - 8, tick.value + 4, "end", tick.text)


def _text(x: float, y: float, anchor: str, text: str) -> str:
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor" font-size="13">'
        f"{escape(text)}</text>"
    )


def _svg(frame: Frame, label: str, marks: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {frame.width} {frame.height}" style="width:100%;height:auto" '
        f'role="img" aria-label="{escape(label)}">{"".join(marks)}</svg>'
    )


def _key(*entries: tuple[str, str]) -> str:
    spans = (
        f'<span style="margin-right:1.2rem"><span style="color:{colour}">■</span> {text}</span>'
        for colour, text in entries
    )
    return f'<p style="font-size:.85em">{"".join(spans)}</p>'
