"""Certified peaks and estimated step times of every zoo model: the data behind the docs' table.

For each model: the step without rematerialization, each policy a user writes by hand with
`flax.linen.remat`, plans at fractions of the no-remat peak, and plans at exactly the compiled
peak of each hand policy. Everything is compiled for the target; no device is needed.

    python -m benchmarks.table --models gpt2-6 encdec --target h200

writes one JSON file a model below `docs/data/<target>/`; `--page` makes
`docs/measurements-<target>.md` from all of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import (
    Facts,
    Row,
    candidates_of,
    hand_row,
    mib,
    ms,
    plan_row,
    prepared,
)
from jax_hremat._planner.context import PlanningContext, uniform
from jax_hremat._solve.prediction import predict

HAND_POLICIES = ("block", "dots_saveable", "dots_with_no_batch_dims_saveable")
FRACTIONS = (0.9, 0.7, 0.5, 0.3)


@dataclass(frozen=True)
class Measurement(Facts):
    """All rows of one model."""

    predicted_no_remat_bytes: int
    hand: Sequence[Row]
    plans: Sequence[Row]
    at_hand_peaks: Sequence[Row]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Measurement:
    """Plan and compile everything about one model."""
    target = jax_hremat.get_target(target_name)
    context, facts = prepared(name, target, size)
    hand = [hand_row(name, size, policy, target) for policy in HAND_POLICIES]
    return Measurement(
        **facts,
        predicted_no_remat_bytes=predict(
            *uniform(context.chain(lambda options: (options.plain,)))
        ).peak_bytes,
        hand=hand,
        plans=_plan_rows(context),
        at_hand_peaks=[_alone(context, row.label, row.peak_bytes) for row in hand],
    )


def _alone(context: PlanningContext, label: str, budget_bytes: int) -> Row:
    """A plan that knows of no other."""
    return plan_row(candidates_of(context), label, budget_bytes)[0]


def _plan_rows(context: PlanningContext) -> list[Row]:
    """Plans at the fractions; below the floor, one at the floor and one halfway to it."""
    whole = context.baseline.memory.peak_bytes
    rows: list[Row] = []
    for fraction in FRACTIONS:
        budget_bytes = int(fraction * whole)
        try:
            rows.append(_alone(context, f"{fraction:g}", budget_bytes))
        except jax_hremat.InfeasibleBudgetError as error:
            lowest = rows[-1].budget_bytes if rows else whole
            assert lowest is not None
            middle = (lowest + error.min_budget_bytes) // 2
            rows.append(_alone(context, f"{middle / whole:.3f} (halfway)", middle))
            floor = error.min_budget_bytes
            rows.append(_alone(context, f"{floor / whole:.3f} (floor)", floor))
            break
    return rows


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    first = found[0]
    lines = [
        f"# Measured for the target {target}",
        "",
        "Made by `python -m benchmarks.table --models … --target "
        f"{target}`, then `--page`. Peaks are arguments + outputs + temporaries − aliases of "
        "the compiled `jit(value_and_grad(loss))`; step times are a roofline over the same "
        "executable (60 % of peak flops, 80 % of bandwidth), so their ratios mean more than "
        "their values. Nothing was run on a GPU: autotuning and library workspaces are not in "
        "these figures.",
        "",
        command.where(first),
        "",
    ]
    for data in found:
        lines += _model_section(data)
    lines += _overhead_section(found)
    return "\n".join(lines) + "\n"


def _model_section(data: Mapping[str, Any]) -> list[str]:
    base = data["no_remat"]
    timings = data["timings_s"]
    error = data["predicted_no_remat_bytes"] / base["peak_bytes"] - 1
    lines = [
        f"## {data['model']}",
        "",
        f"{data['description']}. Measured {data['date']}. {data['num_operations']} operations, "
        f"{data['num_blocks']} blocks of {data['num_kinds']} kinds, "
        f"{data['num_block_compiles']} block compilations. Planning before any budget: trace "
        f"{timings['trace']:.1f} s, partition {timings['partition']:.2f} s, cost "
        f"{timings['cost']:.1f} s (the no-remat step's compilation included).",
        "",
        "| step | budget MiB | certified peak MiB | predicted MiB (error) | est. step ms "
        "| over no remat | solve s | compile s (steps) |",
        "|---|---|---|---|---|---|---|---|",
        f"| no remat | | {mib(base['peak_bytes'])} | {mib(data['predicted_no_remat_bytes'])} "
        f"({error:+.1%}) | {ms(base['step_s'])} | | | |",
    ]
    for row in data["hand"]:
        lines.append(
            f"| by hand: {row['label']} | | {mib(row['peak_bytes'])} | | {ms(row['step_s'])} "
            f"| {row['step_s'] / base['step_s'] - 1:+.1%} | | |"
        )
    for prefix, rows in (("plan", data["plans"]), ("plan at peak of", data["at_hand_peaks"])):
        for row in rows:
            error = row["predicted_peak_bytes"] / row["peak_bytes"] - 1
            lines.append(
                f"| {prefix} {row['label']} | {mib(row['budget_bytes'])} "
                f"| {mib(row['peak_bytes'])} | {mib(row['predicted_peak_bytes'])} "
                f"({error:+.1%}) | {ms(row['step_s'])} "
                f"| {row['step_s'] / base['step_s'] - 1:+.1%} | {row['solve_s']:.1f} "
                f"| {row['certify_s']:.1f} ({row['num_steps']}) |"
            )
    return [*lines, ""]


def _overhead_section(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## Added time compared with the hand-written policies",
        "",
        "At the compiled peak of each hand policy: the plan's added time over no remat as a "
        "fraction of the policy's. Where either is faster than no remat, as inside a scan, whose "
        "residuals cost time to stack: the plan's step over the policy's.",
        "",
        "| model | " + " | ".join(HAND_POLICIES) + " | geometric mean |",
        "|---|" + "---|" * (len(HAND_POLICIES) + 1),
    ]
    for data in found:
        base = data["no_remat"]["step_s"]
        pairs = list(zip(data["hand"], data["at_hand_peaks"], strict=True))
        added = [(p["step_s"] - base, h["step_s"] - base) for h, p in pairs]
        if min(min(a) for a in added) > 0:
            ratios = [plan / hand for plan, hand in added]
            cells = " | ".join(f"{r:.2f}" for r in ratios)
            mean = f"{math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}"
        else:
            cells = " | ".join(f"step {p['step_s'] / h['step_s']:.3f}" for h, p in pairs)
            mean = ""
        lines.append(f"| {data['model']} | {cells} | {mean} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "{}", "measurements-{}.md", measure, page)


if __name__ == "__main__":
    main()
