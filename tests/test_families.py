"""Kinds of blocks that differ in sizes alone: one is searched, and the costs of most are made of
those of two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from drawing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tracing import trace_loss

from jax_hremat import SearchConfig
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.source import Price, block_prices
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.family import Family
from jax_hremat._options.scaling import End, interpolated_cost
from jax_hremat._options.search import search_options
from jax_hremat._partition.blocks import Block, Partition, partition_graph
from jax_hremat._plan.region import Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import get_target

LAYERS, GROWTH, WIDTH, ROWS = 5, 32, 64, 256
TARGET = get_target("cpu")


def dense(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
    """Each layer reads what all layers before it have made."""
    made = [x]
    for w_in, w_out in params:
        x = jnp.concatenate(made, 1)
        made.append(jnp.tanh(jnp.sin(x @ w_in) ** 2 @ w_out))
    return jnp.mean(jnp.concatenate(made, 1) ** 2)


@pytest.fixture(scope="module")
def program() -> Program:
    shapes = [((WIDTH + GROWTH * i, 4 * WIDTH), (4 * WIDTH, GROWTH)) for i in range(LAYERS)]
    params = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in pair) for pair in shapes]
    return trace_loss(dense, (params, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)))


@pytest.fixture(scope="module")
def graph(program: Program) -> Graph:
    return build_graph(program)


@pytest.fixture(scope="module")
def partition(graph: Graph) -> Partition:
    """A block for each layer, one for the loss."""
    starts = [op.id for op in graph.operations if op.primitive == "concatenate"]
    return partition_graph(graph, lambda graph: starts[1:])


def options_of(
    graph: Graph, partition: Partition, price: Price
) -> tuple[dict[int, BlockOptions], dict[int, list[Region]]]:
    """The options of each kind, and the candidates that were priced."""
    priced: dict[int, list[Region]] = {kind: [] for kind in partition.unique}

    def recorded(block: Block, mode: Region) -> OptionCost:
        priced[partition.blocks.index(block)].append(mode)
        return price(block, mode)

    config = SearchConfig(max_packings=2, max_saved_sets=1, max_workers=1)
    options = search_options(
        graph, partition, {}, recorded, rates(TARGET), config, SolverConfig(), lambda *_: None
    )
    return options, priced


def test_layers_of_growing_width_are_a_family(graph: Graph, partition: Partition) -> None:
    # The first reads an argument alone; each of the others more values than the one before.
    *layers, loss = partition.unique
    assert partition.families == ((layers[0],), tuple(layers[1:]), (loss,))
    computed = [
        [v for v in partition.blocks[k].inputs if graph.values[v].kind == "computed"]
        for k in layers
    ]
    assert list(map(len, computed)) == [0, *range(2, LAYERS)]


@pytest.mark.parametrize("source", ["analytic", pytest.param("compiled", marks=pytest.mark.slow)])
def test_most_kinds_are_only_priced_as_they_are(
    program: Program, graph: Graph, partition: Partition, source: str
) -> None:
    with block_prices(source, program, graph, TARGET, None) as price:  # type: ignore[arg-type]
        options, priced = options_of(graph, partition, price)
        _, *layers, _ = partition.unique
        searched, end, between = layers[-1], layers[0], layers[1:-1]
        regions = options[searched].near_hull
        assert len(priced[searched]) >= len(regions) > 3
        assert len(set(priced[end])) == len(regions)
        for kind in between:
            assert priced[kind] == [Region(*range_of(partition.blocks[kind]))]
            assert [name for name, _ in options[kind].by_hand] == [
                name for name, _ in options[searched].by_hand
            ]
            assert options[kind].num_measured == 1
            found = {o.region: o.cost for o in options[kind].options}
            assert found.keys() <= set(regions) and len(found) > 2
            for region, cost in found.items():
                start = partition.blocks[kind].start
                true = price(partition.blocks[kind], region.shifted(start))
                assert cost.time_s == pytest.approx(true.time_s, rel=0.05)
                assert cost.kept_bytes == pytest.approx(true.kept_bytes, rel=0.1, abs=64)
                assert cost.kept_inputs == true.kept_inputs
                assert cost.kept_outputs == true.kept_outputs


def test_what_a_user_would_write_is_priced_for_every_kind() -> None:
    """Two products in one block: under a policy by batch dimensions, blocks of one form differ."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for i, (a, b) in enumerate(params):
            first, second = ("nij,njk->nik", "nij,jk->nik")[:: 1 if i % 2 else -1]
            x = jnp.concatenate([jnp.einsum(second, jnp.sin(jnp.einsum(first, x, a)), b), x], 2)
        return jnp.mean(x**2)

    sizes = [8 * 2**i for i in range(5)]
    shapes = [[(4, n, n), (n, n)][:: 1 if i % 2 else -1] for i, n in enumerate(sizes)]
    params = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in pair) for pair in shapes]
    args = (params, jax.ShapeDtypeStruct((4, 16, sizes[0]), jnp.float32))
    program = trace_loss(loss, args)
    graph = build_graph(program)
    starts = [op.id + 1 for op in graph.operations if op.primitive == "concatenate"]
    partition = partition_graph(graph, lambda graph: starts)
    assert [len(family) for family in partition.families] == [1, len(sizes) - 1, 1]
    with block_prices("analytic", program, graph, TARGET, None) as price:
        options, priced = options_of(graph, partition, price)
    for kind in partition.families[1]:
        by_hand = dict(options[kind].by_hand)
        no_batch_dims = by_hand["dots_with_no_batch_dims_saveable"]
        products = [
            graph.operations[op]
            for op in range(*range_of(partition.blocks[kind]))
            if graph.operations[op].primitive == "dot_general"
        ]
        start = partition.blocks[kind].start
        assert [op for op, _ in no_batch_dims.region.saved] == [
            product.id - start for product in products if not product.has_batch_dims
        ]
    assert any(len(priced[kind]) == 2 for kind in partition.families[1])


def range_of(block: Block) -> tuple[int, int]:
    return block.start, block.stop


sizes = st.integers(2**12, 2**30)
costs = st.builds(
    OptionCost,
    forward_s=st.floats(1e-6, 1e-2),
    backward_s=st.floats(1e-6, 1e-2),
    kept_bytes=sizes,
    kept_inputs=st.just((0,)),
    kept_outputs=st.just(()),
    forward_peak_bytes=sizes,
    backward_peak_bytes=sizes,
)


def scaled(cost: OptionCost, by: float) -> OptionCost:
    return replace(
        cost,
        forward_s=by * cost.forward_s,
        backward_s=by * cost.backward_s,
        kept_bytes=round(by * cost.kept_bytes),
        forward_peak_bytes=round(by * cost.forward_peak_bytes),
        backward_peak_bytes=round(by * cost.backward_peak_bytes),
    )


def assert_about_equal(a: OptionCost, b: OptionCost, plain: OptionCost) -> None:
    """To a thousandth of the plain option's figures: these are added to differences."""
    assert a.time_s == pytest.approx(b.time_s, rel=1e-3, abs=1e-3 * plain.time_s)
    for figure in ("kept_bytes", "forward_peak_bytes", "backward_peak_bytes"):
        of_plain = getattr(plain, figure)
        expected = pytest.approx(getattr(b, figure), rel=1e-3, abs=1e-3 * of_plain + 2)
        assert getattr(a, figure) == expected


@settings(max_examples=examples(60))
@given(costs, costs, costs, costs)
def test_ends_are_reproduced(
    plain: OptionCost, option: OptionCost, other_plain: OptionCost, other: OptionCost
) -> None:
    ends = [End(plain, option), End(other_plain, other)]
    if plain.kept_bytes != other_plain.kept_bytes:
        for end in ends:
            assert_about_equal(interpolated_cost(end.plain, ends), end.cost, end.plain)
    assert_about_equal(interpolated_cost(plain, ends[:1]), option, plain)


@settings(max_examples=examples(60))
@given(costs, costs, st.floats(1.0, 8.0), st.floats(1.0, 8.0))
def test_what_grows_alike_is_exact(
    plain: OptionCost, option: OptionCost, to_middle: float, to_end: float
) -> None:
    ends = [End(scaled(plain, by), scaled(option, by)) for by in (1.0, to_middle * to_end)]
    middle = interpolated_cost(scaled(plain, to_middle), ends)
    assert_about_equal(middle, scaled(option, to_middle), scaled(plain, to_middle))


class Recorded:
    """A search that records whether candidates that lower the peak were asked for."""

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def plain_regions(self) -> list[Region]:
        return [Region(0, 4)]

    def first_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        self.asked.append(lower_peak)
        return []

    def second_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        self.asked.append(lower_peak)
        return []

    def options(self, measured: Mapping[Region, OptionCost]) -> BlockOptions:
        raise NotImplementedError


class PeaksOf:
    """Costs of which only the peaks of backwards are known, by kind."""

    def __init__(self, *peaks_bytes: int) -> None:
        self.peaks_bytes = peaks_bytes

    def start(self, kind: int, regions: Iterable[Region]) -> None:
        assert not list(regions)

    def of(self, kind: int) -> dict[Region, OptionCost]:
        return {Region(0, 4): OptionCost(1.0, 2.0, 0, (), (), 0, self.peaks_bytes[kind])}


@pytest.mark.parametrize(
    ("later_bytes", "asked"), [((7, 4), True), ((9, 4), False), ((4, 9), False), ((8, 8), True)]
)
def test_a_lower_peak_is_worth_nothing_where_a_later_block_needs_more(
    later_bytes: tuple[int, int], asked: bool
) -> None:
    search = Recorded()
    family = Family(kind=0, search=search, others={}, ends={}, blocks={}, later=(1, 2))
    _, first, second, _ = family.waves
    for wave in (first, second):
        wave(PeaksOf(8, *later_bytes))
    assert search.asked == [asked, asked]
