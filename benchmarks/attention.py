"""A Llama with fused attention, by hand and planned, and what its attention costs.

    python -m benchmarks.attention --models scan fsdp --target h200 --plans

writes one JSON file a variant below `docs/data/attention-<target>/`; `--page` makes
`docs/attention-<target>.md` from all of them. cuDNN's library must be installed (`gpu-aot-cudnn`).
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jax_hremat
from benchmarks import command
from benchmarks.measured import Setting, mib, ms, plan_row, say, setting_of, traced
from benchmarks.mesh import LAYOUTS, placed
from benchmarks.zoo import Problem
from benchmarks.zoo.fused import HAND, FusedConfig, fused_problem
from jax_hremat._cost.kernels import kernel_book
from jax_hremat._emit.emit import emit_flat
from jax_hremat._emit.step import Step, own_step
from jax_hremat._plan.openings import Openings
from jax_hremat._plan.region import Region
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.context import prepare
from jax_hremat._primitives.formulas import num_scores
from jax_hremat._primitives.kernels import array_of
from jax_hremat._xla.compile import compile_flat, never_run
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import KernelCost, estimate_step
from jax_hremat._xla.rates import rates

# `full` and MaxText's.
PRESETS = tuple(HAND)[:6]
_SMALL = dict(layers=2, width=256, heads=4, kv_heads=2, ff=512, vocab=512, batch=2, context=256)
# Fields of `FusedConfig`; the mesh of a variant is a layout of `benchmarks.mesh`; `budgets` is how
# many it is planned for besides, from the least that any plan fits to the peak without any.
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "scan": {},
    "fsdp": {"layout": "sharded"},
    "long": {"batch": 2, "context": 8192},
    "longer": {"batch": 1, "context": 16384, "layers": 4, "scan": False, "budgets": 5},
    "unrolled": {"layers": 4, "scan": False},
    "pallas": {"attention": "pallas"},
    "small": _SMALL,
}


@dataclass(frozen=True)
class AttentionRow:
    """One step, compiled, on one device.

    Attributes:
        label: What it is.
        peak_bytes: Compiled peak.
        step_s: Roofline estimate.
        attention_s: The part of it that is the attention's kernels.
        forwards: How often the attention's forward runs.
        backwards: How often its backward does.
        budget_bytes: For a plan, its budget.
    """

    label: str
    peak_bytes: int
    step_s: float
    attention_s: float
    forwards: int
    backwards: int
    budget_bytes: int | None = None


@dataclass(frozen=True)
class AttentionTable(Setting):
    """One variant.

    Attributes:
        forward_s: One forward of the attention, by its flops over the rate of products.
        backward_s: One backward likewise.
        layers: How many there are.
        unpriced: What the estimates leave out.
        hand: Nothing, and each policy around each layer.
        plans: A plan for the peak of each of those; empty if none were asked for.
        either: The better of these and of the plans with the scan written out; empty where there is
            no scan.
        swept: Plans for budgets from the least that any fits, evenly to the peak of nothing by
            hand; empty if none were asked for.
    """

    forward_s: float
    backward_s: float
    layers: int
    unpriced: Mapping[str, int]
    hand: Sequence[AttentionRow]
    plans: Sequence[AttentionRow] = field(default=())
    either: Sequence[AttentionRow] = field(default=())
    swept: Sequence[AttentionRow] = field(default=())


def measure(variant: str, target_name: str, plans: bool) -> AttentionTable:
    """Compile one variant under each policy, and plan it for the peak of each."""
    target = jax_hremat.get_target(target_name)
    options = dict(VARIANTS[variant])
    layout, num_budgets = options.pop("layout", None), options.pop("budgets", 0)
    config = FusedConfig(**options)
    jax_hremat.load_cudnn()

    def problem(remat: str | None) -> Problem:
        if layout is None:
            return fused_problem(variant, remat, **options)
        axes = LAYOUTS[layout].axes
        kinds = (AxisType.Auto,) * len(axes)
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), kinds)
        on_batch = NamedSharding(mesh, PartitionSpec("data"))
        return placed(LAYOUTS[layout])(fused_problem(variant, remat, on_batch, **options))

    hand = []
    unpriced: dict[str, int] = {}
    for remat in (None, *HAND):
        say(f"compiling {remat}", len(hand), len(HAND))
        step = own_step(traced(problem(remat)))
        row, unknown = _row(remat or "none", step, _plain(step), target, config)
        hand.append(row)
        unpriced |= unknown
    program = traced(problem(None))
    written_out = program.with_opened(Openings(scan_steps=config.layers))
    forward_flops = _flops(config)
    rate = rates(target).flops_per_s[array_of(config.dtype, ()).dtype]
    peaks = {row.label: row.peak_bytes for row in hand}
    search = _Plans(own_step(program), target, config) if plans else None
    as_is = search.at(peaks) if search is not None else []
    either = []
    if plans and config.scan:
        unrolled = _Plans(own_step(written_out), target, config).at(peaks)
        either = [min(rows, key=_time_then_peak) for rows in zip(as_is, unrolled, strict=True)]
    return AttentionTable(
        **setting_of(problem(None), target.name),
        forward_s=forward_flops / rate,
        backward_s=2.5 * forward_flops / rate,
        layers=config.layers,
        unpriced=unpriced,
        hand=hand,
        plans=as_is,
        either=either,
        swept=search.at(_evenly(search.least_bytes(), peaks["none"], num_budgets))
        if search is not None and num_budgets
        else (),
    )


def _time_then_peak(row: AttentionRow) -> tuple[float, int]:
    return row.step_s, row.peak_bytes


def _flops(config: FusedConfig) -> float:
    """4·B·H·T·S·D, half of it masked away."""
    scores = num_scores(config.context, config.context, causal=True)
    return 4.0 * config.batch * config.heads * scores * config.head_dim


def _plain(step: Step) -> Region:
    return Region(0, step.program.num_operations)


def _row(
    label: str, step: Step, root: Region, target: jax_hremat.Target, config: FusedConfig
) -> tuple[AttentionRow, Mapping[str, int]]:
    compiled = compile_flat(
        step.around(emit_flat(step.program, root)), step.avals, never_run(target)
    )
    roofline = estimate_step(parse_hlo(compiled.hlo_text), rates(target, kernel_book(step, {})))
    attention = [k for k in roofline.kernels if k.opcode.startswith("custom-call:")]
    backward = [k for k in attention if _is_backward(k)]
    runs = sum(k.executions for k in attention) - sum(k.executions for k in backward)
    row = AttentionRow(
        label=label,
        peak_bytes=compiled.memory.peak_bytes,
        step_s=roofline.time_s,
        attention_s=sum(k.time_s for k in attention),
        forwards=runs,
        backwards=sum(k.executions for k in backward),
    )
    return row, roofline.unknown


def _is_backward(kernel: KernelCost) -> bool:
    """By the scope that JAX puts around what is transposed; recomputed forwards lie in it too."""
    return "transpose(" in kernel.op_name and "rematted_computation" not in kernel.op_name


class _Plans:
    """The plans of one step."""

    def __init__(self, step: Step, target: jax_hremat.Target, config: FusedConfig) -> None:
        self._step, self._target, self._config = step, target, config
        context = prepare(step, target, jax_hremat.PlannerConfig(), 0.0, say)
        self._candidates = Candidates(context, say)

    def at(self, budgets_bytes: Mapping[str, int]) -> list[AttentionRow]:
        """A plan for each budget, by its label."""
        return [self._at(label, size) for label, size in budgets_bytes.items()]

    def least_bytes(self) -> int:
        """The least budget that a plan fits."""
        try:
            plan_row(self._candidates, "", 1)
        except jax_hremat.InfeasibleBudgetError as error:
            return error.min_budget_bytes
        raise AssertionError("a byte is too little")

    def _at(self, label: str, budget_bytes: int) -> AttentionRow:
        budgeted, plan = plan_row(self._candidates, label, budget_bytes)
        row, _ = _row(label, self._step, plan.root, self._target, self._config)
        return replace(row, budget_bytes=budgeted.budget_bytes)


def _evenly(first_bytes: int, last_bytes: int, count: int) -> dict[str, int]:
    """Budgets by what they are called."""
    step_bytes = (last_bytes - first_bytes) / (count - 1)
    sizes = [first_bytes + round(i * step_bytes) for i in range(count)]
    return {f"{mib(size)} MiB": size for size in sizes}


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """`docs/attention-<target>.md`."""
    lines = [
        f"# Fused attention, for the target {target}",
        "",
        "A Llama in plain JAX whose attention is a kernel that XLA only calls, compiled under "
        "policies by hand around each layer: MaxText's six; one that keeps what the attention's "
        "backward reads, by the primitive inside its custom rule; and both together. Peaks are "
        "the compiler's, times a roofline; see [fused attention](how-to/fused-attention.md) for "
        "what a kernel costs in it.",
    ]
    for one in found:
        lines += [
            "",
            f"## {one['model']}",
            "",
            f"{one['description']}. {one['date']}. {command.where(one)}",
            "",
            f"By 4·B·H·T·S·D and 10·B·H·T·S·D, half of them masked away, over the rate of matrix "
            f"products, a forward takes {ms(one['forward_s'])} ms and a backward "
            f"{ms(one['backward_s'])} ms.",
            "",
            *_table(one["hand"], one),
        ]
        if one["plans"]:
            lines += ["", "Planned for each of these peaks:", ""]
            lines += _beside(one["hand"], one["plans"])
        if one.get("either"):
            lines += [
                "",
                f"The same with `PlannerConfig(unroll_scans={one['layers']})`: the better of these "
                f"plans and those with the scan written out. By hand the layers stay a scan:",
                "",
            ]
            lines += _beside(one["hand"], one["either"])
        if one.get("swept"):
            lines += ["", "Planned for budgets from the least that any plan fits:", ""]
            lines += _swept(one["swept"])
    return "\n".join(lines) + "\n"


def _table(rows: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> list[str]:
    lines = [
        "| by hand, around each layer | peak MiB | est. ms | attention ms | by its flops | "
        "forwards |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        by_flops = row["forwards"] * one["forward_s"] + one["layers"] * one["backward_s"]
        lines.append(
            f"| {row['label']} | {mib(row['peak_bytes'])} | {ms(row['step_s'])} | "
            f"{ms(row['attention_s'])} | {ms(by_flops)} | {row['forwards']} |"
        )
    return lines


def _beside(hand: Sequence[Mapping[str, Any]], plans: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| at the peak of | by hand, ms | plan, ms | ratio | plan's peak MiB | forwards |",
        "|---|---|---|---|---|---|",
    ]
    for row, plan in zip(hand, plans, strict=True):
        lines.append(
            f"| {row['label']}, {mib(row['peak_bytes'])} MiB | {ms(row['step_s'])} | "
            f"{ms(plan['step_s'])} | {plan['step_s'] / row['step_s']:.3f} | "
            f"{mib(plan['peak_bytes'])} | {plan['forwards']} |"
        )
    ratios = [
        plan["step_s"] / row["step_s"]
        for row, plan in zip(hand, plans, strict=True)
        if row["label"] in PRESETS
    ]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    lines += [
        "",
        f"Over `full` and MaxText's presets the geometric mean of the ratios is {mean:.3f}.",
    ]
    return lines


def _swept(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| budget | plan's peak MiB | plan, ms | forwards | attention ms |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['label']} | {mib(row['peak_bytes'])} | {ms(row['step_s'])} | "
            f"{row['forwards']} | {ms(row['attention_s'])} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[], choices=tuple(VARIANTS))
    parser.add_argument("--target", default="h200", help="a name of jax_hremat.list_targets()")
    parser.add_argument("--plans", action="store_true", help="plan each for the peaks by hand")
    parser.add_argument("--out", type=Path, default=command.DOCS / "data", help="folder of data")
    parser.add_argument("--page", action="store_true", help="make the page from all data")
    options = parser.parse_args(argv)
    folder = options.out / f"attention-{options.target}"
    for variant in options.models:
        table = measure(variant, options.target, options.plans)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{variant}.json").write_text(json.dumps(asdict(table), indent=1) + "\n")
    if options.page:
        path = folder.parent.parent / f"attention-{options.target}.md"
        path.write_text(page(options.target, list(command.read(folder).values())))


if __name__ == "__main__":
    main()
