"""Strategies: the laws that all of them keep, and what each promises by itself."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from exhaustive import fastest_s
from hypothesis import given
from hypothesis import strategies as st
from strategy_laws import check_laws, peaks_between

from benchmarks.random_graphs import KINDS, random_graph
from docs import snippets
from jax_hremat._schedules import hrockmate
from jax_hremat._schedules.grouping import ByScore, Equally, Node, Partitioner, Randomly
from jax_hremat._schedules.line import line_of
from jax_hremat._schedules.tw_remat import bounds, decompositions, recursive_order
from jax_hremat._shared.errors import SolverError
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.hierarchy import Level, Run, fastest_runs
from jax_hremat.schedules import (
    STRATEGIES,
    Checkmate,
    Chen,
    ChenRecursive,
    Family,
    Forward,
    Graph,
    HRockmate,
    Operation,
    Rockmate,
    Rotor,
    Schedule,
    Strategy,
    simulate,
    training_graph,
    with_drops,
    without_recompute,
    without_unread,
)

GRAPHS = {f"{kind}-{seed}": random_graph(kind, 6, seed) for kind in KINDS for seed in (1,)}
# A second loss-like result, constants, an operation without a backward, and times of zero.
GRAPHS["mixed"] = training_graph(
    [
        Forward(name="ids", time_s=0, output_bytes=3, backward_time_s=None),
        Forward(name="a", time_s=1, output_bytes=8, backward_time_s=2, reads=("ids",)),
        Forward(name="b", time_s=0, output_bytes=9, backward_time_s=1, reads=("a",)),
        Forward(name="c", time_s=3, output_bytes=2, backward_time_s=1, reads=("b", "ids")),
        Forward(name="mean", time_s=1, output_bytes=1, backward_time_s=None, reads=("b",)),
        Forward(name="loss", time_s=1, output_bytes=1, backward_time_s=1, reads=("c",)),
    ],
    results=("mean", "loss", "a.backward"),
    constant_bytes=50,
)


@functools.cache
def optimum_s(name: str, peak_bytes: int) -> float:
    """No frontier-advancing schedule of the graph is faster."""
    schedule = Checkmate().schedule(GRAPHS[name], peak_bytes)
    return math.inf if schedule is None else schedule.bound_s or 0.0


# Those that solve no integer program take no time to speak of.
QUICK = ("keep-all", "chen", "chen-recursive", "rotor", "greedy", "tw-remat")


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        pytest.param(
            name,
            graph,
            # Those that solve integer programs, on one graph with a bit of everything.
            marks=() if name in QUICK or graph == "mixed" else pytest.mark.slow,
        )
        for name in STRATEGIES
        for graph in GRAPHS
    ],
)
def test_laws(name: str, graph: str) -> None:
    check_laws(STRATEGIES[name], GRAPHS[graph], functools.partial(optimum_s, graph))


def any_graph(seed: int) -> Graph:
    """Operations that read whatever is before them, and are the backward of any of these."""
    rng = random.Random(seed)
    operations: list[Operation] = []
    for i in range(rng.randint(1, 9)):
        forward = [j for j, o in enumerate(operations) if o.backward_of is None]
        operations.append(
            Operation(
                name=f"o{i}",
                time_s=float(rng.randint(0, 5)),
                output_bytes=rng.randint(0, 9),
                reads=tuple(sorted(rng.sample(range(i), min(i, rng.randint(0, 3))))),
                workspace_bytes=rng.choice((0, 0, 3)),
                backward_of=rng.choice(forward) if forward and rng.random() < 0.4 else None,
            )
        )
    graph = Graph(tuple(operations), constant_bytes=rng.choice((0, 7)))
    results = {*graph.results, *rng.sample(range(len(graph)), min(len(graph), rng.randint(0, 2)))}
    return replace(graph, results=tuple(results))


@given(st.integers(0, 10**6))
def test_laws_on_any_graph(seed: int) -> None:
    graph = any_graph(seed)
    for name in QUICK:
        check_laws(STRATEGIES[name], graph)


@pytest.mark.parametrize(
    "seed", [15, 19, *(pytest.param(s, marks=pytest.mark.slow) for s in range(100, 120))]
)
def test_laws_of_programs_on_any_graph(seed: int) -> None:
    for name in STRATEGIES.keys() - set(QUICK):
        check_laws(STRATEGIES[name], any_graph(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", (2, 3))
@pytest.mark.parametrize("kind", KINDS)
def test_laws_on_larger_graphs(kind: str, seed: int) -> None:
    graph = random_graph(kind, 10, seed)

    @functools.cache
    def bound_s(peak_bytes: int) -> float:
        schedule = Checkmate().schedule(graph, peak_bytes)
        return math.inf if schedule is None else schedule.bound_s or 0.0

    for strategy in STRATEGIES.values():
        check_laws(strategy, graph, bound_s)


@pytest.mark.parametrize("name", STRATEGIES)
def test_where_nothing_need_be_recomputed_nothing_is(name: str) -> None:
    graph = GRAPHS["skips-1"]
    whole = simulate(graph, without_recompute(graph))
    found = STRATEGIES[name].schedule(graph, whole.peak_bytes)
    assert found is not None and found.order == tuple(range(len(graph)))


def test_the_strategy_of_the_guide_keeps_the_laws() -> None:
    page = Path(__file__).parents[1] / "docs" / "how-to" / "strategies.md"
    strategy = snippets.run(page)["RecomputeCheap"]()
    for name, graph in GRAPHS.items():
        check_laws(strategy, graph, functools.partial(optimum_s, name))


def test_names() -> None:
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())


def test_a_law_is_broken_by_a_strategy_that_exceeds_the_peak() -> None:
    class TooMuch(Family):
        name = summary = source = leaves_out = "too much"

        def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
            yield range(len(graph))

        def schedules(self, graph: Graph, peaks_bytes: Sequence[int]) -> list[Schedule | None]:
            return [self.lowest(graph) for _ in peaks_bytes]

    with pytest.raises(AssertionError, match="no peak is below the lowest"):
        check_laws(TooMuch(), GRAPHS["chain-1"])


# Checkmate.


@pytest.mark.parametrize(
    ("size", "seed"),
    [(4, 0), (4, 1), *(pytest.param(5, s, marks=pytest.mark.slow) for s in (2, 3))],
)
@pytest.mark.parametrize("kind", KINDS)
def test_checkmate_finds_the_fastest_schedule_of_its_kind(kind: str, size: int, seed: int) -> None:
    graph = random_graph(kind, size, seed)
    lowest = simulate(graph, Checkmate().lowest(graph))
    assert fastest_s(graph, lowest.peak_bytes - 1, advancing=True) is None
    for peak_bytes in peaks_between(lowest, simulate(graph, without_recompute(graph)), 4):
        schedule = Checkmate().schedule(graph, peak_bytes)
        assert schedule is not None and schedule.bound_s is not None
        found_s = simulate(graph, schedule).time_s
        assert found_s == pytest.approx(fastest_s(graph, peak_bytes, advancing=True))
        assert schedule.bound_s == pytest.approx(found_s, rel=1e-5)
        any_s = fastest_s(graph, peak_bytes)
        assert any_s is not None and any_s <= found_s * (1 + 1e-9)


def test_sizes_beyond_the_solvers_tolerance_stay_within_the_peak() -> None:
    sizes = (1_000_000_007, 1_000_000_009, 1_000_000_021, 1_000_000_033)
    graph = training_graph(
        [
            Forward(
                name=f"{i}",
                time_s=1.0,
                output_bytes=size,
                backward_time_s=1.0,
                reads=(f"{i - 1}",) if i else (),
                backward_reads_output=True,
            )
            for i, size in enumerate(sizes)
        ]
    )
    whole_bytes = simulate(graph, without_recompute(graph)).peak_bytes
    for less_bytes in (1, 100, 5000):
        schedule = Checkmate().schedule(graph, whole_bytes - less_bytes)
        assert schedule is not None
        assert simulate(graph, schedule).peak_bytes <= whole_bytes - less_bytes
    assert simulate(graph, Checkmate().lowest(graph)).peak_bytes < whole_bytes


def test_sizes_without_a_common_divisor_stay_within_the_peak() -> None:
    graph = random_graph("chain", 6, 1)
    sizes = [1013 * o.output_bytes + 7 * i for i, o in enumerate(graph.operations)]
    pairs = zip(graph.operations, sizes, strict=True)
    graph = Graph(tuple(replace(o, output_bytes=size) for o, size in pairs))
    lowest = simulate(graph, Checkmate().lowest(graph))
    for peak_bytes in peaks_between(lowest, simulate(graph, without_recompute(graph)), 3):
        schedule = Checkmate().schedule(graph, peak_bytes)
        assert schedule is not None
        assert simulate(graph, schedule).peak_bytes <= peak_bytes


# Chains.


def chain(sizes: Sequence[int], times: Sequence[int], reads_output: bool = False) -> Graph:
    """A chain where every backward reads what its forward reads."""
    return training_graph(
        [
            Forward(
                name=f"f{i}",
                time_s=time,
                output_bytes=size,
                backward_time_s=2 * time,
                reads=(f"f{i - 1}",) if i else (),
                backward_reads_output=reads_output,
            )
            for i, (size, time) in enumerate(zip(sizes, times, strict=True))
        ]
    )


def persistent_orders(first: int, last: int, count: int) -> Iterator[tuple[int, ...]]:
    """All persistent schedules of a run of a chain, spelt out independently of the library."""
    backward = 2 * count - 1 - first
    if first == last:
        yield first, backward
        return
    for rest in persistent_orders(first + 1, last, count):
        yield (first, *rest, backward)
    for stop in range(first + 1, last + 1):
        later = list(persistent_orders(stop, last, count))
        for a, b in itertools.product(later, persistent_orders(first, stop - 1, count)):
            yield (*range(first, stop), *a, *b)


@pytest.mark.parametrize("reads_output", (False, True))
@pytest.mark.parametrize(
    ("sizes", "times"),
    [
        ((1, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
        ((3, 1, 4, 1, 5, 9), (2, 7, 1, 8, 2, 8)),
        ((9, 2, 6, 5, 3, 5), (1, 1, 3, 1, 2, 1)),
    ],
)
def test_rotor_is_the_fastest_persistent_schedule(
    sizes: Sequence[int], times: Sequence[int], reads_output: bool
) -> None:
    graph = chain(sizes, times, reads_output)
    orders = {
        without_unread(graph, order) for order in persistent_orders(0, len(sizes) - 1, len(sizes))
    }
    runs = [simulate(graph, with_drops(graph, order)) for order in orders]
    assert len({run.peak_bytes for run in runs}) > 2
    for peak_bytes in range(min(run.peak_bytes for run in runs), runs[0].peak_bytes + 20):
        fastest = min(run.time_s for run in runs if run.peak_bytes <= peak_bytes)
        schedule = Rotor().schedule(graph, peak_bytes)
        assert schedule is not None
        assert simulate(graph, schedule).time_s == fastest
    assert Rotor().schedule(graph, min(run.peak_bytes for run in runs) - 1) is None


def test_rotor_with_few_slots_stays_within_the_peak() -> None:
    graph = chain((300, 100, 401, 100, 500, 900, 207), (2, 7, 1, 8, 2, 8, 1))
    exact, rough = Rotor(slots=10_000), Rotor(slots=20)
    lowest = simulate(graph, rough.lowest(graph))
    for peak_bytes in peaks_between(lowest, simulate(graph, without_recompute(graph)), 9):
        a, b = exact.schedule(graph, peak_bytes), rough.schedule(graph, peak_bytes)
        assert a is not None and b is not None
        assert simulate(graph, b).peak_bytes <= peak_bytes
        assert simulate(graph, a).time_s <= simulate(graph, b).time_s


def test_rockmate_recomputes_inside_segments() -> None:
    # Three blocks; in each, the values of both branches are read together, and one of them is
    # large and quick to make again.
    forward = [Forward(name="d-1", time_s=1, output_bytes=1, backward_time_s=1)]
    for k in range(3):
        for name, time_s, size, reads in (
            ("b", 1, 8, (f"d{k - 1}",)),
            ("c", 9, 2, (f"d{k - 1}",)),
            ("d", 9, 1, (f"b{k}", f"c{k}")),
        ):
            forward.append(
                Forward(
                    name=f"{name}{k}",
                    time_s=time_s,
                    output_bytes=size,
                    backward_time_s=time_s,
                    reads=reads,
                )
            )
    graph = training_graph(forward)
    whole = simulate(graph, without_recompute(graph))
    for share in (0.9, 0.8, 0.7):
        peak_bytes = int(share * whole.peak_bytes)
        by_rotor = Rotor().schedule(graph, peak_bytes)
        by_rockmate = Rockmate().schedule(graph, peak_bytes)
        assert by_rotor is not None and by_rockmate is not None
        assert simulate(graph, by_rockmate).time_s < simulate(graph, by_rotor).time_s


@pytest.mark.parametrize("kind", KINDS)
def test_a_hierarchy_of_one_level_is_checkmate_s_program(kind: str) -> None:
    graph = random_graph(kind, 5, 1)
    whole = simulate(graph, without_recompute(graph))
    peaks_bytes = [whole.peak_bytes * k // 10 for k in range(7, 11)]
    flat = HRockmate(max_parts=len(graph), num_budgets=10).schedules(graph, peaks_bytes)
    for one, other in zip(flat, Checkmate().schedules(graph, peaks_bytes), strict=True):
        if one is None or other is None:
            assert one is other
        else:
            assert simulate(graph, one).time_s == pytest.approx(simulate(graph, other).time_s)


@pytest.mark.parametrize("name", ("chain-1", pytest.param("mixed", marks=pytest.mark.slow)))
def test_laws_of_a_deep_hierarchy(name: str) -> None:
    graph = GRAPHS[name]
    deep = HRockmate(max_parts=2, max_children=2, num_budgets=5)
    check_laws(deep, graph, functools.partial(optimum_s, name))


PARTITIONERS = [ByScore(), ByScore(power=0.0), Equally(), Randomly(seed=1)]


def inside(node: Node) -> Iterator[Node]:
    """A part and all parts inside it."""
    yield node
    for child in node.children:
        yield from inside(child)


@pytest.mark.parametrize("partitioner", PARTITIONERS, ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_partitioner_divides_the_line_into_few_parts(kind: str, partitioner: Partitioner) -> None:
    graph = random_graph(kind, 40, 1)
    line = line_of(graph)
    parts = partitioner(graph, line, 5, 3)
    assert parts == partitioner(graph, line, 5, 3)
    assert len(parts) <= 5
    every = [node for part in parts for node in inside(part)]
    smallest = [node for node in every if not node.children]
    ends = [0, *line.cuts, len(line.forward)]
    assert [(n.start, n.stop) for n in smallest] == list(itertools.pairwise(ends))
    for node in every:
        if node.children:
            assert 2 <= len(node.children) <= 3
            assert (node.start, node.stop) == (node.children[0].start, node.children[-1].stop)


def test_the_score_puts_together_what_much_passes_between() -> None:
    # Of four operations, the second hands a large value to the third.
    graph = chain((1, 9, 1, 1), (1, 1, 1, 1))
    (_, middle, _) = ByScore()(graph, line_of(graph), 3, 2)
    assert (middle.start, middle.stop) == (1, 3)


@pytest.mark.parametrize(
    "partitioner",
    [*(pytest.param(p, marks=pytest.mark.slow) for p in PARTITIONERS[1:-1]), PARTITIONERS[-1]],
    ids=repr,
)
def test_laws_of_other_partitioners(partitioner: Partitioner) -> None:
    other = HRockmate(partitioner=partitioner, max_parts=3, max_children=2, num_budgets=5)
    check_laws(other, GRAPHS["skips-1"], functools.partial(optimum_s, "skips-1"))


def test_equal_levels_are_solved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    solved: list[tuple[Level, int, int | None]] = []

    def counted(
        level: Level, peak_bytes: int, kept_bytes: int | None, config: SolverConfig
    ) -> tuple[tuple[Run, ...], tuple[Run, ...]] | None:
        solved.append((level, peak_bytes, kept_bytes))
        return fastest_runs(level, peak_bytes, kept_bytes, config)

    monkeypatch.setattr(hrockmate, "fastest_runs", counted)
    HRockmate(num_budgets=2).lowest(chain([1] * 40, [1] * 40))
    assert len(set(solved)) == len(solved) < 40


@pytest.mark.parametrize("strategy", (Rotor(max_segments=5), Rockmate(max_segments=5)))
def test_long_chains_are_refused(strategy: Strategy) -> None:
    strategy.lowest(chain([1] * 5, [1] * 5))
    with pytest.raises(SolverError, match="6 segments"):
        strategy.lowest(chain([1] * 6, [1] * 6))


@pytest.mark.parametrize("count", (4, 9, 30, 64, 100))
def test_chen_takes_the_square_root(count: int) -> None:
    graph = chain([1] * count, [1] * count)
    run = simulate(graph, Chen().lowest(graph))
    # The boundaries of √n parts, the values of one, and two gradients.
    assert run.peak_bytes <= 2 * math.ceil(math.sqrt(count)) + 2
    # One more forward.
    assert run.time_s <= graph.time_s + count


@pytest.mark.parametrize("count", (4, 9, 30, 64))
def test_chen_s_recursion_takes_the_logarithm(count: int) -> None:
    graph = chain([1] * count, [1] * count)
    run = simulate(graph, ChenRecursive().lowest(graph))
    levels = math.ceil(math.log2(count))
    assert run.peak_bytes <= levels + 4
    assert run.time_s <= graph.time_s + count * levels


def test_a_line() -> None:
    graph = training_graph(
        [
            Forward(name="a", time_s=1, output_bytes=1, backward_time_s=1),
            Forward(name="b", time_s=1, output_bytes=1, backward_time_s=1, reads=("a",)),
            Forward(name="c", time_s=1, output_bytes=1, backward_time_s=1, reads=("a", "b")),
            Forward(name="d", time_s=1, output_bytes=1, backward_time_s=1, reads=("c",)),
        ]
    )
    line = line_of(graph)
    assert line.forward == (0, 1, 2, 3)
    assert line.backward == ((7,), (6,), (5,), (4,))
    assert line.cuts == (1, 2, 3)
    assert line.necks == (1, 3)
    assert line.passing == ((0,), (0, 1), (2,))
    # An optimizer's step that reads two gradients stands with the earlier one; one that a forward
    # of a later place would have to wait for forbids the cuts between.
    update = Operation(name="update", time_s=1.0, output_bytes=1, reads=(5, 7))
    assert line_of(Graph((*graph.operations, update))).backward[0] == (7, 8)
    early = Operation(name="early", time_s=1, output_bytes=1, reads=(1, 3), backward_of=1)
    assert line_of(Graph((*graph.operations, early))).cuts == (1,)


# Separators.


def of_reads(reads: Sequence[Sequence[int]]) -> Graph:
    """Operations of one size and time each."""
    return Graph(
        tuple(
            Operation(name=f"o{i}", time_s=1.0, output_bytes=1, reads=tuple(r))
            for i, r in enumerate(reads)
        )
    )


def grid(side: int) -> Graph:
    return of_reads(
        [
            [*([i - 1] if i % side else []), *([i - side] if i >= side else [])]
            for i in range(side * side)
        ]
    )


def tree(count: int) -> Graph:
    """Every operation reads two that no other reads."""
    leaves = (count + 1) // 2
    pairs = ([2 * (i - leaves), 2 * (i - leaves) + 1] for i in range(leaves, count))
    return of_reads([*([] for _ in range(leaves)), *pairs])


def series_parallel(depth: int) -> Graph:
    """Diamonds in place of edges, in place of edges."""
    edges = [(0.0, 1.0)]
    for _ in range(depth):
        finer = []
        for number, (a, b) in enumerate(edges):
            middle = (a + b) / 2 + 1e-9 * number, (a + b) / 2 - 1e-9 * number - 1e-12
            finer += [(a, m) for m in middle] + [(m, b) for m in middle]
        edges = finer
    nodes = {x: i for i, x in enumerate(sorted({x for edge in edges for x in edge}))}
    reads: list[list[int]] = [[] for _ in nodes]
    for a, b in edges:
        reads[nodes[b]].append(nodes[a])
    return of_reads(reads)


@pytest.mark.parametrize(
    ("graph", "width"),
    [
        (tree(31), 1),
        (tree(127), 1),
        (grid(3), 3),
        (grid(5), 5),
        (series_parallel(2), 2),
        (series_parallel(3), 2),
        (chain([1] * 16, [1] * 16), 2),
    ],
)
def test_separators_within_their_bounds(graph: Graph, width: int) -> None:
    limit = bounds(graph)
    assert width <= limit.width <= width + 1
    bags = min(decompositions(graph), key=lambda bags: max(map(len, bags)))
    order = list(recursive_order(graph, bags, len(graph).bit_length()))
    run = simulate(graph, with_drops(graph, order))
    assert run.num_computations <= limit.num_computations
    assert run.peak_bytes <= limit.peak_bytes


def test_a_decomposition_is_one() -> None:
    graph = random_graph("layered", 10, 3)
    for bags in decompositions(graph):
        for i, operation in enumerate(graph.operations):
            assert any(i in bag for bag in bags)
            for j in operation.reads:
                assert any({i, j} <= bag for bag in bags)
