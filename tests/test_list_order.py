"""A block alone is ordered by the list scheduler, as it is in a step, and what that takes is not
counted."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from random_plans import struct
from tracing import trace_loss

from jax_hremat._cost import compiled
from jax_hremat._cost.block_step import BlockStep, block_step
from jax_hremat._cost.compiled import compiled_cost
from jax_hremat._cost.list_order import BEHIND, in_list_order
from jax_hremat._partition.blocks import make_block
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import build_graph
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.liveness import buffer_timeline
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.target import Target


def loss(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w))


@pytest.fixture(scope="module")
def step() -> BlockStep:
    program = trace_loss(loss, (struct(256, 256), struct(512, 256)))
    graph = build_graph(program)
    block = make_block(graph, 0, len(graph.operations))
    return block_step(program, graph, block, Region(0, block.stop))


def test_the_list_scheduler_orders_a_block(h200: Target, step: BlockStep) -> None:
    text = compile_flat(
        in_list_order(step.function, h200), step.avals, h200, keep_unused=True
    ).hlo_text
    module = parse_hlo(text)
    large = [b for b in buffer_timeline(module).buffers if b.nbytes > h200.memory_bytes // 4]
    # Depth first and in post-order the larger array is computed before the smaller one is freed.
    smaller, larger = sorted(large, key=lambda b: b.nbytes)
    assert smaller.end < larger.start
    own = (
        position
        for position, instruction in enumerate(module.entry.instructions)
        if instruction.opcode in ("custom-call", "fusion") and BEHIND not in instruction.op_name
    )
    assert max(own) < smaller.start


def test_what_is_put_behind_a_block_is_not_counted(
    h200: Target, step: BlockStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = compiled_cost(step, h200)

    def unchanged(function: Any, target: Target) -> Any:
        del target
        return function

    monkeypatch.setattr(compiled, "in_list_order", unchanged)
    alone = compiled_cost(step, h200)
    assert behind.forward_s == pytest.approx(alone.forward_s)
    assert behind.backward_s == pytest.approx(alone.backward_s)
    assert behind.kept_bytes == alone.kept_bytes
    assert behind.kept_inputs == alone.kept_inputs
    assert behind.kept_outputs == alone.kept_outputs
    assert behind.forward_peak_bytes == alone.forward_peak_bytes
    assert behind.profile == alone.profile
