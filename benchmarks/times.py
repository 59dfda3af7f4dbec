"""Estimated beside measured step times, on the CPU.

Each model is planned for this CPU, its rates measured first, at a size that runs; the step as it
was written, the emitted one without rematerialization, standard plans and plans of the frontier
are run on real inputs, in turn, several times over.

    python -m benchmarks.times --models gpt2-small lstm --size small --target cpu

writes one JSON file a model below `docs/data/times-cpu/`; `--page` makes `docs/times-cpu.md`. Run
it on a quiet machine: nothing else may compete for its cores.
"""

from __future__ import annotations

import ctypes
import functools
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
NUM_RUNS = 9
# Options of glibc's `mallopt`: no separate mappings, one arena, and freed memory stays.
_KEEP_PAGES = {"M_MMAP_MAX": (-4, 0), "M_ARENA_MAX": (-8, 1), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}


@dataclass(frozen=True)
class Timed:
    """Runs of one step: the median, and the difference of the upper and the lower quartile."""

    median_s: float
    spread_s: float


@dataclass(frozen=True)
class Pair:
    """One plan, estimated and run.

    Attributes:
        checkpoints: `jax.checkpoint` regions in it.
        peak_bytes: Compiled peak.
        estimated_s: Roofline.
        measured: Its runs.
    """

    checkpoints: int
    peak_bytes: int
    estimated_s: float
    measured: Timed


@dataclass(frozen=True)
class Times(Facts):
    """One model.

    Attributes:
        rates: What the CPU was measured to sustain before.
        original: The step as it was written.
        pairs: The plans.
    """

    rates: Mapping[str, Any]
    original: Timed
    pairs: Sequence[Pair]


def measure(name: str, target_name: str, size: zoo.Size = "small") -> Times:
    """Plan one model, and run some of the plans."""
    if target_name != "cpu":
        raise SystemExit("steps are run on this machine: give --target cpu")
    problem = zoo.make(name, size)
    target = this_cpu()
    bench, facts = prepared(name, target, size, CONFIG)
    candidates = candidates_of(bench)
    chosen = _different(candidates)
    args = problem.concrete(0)

    def compiled(loss_fn: Any) -> Any:
        step = replace(problem, loss_fn=loss_fn).value_and_grad
        return jax.jit(step, compiler_options=dict(target.compiler_options)).lower(*args).compile()

    steps = [compiled(problem.loss_fn), *(compiled(emit(bench.program, c.root)) for c in chosen)]
    runs: list[list[float]] = [[] for _ in steps]
    for _ in range(NUM_RUNS + 1):
        # In turn, so that what else the machine does meets all alike.
        for step, own in zip(steps, runs, strict=True):
            start_s = time.perf_counter()
            jax.block_until_ready(step(*args))
            own.append(time.perf_counter() - start_s)
    original, *measured = (_timed(own[1:]) for own in runs)
    return Times(
        **facts,
        rates={
            "matrix_flops_per_s": dict(target.matrix_flops_per_s),
            "convolution_flops_per_s": dict(target.convolution_flops_per_s),
            "vector_flops_per_s": target.vector_flops_per_s,
            "bandwidth_bytes_per_s": target.bandwidth_bytes_per_s,
            "launch_s": target.launch_s,
        },
        original=original,
        pairs=[
            Pair(c.root.num_wrapped, c.peak_bytes, c.step_s, own)
            for c, own in zip(chosen, measured, strict=True)
        ],
    )


@functools.cache
def this_cpu() -> jax_hremat.Target:
    """This machine's CPU with measured rates, once freed memory stays with the process.

    A page that is new to the process can cost more than all that is computed in it, and a step
    that takes less memory is then faster for that alone; a GPU's allocator keeps what it has.
    """
    libc = ctypes.CDLL(None)
    for name, (option, value) in _KEEP_PAGES.items():
        if not libc.mallopt(option, value):
            raise SystemExit(f"this C library does not take {name}={value}")
    return jax_hremat.calibrate()


def _timed(runs_s: Sequence[float]) -> Timed:
    low, _, high = statistics.quantiles(runs_s, n=4)
    return Timed(statistics.median(runs_s), high - low)


def _different(candidates: Candidates) -> list[Candidate]:
    """Plans that differ: no rematerialization, the solver's at a few budgets, standard ones."""
    whole_bytes = candidates.bare.peak_bytes
    for fraction in FRACTIONS:
        Rounds(candidates, int(fraction * whole_bytes)).search()
    _ = candidates.lowest
    for chain, selection, _ in candidates.standard:
        if candidates.num_compiled >= MAX_PLANS:
            break
        candidates.add(chain, selection, candidates.bare.outcome)
    others = [c for c in candidates.within(10 * whole_bytes) if c is not candidates.bare]
    others.sort(key=lambda c: c.peak_bytes)
    # Both ends and evenly between.
    last = len(others) - 1
    count = min(MAX_PLANS - 1, len(others))
    return [candidates.bare, *(others[round(i * last / max(count - 1, 1))] for i in range(count))]


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements."""
    pairs = [pair for data in found for pair in data["pairs"]]
    rank = _rank_correlation([(p["estimated_s"], p["measured"]["median_s"]) for p in pairs])
    relative = [_relative(data) for data in found]
    errors = sorted(e / m - 1 for model in relative for e, m in model)
    within = sorted(abs(error) for error in errors)
    lines = [
        "# Estimated and measured step times on the CPU",
        "",
        "Made by `python -m benchmarks.times --models … --size small --target cpu`, then `--page`. "
        f"Medians of {NUM_RUNS} runs after one that is left out, the steps of a model in turn. The "
        "rates are those `jax_hremat.calibrate` found before: they are of large products, and "
        "steps of this size reach less, so the estimates are low throughout. The process keeps the "
        "pages it has freed, as a GPU's allocator does; with new pages in each step, those of less "
        "memory are faster for that alone.",
        "",
        command.where(found[0]),
        "",
        f"{len(pairs)} pairs of a model and a plan. Rank correlation (Spearman) of estimated and "
        f"measured time over all of them: {rank:.3f}. Most of that is the difference "
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
        own = _rank_correlation(both)
        lines.append(
            f"| {data['model']} | {len(both)} | {own:.2f} | {min(measured):.2f} … "
            f"{max(measured):.2f} | {min(estimated):.2f} … {max(estimated):.2f} |"
        )
    lines += [
        "",
        "## With nothing to do",
        "",
        "The step as it was written beside the emitted one at a budget that needs no checkpoint, "
        "in ms; in parentheses the distance of the quartiles.",
        "",
        "| model | as written | emitted | emitted over written |",
        "|---|---|---|---|",
    ]
    for data in found:
        written, emitted = data["original"], _bare(data)["measured"]
        lines.append(
            f"| {data['model']} | {_ms(written)} | {_ms(emitted)} "
            f"| {emitted['median_s'] / written['median_s']:.3f} |"
        )
    lines += [
        "",
        "## Every plan",
        "",
        "| model | checkpoints | peak MiB | estimated ms | measured ms (spread) |",
        "|---|---|---|---|---|",
    ]
    for data in found:
        for p in data["pairs"]:
            lines.append(
                f"| {data['model']} | {p['checkpoints']} | {mib(p['peak_bytes'])} "
                f"| {1e3 * p['estimated_s']:.2f} | {_ms(p['measured'])} |"
            )
    lines += command.models(found)
    return "\n".join(lines) + "\n"


def _rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's; not a number for fewer than three pairs."""
    found: Any = spearmanr(pairs) if len(pairs) > 2 else None
    return float("nan") if found is None else float(found.statistic)


def _relative(data: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Estimated and measured slowdown of each plan of a model that has checkpoints."""
    bare = _bare(data)
    return [
        (
            p["estimated_s"] / bare["estimated_s"],
            p["measured"]["median_s"] / bare["measured"]["median_s"],
        )
        for p in data["pairs"]
        if p is not bare
    ]


def _bare(data: Mapping[str, Any]) -> Mapping[str, Any]:
    (bare,) = [p for p in data["pairs"] if p["checkpoints"] == 0]
    return bare


def _ms(timed: Mapping[str, float]) -> str:
    return f"{1e3 * timed['median_s']:.2f} ({1e3 * timed['spread_s']:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "times-{}", "times-{}.md", measure, page)


if __name__ == "__main__":
    main()
