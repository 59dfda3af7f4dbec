"""What the operations of a plain block take adds up to the block's cost, and tells what its runs
free before they are compiled."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from random_plans import struct
from tracing import trace_loss

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.source import CostSource, block_prices
from jax_hremat._options.runs import RunModel
from jax_hremat._partition.blocks import Block, make_block
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._xla.hlo.aliases import Values
from jax_hremat._xla.hlo.origin import maker_names, readers
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.target import get_target


def feed_forward(params: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    scale, w_in, w_out = params
    h = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale
    h = jax.nn.gelu((h @ w_in).astype(jnp.bfloat16)).astype(jnp.float32) @ w_out
    return jnp.sum((x + h) ** 2)


def three_products(params: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    _, w_in, w_out = params
    return jnp.sum(jnp.tanh(jnp.exp(jnp.sin(x @ w_in) @ w_out) @ w_in))


def scanned(params: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jnp.tanh(x @ params[1]) @ params[2], None

    return jnp.sum(jnp.sin(jax.lax.scan(step, jnp.tanh(x), length=4)[0]) ** 2)


ARGS = ((struct(64), struct(64, 256), struct(256, 64)), struct(512, 64))


@functools.cache
def costs_of(
    loss: Any, source: CostSource, runs: tuple[tuple[str, str], ...] = ()
) -> tuple[Graph, Block, OptionCost, dict[tuple[int, int], OptionCost]]:
    """A whole program as one plain block, and with each run from one primitive to another."""
    program = trace_loss(loss, ARGS)
    graph = build_graph(program)
    block = make_block(graph, 0, len(graph.operations))
    names = [op.primitive for op in graph.operations]
    found = {}
    with block_prices(source, program, graph, get_target("cpu"), None) as price:
        plain = price(block, Region(0, block.stop))
        for first, last in runs:
            start = names.index(first)
            stop = names.index(last, start) + 1
            run = Region(start, stop, checkpointed=True)
            found[start, stop] = price(block, Region(0, block.stop, children=(run,)))
    return graph, block, plain, found


@pytest.mark.parametrize("loss", [feed_forward, scanned])
@pytest.mark.parametrize("source", ["analytic", "compiled"])
def test_what_operations_take_adds_up(loss: Any, source: CostSource) -> None:
    _, block, plain, _ = costs_of(loss, source)
    profile = plain.profile
    assert profile is not None
    assert len(profile.forward_s) == len(block)
    # With JAX 0.12, XLA adds a copy without a name to the body of the loop.
    nameless = 0.02 if loss is scanned else 0.0
    assert sum(profile.forward_s) == pytest.approx(plain.forward_s, rel=nameless + 1e-9)
    assert sum(r.size_bytes for r in profile.residuals) == plain.kept_bytes > 0
    for residual in profile.residuals:
        assert 0 <= residual.made_by <= residual.last_reader < len(block)
        assert 0 <= residual.first_reader <= residual.last_reader


@pytest.mark.parametrize("source", ["analytic", "compiled"])
def test_only_the_plain_block_has_a_profile(source: CostSource) -> None:
    *_, found = costs_of(feed_forward, source, (("tanh", "dot_general"),))
    assert [cost.profile for cost in found.values()] == [None]


@pytest.mark.parametrize("source", ["analytic", "compiled"])
def test_what_a_run_frees_is_known_before_it_is_compiled(source: CostSource) -> None:
    runs = (("sin", "sin"), ("sin", "exp"), ("sin", "tanh"), ("exp", "tanh"), ("tanh", "tanh"))
    graph, block, plain, found = costs_of(three_products, source, runs)
    assert plain.profile is not None
    model = RunModel(graph, block, plain.profile, ())
    freed = {runs: model.run(*runs).freed_bytes for runs in found}
    assert freed == {runs: plain.kept_bytes - cost.kept_bytes for runs, cost in found.items()}
    assert len(set(freed.values())) > 2


NAMELESS = """\
HloModule m, is_scheduled=true

%larger (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %max = f32[] maximum(%x, %y), metadata={op_name="jvp(hremat_op3)/reduce_max"}
}

%rows (p: f32[16,16]) -> f32[16] {
  %p = f32[16,16]{1,0} parameter(0)
  %exp = f32[16,16]{1,0} exponential(%p), metadata={op_name="jvp(hremat_op2)/exp"}
  %least = f32[] constant(-inf)
  ROOT %reduce = f32[16]{0} reduce(%exp, %least), dimensions={1}, to_apply=%larger
}

ENTRY %main (a: f32[16,16]) -> f32[16] {
  %a = f32[16,16]{1,0} parameter(0)
  ROOT %fusion = f32[16]{0} fusion(%a), kind=kInput, calls=%rows
}
"""


def test_a_reduction_without_a_name_has_that_of_what_combines_two_elements() -> None:
    module = parse_hlo(NAMELESS)
    names = list(maker_names(module, module.entry, ("fusion", 0)))
    assert names == ["jvp(hremat_op3)/reduce_max", "jvp(hremat_op2)/exp"]
    (reader,) = readers(module, Values(module, module.entry), ("a", 0))
    assert reader.op_names == ("jvp(hremat_op2)/exp", "jvp(hremat_op3)/reduce_max")
