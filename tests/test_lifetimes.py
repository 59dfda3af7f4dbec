"""What is alive when: buffers of constants, and parts of gradients that wait for others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_schedule import MIB, make, option
from tracing import trace_loss

from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._cost.option_cost import LiveRange, Phase
from jax_hremat._emit.step import own_step
from jax_hremat._planner.context import prepare
from jax_hremat._solve.chain import BoundaryValue, Chain, PartialGradient, Selection
from jax_hremat._solve.lifetimes import Held, Memory, timeline
from jax_hremat._solve.prediction import predict
from jax_hremat._xla.target import get_target


def held(block: int, in_backward: bool, *buffers: LiveRange) -> Held:
    """Two positions of a block with buffers of its own."""
    key = ("backward" if in_backward else "forward", block)
    return Held(block, in_backward, 0, 0, (0, 0), {key: buffers})


def test_buffers_of_the_same_constants_are_made_at_once() -> None:
    zeros, others = LiveRange(8, 1, 1, True), LiveRange(8, 0, 1)
    small = LiveRange(4, 0, 0, True)
    alive = [
        held(0, False, others),
        held(1, False, zeros),
        held(2, False, zeros, small),
        # The constants of a recompute are made in it.
        held(2, True, zeros),
    ]
    step = timeline(alive)
    assert sorted(step.buffers) == [
        LiveRange(4, 4, 4, True),
        LiveRange(8, 0, 1),
        LiveRange(8, 3, 3, True),
        LiveRange(8, 3, 5, True),
        LiveRange(8, 7, 7, True),
    ]
    # Those of block 2, made with those of block 1, until block 2 needs them itself.
    assert step.early_bytes == [0, 0, 0, 8, 8, 0, 0, 0]


def test_a_partial_gradient_waits_in_the_backwards_between() -> None:
    chain = make([[option(1, 2, 3, 4, 5)]] * 4, [1.0] * 4, [])
    partial = (PartialGradient(7 * MIB, range(1, 3)),)
    with_partial = replace(chain, partial_gradients=partial)
    before, after = (predict(c, Selection((0,) * 4)) for c in (chain, with_partial))
    more = [b.live_bytes - a.live_bytes for a, b in zip(before.moments, after.moments, strict=True)]
    # Four forwards, then the backwards of blocks 3 to 0.
    assert more == [0, 0, 0, 0, 0, 7 * MIB, 7 * MIB, 0]


def test_a_partial_gradient_is_one_buffer_from_where_it_is_made() -> None:
    made = LiveRange(7 * MIB, 1, 1)
    backward = Phase(
        (LiveRange(2 * MIB),), (2 * MIB, 9 * MIB), gradients=((3, made), (5, LiveRange(MIB)))
    )
    plain = option(1, 2, 3, 4, 5)
    last = replace(plain, cost=replace(plain.cost, backward=backward))
    chain = make([[plain]] * 3 + [[last]], [1.0] * 4, [])
    chain = replace(chain, partial_gradients=(PartialGradient(7 * MIB, range(1, 3), 3),))
    memory, blocks = Memory(chain, Selection((0,) * 4)), range(4)
    alive = [*map(memory.in_forward, blocks), *map(memory.in_backward, reversed(blocks))]
    step = timeline(alive)
    # Four forwards of one position; in the backward of block 3 it is made at the second.
    assert [b for b in step.buffers if b.size_bytes == 7 * MIB] == [LiveRange(7 * MIB, 5, 7)]
    # The part that waits for none is an own one of the block.
    assert LiveRange(MIB, 4, 5) in step.buffers
    assert max(backward.sizes_at_peak) == 7 * MIB and len(backward.sizes_at_peak) == 3


def test_a_cotangent_is_one_buffer_from_where_it_is_made_to_where_it_is_read() -> None:
    # The value goes from block 0 to 2, its cotangent the other way.
    value = BoundaryValue(7 * MIB, 0, (2,), True, frozenset(), output=4, input=6)
    plain = option(1, 2, 3, 4, 5)
    made = Phase((), (MIB, 7 * MIB, 7 * MIB), gradients=((6, LiveRange(7 * MIB, 1)),))
    read = Phase((), (7 * MIB, MIB), cotangents=((4, LiveRange(7 * MIB, 0, 0)),))
    first, last = (replace(plain, cost=replace(plain.cost, backward=b)) for b in (read, made))
    chain = make([[first], [plain], [last]], [1.0] * 3, [])
    for values in ((value,), (replace(value, output=None, input=None),)):
        chain = replace(chain, boundary_values=values)
        memory, blocks = Memory(chain, Selection((0,) * 3)), range(3)
        alive = [*map(memory.in_forward, blocks), *map(memory.in_backward, reversed(blocks))]
        cotangents = [b for b in timeline(alive).buffers if b.size_bytes == 7 * MIB and b.first > 2]
        if values == (value,):
            # Three forwards of one position, then three, one and two of the backwards.
            assert cotangents == [LiveRange(7 * MIB, 4, 7)]
        else:
            # Where it is not known which buffers are the cotangent, there are three.
            assert sorted(b[1:3] for b in cotangents) == [(4, 5), (6, 6), (7, 7)]


def tied(dtype: str, config: PlannerConfig) -> Chain:
    """Layers between an embedding and the product with its table, all in one type."""

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        table = params["table"]
        x = table.astype(dtype)[tokens]
        for n in range(4):
            with jax.named_scope(f"layer_{n}"):
                x = jnp.tanh(x @ params[f"w{n}"].astype(dtype)) @ params[f"v{n}"].astype(dtype)
        logits = x @ table.astype(dtype).T
        return jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1).mean()

    def wide(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.float32)

    params = {"table": wide(512, 64)}
    params |= {f"w{n}": wide(64, 256) for n in range(4)}
    params |= {f"v{n}": wide(256, 64) for n in range(4)}
    tokens = jax.ShapeDtypeStruct((32, 16), np.int32)
    step = own_step(trace_loss(loss, (params, tokens)))
    context = prepare(step, get_target("cpu"), config, 0.0, lambda *_: None)
    chain = context.chain()
    assert len(chain) > 2
    for one in chain.partial_gradients:
        assert one.waits.stop == len(chain) - 1
    return chain


def test_the_gradient_of_a_tied_embedding_waits_in_the_type_in_which_it_is_read() -> None:
    search = SearchConfig(max_packings=0, max_saved_sets=0)
    config = PlannerConfig(search=search, cost="analytic")
    (half,), (whole,) = (tied(t, config).partial_gradients for t in ("bfloat16", "float32"))
    assert (half.size_bytes, whole.size_bytes) == (512 * 64 * 2, 512 * 64 * 4)
    # A part of the gradient's own type is added in the gradient's memory.
    assert (half.waits.start, whole.waits.start) == (0, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_block_says_when_it_makes_its_part_of_a_gradient(dtype: str) -> None:
    search = SearchConfig(max_packings=1, max_saved_sets=1, max_workers=1)
    chain = tied(dtype, PlannerConfig(search=search, cache_dir=""))
    (partial,) = chain.partial_gradients
    last = len(chain) - 1
    of_computed = {v.input for v in chain.boundary_values if v.readers[-1] == last}
    for option_ in chain.options[-1]:
        backward = option_.cost.backward
        ((position, buffer),) = (one for one in backward.gradients if one[0] not in of_computed)
        assert (position, buffer.size_bytes) == (partial.position, partial.size_bytes)
        # Made of the cotangent of the logits, it waits up to the end.
        assert 0 < buffer.first < len(backward.live_bytes) == buffer.last + 1
        assert buffer.size_bytes <= backward.live_bytes[-1]
    # The first block completes the gradient, which is then a result of the step.
    assert not any(o.cost.backward.gradients for o in chain.options[0])
