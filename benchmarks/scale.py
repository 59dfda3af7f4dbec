"""Deep and scanned models: what planning takes, and how low the compiled peak goes.

For each model: the step without rematerialization, `flax.linen.remat` on every layer by hand, the
least certified peak, and plans at three budgets between that floor and no rematerialization.
Everything is compiled for the target; no device is needed.

    python -m benchmarks.scale --models gpt2-96 lstm --target h200

writes one JSON file a model below `docs/data/scale-<target>/`; `--page` makes
`docs/scale-<target>.md` from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Facts, Row, hand_row, mib, ms, plan_row, prepared
from jax_hremat._bench import Workbench

# Budgets, as parts of the way from the floor to no rematerialization.
PARTS = (0.75, 0.4, 0.1)


@dataclass(frozen=True)
class Scale(Facts):
    """One model.

    Attributes:
        num_levels: Deepest nesting of checkpoints in the plan of least peak.
        fixed_bytes: Arguments and outputs of the step, which no plan changes.
    """

    num_levels: int
    fixed_bytes: int
    hand: Row
    floor: Row
    plans: Sequence[Row]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Scale:
    """Plan one model at its floor and three budgets above it."""
    target = jax_hremat.get_target(target_name)
    bench, facts = prepared(name, target, size)
    floor, plan = plan_row(bench, "floor", _floor_bytes(bench))
    span = bench.baseline.memory.peak_bytes - floor.peak_bytes
    return Scale(
        **facts,
        num_levels=plan.root.depth,
        fixed_bytes=bench.fixed_bytes,
        hand=hand_row(name, size, "block", target),
        floor=floor,
        plans=[
            plan_row(bench, f"{part:g}", int(floor.peak_bytes + part * span))[0] for part in PARTS
        ],
    )


def _floor_bytes(bench: Workbench) -> int:
    try:
        plan_row(bench, "nothing", 1)
    except jax_hremat.InfeasibleBudgetError as error:
        return error.min_budget_bytes
    raise AssertionError("a plan was found for one byte")


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    versions = ", ".join(f"{k} {v}" for k, v in found[0]["versions"].items())
    lines = [
        f"# Deep and scanned models for the target {target}",
        "",
        f"Made by `python -m benchmarks.scale --models … --target {target}`, then `--page`; how to "
        f"read peaks and times is said in [measurements-{target}.md](measurements-{target}.md).",
        "",
        f"Versions: {versions}. Machine: {found[0]['machine']}.",
        "",
        "## Planning",
        "",
        "Cost is the compilation of all modes of all kinds of blocks, beside which the no-remat "
        "step is compiled. Solve is the slowest of the budgets; certify its compilations of the "
        "whole step.",
        "",
        "| model | operations | blocks (kinds) | levels | trace s | partition s "
        "| cost s (compiles) | solve s | certify s (steps) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for data in found:
        timings = data["timings_s"]
        slow = max(data["plans"], key=lambda row: row["solve_s"])
        lines.append(
            f"| {data['model']} | {data['num_operations']} | {data['num_blocks']} "
            f"({data['num_kinds']}) | {data['num_levels']} | {timings['trace']:.1f} "
            f"| {timings['partition']:.2f} | {timings['cost']:.0f} "
            f"({data['num_block_compiles']}) | {slow['solve_s']:.1f} "
            f"| {slow['certify_s']:.0f} ({slow['num_steps']}) |"
        )
    lines += [
        "",
        "## Peaks",
        "",
        "Compiled, in MiB. Fixed are arguments and outputs, which no plan changes; what a plan "
        "can change is the rest. Steps are estimates, over no rematerialization.",
        "",
        "| model | fixed | no remat | by hand: every layer | floor | floor over hand, without "
        "fixed | plans: certified ≤ budget (step) |",
        "|---|---|---|---|---|---|---|",
    ]
    for data in found:
        lines.append(_peak_line(data))
    lines += ["", *(f"- {d['model']}: {d['description']}. {d['date']}." for d in found)]
    return "\n".join(lines) + "\n"


def _peak_line(data: Mapping[str, Any]) -> str:
    fixed, base = data["fixed_bytes"], data["no_remat"]["step_s"]

    def step(row: Mapping[str, Any]) -> str:
        return f"{row['step_s'] / base - 1:+.1%}"

    hand, floor = data["hand"], data["floor"]
    ratio = (floor["peak_bytes"] - fixed) / (hand["peak_bytes"] - fixed)
    plans = "; ".join(
        f"{mib(row['peak_bytes'])} ≤ {mib(row['budget_bytes'])} ({step(row)})"
        for row in data["plans"]
    )
    return (
        f"| {data['model']} | {mib(fixed)} | {mib(data['no_remat']['peak_bytes'])}, {ms(base)} ms "
        f"| {mib(hand['peak_bytes'])} ({step(hand)}) | {mib(floor['peak_bytes'])} ({step(floor)}) "
        f"| {ratio:.2f} | {plans} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    command.run(argv, about, "scale-{}", "scale-{}.md", measure, page)


if __name__ == "__main__":
    main()
