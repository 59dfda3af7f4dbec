"""What each effort finds, and the seconds it takes, cold and warm.

For each model and effort: a plan at half of the no-remat peak with an empty cache, and the same
request again, which the cache answers. Everything is compiled for the target; no device is needed.

    python -m benchmarks.efforts --models gpt2-2 gpt2-small resnet50 --target h200

writes one JSON file a model below `docs/data/efforts-<target>/`; `--page` makes
`docs/efforts-<target>.md` from all of them. Run it on a quiet machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Setting, mib, ms, planner_of, setting_of
from jax_hremat._planner.config import Effort

# The budget, as a part of the no-remat peak.
BUDGET = 0.5


@dataclass(frozen=True)
class Trial:
    """One effort.

    Attributes:
        effort: Its name.
        cold_s: Seconds of planning with an empty cache.
        warm_s: Seconds of the same request again.
        num_steps, num_blocks: Whole steps and options of blocks compiled.
        peak_bytes, step_s: Certified peak and estimated step of the plan.
    """

    effort: str
    cold_s: float
    warm_s: float
    num_steps: int
    num_blocks: int
    peak_bytes: int
    step_s: float


@dataclass(frozen=True)
class Efforts(Setting):
    """One model: the step without rematerialization, and each effort."""

    no_remat_bytes: int
    no_remat_s: float
    budget_bytes: int
    trials: Sequence[Trial]


def measure(name: str, target: str, size: zoo.Size = "full") -> Efforts:
    """Plan one model with each effort, twice."""
    problem = zoo.make(name, size)
    found = [_planned(problem, target, effort) for effort in get_args(Effort)]
    _, plan = found[-1]
    return Efforts(
        **setting_of(problem, target),
        no_remat_bytes=plan.baseline_peak_bytes,
        no_remat_s=plan.baseline_step_s,
        budget_bytes=plan.certificate.budget_bytes,
        trials=[trial for trial, _ in found],
    )


def _planned(
    problem: zoo.Problem, target: str, effort: Effort
) -> tuple[Trial, jax_hremat.RematPlan]:
    with tempfile.TemporaryDirectory() as folder:
        config = replace(jax_hremat.PlannerConfig.of_effort(effort), cache_dir=folder)
        plan = planner_of(problem, target, BUDGET, config)
        start_s = time.perf_counter()
        found = plan(*problem.args)
        cold_s = time.perf_counter() - start_s
        start_s = time.perf_counter()
        assert plan(*problem.args) == found
        warm_s = time.perf_counter() - start_s
    trial = Trial(
        effort=effort,
        cold_s=cold_s,
        warm_s=warm_s,
        num_steps=found.num_compiles["steps"],
        num_blocks=found.num_compiles["blocks"],
        peak_bytes=found.certificate.peak_bytes,
        step_s=found.estimated_step_s,
    )
    return trial, found


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# Efforts for the target {target}",
        "",
        f"Made by `python -m benchmarks.efforts --models … --target {target}`, then `--page`.",
        "",
        command.where(found[0]),
        "",
        f"Every plan is for {100 * BUDGET:.0f} % of the peak without rematerialization. Seconds "
        "are those of `plan_remat`, with an empty cache (cold) and again in the same process "
        "(warm). Compiled are whole steps and, for the costs, options of blocks. Added time is "
        "estimated.",
        "",
        "| model | effort | cold s | warm s | steps | blocks | peak MiB | step ms | added time |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for data in found:
        for trial in data["trials"]:
            added = trial["step_s"] / data["no_remat_s"] - 1
            lines.append(
                f"| {data['model']} | {trial['effort']} | {trial['cold_s']:.1f} "
                f"| {trial['warm_s']:.1f} | {trial['num_steps']} | {trial['num_blocks']} "
                f"| {mib(trial['peak_bytes'])} of {mib(data['no_remat_bytes'])} "
                f"| {ms(trial['step_s'])} | {added:+.1%} |"
            )
    return "\n".join([*lines, *command.models(found)]) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    command.run(argv, __doc__, "efforts-{}", "efforts-{}.md", measure, page)


if __name__ == "__main__":
    main()
