"""How far the strategies of the literature are from the optimum, on random graphs.

Each graph is scheduled by every strategy at three shares of its peak without recomputation, and
compared with the time that Checkmate's program proves to be optimal.

    python -m benchmarks.strategies --graphs 200 --page

writes `docs/data/strategies/random.json`, after every graph, and makes `docs/strategies.md` of it.
What is in the file already is not measured again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.device import machine
from benchmarks.random_graphs import KINDS, random_graph
from jax_hremat.schedules import STRATEGIES, Graph, Strategy, simulate, without_recompute

SHARES = (0.9, 0.8, 0.7)
# Forward operations, the loss among them; the backward has as many.
SIZES = range(6, 21)
PROVEN = "checkmate"
# A schedule counts as proven to be optimal if no other is faster by more than this part.
_GAP = 1e-4
_DOCS = Path(__file__).parent.parent / "docs"


@dataclass(frozen=True)
class Answers:
    """One strategy on one graph.

    Attributes:
        times_s: For each share of the peak, the time of the schedule; None if there is none.
        bounds_s: For each share, what the strategy proves; None if it proves nothing.
        took_s: Seconds for all of them.
    """

    times_s: Sequence[float | None]
    bounds_s: Sequence[float | None]
    took_s: float


@dataclass(frozen=True)
class OneGraph:
    """One graph, and all answers by the strategies' names."""

    number: int
    kind: str
    num_operations: int
    peak_bytes: int
    time_s: float
    answers: Mapping[str, Mapping[str, Any]]


def measure(number: int, known: Mapping[str, Any]) -> OneGraph:
    """Schedule one graph, the kind and size of which go by its number, by every strategy of which
    nothing is known."""
    kind = sorted(KINDS)[number % len(KINDS)]
    size = SIZES[number // len(KINDS) % len(SIZES)]
    graph = random_graph(kind, size, number)
    whole = simulate(graph, without_recompute(graph))
    peaks_bytes = [int(share * whole.peak_bytes) for share in SHARES]
    return OneGraph(
        number=number,
        kind=kind,
        num_operations=len(graph),
        peak_bytes=whole.peak_bytes,
        time_s=whole.time_s,
        answers={
            name: known.get(name) or asdict(_ask(strategy, graph, peaks_bytes))
            for name, strategy in STRATEGIES.items()
        },
    )


def _ask(strategy: Strategy, graph: Graph, peaks_bytes: Sequence[int]) -> Answers:
    start_s = time.perf_counter()
    found = strategy.schedules(graph, peaks_bytes)
    took_s = time.perf_counter() - start_s
    return Answers(
        times_s=[None if one is None else simulate(graph, one).time_s for one in found],
        bounds_s=[None if one is None else one.bound_s for one in found],
        took_s=took_s,
    )


def gaps(graphs: Sequence[Mapping[str, Any]], name: str, share: int) -> list[float | None]:
    """For each graph whose optimum at this share is proven, how much slower the strategy's
    schedule is, as a part; None if it found none."""
    found = []
    for graph in graphs:
        optimum_s = graph["answers"][PROVEN]["times_s"][share]
        bound_s = graph["answers"][PROVEN]["bounds_s"][share]
        if optimum_s is not None and optimum_s <= (1 + _GAP) * bound_s:
            time_s = graph["answers"][name]["times_s"][share]
            found.append(None if time_s is None else time_s / optimum_s - 1)
    return found


def page(data: Mapping[str, Any]) -> str:
    """The Markdown page of one JSON file."""
    graphs = data["graphs"]
    sizes = [graph["num_operations"] for graph in graphs]
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    lines = [
        "# Strategies on random graphs",
        "",
        f"Made by `python -m benchmarks.strategies --graphs {len(graphs)} --page` on "
        f"{data['date']}. {len(graphs)} random training steps of {min(sizes)} to {max(sizes)} "
        "operations, backwards included: chains, ladders (an encoder and a decoder with "
        "connections between them), chains with skips, and layered graphs. Schedules are "
        "simulated, not compiled. What each strategy is: "
        "[strategies](how-to/strategies.md). Larger graphs, and what H-Rockmate's hierarchy loses: "
        "[a hierarchy of parts](hierarchy.md).",
        "",
        f"Versions: {versions}. Machine: {data['machine']}.",
        "",
        "The gap is the time of a strategy's schedule over that of Checkmate's, less one, on the "
        "graphs where HiGHS proves that Checkmate's is optimal. It is negative where a schedule "
        "is faster that is none of Checkmate's: it computes operations for the first time in "
        "another order, or one of them twice between two first computations. Found says on how "
        "many of these graphs a strategy finds a schedule within the budget; median and worst are "
        "over those. Seconds are for all three budgets, the median and the most.",
        "",
    ]
    for k, share in enumerate(SHARES):
        proven = len(gaps(graphs, PROVEN, k))
        feasible = sum(g["answers"][PROVEN]["times_s"][k] is not None for g in graphs)
        lines += [
            f"## {share:.0%} of the peak without recomputation",
            "",
            f"Checkmate finds a schedule for {feasible} of the {len(graphs)} graphs; it is proven "
            f"to be optimal for {proven}.",
            "",
            "| strategy | found | median gap | worst gap | faster than it | s, median | s, most |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [_row(graphs, name, k) for name in STRATEGIES]
        lines.append("")
    lines += _by_kind(graphs)
    return "\n".join(lines) + "\n"


def _row(graphs: Sequence[Mapping[str, Any]], name: str, share: int) -> str:
    every = gaps(graphs, name, share)
    found = [gap for gap in every if gap is not None]
    took_s = [graph["answers"][name]["took_s"] for graph in graphs]
    cells = [name, f"{len(found)} of {len(every)}"]
    cells += [_percent(statistics.median(found)), _percent(max(found))] if found else ["", ""]
    cells.append(str(sum(gap < -_GAP for gap in found)))
    cells += [f"{statistics.median(took_s):.2f}", f"{max(took_s):.1f}"]
    return f"| {' | '.join(cells)} |"


def _by_kind(graphs: Sequence[Mapping[str, Any]]) -> list[str]:
    kinds = sorted(KINDS)
    lines = [
        "## By kind",
        "",
        f"The median gap at {SHARES[1]:.0%}, and in brackets on how many graphs a schedule was "
        "found.",
        "",
        "| strategy | " + " | ".join(kinds) + " |",
        "|---|" + "---|" * len(kinds),
    ]
    for name in STRATEGIES:
        cells = []
        for kind in kinds:
            every = gaps([g for g in graphs if g["kind"] == kind], name, 1)
            found = [gap for gap in every if gap is not None]
            median = f"{_percent(statistics.median(found))} " if found else ""
            cells.append(f"{median}({len(found)} of {len(every)})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %".replace("-", "−")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure graphs, and make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--graphs", type=int, default=0, help="how many, from the first on")
    parser.add_argument("--out", type=Path, default=_DOCS / "data" / "strategies" / "random.json")
    parser.add_argument("--page", action="store_true", help="make the page from --out")
    options = parser.parse_args(argv)
    old = json.loads(options.out.read_text())["graphs"] if options.out.exists() else []
    graphs = {graph["number"]: graph for graph in old}
    for number in range(options.graphs):
        known = graphs[number]["answers"] if number in graphs else {}
        if STRATEGIES.keys() <= known.keys():
            continue
        start_s = time.perf_counter()
        graphs[number] = asdict(measure(number, known))
        _write(options.out, [graphs[number] for number in sorted(graphs)])
        took_s = time.perf_counter() - start_s
        print(f"{number}: {graphs[number]['kind']}, {took_s:.0f} s", flush=True)
    if options.page:
        path = options.out.parent.parent.parent / "strategies.md"
        path.write_text(page(json.loads(options.out.read_text())))
        print(f"wrote {path}")


def _write(path: Path, graphs: Sequence[Mapping[str, Any]]) -> None:
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {name: version(name) for name in ("cvxpy", "highspy", "networkx", "numpy")},
        "machine": machine(),
        "graphs": graphs,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
