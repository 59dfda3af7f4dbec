"""Deep and scanned models: what planning takes, and how low the compiled peak goes.

For each model: the step without rematerialization, `flax.linen.remat` on every layer by hand, the
least certified peak, and plans at three budgets between that floor and no rematerialization.
Everything is compiled for the target; no device is needed.

    python -m benchmarks.scale --models gpt2-96 lstm --target h200

writes one JSON file a model below `docs/data/scale-<target>/`; `--page` makes
`docs/scale-<target>.md` from all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax_hremat
from benchmarks import zoo
from benchmarks.table import Row, hand_row, machine, mib, ms, plan_row, say, trace_problem
from jax_hremat._bench import prepare
from jax_hremat._compile import compiler_versions

# Budgets, as parts of the way from the floor to no rematerialization.
PARTS = (0.75, 0.4, 0.1)
_DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Scale:
    """One model.

    Attributes:
        fixed_bytes: Arguments and outputs of the step, which no plan changes.
        num_levels: Deepest nesting of checkpoints in the plan of least peak.
        timings_s: Seconds up to the costs, and of the no-remat step's compilation, which runs
            beside them.
    """

    model: str
    description: str
    target: str
    versions: Mapping[str, str]
    machine: str
    date: str
    num_operations: int
    num_blocks: int
    num_kinds: int
    num_block_compiles: int
    num_levels: int
    fixed_bytes: int
    timings_s: Mapping[str, float]
    no_remat: Row
    hand: Row
    floor: Row
    plans: Sequence[Row]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Scale:
    """Plan one model at its floor and three budgets above it."""
    target = jax_hremat.get_target(target_name)
    problem = zoo.make(name, size)
    start_s = time.perf_counter()
    program = trace_problem(problem)
    trace_s = time.perf_counter() - start_s
    bench = prepare(program, target, jax_hremat.PlannerConfig(), trace_s, say)
    whole = bench.baseline.memory.peak_bytes
    floor, plan = plan_row(bench, "floor", _floor_bytes(bench, whole))
    span = whole - floor.peak_bytes
    return Scale(
        model=name,
        description=problem.description,
        target=target.name,
        versions=compiler_versions(),
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
        num_operations=len(bench.graph.operations),
        num_blocks=len(bench.partition.blocks),
        num_kinds=len(bench.partition.unique),
        num_block_compiles=bench.num_measured,
        num_levels=plan.root.depth,
        fixed_bytes=bench.fixed_bytes,
        timings_s=bench.timings_s,
        no_remat=Row("no remat", whole, bench.baseline.step_s),
        hand=hand_row(name, size, "block", target),
        floor=floor,
        plans=[
            plan_row(bench, f"{part:g}", int(floor.peak_bytes + part * span))[0] for part in PARTS
        ],
    )


def _floor_bytes(bench: Any, whole_bytes: int) -> int:
    try:
        plan_row(bench, "nothing", 1)
    except jax_hremat.InfeasibleBudgetError as error:
        return error.min_budget_bytes
    raise AssertionError(f"a plan for one byte, of {whole_bytes}")


def page(target: str) -> str:
    """The Markdown page made of all measurements of a target."""
    files = sorted((_DOCS / "data" / f"scale-{target}").glob("*.json"))
    found = [json.loads(f.read_text()) for f in files]
    if not found:
        raise SystemExit(f"no measurements for {target}; run this module with --models first")
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", default=[], choices=zoo.names())
    parser.add_argument("--target", default="h200", help="a name of jax_hremat.list_targets()")
    parser.add_argument("--size", default="full", choices=("full", "small", "tiny"))
    parser.add_argument("--out", type=Path, default=_DOCS / "data")
    parser.add_argument("--page", action="store_true", help="make the page from all data")
    options = parser.parse_args(argv)
    for model in options.models:
        result = measure(model, options.target, options.size)
        folder = options.out / f"scale-{options.target}"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{model}.json"
        path.write_text(json.dumps(asdict(result), indent=1) + "\n")
        print(f"wrote {path}")
    if options.page:
        path = _DOCS / f"scale-{options.target}.md"
        path.write_text(page(options.target))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
