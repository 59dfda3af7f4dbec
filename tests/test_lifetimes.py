"""What is alive when: buffers of constants, and parts of gradients that wait for others."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from test_schedule import MIB, make, option
from tracing import trace_loss

from jax_hremat import PlannerConfig
from jax_hremat._cost.option_cost import LiveRange
from jax_hremat._emit.step import own_step
from jax_hremat._planner.context import prepare
from jax_hremat._solve.chain import PartialGradient, Selection
from jax_hremat._solve.lifetimes import Held, timeline
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


def test_the_gradient_of_a_tied_embedding_waits_in_the_type_in_which_it_is_read() -> None:
    def partial(dtype: str) -> tuple[PartialGradient, ...]:
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
        config = PlannerConfig(cost="analytic")
        step = own_step(trace_loss(loss, (params, tokens)))
        context = prepare(step, get_target("cpu"), config, 0.0, lambda *_: None)
        chain = context.chain()
        assert len(chain) > 2
        for one in chain.partial_gradients:
            assert one.waits.stop == len(chain) - 1
        return chain.partial_gradients

    (half,), (whole,) = partial("bfloat16"), partial("float32")
    assert (half.size_bytes, whole.size_bytes) == (512 * 64 * 2, 512 * 64 * 4)
    # A part of the gradient's own type is added in the gradient's memory.
    assert (half.waits.start, whole.waits.start) == (0, 1)
