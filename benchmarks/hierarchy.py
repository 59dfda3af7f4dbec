"""What H-Rockmate's hierarchy loses, what its choices matter, and the planning time that it buys.

    python -m benchmarks.hierarchy --measure --page

writes `docs/data/hierarchy/*.json`, after every answer, and makes `docs/hierarchy.md` of them. What
is in the files already is not measured again. Schedules are simulated, nothing is compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

from benchmarks.device import machine
from benchmarks.random_graphs import KINDS, random_graph, repeated_layers
from jax_hremat._shared.errors import SolverError
from jax_hremat.schedules import (
    STRATEGIES,
    ByScore,
    Equally,
    Graph,
    HRockmate,
    Randomly,
    Strategy,
    simulate,
    without_recompute,
)

LEVELS: Mapping[str, Strategy] = {
    "one level": HRockmate(max_parts=sys.maxsize),
    "default": HRockmate(),
    "many levels": HRockmate(max_parts=2, max_children=2),
}
PARTITIONERS: Mapping[str, Strategy] = {
    "bytes alone": HRockmate(partitioner=ByScore(power=0.0)),
    "equal parts": HRockmate(partitioner=Equally()),
    "random parts": HRockmate(partitioner=Randomly(seed=0)),
}
NUM_OPTIONS = (1, 2, 3, 5, 10)
# Twelve bounds for each part, so that there may be ten options to hand up.
OPTIONS: Mapping[str, Strategy] = {
    "1 option" if count == 1 else f"{count} options": HRockmate(
        max_options=count, num_peaks=3, num_kept=4
    )
    for count in NUM_OPTIONS
}
VARIANTS = {**LEVELS, **PARTITIONERS, **OPTIONS}
LARGE = ("hrockmate", "tree", "rotor", "rockmate", "greedy", "chen", "tw-remat")
LAYERS = "layers"
_DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Experiment:
    """Graphs, and what schedules them.

    Attributes:
        name: Of its file.
        strategies: By the names that they have in the data.
        shares: Of the peak without recomputation.
        limit_s: Seconds for all shares of one graph, after which an answer is given up.
        grows: Whether a kind's graphs follow each other by size.
    """

    name: str
    strategies: Mapping[str, Strategy]
    shares: Sequence[float]
    limit_s: float
    grows: bool = False


SMALL = Experiment("small", VARIANTS, (0.9, 0.8, 0.7), 60.0)
MEDIUM = Experiment("medium", VARIANTS, (0.8, 0.6), 40.0)
SCALE = Experiment(
    "large", {name: STRATEGIES[name] for name in LARGE}, (0.8, 0.6), 40.0, grows=True
)
SCALE_SIZES = (100, 300, 1000, 3000, 10_000)
MEDIUM_SIZE, MEDIUM_SEEDS = 100, (1,)


@dataclass(frozen=True)
class Case:
    """A graph by what it is made of."""

    kind: str
    num_operations: int
    seed: int

    def graph(self) -> Graph:
        """A training step; half of its operations are backwards."""
        if self.kind == LAYERS:
            return repeated_layers(self.num_operations // 2, self.seed)
        return random_graph(self.kind, self.num_operations // 2, self.seed)


@dataclass(frozen=True)
class Answer:
    """One strategy on one graph.

    Attributes:
        times_s: For each share of the peak, the time of the schedule; None if there is none.
        took_s: Seconds for all of them; None if that was more than the limit.
        refused: Why the strategy refuses the graph; None if it does not.
    """

    times_s: Sequence[float | None]
    took_s: float | None
    refused: str | None = None


def ask(strategy: Strategy, case: Case, shares: Sequence[float]) -> Answer:
    """Schedule one graph at some shares of its peak without recomputation."""
    graph = case.graph()
    whole = simulate(graph, without_recompute(graph))
    start_s = time.perf_counter()
    try:
        found = strategy.schedules(graph, [int(share * whole.peak_bytes) for share in shares])
    except SolverError as error:
        return Answer([None] * len(shares), time.perf_counter() - start_s, str(error))
    took_s = time.perf_counter() - start_s
    return Answer([None if s is None else simulate(graph, s).time_s for s in found], took_s)


class Worker:
    """A process that answers, and is ended where it takes longer than a limit."""

    def __init__(self) -> None:
        self._pool: Pool | None = None

    def ask(self, strategy: Strategy, case: Case, experiment: Experiment) -> Answer:
        """As the function `ask`."""
        if self._pool is None:
            self._pool = multiprocessing.get_context("spawn").Pool(1)
            # So that the seconds are without imports, the solver's among them.
            self._pool.apply(ask, (HRockmate(), Case("chain", 20, 0), (0.5,)))
        given = self._pool.apply_async(ask, (strategy, case, experiment.shares))
        try:
            return given.get(experiment.limit_s)
        except multiprocessing.TimeoutError:
            self.close()
            return Answer([None] * len(experiment.shares), None)

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.terminate()
            self._pool = None


def measured(
    experiment: Experiment,
    cases: Sequence[Case],
    records: Sequence[Mapping[str, Any]],
    worker: Worker,
) -> Iterator[dict[str, Any]]:
    """What is not among the records yet; nothing of a strategy that was given up on a smaller graph
    of the kind, or refused it, or would be given up if its time grows as it did last."""
    known = {(Case(**record["case"]), record["strategy"]): record for record in records}
    for name, strategy in experiment.strategies.items():
        took_s: dict[str, list[float]] = {}
        for case in cases:
            before_s = took_s.setdefault(case.kind, []) if experiment.grows else []
            if _expected_s(before_s) > experiment.limit_s:
                continue
            record = known.get((case, name))
            if record is None:
                answer = worker.ask(strategy, case, experiment)
                record = {"case": asdict(case), "strategy": name, **asdict(answer)}
                yield record
            last_s = record["took_s"]
            before_s.append(math.inf if last_s is None or record["refused"] else last_s)


def _expected_s(before_s: Sequence[float]) -> float:
    """What the next takes, if it is to the last as that is to the one before."""
    if len(before_s) < 2:
        return sum(before_s)
    return before_s[-1] ** 2 / before_s[-2]


def small_cases(optima: Mapping[str, Any]) -> list[Case]:
    """The random graphs of which Checkmate's answers are known, one for each kind and size."""
    cases = {}
    for graph in optima["graphs"]:
        case = Case(graph["kind"], graph["num_operations"], graph["number"])
        cases.setdefault((case.kind, case.num_operations), case)
    return list(cases.values())


def optimal_records(optima: Mapping[str, Any], cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """The answers of Checkmate's program and of `tree` that are known; of the program's only those
    that are proven, as in `benchmarks/strategies.py`."""
    graphs = {graph["number"]: graph for graph in optima["graphs"]}
    for case in cases:
        for name in ("checkmate", "tree"):
            answer = graphs[case.seed]["answers"][name]
            times_s = [
                time_s if name == "tree" or (time_s and time_s <= 1.0001 * bound_s) else None
                for time_s, bound_s in zip(answer["times_s"], answer["bounds_s"], strict=True)
            ]
            yield {
                "case": asdict(case),
                "strategy": name,
                **asdict(Answer(times_s, answer["took_s"])),
            }


def page(data: Mapping[str, Mapping[str, Any]]) -> str:
    """The Markdown page of the experiments' data."""
    small, medium, large = (data[e.name]["records"] for e in (SMALL, MEDIUM, SCALE))
    versions = ", ".join(f"{k} {v}" for k, v in data[SCALE.name]["versions"].items())
    operations = [case.num_operations for case in _cases(small)]
    lines = [
        "# What a hierarchy loses and buys",
        "",
        "Made by `python -m benchmarks.hierarchy --measure --page` on "
        f"{data[SCALE.name]['date']}. Versions: {versions}. Machine: "
        f"{data[SCALE.name]['machine']}, used by other work at the same time; so read seconds as "
        "about right.",
        "",
        "H-Rockmate (HiRemate) groups operations into parts, parts into larger ones, and solves an "
        "integer program at each level. Here are its own questions, on graphs of operations with "
        "times and sizes: schedules are simulated, not compiled. The small graphs are "
        f"{len(operations)} of those on [the page of strategies](strategies.md), of "
        f"{min(operations)} to {max(operations)} operations, backwards included, one of each kind "
        f"and size; the medium ones have {MEDIUM_SIZE} operations. What each strategy is: "
        "[strategies](how-to/strategies.md). For compiled models, see what "
        "[partitioners](partitioners-h200.md) and [planning](planning-h200.md) do there.",
        "",
        "A gap is the time of a schedule over that of the best known, less one. On the small "
        "graphs the best known is Checkmate's, proven to be optimal; on others, the fastest of all "
        "schedules in the table, and of the other tables for the same graphs. Found counts the "
        "graphs on which there is a schedule, of those on which one is known; median and worst "
        "gaps are over these, mean gaps over the graphs on which all that are compared find a "
        "schedule.",
        "",
        *_levels(small),
        *_partitioners(small, medium),
        *_options(small, medium),
        *_scale(large),
    ]
    return "\n".join(lines) + "\n"


def _levels(small: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## How much is lost by the hierarchy?",
        "",
        "Checkmate's program takes all operations at once. *One level* is H-Rockmate's program "
        "with each operation a part: it differs from Checkmate's in that a backward runs once, and "
        "in bounds on the peak that are evenly spaced. So it has no schedule where gradients must "
        "be dropped and computed again, as on ladders and layered graphs, where they wait for "
        "long. *Default* has at most "
        f"{HRockmate().max_parts} parts on the highest level and {HRockmate().max_children} in "
        "each other; *many levels* has two on every level. `tree` is the planner's own program.",
        "",
    ]
    names = ("one level", "default", "many levels")
    lines += [_verdict(small, names, SMALL, "checkmate"), ""]
    for k, share in enumerate(SMALL.shares):
        common = _common_gaps(small, names, "checkmate", k)
        if not common["default"]:
            continue
        means = {name: _percent(statistics.mean(common[name])) for name in names}
        lines += [
            f"At {share:.0%} of the peak, on the {len(common['default'])} graphs on which all "
            f"three find a schedule, one level is slower than the optimum by {means['one level']} "
            f"on average, the default by {means['default']}, many levels by "
            f"{means['many levels']}. {_not_found(small, names, k)}",
            "",
        ]
    lines += _table(small, ("checkmate", *names, "tree"), SMALL, "checkmate")
    return lines


def _partitioners(
    small: Sequence[Mapping[str, Any]], medium: Sequence[Mapping[str, Any]]
) -> list[str]:
    names = ("default", *PARTITIONERS, "one level")
    return [
        "## Does it matter how operations are grouped?",
        "",
        "*Default* groups by the paper's score, minus the bytes passing into and out of a part "
        "times the square root of its number of operations. *Bytes alone* leaves the number out, "
        "*equal parts* divides the line into equally many operations, *random parts* groups "
        "neighbours drawn at random, *one level* does not group.",
        "",
        _verdict(small, names[:-1], SMALL, "checkmate"),
        "",
        *_summaries(small, medium, names),
    ]


def _options(small: Sequence[Mapping[str, Any]], medium: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        "## How many options should a part hand up?",
        "",
        "Each part is solved for twelve bounds (three on its peak, four on what it keeps), and "
        "hands up at most so many of the answers, the one that keeps all among them; so with one "
        "option, only the highest level has a choice.",
        "",
        _verdict(small, tuple(OPTIONS), SMALL, "checkmate"),
        "",
        *_summaries(small, medium, tuple(OPTIONS)),
    ]


def _verdict(
    records: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    experiment: Experiment,
    reference: str,
) -> str:
    """The range of each mean gap over the shares, and of what is found of all that is known."""
    texts = []
    for name in names:
        gaps, founds = [], []
        for k in range(len(experiment.shares)):
            common = _common_gaps(records, names, reference, k)[name]
            gaps += [statistics.mean(common)] if common else []
            every = _gaps(records, name, reference, k)
            founds += [sum(gap is not None for gap in every) / len(every)] if every else []
        if gaps:
            texts.append(
                f"{name} {_percent(min(gaps))} to {_percent(max(gaps))} "
                f"({min(founds):.0%} to {max(founds):.0%})"
            )
    return (
        "**In short**, by mean gap to the optimum, the least and the largest of the budgets "
        f"(and on how many of the small graphs): {_listed(texts)}."
    )


def _summaries(
    small: Sequence[Mapping[str, Any]], medium: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[str]:
    lines = []
    for title, records, experiment, reference in (
        ("Small graphs", small, SMALL, "checkmate"),
        (f"Graphs of {MEDIUM_SIZE} operations", medium, MEDIUM, None),
    ):
        sentences = [_ranking(records, names, experiment, reference, k) for k in (0, -1)]
        lines += [f"{title}. {' '.join(sentences)}", ""]
        lines += _table(records, names, experiment, reference)
    return lines


def _ranking(
    records: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    experiment: Experiment,
    reference: str | None,
    k: int,
) -> str:
    """Which finds a schedule most often, and which loses least where all do that are never given
    up."""
    wanted = [name for name in names if _is_complete(records, name)]
    found = {
        name: sum(gap is not None for gap in _gaps(records, name, reference, k)) for name in wanted
    }
    most_first = sorted(wanted, key=lambda name: -found[name])
    total = len(_gaps(records, names[0], reference, k))
    by_name = _listed([f"{found[name]} by {name}" for name in most_first])
    text = f"At {experiment.shares[k]:.0%}, of {total} graphs a schedule is found on {by_name}"
    common = _common_gaps(records, wanted, reference, k)
    count = len(common[wanted[0]])
    if not count:
        return f"{text}; on no graph do all."
    means = {name: statistics.mean(gaps) for name, gaps in common.items()}
    best_first = sorted(wanted, key=lambda name: means[name])
    ranked = _listed([f"{name} {_percent(means[name])}" for name in best_first])
    return f"{text}; where all do ({count}), the mean gaps are: {ranked}."


def _table(
    records: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    experiment: Experiment,
    reference: str | None,
) -> list[str]:
    head = [
        "",
        *(f"{s:.0%}: found | median | worst" for s in experiment.shares),
        "s, median",
        "s, most",
    ]
    columns = 3 * len(experiment.shares) + 3
    lines = [f"| {' | '.join(head)} |", "|---" * columns + "|"]
    for name in names:
        cells = [name]
        for k in range(len(experiment.shares)):
            every = _gaps(records, name, reference, k)
            found = [gap for gap in every if gap is not None]
            cells.append(f"{len(found)} of {len(every)}")
            cells += (
                [_percent(statistics.median(found)), _percent(max(found))] if found else ["", ""]
            )
        took_s = [r["took_s"] for r in records if r["strategy"] == name]
        done_s = [s for s in took_s if s is not None]
        given_up = len(took_s) - len(done_s)
        cells.append(_seconds(statistics.median(done_s)) if done_s else "")
        most = _seconds(max(done_s)) if done_s else ""
        cells.append(
            f"> {experiment.limit_s:.0f} ({given_up} of {len(took_s)})" if given_up else most
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _scale(large: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "## What planning time does it buy?",
        "",
        "Each cell has the seconds for two budgets, 80 % and 60 % of the peak without "
        "recomputation, and the gap at each to the fastest schedule in the column; – where a "
        "strategy finds none. The first row has the time that this fastest schedule adds to a step "
        f"without recomputation. An answer is given up after {SCALE.limit_s:.0f} s, and a strategy "
        "stops where the next graph of the kind would take longer than that, if its time grew as "
        "it did last. *Layers* repeats one layer of random "
        "operations, all others are random throughout.",
        "",
    ]
    kinds = [kind for kind in (*KINDS, LAYERS) if any(c.kind == kind for c in _cases(large))]
    sizes = sorted({case.num_operations for case in _cases(large)})
    lines += [f"- {_winners(large, size)}" for size in sizes]
    lines += ["", "How far each goes:", ""]
    lines += [f"- {_stops(large, name, kinds)}" for name in SCALE.strategies]
    lines.append("")
    for kind in kinds:
        some = [record for record in large if record["case"]["kind"] == kind]
        lines += [
            f"### {kind.capitalize()}",
            "",
            "| operations | " + " | ".join(f"{size:,}" for size in sizes) + " |",
            "|---" * (len(sizes) + 1) + "|",
            "| *fastest* | " + " | ".join(_fastest(some, size) for size in sizes) + " |",
        ]
        for name in SCALE.strategies:
            cells = [_cell(some, name, size) for size in sizes]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def _winners(large: Sequence[Mapping[str, Any]], size: int) -> str:
    """How often each strategy has the fastest schedule of a size, and how H-Rockmate does."""
    counts: Counter[str] = Counter()
    gaps, took_s = [], []
    cases = [case for case in _cases(large) if case.num_operations == size]
    for case in cases:
        own = [r for r in large if r["case"] == asdict(case)]
        for k in range(len(SCALE.shares)):
            best_s = _best_s(own, k)
            counts.update(r["strategy"] for r in own if best_s and r["times_s"][k] == best_s)
        for r in own:
            if r["strategy"] == "hrockmate" and r["took_s"] is not None:
                took_s.append(r["took_s"])
                best = [(t, _best_s(own, k)) for k, t in enumerate(r["times_s"])]
                gaps += [t / best_s - 1 for t, best_s in best if t and best_s]
    ranked = _listed([f"{name} {count}" for name, count in counts.most_common()])
    text = (
        f"{size:,} operations: of {len(cases) * len(SCALE.shares)} questions, fastest are {ranked}"
    )
    if not took_s:
        return f"{text}; hrockmate does not run."
    mean = _percent(statistics.mean(gaps)) if gaps else "no"
    return (
        f"{text}. hrockmate answers {len(gaps)}, with a mean gap of {mean}, in "
        f"{_seconds(statistics.median(took_s))} s in the median, {_seconds(max(took_s))} s at most "
        f"(run on {len(took_s)} of {len(cases)} graphs)."
    )


def _stops(large: Sequence[Mapping[str, Any]], name: str, kinds: Sequence[str]) -> str:
    """Where a strategy stops, for each kind."""
    largest = max(case.num_operations for case in _cases(large))
    reached: dict[str, list[str]] = {}
    for kind in kinds:
        own = [r for r in large if r["strategy"] == name and r["case"]["kind"] == kind]
        done = [r for r in own if r["took_s"] is not None and r["refused"] is None]
        if not done:
            reached.setdefault("answers no graph in time", []).append(kind)
            continue
        last = max(done, key=lambda r: r["case"]["num_operations"])
        size = last["case"]["num_operations"]
        if size == largest:
            text = f"runs up to {size:,} operations"
        elif any(r["refused"] is not None for r in own):
            text = f"refuses more than {size:,} operations"
        else:
            text = f"stopped above {size:,} operations"
        reached.setdefault(text, []).append(f"{kind}: {_seconds(last['took_s'])} s there")
    return f"`{name}` " + "; ".join(f"{text} ({', '.join(s)})" for text, s in reached.items()) + "."


def _fastest(records: Sequence[Mapping[str, Any]], size: int) -> str:
    of_size = [r for r in records if r["case"]["num_operations"] == size]
    if not of_size:
        return ""
    whole_s = Case(**of_size[0]["case"]).graph().time_s
    best = [_best_s(of_size, k) for k in range(len(SCALE.shares))]
    return " / ".join("–" if s is None else f"+{_percent(s / whole_s - 1)}" for s in best)


def _cell(records: Sequence[Mapping[str, Any]], name: str, size: int) -> str:
    of_size = [r for r in records if r["case"]["num_operations"] == size]
    own = next((r for r in of_size if r["strategy"] == name), None)
    if own is None:
        return ""
    if own["refused"] is not None:
        return "refused"
    if own["took_s"] is None:
        return f"> {SCALE.limit_s:.0f} s"
    gaps = []
    for k, time_s in enumerate(own["times_s"]):
        best_s = _best_s(of_size, k)
        gaps.append("–" if time_s is None or best_s is None else _percent(time_s / best_s - 1))
    return f"{_seconds(own['took_s'])} s: {' / '.join(gaps)}"


def _gaps(
    records: Sequence[Mapping[str, Any]], name: str, reference: str | None, k: int
) -> list[float | None]:
    """For each graph on which a best schedule is known at the share, the strategy's gap; None
    where it finds no schedule."""
    found = []
    by_case: dict[Case, list[Mapping[str, Any]]] = {}
    for record in records:
        by_case.setdefault(Case(**record["case"]), []).append(record)
    for own in by_case.values():
        best_s = _best_s([r for r in own if reference in (None, r["strategy"])], k)
        if best_s is not None:
            time_s = next((r["times_s"][k] for r in own if r["strategy"] == name), None)
            found.append(None if time_s is None else time_s / best_s - 1)
    return found


def _common_gaps(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], reference: str | None, k: int
) -> dict[str, list[float]]:
    """The gaps of several strategies on the graphs on which all of them find a schedule."""
    rows = zip(*(_gaps(records, name, reference, k) for name in names), strict=True)
    full = [[gap for gap in row if gap is not None] for row in rows]
    common = [row for row in full if len(row) == len(names)]
    return {name: [row[n] for row in common] for n, name in enumerate(names)}


def _not_found(records: Sequence[Mapping[str, Any]], names: Sequence[str], k: int) -> str:
    parts = []
    for name in names:
        gaps = _gaps(records, name, "checkmate", k)
        parts.append(f"{name} on {sum(gap is None for gap in gaps)}")
    count = len(_gaps(records, names[0], "checkmate", k))
    kinds = Counter(
        case.kind
        for case, gap in zip(
            _proven(records, k), _gaps(records, names[0], "checkmate", k), strict=True
        )
        if gap is None
    )
    text = f"Of {count} graphs with a proven optimum, no schedule is found by {_listed(parts)}"
    if not kinds:
        return f"{text}."
    of_kinds = _listed([f"{number} of kind {kind}" for kind, number in kinds.most_common()])
    return f"{text}; those of {names[0]} are {of_kinds}."


def _proven(records: Sequence[Mapping[str, Any]], k: int) -> list[Case]:
    return [
        Case(**r["case"])
        for r in records
        if r["strategy"] == "checkmate" and r["times_s"][k] is not None
    ]


def _is_complete(records: Sequence[Mapping[str, Any]], name: str) -> bool:
    own = [r for r in records if r["strategy"] == name]
    return all(r["took_s"] is not None for r in own) and len(own) == len(_cases(records))


def _best_s(records: Sequence[Mapping[str, Any]], k: int) -> float | None:
    return min((r["times_s"][k] for r in records if r["times_s"][k] is not None), default=None)


def _cases(records: Sequence[Mapping[str, Any]]) -> list[Case]:
    return list(dict.fromkeys(Case(**record["case"]) for record in records))


def _listed(parts: Sequence[str]) -> str:
    if len(parts) < 2:
        return parts[0] if parts else "none"
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %".replace("-", "−")


def _seconds(count_s: float) -> str:
    return (
        f"{count_s:.2f}" if count_s < 1 else f"{count_s:.1f}" if count_s < 10 else f"{count_s:.0f}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="what is not in --out yet")
    parser.add_argument("--out", type=Path, default=_DOCS / "data" / "hierarchy")
    parser.add_argument(
        "--optima",
        type=Path,
        default=_DOCS / "data" / "strategies" / "random.json",
        help="Checkmate's answers",
    )
    parser.add_argument("--page", action="store_true", help="make the page from --out")
    options = parser.parse_args(argv)
    if options.measure:
        optima = json.loads(options.optima.read_text())
        cases = small_cases(optima)
        _write(options.out, SMALL, [*optimal_records(optima, cases)])
        medium = [Case(kind, MEDIUM_SIZE, seed) for seed in MEDIUM_SEEDS for kind in KINDS]
        large = [Case(kind, size, 1) for size in SCALE_SIZES for kind in (*KINDS, LAYERS)]
        with contextlib.closing(Worker()) as worker:
            _measure(options.out, SMALL, cases, worker)
            _measure(options.out, MEDIUM, medium, worker)
            _measure(options.out, SCALE, large, worker)
    if options.page:
        path = options.out.parent.parent / "hierarchy.md"
        path.write_text(page({e.name: _read(options.out, e) for e in (SMALL, MEDIUM, SCALE)}))
        print(f"wrote {path}")


def _measure(out: Path, experiment: Experiment, cases: Sequence[Case], worker: Worker) -> None:
    for record in measured(experiment, cases, _read(out, experiment)["records"], worker):
        _write(out, experiment, [record])
        print(experiment.name, record["strategy"], record["case"], record["took_s"], flush=True)


def _read(out: Path, experiment: Experiment) -> dict[str, Any]:
    path = out / f"{experiment.name}.json"
    return json.loads(path.read_text()) if path.exists() else {"records": []}


def _write(out: Path, experiment: Experiment, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records, or put them in place of those of the same strategies and graphs."""
    old = _read(out, experiment)["records"]
    merged = {(Case(**r["case"]), r["strategy"]): r for r in (*old, *records)}
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("cvxpy", "highspy", "networkx", "numpy")},
        "machine": machine(),
        "records": list(merged.values()),
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{experiment.name}.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
