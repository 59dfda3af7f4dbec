"""Plans of the same models by every strategy, certified alike.

    python -m benchmarks.compared --models gpt2-small unet --target h200

writes one JSON file a model below `docs/data/compared-<target>/`, and measures only the strategies
that it has not; `--page` makes `docs/compared-<target>.md` and the pictures from all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Setting, mib, ms, setting_of
from jax_hremat._plan.comparison import StrategyPlan
from jax_hremat._strategies.registry import ALL_STRATEGIES

FRACTIONS = (0.8, 0.6, 0.4)
# Steps that differ by less than this part of the step count as equally fast.
_ALIKE = 1e-3
_PARTITIONERS = (jax_hremat.partition_by_width, jax_hremat.partition_by_score)


@dataclass(frozen=True)
class Point:
    """What a strategy found for a budget; where nothing fits, at its least budget."""

    fraction: float
    fits: bool
    budget_bytes: int
    peak_bytes: int
    predicted_peak_bytes: int
    step_s: float
    bound_step_s: float | None
    free_peak_bytes: int | None
    free_step_s: float | None


@dataclass(frozen=True)
class Strategy:
    """One strategy on a model, with an empty cache.

    Attributes:
        planning_s: Seconds for all budgets.
        num_compiles: Compiled for the last budget: whole steps, and options of blocks.
    """

    name: str
    planning_s: float
    num_blocks: int
    num_compiles: Mapping[str, int]
    points: Sequence[Point]


@dataclass(frozen=True)
class Compared(Setting):
    """All strategies on one model.

    Attributes:
        with_both: `tree` with both partitioners, for each budget alone at which a strategy with
            other blocks beats it.
    """

    no_remat_peak_bytes: int
    no_remat_step_s: float
    strategies: Sequence[Mapping[str, Any]]
    with_both: Sequence[Mapping[str, Any]]


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Iterator[Compared]:
    """Plan one model by every strategy of which its file says nothing, one after the other; then by
    `tree` with both partitioners, for each budget at which a strategy with other blocks beats it.
    """
    problem = zoo.make(name, size)
    path = command.DOCS / "data" / f"compared-{target_name}" / f"{name}.json"
    before = json.loads(path.read_text()) if size == "full" and path.exists() else {}
    known = {one["name"]: one for one in before.get("strategies", ())}
    with_both = {point["fraction"]: point for point in before.get("with_both", ())}

    def compared(budgets: Sequence[float], strategy: str, **config: Any) -> jax_hremat.Comparison:
        return jax_hremat.compare(
            problem.loss_fn,
            budgets=budgets,
            strategies=[strategy],
            argnums=problem.argnums,
            has_aux=problem.has_aux,
            target=target_name,
            config=jax_hremat.PlannerConfig(cache_dir="", **config),
        )(*problem.args)

    def result(no_remat: tuple[int, float]) -> Compared:
        return Compared(
            **setting_of(problem, target_name),
            no_remat_peak_bytes=no_remat[0],
            no_remat_step_s=no_remat[1],
            strategies=[known[name] for name in ALL_STRATEGIES if name in known],
            with_both=[with_both[fraction] for fraction in FRACTIONS if fraction in with_both],
        )

    for strategy in ALL_STRATEGIES:
        if strategy not in known:
            found = compared(FRACTIONS, strategy)
            known[strategy] = asdict(_strategy(found))
            yield result(found.no_remat)
    for fraction in _beaten_by_other_blocks(*(known[name] for name in ALL_STRATEGIES)):
        if fraction not in with_both:
            found = compared([fraction], ALL_STRATEGIES[0], partitioner=_PARTITIONERS)
            with_both[fraction] = asdict(_point(fraction, found.found[0]))
            yield result(found.no_remat)


def _beaten_by_other_blocks(own: Mapping[str, Any], *others: Mapping[str, Any]) -> list[float]:
    """The budgets at which a strategy that cut the program into other blocks is faster, by more
    than counts as equally fast."""
    return [
        fraction
        for i, fraction in enumerate(FRACTIONS)
        for mine in [own["points"][i]]
        if any(
            other["points"][i]["fits"]
            and mine["step_s"] - other["points"][i]["step_s"] > _ALIKE * mine["step_s"]
            for other in others
            if other["num_blocks"] != own["num_blocks"]
        )
    ]


def _strategy(found: jax_hremat.Comparison) -> Strategy:
    """The only strategy of a comparison."""
    own = found.found
    ((name, planning_s),) = found.planning_s.items()
    return Strategy(
        name=name,
        planning_s=planning_s,
        num_blocks=len(own[-1].plan.blocks),
        num_compiles=dict(own[-1].plan.num_compiles),
        points=[_point(fraction, one) for fraction, one in zip(FRACTIONS, own, strict=True)],
    )


def _point(fraction: float, one: StrategyPlan) -> Point:
    free = one.plan.free_schedule
    return Point(
        fraction=fraction,
        fits=one.fits,
        budget_bytes=one.budget_bytes,
        peak_bytes=one.plan.certificate.peak_bytes,
        predicted_peak_bytes=one.plan.predicted_peak_bytes + one.plan.predicted_gaps_bytes,
        step_s=one.plan.estimated_step_s,
        bound_step_s=one.plan.bound_step_s,
        free_peak_bytes=free and free.peak_bytes,
        free_step_s=free and free.step_s,
    )


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# Strategies compared, for the target {target}",
        "",
        f"Made by `python -m benchmarks.compared --models … --target {target}`, then `--page`. "
        "What each strategy is, and what it leaves out of its paper: [strategies]"
        "(reference/strategies.md). Budgets are shares of the peak without rematerialization. "
        "Each cell has the certified peak in MiB and the estimated time added to the step; in "
        "brackets, where no plan fits, those of the least peak that the strategy found. The least "
        f"time at each budget, and what is within {_ALIKE:.1%} of the step of it, is bold. The "
        "bound is the added time that no selection of the options priced for `tree` is predicted "
        "to undercut. A free schedule drops and computes blocks in any order, which checkpoints "
        "cannot express: it is simulated, not compiled, and the plan in the row above is a nest "
        "near it. Only `tree` compiles a plan that exceeds its budget widely once more, with "
        "[more barriers](explanation/emission.md#the-cotangent-barrier). "
        "Planning is for all three budgets, with an empty cache; most of it was timed while other "
        "programs ran on the machine, so these seconds are too high, some by several times.",
        "",
        command.where(found[0]),
    ]
    for one in found:
        base_s = one["no_remat_step_s"]
        lines += [
            "",
            f"## {one['model']}",
            "",
            f"![Added time over peak of {one['model']}, one line for each strategy]"
            f"(data/compared-{target}/{one['model']}.svg)",
            "",
            f"Without rematerialization: {mib(one['no_remat_peak_bytes'])} MiB, {ms(base_s)} ms.",
            "",
            "| strategy | " + " | ".join(f"{f:.0%}" for f in FRACTIONS) + " | blocks "
            "| options compiled | planning s |",
            "|---|" + "---|" * (len(FRACTIONS) + 3),
        ]
        best_s = [
            min(
                (s["points"][i]["step_s"] for s in one["strategies"] if s["points"][i]["fits"]),
                default=0.0,
            )
            for i in range(len(FRACTIONS))
        ]
        for strategy in one["strategies"]:
            cells = [
                _cell(point, base_s, least_s)
                for point, least_s in zip(strategy["points"], best_s, strict=True)
            ]
            lines.append(
                f"| `{strategy['name']}` | {' | '.join(cells)} | {strategy['num_blocks']} "
                f"| {strategy['num_compiles']['blocks']} | {strategy['planning_s']:.0f} |"
            )
            if any(point.get("free_step_s") for point in strategy["points"]):
                free = " | ".join(_free_cell(point, base_s) for point in strategy["points"])
                lines.append(f"| … free schedule, simulated | {free} | | | |")
        bounds = " | ".join(_bound_cell(p, base_s) for p in one["strategies"][0]["points"])
        lines.append(f"| *bound of `{one['strategies'][0]['name']}`* | {bounds} | | | |")
    lines += _where_not_the_fastest(found)
    return "\n".join([*lines, *command.models(found)]) + "\n"


def _where_not_the_fastest(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where another strategy is faster than the first, the library's own, and why."""
    cases = []
    for one in found:
        of = {strategy["name"]: strategy["points"] for strategy in one["strategies"]}
        own = of[ALL_STRATEGIES[0]]
        with_both = {point["fraction"]: point for point in one.get("with_both", ())}
        base_s = one["no_remat_step_s"]
        for name in ALL_STRATEGIES[1:]:
            for i, fraction in enumerate(FRACTIONS):
                its = of[name][i]
                if not its["fits"] or own[i]["step_s"] <= its["step_s"]:
                    continue
                behind = (own[i]["step_s"] - its["step_s"]) / base_s
                case = f"- {one['model']} at {fraction:.0%}: `{name}` is faster by {behind:.2%}"
                if fraction in with_both:
                    both = with_both[fraction]
                    left = (both["step_s"] - its["step_s"]) / base_s
                    word = "slower" if left > 0 else "faster"
                    case += (
                        f"; `tree` with both partitioners is {abs(left):.2%} {word} than "
                        f"that, in {mib(both['peak_bytes'])} MiB"
                    )
                cases.append(case)
    return [
        "",
        "## Where `tree` is not the fastest",
        "",
        "In parts of the step without rematerialization:",
        "",
        *(cases or ["It is everywhere."]),
        "",
        "A strategy with the same blocks can be faster by a little, since `tree` stops once at "
        "most a hundredth of the budget is unused, or once the next plan is predicted to save less "
        "than 0.2 % of the step. `hrockmate` cuts the program into other blocks. Where these win, "
        "the budget was planned, by itself, with "
        "`PlannerConfig(partitioner=(partition_by_width, partition_by_score))` too: `tree` then "
        "plans with both partitions, in twice the time, and returns the faster plan.",
    ]


def _cell(point: Mapping[str, Any], base_s: float, least_s: float) -> str:
    added = f"{point['step_s'] / base_s - 1:+.1%}"
    if not point["fits"]:
        return f"({mib(point['peak_bytes'])}, {added})"
    is_best = point["step_s"] - least_s < _ALIKE * base_s
    return f"{mib(point['peak_bytes'])}, " + (f"**{added}**" if is_best else added)


def _free_cell(point: Mapping[str, Any], base_s: float) -> str:
    if not point.get("free_step_s"):
        return ""
    return f"{mib(point['free_peak_bytes'])}, {point['free_step_s'] / base_s - 1:+.1%}"


def _bound_cell(point: Mapping[str, Any], base_s: float) -> str:
    return "" if point["bound_step_s"] is None else f"{point['bound_step_s'] / base_s - 1:+.1%}"


def draw(target: str, one: Mapping[str, Any], path: Path) -> None:
    """Added time over peak, one colour a strategy."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    base_s = one["no_remat_step_s"]
    for i, strategy in enumerate(one["strategies"]):
        points = sorted({(p["peak_bytes"] / 2**30, p["step_s"]) for p in strategy["points"]})
        axes.plot(
            [peak for peak, _ in points],
            [100 * (step_s / base_s - 1) for _, step_s in points],
            "o-",
            markersize=4,
            label=strategy["name"],
            zorder=3 - i / len(one["strategies"]),
        )
    axes.plot([one["no_remat_peak_bytes"] / 2**30], [0], "ks", label="no rematerialization")
    axes.set_xlabel("peak of the compiled step (GiB)")
    axes.set_ylabel("added step time (%)")
    axes.set_title(f"{one['model']} on {target}")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize="small")
    # Without a date and with fixed names inside, equal data make an equal file.
    with rc_context({"svg.hashsalt": "jax_hremat"}):
        figure.savefig(path, metadata={"Date": None})


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "compared-{}", "compared-{}.md", measure, page, draw)


if __name__ == "__main__":
    main()
