"""What a group that keeps values takes to make a block's outputs again, against the replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from drawing import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_plans import WIDTH, losses, struct
from tracing import trace_loss

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import LiveRange, OptionCost
from jax_hremat._options.outputs import with_outputs
from jax_hremat._partition.blocks import make_block
from jax_hremat._plan.region import Region
from jax_hremat._solve.lifetimes import kept_cost
from jax_hremat._solve.prediction import block_recompute_s
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay

COST = OptionCost(1.0, 1.0, 10, (), (), 0, 0, kept_buffers=(LiveRange(10),))


# Results that a checkpoint keeps whenever it is asked to; a maximum, for example, may not be.
NAMED = ("dot_general", "mul", "add", "sin", "exp", "tanh")


def option_of(graph: Graph, stop: int, saved: tuple[tuple[int, int], ...]) -> Option:
    """The block of the first operations, saving some of its values. Operation e takes 2^e seconds,
    so that a sum says which operations it is of."""
    region = Region(0, stop, checkpointed=True, saved=saved)
    times: Any = [1 << op.id for op in graph.operations]
    return with_outputs(graph, make_block(graph, 0, stop), Option(region, COST, "names"), times)


def operations_in(total: Any) -> set[int]:
    return {e for e in range(int(total).bit_length()) if int(total) >> e & 1}


def recomputed(program: Program, root: Region) -> set[int]:
    return {e for e, count in enumerate(replay(program, root).recomputed) if count}


@given(st.data())
@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_group_recomputes_what_is_predicted(data: st.DataObject) -> None:
    loss = data.draw(losses(rewritten=False))
    program = trace_loss(loss, (struct(WIDTH, WIDTH), struct(WIDTH, WIDTH)))
    graph = build_graph(program)
    count = len(graph.operations)
    stop = data.draw(st.integers(1, count - 1))
    made = [
        (op.id, k)
        for op in graph.operations[:stop]
        for k in range(len(op.outputs))
        if op.primitive in NAMED
    ]
    saved = tuple(sorted(data.draw(st.sets(st.sampled_from(made), max_size=4)))) if made else ()
    predicted = operations_in(option_of(graph, stop, saved).outputs_s)

    group = Region(0, count, checkpointed=True, saved=saved)
    alone = Region(0, count, children=(Region(0, stop, checkpointed=True, saved=saved),))
    in_group, own = recomputed(program, group), recomputed(program, alone)
    extra = {e for e in in_group - own if e < stop}
    assert extra <= predicted
    assert not predicted & own
    # The rest of the program, recomputed too, reads the outputs that it does not only pass on.
    later = [op for op in graph.operations[stop:] if op.id in in_group or op.needs]
    read = {v for op in later for v in (*(op.reads if op.id in in_group else ()), *op.needs)}
    if read.issuperset(make_block(graph, 0, stop).outputs):
        assert extra == predicted


def two_products(x: Any, w: Any) -> Any:
    """Block: tanh(x w) w + x. Its backward reads tanh(x w) and not the second product."""
    y = jnp.tanh(x @ w) @ w + x
    return jnp.sin(y).sum()


def test_a_product_that_only_the_next_block_reads() -> None:
    program = trace_loss(two_products, (struct(8, 8), struct(8, 8)))
    graph = build_graph(program)
    names = [op.primitive for op in graph.operations]
    assert names[:4] == ["dot_general", "tanh", "dot_general", "add"]

    kept_for_outputs = option_of(graph, 4, ((2, 0),))
    assert operations_in(kept_for_outputs.outputs_s) == {3}
    assert kept_for_outputs.outputs_bytes == 8 * 8 * 4
    kept_for_itself = option_of(graph, 4, ((1, 0),))
    assert operations_in(kept_for_itself.outputs_s) == {2, 3}
    assert kept_for_itself.outputs_bytes == 0
    plain = Option(Region(0, 4), COST, "plain")
    assert with_outputs(graph, make_block(graph, 0, 4), plain, [1.0] * 10) == plain


def test_the_last_block_of_a_group_does_not_make_its_outputs() -> None:
    program = trace_loss(two_products, (struct(8, 8), struct(8, 8)))
    graph = build_graph(program)
    saving = replace(option_of(graph, 4, ((2, 0),)), outputs_s=0.5)
    plain = Option(Region(0, 4), replace(COST, backward_s=0.25), "plain")

    class TwoBlocks:
        options = ((plain, saving), (plain, saving))

    chain: Any = TwoBlocks()
    assert kept_cost(chain, (0, 1), 1, 1) == COST
    first = kept_cost(chain, (0, 1), 0, 1)
    assert (first.kept_bytes, first.kept_sizes) == (10 + 256, (10, 256))
    assert block_recompute_s(chain, (0, 1), 0, 0, 1) == 0.75 + 0.5
    assert block_recompute_s(chain, (0, 1), 1, 0, 1) == 0.75
