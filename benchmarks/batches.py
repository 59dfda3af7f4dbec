"""The largest batch that fits, and the fastest: plans beside no rematerialization and every layer.

The step is that of `benchmarks.training`: AdamW, donated state, four microbatches. By hand, the
largest of the sizes whose compiled step fits is found by halving; with the library it is
`max_batch`, which chooses for throughput.

    python -m benchmarks.batches --models gpt2-small --target h200

writes one JSON file a model below `docs/data/batches-<target>/`; `--page` makes
`docs/batches-<target>.md` from all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Setting, mib, ms, setting_of
from benchmarks.training import MICROBATCHES, make_step, step_args
from jax_hremat._calls.planned import Loss
from jax_hremat._emit.step import training_step
from jax_hremat._plan.region import Region
from jax_hremat._trace.call import Arguments
from jax_hremat._xla.certify import compile_step

BUDGETS = ("40GB", "80GB")
# Examples in a whole batch.
SIZES = tuple(range(32, 1025, 32))
MAX_TRIALS = 8
CONFIG = jax_hremat.PlannerConfig(max_rounds=1)


@dataclass(frozen=True)
class Batch:
    """One batch size and one way to run it; no peak where it does not fit."""

    size: int
    peak_bytes: int | None
    step_s: float | None

    @property
    def per_s(self) -> float:
        """Examples a second."""
        return self.size / self.step_s if self.step_s else 0.0


@dataclass(frozen=True)
class Within:
    """One budget.

    Attributes:
        no_remat: The largest batch as the model is; None if the smallest does not fit.
        every_layer: The same with `flax.linen.remat` on every layer.
        trials: What `max_batch` tried.
        seconds: What that took.
    """

    budget: str
    no_remat: Batch | None
    every_layer: Batch | None
    trials: Sequence[Batch]
    seconds: float


@dataclass(frozen=True)
class Batches(Setting):
    """One model."""

    budgets: Sequence[Within]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Batches:
    """Search under each budget."""
    problem = zoo.make(name, size)
    return Batches(
        **setting_of(problem, target_name),
        budgets=[_within(name, target_name, size, budget) for budget in BUDGETS],
    )


def _within(name: str, target_name: str, size: zoo.Size, budget: str) -> Within:
    problem = zoo.make(name, size)
    start_s = time.perf_counter()
    search = jax_hremat.max_batch(
        make_step,
        problem.loss_fn,
        budget=budget,
        sizes=SIZES,
        max_trials=MAX_TRIALS,
        target=target_name,
        config=CONFIG,
    )(step_args(problem, SIZES[0])[0], lambda count: step_args(problem, count)[1])
    return Within(
        budget=budget,
        no_remat=_largest(name, target_name, size, None, search.budget_bytes),
        every_layer=_largest(name, target_name, size, "block", search.budget_bytes),
        trials=[
            Batch(
                t.size,
                t.fitted.plan.certificate.peak_bytes if t.fitted else None,
                t.fitted.plan.estimated_step_s if t.fitted else None,
            )
            for t in search.trials
        ],
        seconds=time.perf_counter() - start_s,
    )


def _largest(
    name: str, target_name: str, size: zoo.Size, remat: zoo.Remat | None, budget_bytes: int
) -> Batch | None:
    """The largest batch of a step written by hand, compiled."""
    problem = zoo.make(name, size, remat=remat)
    target = jax_hremat.get_target(target_name)
    loss, _ = Loss.of(problem.loss_fn, (0,), False)
    best, low, high = None, -1, len(SIZES)
    while high - low > 1:
        middle = (low + high) // 2
        step = training_step(
            make_step,
            problem.loss_fn,
            loss.trace_as_jit,
            Arguments.of(step_args(problem, SIZES[middle]), {}),
            has_aux=False,
            donate_argnums=(0,),
        )
        compiled = compile_step(step, Region(0, step.program.num_operations), target)
        if compiled.memory.peak_bytes <= budget_bytes:
            best, low = Batch(SIZES[middle], compiled.memory.peak_bytes, compiled.step_s), middle
        else:
            high = middle
    return best


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# The largest and the fastest batch for the target {target}",
        "",
        f"Made by `python -m benchmarks.batches --models … --target {target}`, then `--page`, with "
        f"`max_batch`: AdamW, the state donated, {MICROBATCHES} microbatches in a `scan`. Peaks "
        "are those of the whole compiled step, times are estimates, nothing was run. By hand it "
        f"is the largest multiple of {SIZES[1] - SIZES[0]} whose step fits; examples a second is "
        "batch over estimated step.",
        "",
        command.where(found[0]),
        "",
        "| model | budget | step | batch | peak MiB | est. step ms | examples/s | over no remat |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for data in found:
        for within in data["budgets"]:
            lines += _lines(data["model"], within)
    lines += ["", "Tried, with examples a second:", ""]
    for data in found:
        for within in data["budgets"]:
            tried = ", ".join(map(_tried, within["trials"]))
            lines.append(f"- {data['model']}, {within['budget']}: {tried}.")
    lines += command.models(found)
    return "\n".join(lines) + "\n"


def _rate(row: Mapping[str, Any]) -> float:
    return row["size"] / row["step_s"]


def _tried(row: Mapping[str, Any]) -> str:
    """Such as `96 (333)`."""
    return f"{row['size']} ({f'{_rate(row):.0f}' if row['step_s'] else 'does not fit'})"


def _lines(model: str, within: Mapping[str, Any]) -> list[str]:
    base = within["no_remat"]
    fitting = [row for row in within["trials"] if row["step_s"]]
    rows = [
        ("no remat", base),
        ("every layer by hand", within["every_layer"]),
        ("plan, largest tried", max(fitting, key=lambda row: row["size"])),
        ("plan, fastest", max(fitting, key=_rate)),
    ]
    return [
        f"| {model} | {within['budget']} | {label} | {row['size']} | {mib(row['peak_bytes'])} "
        f"| {ms(row['step_s'])} | {_rate(row):.0f} "
        f"| {'' if base is None else f'{_rate(row) / _rate(base) - 1:+.1%}'} |"
        for label, row in rows
        if row is not None
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "batches-{}", "batches-{}.md", measure, page)


if __name__ == "__main__":
    main()
