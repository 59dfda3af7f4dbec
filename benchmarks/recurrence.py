"""How the least memory of a recurrence grows with the number of its steps.

A sequence classifier, an LSTM whose last state alone is used, over more and more steps: without
rematerialization, with every step in `flax.linen.remat`, in √n segments by hand, and as planned.

    python -m benchmarks.recurrence --models lstm-last --target h200

writes `docs/data/recurrence-<target>/lstm-last.json`; `--page` makes
`docs/recurrence-<target>.md` of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Facts, Row, candidates_of, mib, ms, plan_row, prepared
from jax_hremat._plan.region import Loop, Region
from jax_hremat._planner.context import PlanningContext
from jax_hremat._trace.bodies import Scan

STEPS = (512, 2048, 8192)


@dataclass(frozen=True)
class Length(Facts):
    """One number of steps.

    Attributes:
        steps: The number.
        fixed_bytes: Arguments and outputs of the step, which no plan changes.
        every_step: Every step checkpointed, by hand.
        segments: Segments of √n steps, each step checkpointed too, by hand.
        least: The plan of least peak.
    """

    steps: int
    fixed_bytes: int
    every_step: Row
    segments: Row
    least: Row


@dataclass(frozen=True)
class Recurrence:
    """One model over all numbers of steps."""

    model: str
    found: Sequence[Length]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Recurrence:
    """Plan and compile one recurrent model over all numbers of steps."""
    target = jax_hremat.get_target(target_name)
    found = []
    for steps in STEPS:
        context, facts = prepared(name, target, size, context=steps)
        candidates = candidates_of(context)
        candidates.compile_lowest()
        least_bytes = candidates.least.peak_bytes
        found.append(
            Length(
                **facts,
                steps=steps,
                fixed_bytes=context.fixed_bytes,
                every_step=_by_hand(context, "every step"),
                segments=_by_hand(context, "√n segments", round(math.sqrt(steps))),
                least=plan_row(candidates, "least", least_bytes)[0],
            )
        )
    return Recurrence(name, found)


def _by_hand(context: PlanningContext, label: str, *segments: int) -> Row:
    """Every step of every scan checkpointed, in segments."""
    loops = []
    for at, scan in sorted(context.costs.bodies.items()):
        assert isinstance(scan, Scan), "a recurrence has no cond"
        step = Region(0, len(scan.body.graph.operations), checkpointed=True)
        loops.append(Region(at, at + 1, loop=Loop(step, segments)))
    root = Region(0, len(context.costs.graph.operations), children=tuple(loops))
    compiled = context.compile_step(root)
    return Row(label, compiled.memory.peak_bytes, compiled.step_s)


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    first = found[0]["found"][0]
    lines = [
        f"# Recurrences for the target {target}",
        "",
        f"Made by `python -m benchmarks.recurrence --models … --target {target}`, then `--page`. "
        "Compiled peaks in MiB without arguments and outputs, and the estimated step; behind each, "
        "how many times that of the row above.",
        "",
        command.where(first),
    ]
    for model in found:
        lines += [
            "",
            f"## {model['model']}",
            "",
            f"{model['found'][0]['description']}, and longer. {model['found'][0]['date']}.",
            "",
            "| steps | no remat | every step by hand | √n segments by hand | plan of least peak |",
            "|---|---|---|---|---|",
        ]
        before: Mapping[str, Any] | None = None
        for row in model["found"]:
            cells = []
            for key in ("no_remat", "every_step", "segments", "least"):
                size = row[key]["peak_bytes"] - row["fixed_bytes"]
                words = f"{mib(size)} ({ms(row[key]['step_s'])} ms)"
                if before is not None:
                    words += f" ×{size / (before[key]['peak_bytes'] - before['fixed_bytes']):.2f}"
                cells.append(words)
            lines.append(f"| {row['steps']} | {' | '.join(cells)} |")
            before = row
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "recurrence-{}", "recurrence-{}.md", measure, page)


if __name__ == "__main__":
    main()
