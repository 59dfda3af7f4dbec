"""Plans made where there is no GPU, run where there is one, beside what a user does by hand.

First, anywhere, for each model a plan for the peak of each hand-written policy, and plans for parts
of the peak without rematerialization:

    python -m benchmarks.attached --plan --models gpt2-small vit --target h100

writes one file a model below `docs/data/plans-h100/`. Then, on a machine with that GPU and the same
version of JAX,

    python -m benchmarks.attached --models gpt2-small vit --target h100

compiles the steps as JAX does there, with all that XLA tries out on an attached device, runs them
in turn on real inputs, and writes one JSON file a model below `docs/data/attached-h100/`; `--page`
makes `docs/attached-h100.md`.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import jax_hremat
from benchmarks import command, zoo
from benchmarks.device import NUM_RUNS, Timed, is_attached, measured_peak_bytes, timed_in_turn
from benchmarks.frontier import HAND_POLICIES
from benchmarks.measured import (
    Setting,
    candidates_of,
    hand_row,
    mib,
    plan_row,
    prepared,
    setting_of,
)
from benchmarks.times import errors_in_words, ms_and_spread, rank_correlation
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._xla.compile import memory_stats

DATA = command.DOCS / "data"
PLANS = "plans-{}"
# Parts of the peak without rematerialization.
FRACTIONS = (0.7, 0.5, 0.35)
NO_REMAT = "no remat"
# Before a policy: the plan whose budget is its peak.
AT_PEAK_OF = "as "


@dataclass(frozen=True)
class Planned:
    """A step to run, as it was compiled without a GPU.

    Attributes:
        label: What it is: `NO_REMAT`, a policy, or what a plan's budget is.
        peak_bytes: Its compiled peak; for a plan, the certified one.
        step_s: Roofline estimate, with the target's published rates and efficiencies.
        plan: The plan as JSON; None where it is written by hand.
    """

    label: str
    peak_bytes: int
    step_s: float
    plan: str | None = None


@dataclass(frozen=True)
class Plans:
    """The steps to run of one model."""

    steps: Sequence[Planned]


@dataclass(frozen=True)
class Ran:
    """A step, compiled and run on the GPU.

    Attributes:
        label: What it is.
        certified_bytes: Peak as compiled without a GPU.
        peak_bytes: Peak of the executable that was run.
        measured_peak_bytes: The device's memory at its peak; None if the device does not say.
        estimated_s: Roofline estimate of the step compiled without a GPU, with published rates.
        measured: Its runs.
        difference: How far its gradient is from that without rematerialization: the norm of the
            difference over the norm.
    """

    label: str
    certified_bytes: int
    peak_bytes: int
    measured_peak_bytes: int | None
    estimated_s: float
    measured: Timed
    difference: float


@dataclass(frozen=True)
class Attached(Setting):
    """One model.

    Attributes:
        steps: The step without rematerialization, then the others by peak.
    """

    steps: Sequence[Ran]


def plan_all(name: str, target_name: str, size: zoo.Size = "full") -> Iterator[Plans]:
    """The steps to run of one model: one more each time."""
    target = jax_hremat.get_target(target_name)
    context, facts = prepared(name, target, size)
    candidates = candidates_of(context)
    has_aux = zoo.make(name, size).has_aux
    base = facts["no_remat"]
    steps = [Planned(NO_REMAT, base.peak_bytes, base.step_s)]
    budgets: list[tuple[str, int]] = []
    for policy in HAND_POLICIES:
        row = hand_row(name, size, policy, target)
        steps.append(Planned(policy, row.peak_bytes, row.step_s))
        budgets.append((AT_PEAK_OF + policy, row.peak_bytes))
    budgets += [(f"{part:.0%}", int(part * base.peak_bytes)) for part in FRACTIONS]
    known: set[int] = set()
    for label, budget_bytes in budgets:
        try:
            row, plan = plan_row(candidates, label, budget_bytes, has_aux=has_aux)
        except InfeasibleBudgetError:
            continue
        if row.peak_bytes not in known:
            known.add(row.peak_bytes)
            steps.append(Planned(label, row.peak_bytes, row.step_s, plan.to_json()))
            yield Plans(steps)


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Attached:
    """Run what was planned for one model."""
    target = jax_hremat.get_target(target_name)
    if not is_attached(target):
        raise SystemExit(f"steps are run on this machine, where no {target_name} is attached")
    problem, planned = zoo.make(name, size), planned_steps(name, target_name)
    args = problem.concrete(0)
    executables = [executable(step, name, size, target, args) for step in planned]
    peaks = [memory_stats(run).peak_bytes for run in executables]
    # From the least peak up, so that each run's is the highest so far.
    order = sorted(range(len(planned)), key=peaks.__getitem__)
    measured_peaks = {i: measured_peak_bytes(executables[i], args) for i in order}
    _, expected = executables[0](*args)
    differences = [float(_difference(expected, run(*args)[1])) for run in executables]
    del expected
    times = timed_in_turn(executables, args)
    return Attached(
        **setting_of(problem, target_name),
        steps=[
            Ran(
                label=step.label,
                certified_bytes=step.peak_bytes,
                peak_bytes=peaks[i],
                measured_peak_bytes=measured_peaks[i],
                estimated_s=step.step_s,
                measured=times[i],
                difference=differences[i],
            )
            for i, step in enumerate(planned)
        ],
    )


def planned_steps(name: str, target_name: str) -> list[Planned]:
    """What `--plan` has written for a model: no rematerialization, then the others by peak."""
    path = DATA / PLANS.format(target_name) / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"there is no {path}; run with --plan first, where no GPU is needed")
    steps = [Planned(**step) for step in json.loads(path.read_text())["steps"]]
    return sorted(steps, key=lambda step: (step.label != NO_REMAT, step.peak_bytes))


def executable(
    step: Planned, name: str, size: zoo.Size, target: jax_hremat.Target, args: Sequence[Any]
) -> jax.stages.Compiled:
    """A step as JAX compiles it for the attached device."""
    problem = zoo.make(name, size)
    if step.plan is not None:
        plan = jax_hremat.RematPlan.from_json(step.plan)
        problem = replace(problem, loss_fn=jax_hremat.apply_plan(problem.loss_fn, plan))
    elif step.label != NO_REMAT:
        policy: Any = step.label
        problem = zoo.make(name, size, remat=policy)
    options = dict(target.compiler_options)
    return jax.jit(problem.value_and_grad, compiler_options=options).lower(*args).compile()


@jax.jit
def _difference(expected: Any, got: Any) -> jax.Array:
    """The norm of the difference of two gradients over that of the first."""

    def squares(tree: Any) -> jax.Array:
        leaves = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)]
        return jnp.sum(jnp.stack(leaves))

    return jnp.sqrt(squares(jax.tree.map(jnp.subtract, expected, got)) / squares(expected))


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements."""
    relative = [
        [
            (_slowdown(data, step, "estimated_s"), _slowdown(data, step))
            for step in data["steps"][1:]
        ]
        for data in found
    ]
    steps = [step for data in found for step in data["steps"]]
    plans = [step for step in steps if _is_plan(step)]
    return "\n".join(
        [
            f"# Plans run on an attached {target}",
            "",
            "Made by `python -m benchmarks.attached --plan --models … "
            f"--target {target}` where there is no GPU, then without `--plan` where there is one, "
            "then `--page`. The steps of a model are run in turn on real inputs; times are medians "
            f"of {NUM_RUNS} measurements. They are compiled as JAX compiles there, with all that "
            "XLA tries out on an attached device.",
            "",
            command.where(found[0]),
            "",
            "## Memory",
            "",
            f"The {len(plans)} plans were certified without a GPU. "
            f"{_over(plans, 'peak_bytes', 'The executable that was run, over the certified peak')} "
            f"{_over(plans, 'measured_peak_bytes', 'What the device took, over the certified')} "
            "The difference comes from the kernels that XLA chooses by trying them out. So where "
            "the target is attached, the planner compiles whole steps on it, and what they need "
            "counts; these plans were made without a GPU.",
            "",
            "## Time",
            "",
            "The error that matters is that of a slowdown, over the step without rematerialization,"
            " since steps are only compared with each other. Estimated over measured, "
            f"{sum(map(len, relative))} steps: {errors_in_words(relative)}.",
            "",
            "| model | no rematerialization: measured ms | estimated ms | rank correlation |",
            "|---|---|---|---|",
            *(
                f"| {data['model']} | {ms_and_spread(data['steps'][0]['measured'])} "
                f"| {1e3 * data['steps'][0]['estimated_s']:.2f} | {rank_correlation(both):.2f} |"
                for data, both in zip(found, relative, strict=True)
            ),
            "",
            "## At the peak of each hand-written policy",
            "",
            "The added time of the plan whose budget is the policy's compiled peak, as a fraction "
            "of the policy's added time, as measured; in brackets as estimated, then both times "
            "over no rematerialization, as measured.",
            "",
            *_beside_policies(found),
            "",
            "## Every step",
            "",
            "The gradient's difference is that from the step without rematerialization, run once "
            "more: the norm of the difference over the norm. Activations are bf16, and XLA rounds "
            "to it in other places where it fuses a recomputed value otherwise. A mixture "
            "of experts routes its tokens by comparing such values, so that some go to other "
            "experts, under the policies as under the plans. In f32 gradients are "
            "[the same](equality.md).",
            *(line for data in found for line in _model_section(data)),
            *command.models(found),
            "",
        ]
    )


def _is_plan(step: Mapping[str, Any]) -> bool:
    return step["label"] not in (NO_REMAT, *HAND_POLICIES)


def _over(steps: Sequence[Mapping[str, Any]], field: str, what: str) -> str:
    """How far a peak is over the certified one, in words; empty where it is not known."""
    over = [step[field] / step["certified_bytes"] - 1 for step in steps if step[field]]
    if not over:
        return ""
    return f"{what}: {min(over):+.2%} to {max(over):+.2%}, median {statistics.median(over):+.2%}."


def _slowdown(data: Mapping[str, Any], step: Mapping[str, Any], field: str = "") -> float:
    """The time of a step over that without rematerialization: as measured, or another field."""
    base = data["steps"][0]
    if field:
        return step[field] / base[field]
    return step["measured"]["median_s"] / base["measured"]["median_s"]


def _beside_policies(found: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| model | " + " | ".join(HAND_POLICIES) + " |",
        "|---|" + "---|" * len(HAND_POLICIES),
    ]
    ratios: list[float] = []
    for data in found:
        by_label = {step["label"]: step for step in data["steps"]}
        cells = []
        for policy in HAND_POLICIES:
            hand, plan = by_label.get(policy), by_label.get(AT_PEAK_OF + policy)
            cells.append("")
            if hand is not None and plan is not None:
                ours, theirs = (_slowdown(data, step) - 1 for step in (plan, hand))
                words = f"{ours:+.1%} for {theirs:+.1%}"
                if theirs > 0:
                    ratios.append(max(ours, 0.0) / theirs)
                    ours_s, theirs_s = (
                        _slowdown(data, step, "estimated_s") - 1 for step in (plan, hand)
                    )
                    estimated = f"{ours_s / theirs_s:.2f}; " if theirs_s > 0 else ""
                    words = f"{ratios[-1]:.2f} ({estimated}{words})"
                cells[-1] = words
        lines.append(f"| {data['model']} | {' | '.join(cells)} |")
    if ratios:
        lines += ["", f"Median of the {len(ratios)} ratios: {statistics.median(ratios):.2f}."]
    return lines


def _model_section(data: Mapping[str, Any]) -> list[str]:
    lines = [
        "",
        f"### {data['model']}",
        "",
        "| step | certified MiB | compiled there MiB | device MiB | estimated | measured "
        "| measured ms (spread) | gradient's difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for step in data["steps"]:
        device = "" if step["measured_peak_bytes"] is None else mib(step["measured_peak_bytes"])
        label = step["label"]
        if label in HAND_POLICIES:
            label = f"by hand: {label}"
        elif label != NO_REMAT:
            label = f"plan: {label}"
        lines.append(
            f"| {label} | {mib(step['certified_bytes'])} | {mib(step['peak_bytes'])} | {device} "
            f"| {_slowdown(data, step, 'estimated_s') - 1:+.1%} "
            f"| {_slowdown(data, step) - 1:+.1%} | {ms_and_spread(step['measured'])} "
            f"| {step['difference']:.0e} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Plan or measure the models named, or make the page."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if "--plan" in argv:
        argv.remove("--plan")
        command.run(argv, __doc__, PLANS, "", plan_all, page)
    else:
        command.run(argv, __doc__, "attached-{}", "attached-{}.md", measure, page)


if __name__ == "__main__":
    main()
