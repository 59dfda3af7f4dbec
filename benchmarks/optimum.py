"""Hierarchical plans beside the optimum of one flat program over all operations.

Small models of each family, two or three layers. The flat program is `saved_value_sets` over the
whole loss: for every value whether it is kept from the forward, for every operation whether it
runs again, least recomputation within a bound on the bytes kept, solved to optimality. Its
answers at five bounds are emitted (one `jax.checkpoint` around everything, with names) and
compiled; the hierarchical planner is then given each compiled peak as its budget.

    python -m benchmarks.optimum --models gpt2-6 encdec --target h200

writes one JSON file a model below `docs/data/optimum-<target>/`; `--page` makes
`docs/optimum-<target>.md` from all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Facts, Row, candidates_of, mib, ms, plan_row, prepared
from jax_hremat._cost.analytic import operation_times_s
from jax_hremat._plan.region import Region
from jax_hremat._planner.context import PlanningContext
from jax_hremat._solve.saved import saved_value_sets, value_refs
from jax_hremat._xla.rates import rates

# Bounds on the bytes kept, as parts of what is kept where nothing is recomputed.
NUM_BOUNDS = 5
# Two or three layers of each family; whole models have too many operations for one program.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "gpt2-6": dict(layers=2),
    "encdec": dict(encoder_layers=1, decoder_layers=1),
    "llama": dict(layers=2),
    "unet": dict(channels=(64, 128), blocks=1, image=64),
    "resnet50": dict(stages=(1, 1, 1)),
    "densenet121": dict(blocks=(2, 2)),
}


@dataclass(frozen=True)
class FlatRow(Row):
    """The compiled answer of the flat program.

    Attributes:
        status: What the solver proved.
        gap: Relative gap.
        flat_s: Seconds to solve for all answers, divided by their number.
        kept_bytes: Bytes of the values kept, by the program.
    """

    status: str = ""
    gap: float = 0.0
    flat_s: float = 0.0
    kept_bytes: int = 0


@dataclass(frozen=True)
class Optimum(Facts):
    """One model: the flat program's answers, and the plans at their compiled peaks."""

    flat: Sequence[FlatRow]
    plans: Sequence[Row]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Optimum:
    """Solve and compile the flat program at five bounds, and plan at each compiled peak."""
    target = jax_hremat.get_target(target_name)
    context, facts = prepared(name, target, size, **SMALL.get(name, {}))
    flat = _flat_rows(context)
    plans = [plan_row(candidates_of(context), row.label, row.peak_bytes)[0] for row in flat]
    return Optimum(**facts, flat=flat, plans=plans)


def _flat_rows(context: PlanningContext) -> list[FlatRow]:
    num_operations = len(context.costs.graph.operations)
    times_s = dict(enumerate(operation_times_s(context.costs.graph, rates(context.target))))
    start_s = time.perf_counter()
    answers = saved_value_sets(
        context.costs.graph, 0, num_operations, times_s, context.config.solver, NUM_BOUNDS
    )
    solve_s = time.perf_counter() - start_s
    rows = []
    for answer in answers:
        refs = value_refs(context.costs.graph, answer.values)
        checkpointed = Region(0, num_operations, checkpointed=True, saved=refs)
        step = context.compile_step(Region(0, num_operations, children=(checkpointed,)))
        rows.append(
            FlatRow(
                label=f"{answer.kept_bytes / answers[0].kept_bytes:.0%} kept",
                peak_bytes=step.memory.peak_bytes,
                step_s=step.step_s,
                status=answer.outcome.status.value,
                gap=answer.outcome.gap,
                flat_s=solve_s / len(answers),
                kept_bytes=answer.kept_bytes,
            )
        )
    return rows


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# Compared with the optimum of a flat program, for the target {target}",
        "",
        f"Made by `python -m benchmarks.optimum --models … --target {target}`, then `--page`. "
        "The flat program has one variable for every value of the loss (kept from the forward or "
        "not) and one for every operation (run again or not), and is solved to optimality: least "
        "recomputation, by the analytic times of operations, within a bound on the bytes kept. "
        "Its answer is one `jax.checkpoint` with names around everything. Both are compiled; the "
        "hierarchical plan's budget is the flat answer's compiled peak, to the byte.",
        "",
        "What it does not show: the optimum over all schedules, with recomputations at other "
        "times than the compiler chooses within that one region.",
        "",
        command.where(found[0]),
        "",
        "| model | flat answer (status, solver s) | compiled peak = budget, MiB | flat step ms "
        "| plan: certified MiB | plan step ms | plan over flat |",
        "|---|---|---|---|---|---|---|",
    ]
    for data in found:
        for flat, plan in zip(data["flat"], data["plans"], strict=True):
            lines.append(
                f"| {data['model']} | {flat['label']} ({flat['status']}, {flat['flat_s']:.2f}) "
                f"| {mib(flat['peak_bytes'])} | {ms(flat['step_s'])} | {mib(plan['peak_bytes'])} "
                f"| {ms(plan['step_s'])} | {plan['step_s'] / flat['step_s']:.3f} |"
            )
    lines += [
        "",
        *(
            f"- {d['model']}: {d['description']}. {d['num_operations']} operations. {d['date']}."
            for d in found
        ),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "optimum-{}", "optimum-{}.md", measure, page)


if __name__ == "__main__":
    main()
