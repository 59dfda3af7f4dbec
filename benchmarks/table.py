"""Certified peaks and estimated step times of every zoo model: the data behind the docs' table.

For each model: the step without rematerialization, each policy a user writes by hand with
`flax.linen.remat`, plans at fractions of the no-remat peak, and plans at exactly the compiled
peak of each hand policy. Everything is compiled for the target; no device is needed.

    python -m benchmarks.table --models gpt2-6 encdec --target h200

writes one JSON file a model below `docs/data/<target>/`; `--page` makes
`docs/measurements-<target>.md` from all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax_hremat
from benchmarks import zoo
from jax_hremat._bench import Workbench, prepare
from jax_hremat._certify import compile_step
from jax_hremat._chain import Selection, predict
from jax_hremat._compile import compiler_versions
from jax_hremat._plan import RematPlan
from jax_hremat._planner import plan_within
from jax_hremat._region import Region
from jax_hremat._trace import Program, trace_loss
from jax_hremat._units import Budget

HAND_POLICIES = ("block", "dots_saveable", "dots_with_no_batch_dims_saveable")
FRACTIONS = (0.9, 0.7, 0.5, 0.3)
_DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Row:
    """One step, compiled.

    Attributes:
        label: What it is.
        peak_bytes: Compiled peak.
        step_s: Roofline estimate.
        budget_bytes: For a plan, its budget.
        predicted_peak_bytes: For a plan, the peak predicted before the step was compiled.
        predicted_step_s: Likewise the time.
        solve_s: For a plan, seconds in the solver.
        certify_s: Seconds compiling whole steps.
        num_steps: Whole steps compiled.
    """

    label: str
    peak_bytes: int
    step_s: float
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_step_s: float | None = None
    solve_s: float | None = None
    certify_s: float | None = None
    num_steps: int | None = None


@dataclass(frozen=True)
class Measurement:
    """All rows of one model, and how they came about."""

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
    timings_s: Mapping[str, float]
    no_remat: Row
    predicted_no_remat_bytes: int
    hand: Sequence[Row] = field(default_factory=tuple)
    plans: Sequence[Row] = field(default_factory=tuple)
    at_hand_peaks: Sequence[Row] = field(default_factory=tuple)


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Measurement:
    """Plan and compile everything about one model."""
    target = jax_hremat.get_target(target_name)
    problem = zoo.make(name, size)
    start_s = time.perf_counter()
    program = trace_problem(problem)
    trace_s = time.perf_counter() - start_s
    bench = prepare(program, target, jax_hremat.PlannerConfig(), trace_s, say)
    bare = bench.chain(lambda options: (options.bare,))
    hand = [hand_row(name, size, policy, target) for policy in HAND_POLICIES]
    return Measurement(
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
        timings_s=bench.timings_s,
        no_remat=Row("no remat", bench.baseline.memory.peak_bytes, bench.baseline.step_s),
        predicted_no_remat_bytes=predict(bare, Selection((0,) * len(bare))).peak_bytes,
        hand=hand,
        plans=_plan_rows(bench),
        at_hand_peaks=[plan_row(bench, row.label, row.peak_bytes)[0] for row in hand],
    )


def trace_problem(problem: zoo.Problem) -> Program:
    """The program of a model's loss."""
    return trace_loss(
        problem.loss_fn, problem.args, {}, argnums=problem.argnums, has_aux=problem.has_aux
    )


def hand_row(name: str, size: zoo.Size, policy: Any, target: jax_hremat.Target) -> Row:
    """A model with a hand-written policy, compiled."""
    program = trace_problem(zoo.make(name, size, remat=policy))
    num_equations = len(program.jaxpr.jaxpr.eqns)
    step = compile_step(program, Region(0, num_equations), target)
    return Row(policy, step.memory.peak_bytes, step.step_s)


def _plan_rows(bench: Workbench) -> list[Row]:
    """Plans at the fractions; below the floor, one at the floor and one halfway to it."""
    whole = bench.baseline.memory.peak_bytes
    rows: list[Row] = []
    for fraction in FRACTIONS:
        budget_bytes = int(fraction * whole)
        try:
            rows.append(plan_row(bench, f"{fraction:g}", budget_bytes)[0])
        except jax_hremat.InfeasibleBudgetError as error:
            lowest = rows[-1].budget_bytes if rows else whole
            assert lowest is not None
            middle = (lowest + error.min_budget_bytes) // 2
            rows.append(plan_row(bench, f"{middle / whole:.3f} (halfway)", middle)[0])
            floor = error.min_budget_bytes
            rows.append(plan_row(bench, f"{floor / whole:.3f} (floor)", floor)[0])
            break
    return rows


def plan_row(bench: Workbench, label: str, budget_bytes: int) -> tuple[Row, RematPlan]:
    """A plan for a budget, and its figures."""
    plan = plan_within(
        bench,
        Budget(bytes=budget_bytes),
        headroom_bytes=0,
        argnums=(0,),
        has_aux=bench.program.has_aux,
        progress=say,
    )
    return _row_of(label, plan), plan


def _row_of(label: str, plan: RematPlan) -> Row:
    return Row(
        label=label,
        peak_bytes=plan.certificate.peak_bytes,
        step_s=plan.estimated_step_s,
        budget_bytes=plan.certificate.budget_bytes,
        predicted_peak_bytes=plan.predicted_peak_bytes,
        predicted_step_s=plan.predicted_step_s,
        solve_s=plan.timings_s["solve"],
        certify_s=plan.timings_s["certify"],
        num_steps=plan.num_compiles["steps"],
    )


def machine() -> str:
    """What was compiled on."""
    return f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, no GPU"


def say(stage: str, done: int, total: int) -> None:
    """Progress, in a terminal only."""
    if sys.stdout.isatty():
        print(f"\r{stage}: {done} of {total}".ljust(60), end="", flush=True)


def page(target: str) -> str:
    """The Markdown page made of all measurements of a target."""
    files = sorted((_DOCS / "data" / target).glob("*.json"))
    found = [json.loads(f.read_text()) for f in files]
    if not found:
        raise SystemExit(f"no measurements for {target}; run this module with --models first")
    first = found[0]
    versions = ", ".join(f"{k} {v}" for k, v in first["versions"].items())
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
        f"Versions: {versions}. Machine: {first['machine']}.",
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
        "## Overhead beside the hand policies",
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


def mib(count_bytes: int) -> str:
    return f"{count_bytes / 2**20:.0f}"


def ms(duration_s: float) -> str:
    return f"{duration_s * 1e3:.2f}"


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
        folder = options.out / options.target
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{model}.json"
        path.write_text(json.dumps(asdict(result), indent=1) + "\n")
        print(f"\rwrote {path}".ljust(60))
    if options.page:
        path = _DOCS / f"measurements-{options.target}.md"
        path.write_text(page(options.target))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
