"""Estimated beside measured step times, on the CPU or on the attached GPU.

Each model is planned for this device, its rates measured first, at a size that runs; the step as it
was written, the emitted one without rematerialization, standard plans and plans of the frontier
are run on real inputs, in turn, several times over. On a GPU the memory that they take is measured
too, and their times are also estimated with the published rates.

    python -m benchmarks.times --models gpt2-small lstm --size small --target cpu
    python -m benchmarks.times --models gpt2-6 gpt2-small encdec vit --target h200

writes one JSON file a model below `docs/data/times-cpu/`; `--page` makes `docs/times-cpu.md`. Run
it on a quiet machine: nothing else may compete for its cores or its GPU.
"""

from __future__ import annotations

import ctypes
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from scipy.stats import spearmanr

import jax_hremat
from benchmarks import command, zoo
from benchmarks.device import Timed, is_attached, measured_peak_bytes, timed_in_turn
from benchmarks.measured import Facts, candidates_of, mib, prepared
from jax_hremat._emit.emit import emit_flat
from jax_hremat._plan.region import Region
from jax_hremat._planner.budget_search import BudgetSearch
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import Candidates
from jax_hremat._xla.compile import memory_stats
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import rates

# The plan need not be good here, only different from the others.
CONFIG = jax_hremat.PlannerConfig(
    search=jax_hremat.SearchConfig(max_packings=2, max_saved_sets=1),
    max_rounds=0,
    cost="analytic",
)
FRACTIONS = (0.9, 0.75, 0.6)
MAX_PLANS = 8
NUM_RUNS = 9
# Options of glibc's `mallopt`: no separate mappings, one arena, and freed memory stays.
_KEEP_PAGES = {"M_MMAP_MAX": (-4, 0), "M_ARENA_MAX": (-8, 1), "M_TRIM_THRESHOLD": (-1, 2**31 - 1)}


@dataclass(frozen=True)
class Pair:
    """One plan, estimated and run.

    Attributes:
        checkpoints: `jax.checkpoint` regions in it.
        peak_bytes: Peak of the executable that was run, as compiled.
        certified_bytes: The same of the one that the planner looked at.
        estimated_s: Roofline with measured rates.
        published_s: Roofline with the target's published rates and efficiencies.
        measured: Its runs.
        measured_peak_bytes: The device's memory at its peak; None if the device does not say.
    """

    checkpoints: int
    peak_bytes: int
    certified_bytes: int
    estimated_s: float
    published_s: float
    measured: Timed
    measured_peak_bytes: int | None


@dataclass(frozen=True)
class Times(Facts):
    """One model.

    Attributes:
        rates: What the device was measured to sustain before.
        original: The step as it was written.
        pairs: The plans.
    """

    rates: Mapping[str, Any]
    original: Timed
    pairs: Sequence[Pair]


def measure(name: str, target_name: str, size: zoo.Size = "small") -> Times:
    """Plan one model, and run some of the plans."""
    published = jax_hremat.get_target(target_name)
    if not is_attached(published):
        raise SystemExit(f"steps are run on this machine, where no {target_name} is attached")
    problem = zoo.make(name, size)
    target = this_device()
    context, facts = prepared(name, target, size, CONFIG)
    candidates = candidates_of(context)
    # From the least peak up, so that each run's is the highest so far.
    chosen = sorted(_different(candidates), key=lambda c: c.peak_bytes)
    args = problem.concrete(0)

    def compiled(step: Any) -> jax.stages.Compiled:
        return jax.jit(step, compiler_options=dict(target.compiler_options)).lower(*args).compile()

    def planned(root: Region) -> Any:
        step = context.program.step(emit_flat(context.program, root))
        return lambda *args: step(*jax.tree.leaves(args))

    original = compiled(problem.value_and_grad)
    steps = [compiled(planned(c.root)) for c in chosen]
    peaks = [measured_peak_bytes(step, args) for step in steps]
    first, *runs = timed_in_turn([original, *steps], args, NUM_RUNS)
    texts = [parse_hlo(step.as_text() or "") for step in steps]
    return Times(
        **facts,
        rates={
            "matrix_flops_per_s": dict(target.matrix_flops_per_s),
            "convolution_flops_per_s": dict(target.convolution_flops_per_s),
            "vector_flops_per_s": target.vector_flops_per_s,
            "bandwidth_bytes_per_s": target.bandwidth_bytes_per_s,
            "launch_s": target.launch_s,
        },
        original=first,
        pairs=[
            Pair(
                checkpoints=candidate.root.num_checkpointed,
                peak_bytes=memory_stats(step).peak_bytes,
                certified_bytes=candidate.peak_bytes,
                estimated_s=estimate_step(text, rates(target)).time_s,
                published_s=estimate_step(text, rates(published)).time_s,
                measured=run,
                measured_peak_bytes=peak,
            )
            for candidate, step, text, run, peak in zip(
                chosen, steps, texts, runs, peaks, strict=True
            )
        ],
    )


@functools.cache
def this_device() -> jax_hremat.Target:
    """JAX's default device with measured rates; a CPU once freed memory stays with the process.

    There a page that is new to the process can cost more than all that is computed in it, and a
    step that takes less memory is then faster for that alone; a GPU's allocator keeps what it has.
    """
    if jax.default_backend() == "cpu":
        libc = ctypes.CDLL(None)
        for name, (option, value) in _KEEP_PAGES.items():
            if not libc.mallopt(option, value):
                raise SystemExit(f"this C library does not take {name}={value}")
    return jax_hremat.calibrate()


def _different(candidates: Candidates) -> list[Candidate]:
    """Plans that differ: no rematerialization, the solver's at a few budgets, standard ones."""
    whole_bytes = candidates.plain.peak_bytes
    for fraction in FRACTIONS:
        BudgetSearch(candidates, int(fraction * whole_bytes)).search()
    candidates.compile_lowest()
    for plan in sorted(candidates.chains.standard, key=lambda plan: plan.prediction.peak_bytes):
        if candidates.num_compiled >= MAX_PLANS:
            break
        candidates.add(plan.chain, plan.selection, candidates.plain.outcome)
    others = [c for c in candidates.within(10 * whole_bytes) if c is not candidates.plain]
    others.sort(key=lambda c: c.peak_bytes)
    # Both ends and evenly between.
    last = len(others) - 1
    count = min(MAX_PLANS - 1, len(others))
    return [candidates.plain, *(others[round(i * last / max(count - 1, 1))] for i in range(count))]


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements."""
    on_cpu = target == "cpu"
    pairs = [pair for data in found for pair in data["pairs"]]
    rank = rank_correlation([(p["estimated_s"], p["measured"]["median_s"]) for p in pairs])
    relative = [_relative(data) for data in found]
    lines = [
        f"# Estimated and measured step times on {'the CPU' if on_cpu else target}",
        "",
        f"Made by `python -m benchmarks.times --models … --size {'small' if on_cpu else 'full'} "
        f"--target {target}`, then `--page`. Medians of {NUM_RUNS} measurements, the steps of a "
        "model in turn. The rates are those `jax_hremat.calibrate` found before: they are of large "
        "products, and those of a model reach less"
        + (
            ", so the estimates are low throughout. The process keeps the pages it has freed, as a "
            "GPU's allocator does; with new pages in each step, those of less memory are faster "
            "for that alone."
            if on_cpu
            else "."
        ),
        "",
        command.where(found[0]),
        "",
        f"{len(pairs)} pairs of a model and a plan. Rank correlation (Spearman) of estimated and "
        f"measured time over all of them: {rank:.3f}. Most of that is the difference "
        "between models; the table has it for the plans of each.",
        "",
        "The error that matters is that of a slowdown, since plans are only compared with each "
        "other: estimated over measured time, each over no rematerialization. Its absolute value: "
        f"{errors_in_words(relative)}.",
        "",
        "| model | plans | rank correlation | measured slowdown, from … to | estimated |",
        "|---|---|---|---|---|",
    ]
    for data, both in zip(found, relative, strict=True):
        estimated, measured = zip(*both, strict=True)
        own = rank_correlation(both)
        lines.append(
            f"| {data['model']} | {len(both)} | {own:.2f} | {min(measured):.2f} … "
            f"{max(measured):.2f} | {min(estimated):.2f} … {max(estimated):.2f} |"
        )
    if not on_cpu:
        lines += _device_sections(found)
    lines += [
        "",
        "## Without checkpoints",
        "",
        "The step as it was written, and the one that the library emits at a budget that needs "
        "no checkpoint, in ms; in parentheses the distance of the quartiles.",
        "",
        "| model | as written | emitted | emitted over written |",
        "|---|---|---|---|",
    ]
    for data in found:
        under_policy, emitted = data["original"], _plain(data)["measured"]
        lines.append(
            f"| {data['model']} | {ms_and_spread(under_policy)} | {ms_and_spread(emitted)} "
            f"| {emitted['median_s'] / under_policy['median_s']:.3f} |"
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
                f"| {1e3 * p['estimated_s']:.2f} | {ms_and_spread(p['measured'])} |"
            )
    lines += command.models(found)
    return "\n".join(lines) + "\n"


def _device_sections(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What only a device with an allocator and published rates shows."""
    published = [_relative(data, "published_s") for data in found]
    pairs = [pair for data in found for pair in data["pairs"]]
    peaks = sorted(p["measured_peak_bytes"] / p["peak_bytes"] - 1 for p in pairs)
    compiled = sorted(p["peak_bytes"] / p["certified_bytes"] - 1 for p in pairs)
    rates = found[0]["rates"]
    matrix = ", ".join(f"{d} {r / 1e12:.0f}" for d, r in rates["matrix_flops_per_s"].items())
    convolution = ", ".join(
        f"{d} {r / 1e12:.0f}" for d, r in rates["convolution_flops_per_s"].items()
    )
    lines = [
        "",
        "## Rates",
        "",
        f"Measured in the process of {found[0]['model']}: products {matrix} TFLOP/s, convolutions "
        f"{convolution} TFLOP/s, other arithmetic {rates['vector_flops_per_s'] / 1e12:.1f} "
        f"TFLOP/s, memory {rates['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"{1e6 * rates['launch_s']:.2f} µs a kernel. With the published rates and efficiencies "
        f"instead, the absolute error of a slowdown: {errors_in_words(published)}.",
        "",
        "| model | measured over estimated step, measured rates | published rates |",
        "|---|---|---|",
    ]
    for data in found:
        plain = _plain(data)
        median_s = plain["measured"]["median_s"]
        lines.append(
            f"| {data['model']} | {median_s / plain['estimated_s']:.2f} "
            f"| {median_s / plain['published_s']:.2f} |"
        )
    return [
        *lines,
        "",
        "## Memory",
        "",
        "The device's memory at the peak of a run, arguments included, over the peak that the "
        f"executable was compiled to: {peaks[0]:+.2%} to {peaks[-1]:+.2%}, median "
        f"{statistics.median(peaks):+.2%}. That over the certified peak, of the step as the "
        f"planner compiled it on the device: {compiled[0]:+.2%} to {compiled[-1]:+.2%}, median "
        f"{statistics.median(compiled):+.2%}.",
    ]


def errors_in_words(relative: Sequence[Sequence[tuple[float, float]]]) -> str:
    """The errors of all slowdowns, estimated and measured, in words."""
    errors = sorted(e / m - 1 for model in relative for e, m in model)
    within = sorted(abs(error) for error in errors)
    return (
        f"median {statistics.median(within):.1%}, nine tenths within "
        f"{within[int(0.9 * (len(within) - 1))]:.1%}, worst {within[-1]:.1%}; signed from "
        f"{errors[0]:+.1%} to {errors[-1]:+.1%}"
    )


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's; not a number for fewer than three pairs."""
    found: Any = spearmanr(pairs) if len(pairs) > 2 else None
    return float("nan") if found is None else float(found.statistic)


def _relative(data: Mapping[str, Any], estimate: str = "estimated_s") -> list[tuple[float, float]]:
    """Estimated and measured slowdown of each plan of a model that has checkpoints."""
    plain = _plain(data)
    return [
        (
            p[estimate] / plain[estimate],
            p["measured"]["median_s"] / plain["measured"]["median_s"],
        )
        for p in data["pairs"]
        if p is not plain
    ]


def _plain(data: Mapping[str, Any]) -> Mapping[str, Any]:
    (plain,) = [p for p in data["pairs"] if p["checkpoints"] == 0]
    return plain


def ms_and_spread(timed: Mapping[str, float]) -> str:
    """The median of runs in ms, and in parentheses the distance of the quartiles, as a cell."""
    return f"{1e3 * timed['median_s']:.2f} ({1e3 * timed['spread_s']:.2f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "times-{}", "times-{}.md", measure, page)


if __name__ == "__main__":
    main()
