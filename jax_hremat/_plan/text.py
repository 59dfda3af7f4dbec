"""`RematPlan` -> the text that `print(plan)` shows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from jax_hremat._plan.certificate import Certificate
from jax_hremat._plan.own_checkpoint import words
from jax_hremat._plan.tree import tree_lines
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_seconds
from jax_hremat._shared.text import plain_table, plain_text

if TYPE_CHECKING:
    from jax_hremat._plan.plan import RematPlan

_MAX_SAVED = 4


def plan_text(plan: RematPlan) -> str:
    """The plan as plain text: its cost, its blocks, and the largest buffers at the peak."""
    return plain_text(_summary(plan), Text(), _blocks(plan), Text(), _buffers(plan))


def _summary(plan: RematPlan) -> Table:
    c = plan.certificate
    table = plain_table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    share = 100 * c.peak_bytes / plan.baseline_peak_bytes
    table.add_row(
        "certified peak",
        format_bytes(c.peak_bytes),
        f"compiled for {devices_words(c)}: arguments {format_bytes(c.argument_bytes)}, results "
        f"{format_bytes(c.output_bytes)}, temporaries {format_bytes(c.temp_bytes)}",
    )
    kept = f"kept, {format_bytes(c.headroom_bytes)} of it headroom" if c.headroom_bytes else "kept"
    if c.exceeds_device and c.device_bytes is not None:
        kept += f"; more than the {format_bytes(c.device_bytes)} of one {c.target}"
    table.add_row("budget", format_bytes(c.budget_bytes), kept)
    table.add_row(
        "no-remat peak", format_bytes(plan.baseline_peak_bytes), f"the plan takes {share:.0f} %"
    )
    table.add_row(
        "estimated step",
        format_seconds(plan.estimated_step_s),
        f"{format_seconds(plan.baseline_step_s)} without rematerialization "
        f"({100 * (plan.slowdown - 1):+.1f} %)",
    )
    if plan.bound_step_s is not None:
        table.add_row(
            "predicted step",
            format_seconds(plan.predicted_step_s),
            f"no selection of the priced options is predicted below "
            f"{format_seconds(plan.bound_step_s)} within the budget",
        )
    if plan.own_checkpoints:
        count = sum(checkpoint.count for checkpoint in plan.own_checkpoints)
        table.add_row("of the function", str(count), own_words(plan))
    if plan.opened.scan_steps:
        table.add_row("scans", "", opened_words(plan))
    if plan.unpriced:
        table.add_row("not priced", "", unpriced_words(plan))
    table.add_row(
        "decisions",
        str(plan.root.num_checkpointed),
        f"checkpoints, nested {plan.root.depth} deep; solver: {plan.solver_status}"
        f" (gap {100 * plan.solver_gap:.2g} %); costs of blocks: {plan.cost_source}",
    )
    if plan.timings_s:
        spent = ", ".join(f"{k} {format_seconds(v)}" for k, v in plan.timings_s.items())
        table.add_row("planning", format_seconds(sum(plan.timings_s.values())), spent)
    return table


def devices_words(certificate: Certificate) -> str:
    """The devices as text, such as `h200`, or `each of 8 h200 (data 4 × model 2)`."""
    mesh = certificate.mesh
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
        else "they stay in every plan, in that without rematerialization too; "
        "PlannerConfig(open_checkpoints=True) plans as if they were not there"
    )
    return f"{words(plan.own_checkpoints)}: {stay}"


def opened_words(plan: RematPlan) -> str:
    """Which scans are planned as if their steps were written out; empty if none."""
    if not plan.opened.scan_steps:
        return ""
    return f"in this plan those of up to {plan.opened.scan_steps} steps are written out"


def unpriced_words(plan: RematPlan) -> str:
    """What the estimates leave out, such as `2 × custom-call:sort`."""
    return ", ".join(f"{count} × {name}" for name, count in plan.unpriced.items())


def _blocks(plan: RematPlan) -> Table:
    table = plain_table()
    table.add_column("block")
    table.add_column("keeps", justify="right")
    table.add_column("of", justify="right")
    table.add_column("adds", justify="right")
    table.add_column("what is done", overflow="fold")
    for line in tree_lines(plan.root, plan.blocks):
        done, last = line.report, line.last_scope
        scope = done.scope if done.scope == last else f"{done.scope} … {last}"
        count = f"{line.count} × " if line.count > 1 else ""
        words = [done.mode, *(f"  keeps {s}" for s in done.saved[:_MAX_SAVED])]
        if len(done.saved) > _MAX_SAVED:
            words.append(f"  and {len(done.saved) - _MAX_SAVED} more")
        indent = "  " * line.depth
        table.add_row(
            Text(indent + count + scope),
            format_bytes(done.kept_bytes),
            format_bytes(done.plain_bytes),
            format_signed_seconds(done.added_s),
            Text("\n".join(indent + w for w in words)),
        )
    return table


def _buffers(plan: RematPlan) -> Table:
    table = plain_table()
    table.add_column("largest buffers at the peak", justify="right")
    table.add_column("")
    table.add_column("kind")
    table.add_column("made by", overflow="fold")
    for buffer in plan.buffers:
        size = format_bytes(buffer.size_bytes)
        table.add_row(size, Text(buffer.text), buffer.kind, Text(buffer.made_by))
    return table
