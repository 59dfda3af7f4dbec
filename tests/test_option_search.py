"""How many candidate options of each kind of block are compiled, and those that cannot be."""

import functools
import logging
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from tracing import trace_loss

from jax_hremat import CompilationError, SearchConfig, partition_by_repeats, partition_by_width
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.source import block_prices
from jax_hremat._options.search import search_options
from jax_hremat._partition.blocks import Block, Partition, partition_graph
from jax_hremat._plan.region import Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._trace.bodies import bodies_of
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target, get_target


def total(limits: dict[int, SearchConfig]) -> int:
    return sum(x.max_packings + x.max_saved_sets for x in limits.values())


def test_a_kind_with_a_fair_share_gets_all_and_one_with_less_fewer():
    config = SearchConfig(fair_share=0.1)
    limits = config.for_shares({0: 0.8, 7: 0.1, 9: 0.1 / 16, 11: 0.0})
    assert [limits[k].max_packings for k in (0, 7, 9, 11)] == [6, 6, 2, 0]
    assert limits[0] == config


@pytest.mark.parametrize("kinds", [10, 60, 200])
def test_many_kinds_share_a_limit_on_them_all(kinds: int):
    config = SearchConfig(fair_share=0.01, max_candidates=120)
    limits = config.for_shares(dict.fromkeys(range(kinds), 1 / kinds))
    # Each of two numbers is rounded for each kind.
    assert total(limits) <= 120 + kinds
    assert total(SearchConfig(max_candidates=10**6).for_shares({0: 1.0})) == 9


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(jnp.tanh(carry @ w) * carry), None

    y = jax.lax.scan(step, x, length=4)[0]
    for _ in range(3):
        y = jnp.sin(jnp.tanh(y @ w) @ w) + y
    return jnp.sum(y**2)


@functools.cache
def partitioned() -> tuple[Program, Graph, Partition]:
    args = (jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((64, 8), jnp.float32))
    program = trace_loss(loss, args)
    graph = build_graph(program)
    return program, graph, partition_graph(graph, partition_by_width)


@functools.cache
def cost_of(block: Block, region: Region) -> OptionCost:
    program, graph, _ = partitioned()
    with block_prices("analytic", program, graph, get_target("cpu"), None) as price:
        return price(block, region)


def search(fails: Callable[[Region], bool]) -> tuple[set[Region], set[Region]]:
    """Regions priced, and regions of the options found, if the compiler failed on some."""
    program, graph, partition = partitioned()
    priced = set()

    def some(block: Block, region: Region) -> OptionCost:
        if fails(region):
            raise CompilationError("too much for it")
        priced.add(region)
        return cost_of(block, region)

    options = search_options(
        graph,
        partition,
        bodies_of(program, graph),
        some,
        rates(get_target("cpu")),
        SearchConfig(max_packings=2, max_saved_sets=1, max_workers=2),
        SolverConfig(),
        lambda stage, done, total: None,
    )

    starts = {kind: partition.blocks[kind].start for kind in options}
    found = {o.region.shifted(starts[k]) for k, kind in options.items() for o in kind.options}
    return priced, found


def as_it_is(region: Region) -> bool:
    return region == Region(region.start, region.stop)


def test_a_region_that_cannot_be_compiled_is_left_out(caplog: pytest.LogCaptureFixture):
    priced, found = search(lambda region: False)
    assert not caplog.records and found <= priced
    # First the regions that were options, one by one; then everything but the blocks themselves.
    once_options = [region for region in found if not as_it_is(region)]
    assert len(once_options) > 2
    for lost in once_options:
        caplog.clear()
        _, others = search(lambda region, lost=lost: region == lost)
        assert others and lost not in others
        assert [r.levelno for r in caplog.records] == [logging.WARNING]
        assert "left out: too much for it" in caplog.text
    _, plain = search(lambda region: not as_it_is(region))
    assert plain and all(map(as_it_is, plain))


def test_a_block_that_cannot_be_compiled_as_it_is_ends_the_search():
    with pytest.raises(CompilationError, match="too much for it"):
        search(as_it_is)


def test_a_run_that_keeps_the_casts_of_its_weights_is_an_option() -> None:
    def layer(x: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
        y = jnp.tanh(x @ w.astype(jnp.bfloat16))
        return x + jnp.sin(jnp.tanh(jnp.sin(y)) @ u.astype(jnp.bfloat16))

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for w, u in zip(weights[::2], weights[1::2], strict=True):
            x = layer(x, w, u)
        return jnp.sum(x.astype(jnp.float32))

    weights = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6
    program = trace_loss(loss, (weights, jax.ShapeDtypeStruct((256, 2048), jnp.bfloat16)))
    graph = build_graph(program)
    partition = partition_graph(graph, partition_by_width)
    with block_prices("analytic", program, graph, get_target("h200"), None) as price:
        found = search_options(
            graph,
            partition,
            bodies_of(program, graph),
            price,
            rates(get_target("h200")),
            SearchConfig(max_workers=2),
            SolverConfig(),
            lambda stage, done, total: None,
        )
        options = [
            (partition.blocks[kind], option)
            for kind, of_kind in found.items()
            for option in of_kind.options
            if any(child.saved for child in option.region.children)
        ]
        assert options
        for block, option in options:
            children = tuple(replace(child, saved=()) for child in option.region.children)
            cost = price(block, replace(option.region, children=children).shifted(block.start))
            assert option.cost.time_s < cost.time_s
            assert option.cost.kept_bytes > cost.kept_bytes


@pytest.mark.parametrize("cast", [pytest.param(False, marks=pytest.mark.slow), True])
def test_an_embedding_is_checkpointed_so_that_its_zeros_are_made_when_they_are_written(
    cast: bool, h200: Target
) -> None:
    def loss(table: jax.Array, w: jax.Array, ids: jax.Array) -> jax.Array:
        with jax.named_scope("tokens"):
            x = (table.astype(jnp.bfloat16) if cast else table)[ids]
        for n in range(4):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ w.astype(x.dtype))
        return jnp.sum(x.astype(jnp.float32) ** 2)

    shapes = [((4096, 64), jnp.float32), ((64, 64), jnp.float32), ((128,), jnp.int32)]
    program = trace_loss(loss, tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    graph = build_graph(program)
    with block_prices("compiled", program, graph, h200, None) as price:
        found = search_options(
            graph,
            partition_graph(graph, partition_by_repeats),
            bodies_of(program, graph),
            price,
            rates(h200),
            SearchConfig(max_workers=2),
            SolverConfig(),
            lambda stage, done, total: None,
        )
    embedding = found[0]
    # Without a cast, the zeros are in the memory of the gradient, which waits for them anyway.
    assert embedding.plain.cost.unbound_bytes == (2 * 4096 * 64 if cast else 0)
    chosen = embedding.checkpointed if cast else embedding.plain
    assert embedding.options == embedding.in_groups == (chosen,)


def test_a_softmax_of_which_xla_keeps_nothing_is_one_kernel_and_an_option() -> None:
    """The sums of a softmax that are kept for its backward make two kernels of it, each of which
    reads the scores. Checkpointed, it is faster than as it is."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        scores = jnp.einsum("nqd,nkd->nqk", x @ w, x)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)
        mixed = jnp.einsum("nqk,nkd->nqd", weights, x)
        return jnp.sum(mixed.astype(jnp.float32) ** 2)

    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 64), (48, 1024, 64))]
    program = trace_loss(loss, args)
    graph = build_graph(program)
    partition = partition_graph(graph, lambda graph: [])
    (kind,) = partition.unique
    products = [op.id for op in graph.operations if op.primitive == "dot_general"]
    with block_prices("compiled", program, graph, get_target("h200"), None) as price:
        config = SearchConfig(max_packings=1, max_saved_sets=0, policies=False, max_workers=2)
        found = search_options(
            graph,
            partition,
            {},
            price,
            rates(get_target("h200")),
            config,
            SolverConfig(),
            lambda stage, done, total: None,
        )[kind]
    fastest, plain = found.options[0], found.plain
    assert [(r.start, r.stop) for r in fastest.region.children] == [(products[1] + 1, products[2])]
    assert fastest.cost.time_s < 0.95 * plain.cost.time_s
    assert fastest.cost.kept_bytes <= plain.cost.kept_bytes
    # Of what keeps next to nothing too: inside the checkpointed block (jax 0.10), or with what
    # comes before it (0.12, where that keeps no more).
    whole = found.checkpointed.cost
    as_little = [o for o in found.options if o.cost.kept_bytes <= whole.kept_bytes]
    assert any(o.region.children and o.cost.time_s < 0.95 * whole.time_s for o in as_little)
