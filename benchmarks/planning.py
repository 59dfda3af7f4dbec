"""What planning takes: by itself, while no whole step compiles, and all told.

By itself it traces, partitions, finds costs and solves. All told, `plan_remat` with an empty cache
is set beside one compilation of the same step with `flax.linen.remat` written on every layer, each
in a process that has done nothing before.

    python -m benchmarks.planning --models gpt2-96 encdec-36 --target h200

writes one JSON file a model below `docs/data/planning-<target>/`; `--page` makes
`docs/planning-<target>.md` from all of them. Run it on a quiet machine: nothing else may compete
for its cores.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Pieces, compiled, pieces_of, planner_of, say, traced
from jax_hremat._emit.step import own_step
from jax_hremat._planner.context import uniform
from jax_hremat._planner.cost_table import priced
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.schedule import Schedules

_T = TypeVar("_T")

CONFIG = jax_hremat.PlannerConfig(cache_dir="")
# Budgets, as parts of the predicted peak without rematerialization.
PARTS = (0.8, 0.6, 0.4)
# The budget of the plan that is certified, as a part of the compiled peak.
WHOLE = 0.5


@dataclass(frozen=True)
class Planning(Pieces):
    """One model.

    Attributes:
        solves_s: Seconds of solving for each budget.
        answers: How each ended.
        plan_s: Seconds of `plan_remat` for half of the peak, with an empty cache.
        num_steps: Whole steps that it compiled.
        refused: Whether it refused the budget; the time is then that until the refusal.
        hand_s: Seconds to trace and compile the step once, each layer with `flax.linen.remat`.
    """

    solves_s: Sequence[float]
    answers: Sequence[str]
    plan_s: float
    num_steps: int
    refused: bool
    hand_s: float


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Planning:
    """Plan a model for three budgets and certify nothing; then plan it all told."""
    target = jax_hremat.get_target(target_name)
    problem = zoo.make(name, size)
    start_s = time.perf_counter()
    program = traced(problem)
    costs = priced(own_step(program), target, CONFIG, time.perf_counter() - start_s, None, say)
    # The state comes in and its gradient goes out.
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(problem.args[0]))
    peak_bytes = predict(*uniform(costs.chain(2 * state_bytes, lambda o: (o.plain,)))).peak_bytes
    solves_s, answers = [], []
    for part in PARTS:
        start_s = time.perf_counter()
        chain = costs.chain(2 * state_bytes)
        schedule = Schedules(chain).fastest_within(int(part * peak_bytes), CONFIG.solver)
        solves_s.append(time.perf_counter() - start_s)
        answers.append(schedule.outcome.status.value)
    planned = _alone(plan_all_told, name, target_name, size)
    return Planning(
        **pieces_of(problem, target.name, costs, costs.timings_s),
        solves_s=solves_s,
        answers=answers,
        **planned,
        hand_s=_alone(compile_by_hand, name, target_name, size),
    )


def plan_all_told(name: str, target_name: str, size: zoo.Size) -> dict[str, Any]:
    """`plan_remat` with an empty cache: the fields of `Planning` that it fills."""
    problem = zoo.make(name, size)
    planned = planner_of(problem, jax_hremat.get_target(target_name), WHOLE, CONFIG)
    start_s = time.perf_counter()
    try:
        plan, refused = planned(*problem.args), False
    except jax_hremat.InfeasibleBudgetError as error:
        assert error.plan is not None, "only a given plan that no longer fits has none"
        plan, refused = error.plan, True
    plan_s = time.perf_counter() - start_s
    return dict(plan_s=plan_s, num_steps=plan.num_compiles["steps"], refused=refused)


def compile_by_hand(name: str, target_name: str, size: zoo.Size) -> float:
    """Seconds to trace and compile the step once, each layer with `flax.linen.remat`."""
    problem = zoo.make(name, size, remat="block")
    start_s = time.perf_counter()
    compiled(problem, jax_hremat.get_target(target_name))
    return time.perf_counter() - start_s


def _alone(function: Callable[..., _T], *args: Any) -> _T:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    budgets = ", ".join(f"{part:.0%}" for part in PARTS)
    lines = [
        f"# What planning takes, for the target {target}",
        "",
        f"Made by `python -m benchmarks.planning --models … --target {target}`, then `--page`.",
        "",
        command.where(found[0]),
        "",
        "No whole step is compiled here: neither the one without rematerialization, nor those "
        "that certify a plan. Cost is the compilation of the "
        f"options of all kinds of blocks. Solving is for {budgets} of the predicted peak without "
        "rematerialization; the total counts the slowest.",
        "",
        "| model | operations | blocks (kinds) | trace s | partition s | cost s (compiles) "
        "| solve s, three budgets | total s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for data in found:
        timings = data["timings_s"]
        solves = " / ".join(f"{s:.1f}" for s in data["solves_s"])
        total_s = sum(timings.values()) + max(data["solves_s"])
        lines.append(
            f"| {data['model']} | {data['num_operations']} | {data['num_blocks']} "
            f"({data['num_kinds']}) | {timings['trace']:.1f} | {timings['partition']:.2f} "
            f"| {timings['cost']:.1f} ({data['num_block_compiles']}) | {solves} | {total_s:.1f} |"
        )
    lines += _all_told(found)
    lines += command.models(found)
    return "\n".join(lines) + "\n"


def _all_told(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a user waits for, where that was measured."""
    measured = [data for data in found if "plan_s" in data]
    if not measured:
        return []
    lines = [
        "",
        "## All told",
        "",
        f"`plan_remat` for {WHOLE:.0%} of the peak, cache empty, whole steps included, beside "
        "one compilation of the same step with `flax.linen.remat` on every layer, each in a "
        "process of its own.",
        "",
        "| model | plan s (steps) | by hand, compile s | ratio |",
        "|---|---|---|---|",
    ]
    return lines + [
        f"| {data['model']} | {data['plan_s']:.1f} ({data['num_steps']})"
        f"{', refused' if data['refused'] else ''} | {data['hand_s']:.1f} "
        f"| {data['plan_s'] / data['hand_s']:.1f} |"
        for data in measured
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "planning-{}", "planning-{}.md", measure, page)


if __name__ == "__main__":
    main()
