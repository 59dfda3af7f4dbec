"""Steps on eight devices: plans beside per-layer remat, with weights whole, split, or gathered.

    python -m benchmarks.mesh --models gpt2-small llama-scan --target h200

writes one JSON file a model below `docs/data/mesh-<target>/`; `--page` makes
`docs/mesh-<target>.md` from all of them. The batch is the zoo's for each device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import (
    Facts,
    Place,
    Row,
    candidates_of,
    hand_row,
    mib,
    ms,
    plan_row,
    prepared,
)

CONFIG = jax_hremat.PlannerConfig(max_rounds=2)
NUM_DEVICES = 8
# Budgets, as parts of the no-remat peak.
FRACTIONS = (0.8, 0.6)

# From the shape of a weight to how it is split.
SplitWeight = Callable[[tuple[int, ...]], PartitionSpec]


@dataclass(frozen=True)
class MeshLayout:
    """How a step lies on the devices.

    Attributes:
        about: In words.
        axes: Axes of the mesh; the batch is split over "data".
        weight: How a weight is split.
    """

    about: str
    axes: Mapping[str, int]
    weight: SplitWeight


def _whole(shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec()


def _over_data(shape: tuple[int, ...]) -> PartitionSpec:
    """The largest dimension that eight divides; each layer of a scan stays together."""
    splittable = [i for i, extent in enumerate(shape) if extent % NUM_DEVICES == 0]
    at = max(splittable, key=lambda i: (shape[i], i), default=None)
    return PartitionSpec(*("data" if i == at else None for i in range(len(shape))))


def _over_model(shape: tuple[int, ...]) -> PartitionSpec:
    """The largest dimension of a matrix in two."""
    if len(shape) < 2:
        return PartitionSpec()
    at = max(range(len(shape)), key=lambda i: (shape[i] % 2 == 0, shape[i], i))
    return PartitionSpec(*("model" if i == at else None for i in range(len(shape))))


LAYOUTS = {
    "data": MeshLayout("batch over 8, weights whole on each", {"data": 8}, _whole),
    "sharded": MeshLayout("batch and weights over the same 8 (FSDP)", {"data": 8}, _over_data),
    "tensor": MeshLayout("batch over 4, weights over 2", {"data": 4, "model": 2}, _over_model),
}


@dataclass(frozen=True)
class OnMesh(Facts):
    """One model in one layout."""

    layout: str
    about: str
    hand: Row
    plans: Sequence[Row]


@dataclass(frozen=True)
class Meshes:
    """One model in every layout."""

    model: str
    found: Sequence[OnMesh]


def placed(layout: MeshLayout) -> Place:
    """Puts a model's arguments on the devices, with as large a batch for each as it has alone."""
    names, sizes = tuple(layout.axes), tuple(layout.axes.values())
    mesh = AbstractMesh(sizes, names, (AxisType.Auto,) * len(sizes))
    copies = layout.axes["data"]

    def on(struct: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return struct.update(sharding=NamedSharding(mesh, spec))

    def batch(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not struct.shape:
            return on(struct, PartitionSpec())
        first, *rest = struct.shape
        return on(struct.update(shape=(first * copies, *rest)), PartitionSpec("data"))

    def place(problem: zoo.Problem) -> zoo.Problem:
        weights, *others = problem.args
        split = jax.tree.map(lambda w: on(w, layout.weight(w.shape)), weights)
        return replace(problem, args=(split, *jax.tree.map(batch, others)))

    return place


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Meshes:
    """Plan one model in every layout."""
    target = jax_hremat.get_target(target_name)
    found = []
    for key, layout in LAYOUTS.items():
        place = placed(layout)
        hand = hand_row(name, size, "block", target, place)
        context, facts = prepared(name, target, size, CONFIG, place)
        candidates = candidates_of(context)
        whole_bytes = context.baseline.memory.peak_bytes
        budgets = {f"{part:.0%}": int(part * whole_bytes) for part in FRACTIONS}
        budgets["every layer's peak"] = hand.peak_bytes
        plans = []
        for label, budget_bytes in budgets.items():
            try:
                plans.append(plan_row(candidates, label, budget_bytes)[0])
            except jax_hremat.InfeasibleBudgetError as error:
                label = f"{label}: least possible"
                plans.append(plan_row(candidates, label, error.min_budget_bytes)[0])
        found.append(OnMesh(**facts, layout=key, about=layout.about, hand=hand, plans=plans))
    return Meshes(name, found)


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """`docs/mesh-<target>.md`."""
    each = [one for model in found for one in model["found"]]
    lines = [
        f"# Steps on eight devices, for the target {target}",
        "",
        "Made by `python -m benchmarks.mesh --models … --target "
        f"{target}`, then `--page`; how to read peaks and times: "
        f"[measurements-{target}.md](measurements-{target}.md). All figures are of one device: "
        "bytes in MiB, steps estimated, including what the devices exchange, at eight tenths of "
        "the link's published rate. Steps of plans are over no rematerialization in the same "
        "layout. Each gradient is sharded like its weight.",
        "",
        command.where(each[0]),
        "",
        "| model | layout | no remat | by hand: every layer | plans: certified ≤ budget (step) "
        "| predicted peak over certified |",
        "|---|---|---|---|---|---|",
        *map(_line, each),
    ]
    seen = {one["model"]: one for one in each}
    return "\n".join([*lines, *command.models(list(seen.values()))]) + "\n"


def _line(one: Mapping[str, Any]) -> str:
    base = one["no_remat"]

    def over(row: Mapping[str, Any]) -> str:
        return f"{row['step_s'] / base['step_s'] - 1:+.1%}"

    plans = "; ".join(
        f"{mib(p['peak_bytes'])} ≤ {mib(p['budget_bytes'])} ({over(p)})" for p in one["plans"]
    )
    errors = ", ".join(f"{p['predicted_peak_bytes'] / p['peak_bytes']:.2f}" for p in one["plans"])
    hand = one["hand"]
    return (
        f"| {one['model']} | {one['about']} | {mib(base['peak_bytes'])}, {ms(base['step_s'])} ms "
        f"| {mib(hand['peak_bytes'])} ({over(hand)}) | {plans} | {errors} |"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "mesh-{}", "mesh-{}.md", measure, page)


if __name__ == "__main__":
    main()
