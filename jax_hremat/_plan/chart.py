"""`RematPlan` -> a picture of memory over the step, in Unicode characters for a terminal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax_hremat._plan.memory import MemoryOverStep, memory_over_step
from jax_hremat._shared.format import format_bytes
from jax_hremat._shared.ticks import byte_ticks

if TYPE_CHECKING:
    from jax_hremat._plan.plan import RematPlan

# A cell filled from below by 0 to 8 eighths.
_EIGHTHS = " ▁▂▃▄▅▆▇█"
_WITHOUT, _BUDGET = "░", "┄"
_MOST_TICKS = 5


def memory_chart(plan: RematPlan, width: int, height: int) -> str:
    """The picture; see `RematPlan.memory_chart`."""
    memory = memory_over_step(plan)
    if memory is None:
        return "memory over the step: not known, this plan was certified again from another one"
    c = plan.certificate
    top_bytes = memory.shown_bytes(c.budget_bytes)
    ticks = byte_ticks(top_bytes, _MOST_TICKS)
    rows_per_tick = max(1, round(height * ticks[1].value / top_bytes))
    row_bytes = ticks[1].value / rows_per_tick
    margin = max(len(tick.text) for tick in ticks)
    # An even number of columns, so that forward and backward are equally wide.
    columns = max(2, (width - margin - 2) // 2 * 2)
    labels = {k * rows_per_tick - 1: tick.text for k, tick in enumerate(ticks) if k}
    cells = _cells(memory, c.budget_bytes, columns, row_bytes, top_bytes)
    lines = [
        f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}{''.join(line)}".rstrip()
        for row, line in reversed(list(enumerate(cells)))
    ]
    half = columns // 2
    above = ", above the picture" if c.budget_bytes > top_bytes else ""
    key = [
        f"█ with the plan {format_bytes(c.peak_bytes)}",
        f"{_WITHOUT} without {format_bytes(plan.baseline_peak_bytes)}",
        f"{_BUDGET} budget {format_bytes(c.budget_bytes)}{above}",
    ]
    return "\n".join(
        [
            "memory over the step (heights predicted, peaks below as compiled)",
            *lines,
            f"{ticks[0].text:>{margin}} └{'─' * (half - 1)}┴{'─' * half}",
            " " * (margin + 2) + f"{'forward':<{half}}backward",
            *_wrapped(key, width),
        ]
    )


def _cells(
    memory: MemoryOverStep, budget_bytes: int, columns: int, row_bytes: float, top_bytes: int
) -> list[list[str]]:
    """The cells of each row, the lowest row first."""
    with_plan = [size / row_bytes for size in _highest(memory.with_plan_bytes, columns)]
    without = [size / row_bytes for size in _highest(memory.without_bytes, columns)]

    budget_row = math.ceil(budget_bytes / row_bytes) - 1

    def cell(row: int, planned: float, plain: float) -> str:
        eighths = min(max(round(8 * (planned - row)), 0), 8)
        if eighths:
            return _EIGHTHS[eighths]
        if row == budget_row:
            return _BUDGET
        return _WITHOUT if plain >= row + 0.5 else " "

    rows = math.ceil(top_bytes / row_bytes)
    return [
        [cell(row, *sizes) for sizes in zip(with_plan, without, strict=True)] for row in range(rows)
    ]


def _highest(sizes: Sequence[int], columns: int) -> list[int]:
    """For each column the largest of the sizes it stands for, or the one it is a part of."""
    count = len(sizes)
    starts = [column * count // columns for column in range(columns + 1)]
    return [max(sizes[start : max(stop, start + 1)]) for start, stop in itertools.pairwise(starts)]


def _wrapped(parts: Sequence[str], width: int) -> list[str]:
    """The parts beside each other, in as many lines as they need."""
    lines = [parts[0]]
    for part in parts[1:]:
        joined = f"{lines[-1]}   {part}"
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines
