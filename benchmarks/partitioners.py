"""Plans of the same models with every partitioner: what planning takes, and what comes out.

    python -m benchmarks.partitioners --models gpt2-6 encdec unet --size small --target h200

writes one JSON file a model below `docs/data/partitioners-<target>/`; `--page` makes
`docs/partitioners-<target>.md` from all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Facts, Row, candidates_of, mib, ms, plan_row, prepared
from jax_hremat._trace.graph import Graph

FRACTIONS = (0.8, 0.6)
# Some partitioners make many kinds of blocks, so few options of each are compiled.
SEARCH = jax_hremat.SearchConfig(max_packings=2, max_saved_sets=1)


def every_hundred(graph: Graph) -> range:
    """A partitioner of a user's own: a block is a hundred operations."""
    return range(0, len(graph.operations), 100)


PARTITIONERS = (
    jax_hremat.partition_by_width,
    jax_hremat.partition_by_repeats,
    jax_hremat.partition_by_score,
    jax_hremat.partition_flat,
    every_hundred,
)


@dataclass(frozen=True)
class One(Facts):
    """One model with one partitioner.

    Attributes:
        plans: Plans at the fractions of the no-remat peak; where one is infeasible, at the least
            budget that the refusal names.
    """

    partitioner: str
    plans: Sequence[Row]


@dataclass(frozen=True)
class Partitioners:
    """One model with every partitioner."""

    model: str
    found: Sequence[One]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Partitioners:
    """Plan one model with every partitioner."""
    target = jax_hremat.get_target(target_name)
    found = []
    for partitioner in PARTITIONERS:
        config = jax_hremat.PlannerConfig(search=SEARCH, partitioner=partitioner, max_rounds=1)
        context, facts = prepared(name, target, size, config)
        plans = []
        for fraction in FRACTIONS:
            budget_bytes = int(fraction * context.baseline.memory.peak_bytes)
            try:
                plans.append(plan_row(candidates_of(context), f"{fraction:g}", budget_bytes)[0])
            except jax_hremat.InfeasibleBudgetError as error:
                label = f"{fraction:g} is infeasible: floor"
                plans.append(plan_row(candidates_of(context), label, error.min_budget_bytes)[0])
        found.append(One(**facts, partitioner=partitioner.__name__, plans=plans))
    return Partitioners(name, found)


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    first = found[0]["found"][0]
    plans = " | ".join(f"at {fraction:.0%}: certified ≤ budget MiB, step" for fraction in FRACTIONS)
    lines = [
        f"# Partitioners compared, for the target {target}",
        "",
        f"Made by `python -m benchmarks.partitioners --models … --target {target}`, then "
        "`--page`. What each is for: [partitioners.md](reference/partitioners.md). "
        "Budgets are parts of the no-remat peak; steps are estimates, over no rematerialization.",
        "",
        command.where(first),
        "",
        f"| model | partitioner | blocks (kinds) | compiles | cost s | {plans} |",
        "|---|---|---|---|---|" + "---|" * len(FRACTIONS),
    ]
    for one in (one for model in found for one in model["found"]):
        base_s = one["no_remat"]["step_s"]
        cells = " | ".join(
            f"{mib(row['peak_bytes'])} ≤ {mib(row['budget_bytes'])}, "
            f"{row['step_s'] / base_s - 1:+.1%}"
            + ("" if row["label"][-1].isdigit() else f" ({row['label']})")
            for row in one["plans"]
        )
        lines.append(
            f"| {one['model']} | `{one['partitioner']}` | {one['num_blocks']} "
            f"({one['num_kinds']}) | {one['num_block_compiles']} | {one['timings_s']['cost']:.0f} "
            f"| {cells} |"
        )
    lines += [""]
    for model in found:
        one = model["found"][0]
        lines.append(
            f"- {model['model']}: {one['description']}. No rematerialization: "
            f"{mib(one['no_remat']['peak_bytes'])} MiB, {ms(one['no_remat']['step_s'])} ms. "
            f"{one['date']}."
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "partitioners-{}", "partitioners-{}.md", measure, page)


if __name__ == "__main__":
    main()
