"""`RematPlan` -> the text that `print(plan)` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from jax_hremat._plan.certificate import Certificate
from jax_hremat._plan.own_checkpoint import words
from jax_hremat._plan.tree import Line, tree_lines
from jax_hremat._shared.format import (
    format_bytes,
    format_seconds,
    format_signed_percent,
    format_signed_seconds,
)
from jax_hremat._shared.text import indented, plain_table, plain_text, shortened, wide_row

if TYPE_CHECKING:
    from jax_hremat._plan.plan import RematPlan

_MAX_LISTED = 6
_INDENT = 2
_FIGURE_WIDTHS = (11, 11, 10)
_NAME_WIDTH = 40
_KINDS = {
    "parameter": "argument",
    "output": "result",
    "temp": "temporary",
    "constant": "constant",
}
# Constants are left out of the sum where they are less than this part of the peak.
_SHOWN = 1e-3
_LEGEND = (
    "Residuals: values kept from the forward for the backward. A row marked 4 × is the sum over "
    "four equal blocks, and the values listed are those of the first. Indented rows are parts "
    "of the row above them. Times are estimates."
)


def plan_text(plan: RematPlan) -> str:
    """The plan as plain text: its cost, its blocks, and the largest buffers at the peak."""
    parts: list[RenderableType] = [_summary(plan)]
    if plan.blocks:
        parts += [Text(), *_blocks(plan)]
    if plan.buffers:
        parts += [Text(), Text("Largest buffers at the peak:"), _buffers(plan)]
    return plain_text(*parts)


def _summary(plan: RematPlan) -> Table:
    c = plan.certificate
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    share = 100 * c.peak_bytes / plan.baseline_peak_bytes
    table.add_row(
        "certified peak",
        format_bytes(c.peak_bytes),
        f"{share:.0f} % of the {format_bytes(plan.baseline_peak_bytes)} without rematerialization",
    )
    table.add_row("", "", Text(f"compiled for {devices_words(c)}"))
    table.add_row("", "", Text(f"= {_peak_words(c)}"))
    table.add_row("budget", format_bytes(c.budget_bytes), _budget_words(c))
    if c.exceeds_device and c.device_bytes is not None:
        table.add_row("", "", f"more than the {format_bytes(c.device_bytes)} of one {c.target}")
    table.add_row(
        "estimated step",
        format_seconds(plan.estimated_step_s),
        f"{format_signed_percent(plan.slowdown - 1)} over the "
        f"{format_seconds(plan.baseline_step_s)} without rematerialization",
    )
    if plan.bound_step_s is not None:
        table.add_row(
            "predicted step",
            format_seconds(plan.predicted_step_s),
            f"before the whole step was compiled; no plan of the options tried is predicted to "
            f"take less than {format_seconds(plan.bound_step_s)} within the budget",
        )
    if plan.free_schedule is not None:
        free = plan.free_schedule
        table.add_row(
            "free schedule",
            format_seconds(free.step_s),
            f"with a peak of {format_bytes(free.peak_bytes)}, simulated, not compiled: the "
            "strategy's own schedule, which checkpoints cannot express; the plan is a nest near it",
        )
    if plan.own_checkpoints:
        count = sum(checkpoint.count for checkpoint in plan.own_checkpoints)
        table.add_row("own checkpoints", str(count), Text(own_words(plan)))
    if plan.opened.scan_steps:
        table.add_row("scans", "", opened_words(plan))
    if plan.unpriced:
        table.add_row("not priced", "", Text(unpriced_words(plan)))
    count = plan.root.num_checkpointed
    table.add_row(
        "checkpoints",
        str(count),
        (f"nested {plan.root.depth} deep; " if plan.root.depth > 1 else "")
        + f"solver: {plan.solver_status} (gap {100 * plan.solver_gap:.2g} %); "
        f"costs of blocks: {plan.cost_source}",
    )
    if plan.timings_s:
        longest = max(plan.timings_s, key=lambda stage: plan.timings_s[stage])
        table.add_row(
            "planning time",
            format_seconds(sum(plan.timings_s.values())),
            f"longest stage: {longest}, {format_seconds(plan.timings_s[longest])}",
        )
    return table


def _peak_words(certificate: Certificate) -> str:
    """The peak as a sum."""
    c = certificate
    counted_bytes = c.argument_bytes + c.output_bytes + c.temp_bytes + c.constant_bytes
    aliased_bytes = counted_bytes - c.peak_bytes
    said = (
        f"arguments {format_bytes(c.argument_bytes)} + results {format_bytes(c.output_bytes)} + "
        f"temporaries {format_bytes(c.temp_bytes)}"
    )
    if c.constant_bytes > _SHOWN * c.peak_bytes:
        said += f" + captured arrays and other constants {format_bytes(c.constant_bytes)}"
    if aliased_bytes:
        said += f" − results in the memory of arguments {format_bytes(aliased_bytes)}"
    return said


def _budget_words(certificate: Certificate) -> str:
    c = certificate
    left = format_bytes(c.budget_bytes - c.headroom_bytes - c.peak_bytes)
    if c.headroom_bytes:
        return f"met, with {left} to spare beyond the headroom of {format_bytes(c.headroom_bytes)}"
    return f"met, with {left} to spare"


def devices_words(certificate: Certificate) -> str:
    """The devices as text, such as `h200`, `h200, on the attached device`, or `each of 8 h200
    (data 4 × model 2)`."""
    mesh = certificate.mesh
    if certificate.attached:
        return f"{certificate.target}, on the attached device"
    if mesh is None:
        return certificate.target
    return f"each of {mesh.num_devices} {certificate.target} ({mesh})"


def own_words(plan: RematPlan) -> str:
    """The function's own checkpoints and what the plan does with them; empty without any."""
    if not plan.own_checkpoints:
        return ""
    stay = (
        "opened: the plan is for the function as if they were not there"
        if plan.opened.checkpoints
        else "they stay in every plan, and in the step without rematerialization; "
        "PlannerConfig(open_checkpoints=True) plans as if they were not there"
    )
    return f"{words(plan.own_checkpoints)}: {stay}"


def opened_words(plan: RematPlan) -> str:
    """Which scans are planned as if they were unrolled; empty if none."""
    if not plan.opened.scan_steps:
        return ""
    return f"those of up to {plan.opened.scan_steps} steps are unrolled in this plan"


def unpriced_words(plan: RematPlan) -> str:
    """What the estimates leave out, such as `2 × custom-call:sort`."""
    return ", ".join(f"{count} × {name}" for name, count in plan.unpriced.items())


def _blocks(plan: RematPlan) -> Iterator[RenderableType]:
    yield wide_row("", ("residuals", "without the", "added"), _FIGURE_WIDTHS)
    yield wide_row("block", ("kept", "plan", "time"), _FIGURE_WIDTHS)
    around: list[str] = []
    for line in tree_lines(plan.root, plan.blocks):
        del around[line.depth :]
        yield from _line(line, around[-1] if around else "")
        around.append(line.report.scope)
    added_s = sum(block.added_s for block in plan.blocks)
    compiled_s = plan.estimated_step_s - plan.baseline_step_s
    yield _row(
        "all blocks",
        sum(block.kept_bytes for block in plan.blocks),
        sum(block.plain_bytes for block in plan.blocks),
        added_s,
    )
    rest = ("", "", format_signed_seconds(compiled_s - added_s))
    whole = ("", "", format_signed_seconds(compiled_s))
    yield wide_row("compiled step, beyond its blocks", rest, _FIGURE_WIDTHS)
    yield wide_row("compiled step", whole, _FIGURE_WIDTHS)
    yield Text()
    yield Text(_LEGEND)


def _line(line: Line, around: str) -> Iterator[RenderableType]:
    done, indent = line.report, _INDENT * line.depth
    yield _row(_name(line, around), line.kept_bytes, line.plain_bytes, line.added_s, indent)
    if done.place.line:
        yield indented(done.place.line, indent + _INDENT)
    yield indented(done.decision, indent + _INDENT)
    for label, listed in (("keeps", done.saved), ("checkpoint around", done.runs)):
        counts = Counter(listed)
        for one in list(counts)[:_MAX_LISTED]:
            times = f"{counts[one]} × " if counts[one] > 1 else ""
            yield indented(f"{label} {times}{one}", indent + _INDENT)
        more = sum(list(counts.values())[_MAX_LISTED:])
        if more:
            yield indented(f"{label} {more} more", indent + _INDENT)


def _name(line: Line, around: str) -> str:
    """The scope, without what the line around it says already."""
    places = line.report.place, line.last
    outside = [str(place.around) for place in places]
    if line.count > 1 and outside[0] != outside[1]:
        first, last = outside
    else:
        first, last = (
            place.listed if place.parts and str(place.around) == around else str(place)
            for place in places
        )
    name = shortened(first, _NAME_WIDTH)
    if last != first:
        name += f" … {shortened(last, _NAME_WIDTH)}"
    return f"{line.count} × {name}" if line.count > 1 else name


def _row(
    name: str, kept_bytes: int, plain_bytes: int, added_s: float, indent: int = 0
) -> RenderableType:
    figures = (format_bytes(kept_bytes), format_bytes(plain_bytes), format_signed_seconds(added_s))
    return wide_row(name, figures, _FIGURE_WIDTHS, indent=indent)


def _buffers(plan: RematPlan) -> Table:
    table = plain_table()
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("array", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("made by", overflow="fold")
    for buffer, count in Counter(plan.buffers).items():
        size = format_bytes(buffer.size_bytes)
        table.add_row(
            f"{count} × {size}" if count > 1 else size,
            Text(shortened(buffer.text, _NAME_WIDTH // 2)),
            _KINDS[buffer.kind],
            Text(buffer.made_by),
        )
    return table
