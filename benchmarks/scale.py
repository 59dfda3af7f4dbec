"""Deep and scanned models: what planning takes, and how low the compiled peak goes.

For each model: the step without rematerialization, `flax.linen.remat` on every layer by hand, the
same in stretches of √n layers that are checkpointed again (what `flax.linen.remat_scan` does), the
least certified peak (of the solver's plans of least memory), and plans at three budgets between
that floor and no rematerialization.
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
from jax_hremat._partition.layers import layer_runs
from jax_hremat._plan.region import Loop, Region
from jax_hremat._planner.context import PlanningContext
from jax_hremat._trace.bodies import Scan

# A whole step of a deep model takes a minute to compile, so each budget gets one correction.
CONFIG = jax_hremat.PlannerConfig(max_rounds=1)
# Budgets, as parts of the way from the floor to no rematerialization.
PARTS = (0.75, 0.4, 0.1)


@dataclass(frozen=True)
class Scale(Facts):
    """One model.

    Attributes:
        num_levels: Deepest nesting of checkpoints in the plan of least peak.
        fixed_bytes: Arguments and outputs of the step, which no plan changes.
        nested: Every layer checkpointed, and √n layers together again; None where no layer repeats.
    """

    num_levels: int
    fixed_bytes: int
    hand: Row
    nested: Row | None
    floor: Row
    plans: Sequence[Row]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Scale:
    """Plan one model at its floor and three budgets above it."""
    target = jax_hremat.get_target(target_name)
    context, facts = prepared(name, target, size, CONFIG)
    candidates = candidates_of(context)
    candidates.compile_lowest()
    least = candidates.least
    floor, plan = plan_row(candidates, "least", least.peak_bytes)
    span = context.baseline.memory.peak_bytes - floor.peak_bytes
    return Scale(
        **facts,
        num_levels=plan.root.depth,
        fixed_bytes=context.fixed_bytes,
        hand=hand_row(name, size, "block", target),
        nested=_nested_row(context),
        floor=floor,
        plans=[
            plan_row(candidates, f"{part:g}", int(floor.peak_bytes + part * span))[0]
            for part in PARTS
        ],
    )


def _nested_row(context: PlanningContext) -> Row | None:
    """`flax.linen.remat_scan` with two levels, over scanned layers or unrolled ones."""
    scans = [
        Region(at, at + 1, loop=_remat_scan(inside))
        for at, inside in context.costs.bodies.items()
        if isinstance(inside, Scan)
    ]
    stretches = [
        _stretch(context, stretch)
        for run in layer_runs(context.costs.partition.kinds)
        for stretch in _in_stretches(run)
    ]
    regions = sorted([*scans, *stretches], key=lambda region: region.start)
    if not regions:
        return None
    step = context.compile_step(
        Region(0, len(context.costs.graph.operations), children=tuple(regions))
    )
    return Row("√n layers", step.memory.peak_bytes, step.step_s)


def _remat_scan(scan: Scan) -> Loop:
    step = Region(0, len(scan.body.graph.operations), checkpointed=True)
    return Loop(step, (max(2, round(scan.trips**0.5)),))


def _in_stretches(layers: Sequence[tuple[int, int]]) -> list[Sequence[tuple[int, int]]]:
    size = max(2, round(len(layers) ** 0.5))
    return [layers[i : i + size] for i in range(0, len(layers), size)]


def _stretch(context: PlanningContext, layers: Sequence[tuple[int, int]]) -> Region:
    """Layers, each checkpointed, checkpointed together; a layer is its first and last block."""
    blocks = context.costs.partition.blocks
    inner = tuple(Region(blocks[a].start, blocks[b].stop, checkpointed=True) for a, b in layers)
    return Region(inner[0].start, inner[-1].stop, checkpointed=True, children=inner)


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# Deep and scanned models for the target {target}",
        "",
        f"Made by `python -m benchmarks.scale --models … --target {target}`, then `--page`; how to "
        f"read peaks and times: [measurements-{target}.md](measurements-{target}.md).",
        "",
        command.where(found[0]),
        "",
        "## Planning",
        "",
        "What planning takes by itself is in "
        f"[planning-{target}.md](planning-{target}.md). Here the no-remat step is "
        "compiled while the costs are found, which is the compilation of all options of all kinds "
        "of blocks, and for as long after it as the column says. Solve is the slowest of the "
        "budgets; certify its compilations of the whole step.",
        "",
        "| model | operations | blocks (kinds) | levels | trace s | partition s "
        "| cost s (compiles) | no-remat step, after it s | solve s | certify s (steps) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for data in found:
        timings = data["timings_s"]
        slow = max(data["plans"], key=lambda row: row["solve_s"])
        lines.append(
            f"| {data['model']} | {data['num_operations']} | {data['num_blocks']} "
            f"({data['num_kinds']}) | {data['num_levels']} | {timings['trace']:.1f} "
            f"| {timings['partition']:.2f} | {timings['cost']:.0f} "
            f"({data['num_block_compiles']}) | {timings['baseline']:.0f} | {slow['solve_s']:.1f} "
            f"| {slow['certify_s']:.0f} ({slow['num_steps']}) |"
        )
    lines += [
        "",
        "## Peaks",
        "",
        "Compiled, in MiB. Fixed are arguments and outputs, which no plan changes; what a plan "
        "can change is the rest. Steps are estimates, over no rematerialization.",
        "",
        "| model | fixed | no remat | by hand: every layer | by hand: √n layers, nested | floor "
        "| floor over every layer | … without fixed | plans: certified ≤ budget (step) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for data in found:
        lines.append(_peak_line(data))
    lines += command.models(found)
    return "\n".join(lines) + "\n"


def _peak_line(data: Mapping[str, Any]) -> str:
    fixed, base = data["fixed_bytes"], data["no_remat"]["step_s"]

    def step(row: Mapping[str, Any]) -> str:
        return f"{row['step_s'] / base - 1:+.1%}"

    hand, nested, floor = data["hand"], data["nested"], data["floor"]
    ratio = (floor["peak_bytes"] - fixed) / (hand["peak_bytes"] - fixed)
    plans = "; ".join(
        f"{mib(row['peak_bytes'])} ≤ {mib(row['budget_bytes'])} ({step(row)})"
        for row in data["plans"]
    )
    return (
        f"| {data['model']} | {mib(fixed)} | {mib(data['no_remat']['peak_bytes'])}, {ms(base)} ms "
        f"| {mib(hand['peak_bytes'])} ({step(hand)}) "
        f"| {mib(nested['peak_bytes']) + f' ({step(nested)})' if nested else ''} "
        f"| {mib(floor['peak_bytes'])} ({step(floor)}) "
        f"| {floor['peak_bytes'] / hand['peak_bytes']:.2f} | {ratio:.2f} | {plans} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "scale-{}", "scale-{}.md", measure, page)


if __name__ == "__main__":
    main()
