"""Estimated beside measured step times, on the CPU.

Each model is planned for this CPU at a size that runs; the step without rematerialization, the
standard plans and plans of the frontier are run on real inputs, in turn, several times over.

    python -m benchmarks.times --models gpt2-small lstm --size small --target cpu

writes one JSON file a model below `docs/data/times-cpu/`; `--page` makes `docs/times-cpu.md`. Run
it on a quiet machine: nothing else may compete for its cores.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from scipy.stats import spearmanr

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Facts, candidates_of, mib, prepared
from jax_hremat._planner.candidates import Candidate, Candidates
from jax_hremat._planner.rounds import Rounds
from jax_hremat._program.emit import emit

# The plan need not be good here, only different from the others.
CONFIG = jax_hremat.PlannerConfig(
    search=jax_hremat.SearchConfig(max_runs=2, max_packings=2, max_saved_sets=1),
    max_rounds=0,
    cost="analytic",
)
FRACTIONS = (0.9, 0.75, 0.6)
MAX_PLANS = 8
NUM_RUNS = 7


@dataclass(frozen=True)
class Pair:
    """One plan, estimated and run.

    Attributes:
        checkpoints: `jax.checkpoint` regions in it.
        peak_bytes: Compiled peak.
        estimated_s: Roofline.
        measured_s: Median over the runs.
        spread_s: Difference of the upper and the lower quartile.
    """

    checkpoints: int
    peak_bytes: int
    estimated_s: float
    measured_s: float
    spread_s: float


@dataclass(frozen=True)
class Times(Facts):
    """One model."""

    pairs: Sequence[Pair]


def measure(name: str, target_name: str, size: zoo.Size = "small") -> Times:
    """Plan one model, and run some of the plans."""
    if target_name != "cpu":
        raise SystemExit("steps are run on this machine: give --target cpu")
    problem = zoo.make(name, size)
    bench, facts = prepared(name, jax_hremat.get_target("cpu"), size, CONFIG)
    candidates = candidates_of(bench)
    chosen = _different(candidates)
    args = problem.concrete(0)
    options = jax_hremat.compiler_options("cpu")

    def step(candidate: Candidate) -> Any:
        loss = emit(bench.program, candidate.root)
        value_and_grad = replace(problem, loss_fn=loss).value_and_grad
        return jax.jit(value_and_grad, compiler_options=options).lower(*args).compile()

    steps = [step(c) for c in chosen]
    runs: list[list[float]] = [[] for _ in chosen]
    for _ in range(NUM_RUNS + 1):
        # In turn, so that what else the machine does meets all alike.
        for compiled, own in zip(steps, runs, strict=True):
            start_s = time.perf_counter()
            jax.block_until_ready(compiled(*args))
            own.append(time.perf_counter() - start_s)
    return Times(
        **facts,
        pairs=[_pair(candidate, own[1:]) for candidate, own in zip(chosen, runs, strict=True)],
    )


def _different(candidates: Candidates) -> list[Candidate]:
    """Plans that differ: no rematerialization, the solver's at a few budgets, standard ones."""
    whole_bytes = candidates.bare.peak_bytes
    for fraction in FRACTIONS:
        Rounds(candidates, int(fraction * whole_bytes)).search()
    _ = candidates.lowest
    for chain, selection in candidates.standard:
        if candidates.num_compiled >= MAX_PLANS:
            break
        candidates.add(chain, selection, candidates.bare.outcome)
    found = sorted(candidates.within(10 * whole_bytes), key=lambda c: c.peak_bytes)
    # Both ends and evenly between.
    last = len(found) - 1
    count = min(MAX_PLANS, len(found))
    return [found[round(i * last / max(count - 1, 1))] for i in range(count)]


def _pair(candidate: Candidate, runs_s: Sequence[float]) -> Pair:
    low, _, high = statistics.quantiles(runs_s, n=4)
    return Pair(
        checkpoints=candidate.root.num_wrapped,
        peak_bytes=candidate.peak_bytes,
        estimated_s=candidate.step_s,
        measured_s=statistics.median(runs_s),
        spread_s=high - low,
    )


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements."""
    pairs = [pair for data in found for pair in data["pairs"]]
    rank = spearmanr([p["estimated_s"] for p in pairs], [p["measured_s"] for p in pairs])
    relative = [_relative(data) for data in found]
    errors = sorted(e / m - 1 for model in relative for e, m in model)
    within = sorted(abs(error) for error in errors)
    lines = [
        "# Estimated and measured step times on the CPU",
        "",
        "Made by `python -m benchmarks.times --models … --size small --target cpu`, then `--page`. "
        f"Medians of {NUM_RUNS} runs after one that is left out, the plans of a model in turn.",
        "",
        command.where(found[0]),
        "",
        f"{len(pairs)} pairs of a model and a plan. Rank correlation (Spearman) of estimated and "
        f"measured time over all of them: {rank.statistic:.3f}. Most of that is the difference "
        "between models; the table has it for the plans of each.",
        "",
        "The error that matters is that of a slowdown, since plans are only compared with each "
        "other: estimated over measured time, each over no rematerialization. Its absolute value: "
        f"median {statistics.median(within):.1%}, nine tenths within "
        f"{within[int(0.9 * (len(within) - 1))]:.1%}, worst {within[-1]:.1%}; signed from "
        f"{errors[0]:+.1%} to {errors[-1]:+.1%}.",
        "",
        "| model | plans | rank correlation | measured slowdown, from … to | estimated |",
        "|---|---|---|---|---|",
    ]
    for data, both in zip(found, relative, strict=True):
        estimated, measured = zip(*both, strict=True)
        own = spearmanr(estimated, measured).statistic if len(both) > 2 else float("nan")
        lines.append(
            f"| {data['model']} | {len(both)} | {own:.2f} | {min(measured):.2f} … "
            f"{max(measured):.2f} | {min(estimated):.2f} … {max(estimated):.2f} |"
        )
    lines += [
        "",
        "| model | checkpoints | peak MiB | estimated ms | measured ms (spread) |",
        "|---|---|---|---|---|",
    ]
    for data in found:
        for p in data["pairs"]:
            lines.append(
                f"| {data['model']} | {p['checkpoints']} | {mib(p['peak_bytes'])} "
                f"| {1e3 * p['estimated_s']:.2f} | {1e3 * p['measured_s']:.2f} "
                f"({1e3 * p['spread_s']:.2f}) |"
            )
    lines += command.models(found)
    return "\n".join(lines) + "\n"


def _relative(data: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Estimated and measured slowdown of each plan of a model that has checkpoints."""
    (bare,) = [p for p in data["pairs"] if p["checkpoints"] == 0]
    return [
        (p["estimated_s"] / bare["estimated_s"], p["measured_s"] / bare["measured_s"])
        for p in data["pairs"]
        if p is not bare
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    about = __doc__.splitlines()[0] if __doc__ else ""
    command.run(argv, about, "times-{}", "times-{}.md", measure, page)


if __name__ == "__main__":
    main()
