"""The whole trade between memory and time of the models, beside what a user does by hand.

For each model: the frontier (certified plans for budgets from the least peak to no
rematerialization), each policy a user writes by hand with `flax.linen.remat`, compiled for the same
target, and a plan whose budget is that policy's peak.

    python -m benchmarks.frontier --models gpt2-6 encdec --target h200

writes one JSON file a model below `docs/data/frontier-<target>/`; `--page` makes
`docs/frontier-<target>.md` and its pictures from all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import (
    Facts,
    Row,
    candidates_of,
    hand_row,
    mib,
    ms,
    plan_row,
    prepared,
    preset_rows,
    row_of,
)
from jax_hremat._options.roles import PRESETS
from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.goals import Terms, frontier_plans
from jax_hremat._shared.hull import above_lower_hull

HAND_POLICIES = ("block", "dots_saveable", "dots_with_no_batch_dims_saveable")
NUM_BUDGETS = 20
SLOWDOWNS = (1.05, 1.10, 1.15)
# As a part of the step without rematerialization.
FAR_ABOVE = 0.01
_GIB = 2.0**30
_LEAST_RATIO = 0.05
_NUM_HALVINGS = 9


@dataclass(frozen=True)
class Trade(Facts):
    """One model.

    Attributes:
        fixed_bytes: Arguments and outputs of the step, which no plan changes.
        loss_bytes: What the last block, which makes the loss, needs in its smallest option.
        plans: The frontier, lowest peak first.
        bounds_s: For each of them that is more than `FAR_ABOVE` above the lower hull, a step time
            that no selection of the planner's options is predicted to undercut at its predicted
            peak; None for others.
        hand: The policies by hand, then MaxText's presets.
        beside: For each of them the plan for its peak, if one fits.
        beside_bounds_s: For each of them, a step time that no selection of the planner's options
            is predicted to undercut at its peak.
        slowdown_bounds_bytes: For each of `SLOWDOWNS`, a peak that no selection that slow is
            predicted to undercut.
        num_steps: Whole steps compiled for the frontier.
        solve_s: Seconds in the solver.
        certify_s: Seconds compiling whole steps.
    """

    fixed_bytes: int
    loss_bytes: int
    plans: Sequence[Row]
    bounds_s: Sequence[float | None]
    hand: Sequence[Row]
    beside: Sequence[Row | None]
    beside_bounds_s: Sequence[float]
    slowdown_bounds_bytes: Sequence[int]
    num_steps: int
    solve_s: float
    certify_s: float


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Trade:
    """The frontier of one model, and its hand policies."""
    target = jax_hremat.get_target(target_name)
    context, facts = prepared(name, target, size)
    candidates = candidates_of(context)
    plans = frontier_plans(candidates, NUM_BUDGETS, Terms((0,)))
    num_steps, timings_s = candidates.num_compiled, candidates.timings_s
    hand = [hand_row(name, size, policy, target) for policy in HAND_POLICIES]
    hand += preset_rows(context)
    rows = [row_of(f"{plan.slowdown - 1:+.1%}", plan) for plan in plans]
    points = [(row.peak_bytes, row.step_s) for row in (*rows, facts["no_remat"])]
    far_above = [above > FAR_ABOVE for above in _above_hull(points)]
    return Trade(
        **facts,
        fixed_bytes=context.fixed_bytes,
        loss_bytes=min(
            max(option.cost.forward_peak_bytes, option.cost.backward_peak_bytes)
            for option in context.costs.of_blocks[-1].options
        ),
        plans=rows,
        bounds_s=[
            candidates.least_possible_step_s(plan.predicted_peak_bytes) if far else None
            for plan, far in zip(plans, far_above, strict=True)
        ],
        hand=hand,
        beside=[_plan_beside(candidates, row) for row in hand],
        beside_bounds_s=[candidates.least_possible_step_s(row.peak_bytes) for row in hand],
        slowdown_bounds_bytes=[_least_possible_bytes(candidates, slow) for slow in SLOWDOWNS],
        num_steps=num_steps,
        solve_s=timings_s["solve"],
        certify_s=timings_s["certify"],
    )


def _plan_beside(candidates: Candidates, hand: Row) -> Row | None:
    try:
        return plan_row(candidates, hand.label, hand.peak_bytes)[0]
    except InfeasibleBudgetError:
        return None


def _least_possible_bytes(candidates: Candidates, slowdown: float) -> int:
    """The least peak, to a five-hundredth of the peak without rematerialization, at which some
    selection could be predicted to be that fast."""
    context = candidates.context
    low, high = context.fixed_bytes, context.baseline.memory.peak_bytes
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) // 2
        is_possible = candidates.least_possible_step_s(middle) <= slowdown * context.baseline.step_s
        low, high = (low, middle) if is_possible else (middle, high)
    return low


def draw(target: str, data: Mapping[str, Any], path: Path) -> None:
    """The frontier and the hand policies of one model, as a picture."""
    base = data["no_remat"]

    def points(rows: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        added = [100 * (row["step_s"] / base["step_s"] - 1) for row in rows]
        return [row["peak_bytes"] / _GIB for row in rows], added

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    ax = figure.subplots()
    ax.step(*points(data["plans"]), where="post", color="#1f6feb", alpha=0.5)
    ax.plot(*points(data["plans"]), "o", color="#1f6feb", label="plans")
    ax.plot(*points([base]), "s", color="#57606a", label="no remat")
    policies, presets = data["hand"][: len(HAND_POLICIES)], data["hand"][len(HAND_POLICIES) :]
    for row, marker in zip(policies, "v^D", strict=True):
        ax.plot(*points([row]), marker, color="#cf222e", label=row["label"])
    if presets:
        ax.plot(*points(presets), "x", color="#bc4c00", label="MaxText's presets, by role")
    ax.set_title(f"{data['model']} for {target}")
    ax.set_xlabel("peak of the compiled step (GiB)")
    ax.set_ylabel("added step time, estimated (%)")
    ax.set_xlim(left=0)
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    # Without a date and with fixed names inside, equal data make an equal file.
    with rc_context({"svg.hashsalt": "jax_hremat"}):
        figure.savefig(path, metadata={"Date": None})


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# Frontiers for the target {target}",
        "",
        f"Made by `python -m benchmarks.frontier --models … --target {target}`, then `--page`; how "
        f"to read peaks and times: [measurements-{target}.md](measurements-{target}.md). "
        "Every point is compiled; nothing was run.",
        "",
        command.where(found[0]),
        "",
        "## At the peak of each hand-written policy",
        "",
        "The added time of the plan whose budget is the policy's compiled peak, as a fraction of "
        "the policy's added time (below 1 the plan is better), and both over no "
        "rematerialization. Where the policy adds nothing, only both are given.",
        "",
    ]
    table, ratios, least = _beside_policies(found, HAND_POLICIES)
    lines += [*table, *_mean_words(ratios, least)]
    with_presets = [data for data in found if len(data["hand"]) > len(HAND_POLICIES)]
    if with_presets:
        compiled = {row["label"] for data in with_presets for row in data["hand"]}
        presets = tuple(name for name in PRESETS if name in compiled)
        table, more, least = _beside_policies(with_presets, presets)
        lines += [
            "",
            "The same for MaxText's presets on every layer, as found by the pattern of blocks, "
            "or on the steps of a scan; the products they save are found by what they read.",
            "",
            *table,
            *_mean_words(more, least),
        ]
    lines += [
        "",
        f"## {NUM_BUDGETS} budgets from the floor to no rematerialization",
        "",
        "Each budget is placed where the lower hull of the plans before it spans the most memory "
        "and time, or at the peak of a plan that is more than 1 % above the hull, since it was "
        "made for another budget. For each the fastest of all certified plans that fit is taken, "
        "so none is left without one and no larger budget has a slower one. Plans are the "
        "different ones that no other beats, of those within a thousandth of the same peak the "
        "fastest; steps is how many whole steps were compiled for them"
        " all. The error is that of the peak as predicted before the step was compiled, of all "
        "plans of this page. Above the hull is how much more time a plan takes, as a part of the "
        "step without rematerialization, than the lower convex hull of all points of its own "
        "frontier allows at its peak: the median and the worst.",
        "",
        "| model | plans | steps compiled, a budget | peak error: median | worst "
        "| above the hull: median | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    errors: list[float] = []
    for data in found:
        own, above = _peak_errors(data), _above_hull(_points(data))
        errors += own
        lines.append(
            f"| {data['model']} | {len(data['plans'])} | {data['num_steps'] / NUM_BUDGETS:.1f} "
            f"| {statistics.median(own):.1%} | {max(own):.1%} "
            f"| {statistics.median(above):.1%} | {max(above):.1%} |"
        )
    lines += [
        "",
        f"Over all models: median {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
        "",
        *_far_above_table(found),
    ]
    lines += [
        "",
        "## Memory taken off at a given slowdown",
        "",
        "Of what a plan can change, the peak without arguments and outputs: the share taken off by "
        "the lowest frontier plan within each slowdown. In brackets, the same without what the "
        "block that makes the loss needs by itself, which every plan must leave room for. Behind "
        "the stroke, the most that any selection of the planner's options could take off, by the "
        "bound of the relaxed program on predicted peaks (a plan may compile to less).",
        "",
        "| model | " + " | ".join(f"{s - 1:.0%}" for s in SLOWDOWNS) + " | floor (slowdown) |",
        "|---|" + "---|" * (len(SLOWDOWNS) + 1),
    ]
    for data in found:
        cells = []
        for slowdown, least in zip(SLOWDOWNS, data["slowdown_bounds_bytes"], strict=True):
            taken = least_peak_bytes(data, slowdown)
            whole, without_loss = (
                f"{_taken_off(data, taken, needed):.0%} / {_taken_off(data, least, needed):.0%}"
                for needed in (0, data["loss_bytes"])
            )
            cells.append(f"{whole} ({without_loss})")
        floor = data["plans"][0]
        slow = floor["step_s"] / data["no_remat"]["step_s"] - 1
        cells.append(f"{_taken_off(data, floor['peak_bytes']):.0%} ({slow:+.1%})")
        lines.append(f"| {data['model']} | {' | '.join(cells)} |")
    for data in found:
        lines += _model_section(target, data)
    return "\n".join(lines) + "\n"


def _far_above_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The plans far above the hull, and what bounds them."""
    lines = [
        f"The plans that are more than {FAR_ABOVE:.0%} above the hull, with the times predicted "
        "for them and the least that any selection of the planner's options is predicted to take "
        "within their predicted peaks without the gaps, by the bound of the root program; both "
        "over no rematerialization.",
        "",
        "| model | compiled MiB | predicted MiB | above the hull | predicted time | bound |",
        "|---|---|---|---|---|---|",
    ]
    for data in found:
        base_s = data["no_remat"]["step_s"]
        for row, above, bound_s in zip(
            data["plans"], _above_hull(_points(data)), data["bounds_s"], strict=True
        ):
            if bound_s is not None:
                lines.append(
                    f"| {data['model']} | {mib(row['peak_bytes'])} "
                    f"| {mib(row['predicted_peak_bytes'])} | {above:.1%} "
                    f"| {row['predicted_step_s'] / base_s - 1:+.1%} | {bound_s / base_s - 1:+.1%} |"
                )
    return lines


def _beside_policies(
    found: Sequence[Mapping[str, Any]], policies: Sequence[str]
) -> tuple[list[str], list[float], list[float]]:
    """A table of models by policies, the ratios in it, and those that no selection of the options
    is predicted to undercut."""
    lines = ["| model | " + " | ".join(policies) + " |", "|---|" + "---|" * len(policies)]
    ratios: list[float] = []
    least: list[float] = []
    for data in found:
        words = dict.fromkeys(policies, "")
        base_s = data["no_remat"]["step_s"]
        for hand, plan, bound_s in zip(
            data["hand"], data["beside"], data["beside_bounds_s"], strict=True
        ):
            if hand["label"] in words:
                ratio, words[hand["label"]] = ratio_beside(data, hand, plan)
                if ratio is not None:
                    bound = max(bound_s - base_s, 0.0) / (hand["step_s"] - base_s)
                    ratios.append(ratio)
                    least.append(min(ratio, bound))
        lines.append(f"| {data['model']} | {' | '.join(words.values())} |")
    return lines, ratios, least


def _mean_words(ratios: Sequence[float], least: Sequence[float]) -> list[str]:
    if not ratios:
        return []
    return [
        "",
        f"Geometric mean of the {len(ratios)} ratios, each counted as {_LEAST_RATIO} at least: "
        f"{_mean(ratios):.3f}; the largest is {max(ratios):.2f}. With the bounds of the relaxed "
        "programs in place of the plans, which no selection of the planner's options is predicted "
        f"to undercut, it would be {_mean(least):.3f}.",
    ]


def _mean(ratios: Sequence[float]) -> float:
    # A plan may add nothing; a mean of logarithms needs a least value.
    return math.exp(sum(math.log(max(r, _LEAST_RATIO)) for r in ratios) / len(ratios))


def ratio_beside(
    data: Mapping[str, Any], hand: Mapping[str, Any], plan: Mapping[str, Any] | None
) -> tuple[float | None, str]:
    """The time that a plan adds as a part of what a policy does, None if that is nothing or no plan
    fits; and both in words."""
    base_s = data["no_remat"]["step_s"]
    if plan is None:
        return None, "no plan fits"
    theirs, ours = hand["step_s"] - base_s, plan["step_s"] - base_s
    words = f"{ours / base_s:+.1%} for {theirs / base_s:+.1%}"
    if theirs <= 0:
        return None, words
    return max(ours, 0.0) / theirs, f"{max(ours, 0.0) / theirs:.2f} ({words})"


def _peak_errors(data: Mapping[str, Any]) -> list[float]:
    plans = [*data["plans"], *(p for p in data["beside"] if p is not None)]
    return [abs(p["predicted_peak_bytes"] / p["peak_bytes"] - 1) for p in plans]


def _points(data: Mapping[str, Any]) -> list[tuple[int, float]]:
    """Peaks and times of a frontier's plans, and last of the step without rematerialization."""
    return [(p["peak_bytes"], p["step_s"]) for p in (*data["plans"], data["no_remat"])]


def _above_hull(points: Sequence[tuple[int, float]]) -> list[float]:
    """Of each point but the last, its time above the lower convex hull of all of them, as a part of
    that of the last, the step without rematerialization."""
    _, plain_s = points[-1]
    return [above / plain_s for above in above_lower_hull(points)[:-1]]


def least_peak_bytes(data: Mapping[str, Any], slowdown: float) -> int:
    """The lowest peak of a plan within a slowdown."""
    most_s = slowdown * data["no_remat"]["step_s"]
    fast = [p["peak_bytes"] for p in data["plans"] if p["step_s"] <= most_s]
    return min(fast, default=data["no_remat"]["peak_bytes"])


def _taken_off(data: Mapping[str, Any], peak_bytes: int, needed_bytes: int = 0) -> float:
    """The share of the peak that is taken off, without what no plan changes and what it needs."""
    whole_bytes = data["no_remat"]["peak_bytes"]
    return (whole_bytes - peak_bytes) / (whole_bytes - data["fixed_bytes"] - needed_bytes)


def _model_section(target: str, data: Mapping[str, Any]) -> list[str]:
    base_s = data["no_remat"]["step_s"]
    timings = data["timings_s"]
    planning_s = sum(timings.values()) + data["solve_s"] + data["certify_s"]
    lines = [
        "",
        f"## {data['model']}",
        "",
        f"{data['description']}. Measured {data['date']}: {planning_s:.0f} s in all, "
        f"{data['num_steps']} whole steps compiled. Fixed: {mib(data['fixed_bytes'])} MiB.",
        "",
        f"![Added step time over peak of {data['model']}]"
        f"(data/frontier-{target}/{data['model']}.svg)",
        "",
        "| | certified peak MiB | est. step ms | over no remat |",
        "|---|---|---|---|",
    ]
    rows = [(f"by hand: {row['label']}", row) for row in data["hand"]]
    rows += [("plan", row) for row in data["plans"]]
    rows.append(("no remat", data["no_remat"]))
    for label, row in rows:
        lines.append(
            f"| {label} | {mib(row['peak_bytes'])} | {ms(row['step_s'])} "
            f"| {row['step_s'] / base_s - 1:+.1%} |"
        )
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "frontier-{}", "frontier-{}.md", measure, page, draw)


if __name__ == "__main__":
    main()
