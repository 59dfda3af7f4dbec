"""A Llama with fused attention under policies by hand, run on the attached device.

    python -m benchmarks.fused --target h200

compiles the steps of `benchmarks.attention`'s table for the device as it is, runs them, and the
attention alone too, and writes `docs/data/fused-h200.json` and `docs/fused-h200.md`. Where no
device of that target is attached, the steps are compiled and estimated only. `--size tiny
--target cpu` is a rehearsal with XLA's own attention.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

import jax_hremat
from benchmarks import command
from benchmarks.device import Timed, is_attached, machine, measured_peak_bytes, timed_in_turn
from benchmarks.measured import mib, ms
from benchmarks.zoo import Problem
from benchmarks.zoo.fused import HAND, FusedConfig, attend, fused_problem
from jax_hremat._primitives.formulas import num_scores
from jax_hremat._xla.compile import compile_flat, compiler_versions, memory_stats
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import rates

# None is no checkpoint at all.
POLICIES: Sequence[str | None] = (None, *HAND)
SIZES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "tiny": dict(
        layers=2, width=32, heads=4, kv_heads=2, ff=48, batch=2, context=16, vocab=64,
        attention="xla",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One policy.

    Attributes:
        label: Its name.
        peak_bytes: Compiled peak.
        estimated_s: Roofline with the target's rates.
        unknown: What the estimate does not price, and how often it is in the text.
        measured: Runs of the step; None if no device of the target is attached.
        measured_peak_bytes: The device's memory at its peak, likewise.
    """

    label: str
    peak_bytes: int
    estimated_s: float
    unknown: Mapping[str, int]
    measured: Timed | None
    measured_peak_bytes: int | None


@dataclass(frozen=True)
class Alone:
    """The attention of one layer by itself.

    Attributes:
        forward_flops: Those of its products; its backward takes two and a half times as many.
        forward: Runs of the forward.
        both: Runs of forward and backward.
    """

    forward_flops: float
    forward: Timed
    both: Timed


@dataclass(frozen=True)
class Found:
    """All of one target."""

    target: str
    description: str
    versions: Mapping[str, str]
    machine: str
    date: str
    rows: Sequence[Row]
    alone: Alone | None


def measure(options: Mapping[str, Any], target: jax_hremat.Target) -> Found:
    """Compile the step under each policy, and run it if the target is attached."""
    attached = is_attached(target)
    problems = {policy or "none": fused_problem("fused", policy, **options) for policy in POLICIES}
    first = next(iter(problems.values()))
    args = first.concrete() if attached else None
    return Found(
        target=target.name,
        description=first.description,
        versions=compiler_versions(),
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
        rows=_estimated(problems, target) if args is None else _run(problems, target, args),
        alone=None if args is None else _alone(FusedConfig(**options)),
    )


def _estimated(problems: Mapping[str, Problem], target: jax_hremat.Target) -> list[Row]:
    if target.platform != "cpu":
        jax_hremat.load_cudnn()
    rows = []
    for label, problem in problems.items():
        step = jax.value_and_grad(problem.loss_fn)
        shapes, tree = jax.tree.flatten(problem.args)
        compiled = compile_flat(lambda *flat, s=step, t=tree: s(*t.unflatten(flat)), shapes, target)
        rows.append(_row(label, compiled.memory.peak_bytes, compiled.hlo_text, target))
    return rows


def _run(
    problems: Mapping[str, Problem], target: jax_hremat.Target, args: Sequence[Any]
) -> list[Row]:
    """The peaks from the least up, so that each is the highest so far."""
    options = dict(target.compiler_options)
    steps = {
        label: jax.jit(jax.value_and_grad(problem.loss_fn), compiler_options=options)
        .lower(*args)
        .compile()
        for label, problem in problems.items()
    }
    by_peak = sorted(steps, key=lambda label: memory_stats(steps[label]).peak_bytes)
    peaks = {label: measured_peak_bytes(steps[label], args) for label in by_peak}
    times = timed_in_turn(list(steps.values()), args)
    return [
        _row(
            label,
            memory_stats(step).peak_bytes,
            step.as_text() or "",
            target,
            timed,
            peaks[label],
        )
        for (label, step), timed in zip(steps.items(), times, strict=True)
    ]


def _row(
    label: str,
    peak_bytes: int,
    hlo_text: str,
    target: jax_hremat.Target,
    measured: Timed | None = None,
    measured_peak: int | None = None,
) -> Row:
    roofline = estimate_step(parse_hlo(hlo_text), rates(target))
    unknown = dict(sorted(roofline.unknown.items()))
    return Row(label, peak_bytes, roofline.time_s, unknown, measured, measured_peak)


def _alone(config: FusedConfig) -> Alone:
    heads = (config.heads, config.kv_heads, config.kv_heads, config.heads)
    args = [
        jax.random.normal(k, (config.batch, config.context, n, config.head_dim), config.dtype)
        for k, n in zip(jax.random.split(jax.random.key(0), 4), heads, strict=True)
    ]

    def forward(q: Any, k: Any, v: Any, _: Any) -> jax.Array:
        return attend(config, q, k, v)

    def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda *qkv: attend(config, *qkv), q, k, v)
        return out, pullback(cotangent)

    executables = [jax.jit(fun).lower(*args).compile() for fun in (forward, both)]
    scores = num_scores(config.context, config.context, causal=True)
    flops = 4.0 * config.batch * config.heads * scores * config.head_dim
    return Alone(flops, *timed_in_turn(executables, args))


def page(data: Mapping[str, Any]) -> str:
    """The Markdown page made of what was found."""
    rows, alone = data["rows"], data["alone"]
    (base,) = [row for row in rows if row["label"] == "none"]
    lines = [
        f"# Fused attention under policies by hand, for the target {data['target']}",
        "",
        f"Made by `python -m benchmarks.fused --target {data['target']}`. {data['description']}. "
        "`jax.checkpoint` around each step of the scan; peaks are compiled ones, times estimated "
        "by roofline, in parentheses over no checkpoint. "
        + (
            "Measured are medians of runs in turn, in parentheses over no checkpoint, and the "
            "device's memory at its peak, arguments included."
            if alone
            else "Nothing was run."
        ),
        "",
        f"{command.where(data)} {data['date']}.",
        "",
        "| policy | peak MiB | measured | estimated ms | measured ms | spread |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        estimated_s, run = row["estimated_s"], row["measured"]
        peak = row["measured_peak_bytes"]
        lines.append(
            f"| {row['label']} | {mib(row['peak_bytes'])} | {'' if peak is None else mib(peak)} "
            f"| {ms(estimated_s)} ({estimated_s / base['estimated_s']:.3f}) "
            + (
                f"| {ms(run['median_s'])} ({run['median_s'] / base['measured']['median_s']:.3f}) "
                f"| {ms(run['spread_s'])} |"
                if run
                else "| | |"
            )
        )
    unknown = sorted({name for row in rows for name in row["unknown"]})
    if unknown:
        lines += ["", f"Not priced in the estimates: {', '.join(f'`{name}`' for name in unknown)}."]
    if alone:
        lines += ["", *_attention_lines(alone)]
    return "\n".join(lines) + "\n"


def _attention_lines(alone: Mapping[str, Any]) -> list[str]:
    forward_s = alone["forward"]["median_s"]
    backward_s = alone["both"]["median_s"] - forward_s
    flops = alone["forward_flops"]
    return [
        f"The attention of one layer alone: forward {ms(forward_s)} ms, "
        f"{flops / forward_s / 1e12:.0f} TFLOP/s by 4·B·H·T·S·D; backward (both less the forward) "
        f"{ms(backward_s)} ms, {2.5 * flops / backward_s / 1e12:.0f} TFLOP/s by 10·B·H·T·S·D; half "
        "of each, since it is causal."
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and make the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="h200", help="a name of jax_hremat.list_targets()")
    parser.add_argument("--size", default="full", choices=tuple(SIZES))
    parser.add_argument("--out", type=Path, default=command.DOCS, help="the folder of the page")
    options = parser.parse_args(argv)
    found = asdict(measure(SIZES[options.size], jax_hremat.get_target(options.target)))
    name = f"fused-{options.target}"
    (options.out / "data").mkdir(parents=True, exist_ok=True)
    (options.out / "data" / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(page(found))


if __name__ == "__main__":
    main()
