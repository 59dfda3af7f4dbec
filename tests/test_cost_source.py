"""Where costs come from: shapes alone, the compiler, the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from random_plans import QUICK as FEW
from random_plans import WIDTH, losses, struct
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._cost.analytic import analytic_cost
from jax_hremat._cost.block_step import block_step
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._partition.blocks import make_block
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.rates import Rates, rates
from jax_hremat._xla.target import get_target

SEARCH = SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2)
CPU = rates(get_target("cpu"))
# A flop a second, a byte in a thousandth of one, launches free.
PLAIN = Rates(flops_per_s={"f32": 1.0}, vector_flops_per_s=1.0, bytes_per_s=1e3, launch_s=0.0)


def cost_of(program: Program, mode: Region, target_rates: Rates = CPU) -> OptionCost:
    graph = build_graph(program)
    block = make_block(graph, mode.start, mode.stop)
    return analytic_cost(block_step(program, graph, block, mode), target_rates)


def whole(program: Program, **how: Any) -> Region:
    return Region(0, program.num_operations, **how)


@given(losses())
@FEW
def test_checkpointing_keeps_nothing_and_takes_no_less_time(loss: Any) -> None:
    program = trace_loss(loss, (struct(WIDTH, WIDTH), struct(WIDTH, WIDTH)))
    plain, checkpointed = (
        cost_of(program, whole(program)),
        cost_of(program, whole(program, checkpointed=True)),
    )
    assert checkpointed.kept_bytes == 0 <= plain.kept_bytes
    assert checkpointed.kept_outputs == ()
    assert checkpointed.time_s >= plain.time_s * (1 - 1e-9)
    assert checkpointed.forward_peak_bytes <= plain.forward_peak_bytes
    assert cost_of(program, whole(program)) == plain


def test_what_shapes_say_of_two_products_by_hand() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jnp.sin(x @ w) @ w).sum()

    program = trace_loss(loss, (struct(8, 8), struct(4, 8)))
    plain = cost_of(program, whole(program), PLAIN)
    size = 4 * 8 * 4
    # The sine, for the second weight's gradient, and the cosine that JAX makes of its argument.
    assert plain.kept_bytes == 2 * size
    # Two products forward; three backward, for x is not differentiated; each 2·4·8·8 flops. The
    # sum is a flop an element and each elementwise operation a quarter of its result's bytes.
    product_s = 2 * 4 * 8 * 8
    fused_s = 0.25 * size / 1e3
    assert plain.forward_s == pytest.approx(2 * product_s + 2 * fused_s + 4 * 8, rel=0.02)
    assert plain.backward_s == pytest.approx(3 * product_s, rel=0.02)
    # Checkpointed, the first product and the sine are recomputed; nothing reads the other's result.
    checkpointed = cost_of(program, whole(program, checkpointed=True), PLAIN)
    assert checkpointed.backward_s - plain.backward_s == pytest.approx(product_s, rel=0.02)


def test_a_loop_takes_its_body_each_time() -> None:
    def loss(w: jax.Array, x: jax.Array, length: int) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=length)[0].sum()

    def time_s(length: int) -> float:
        args = (struct(8, 8), struct(4, 8), length)
        program = trace_loss(lambda w, x: loss(w, x, length), args[:2])
        return cost_of(program, whole(program), PLAIN).time_s

    assert time_s(12) == pytest.approx(4 * time_s(3), rel=0.02)


def test_a_print_has_no_result_and_costs_a_launch() -> None:
    def loss(w: jax.Array, x: jax.Array, tell: bool) -> jax.Array:
        y = jnp.tanh(x @ w).sum()
        if tell:
            jax.debug.print("{}", y)
        return y

    def time_s(tell: bool) -> float:
        program = trace_loss(lambda w, x: loss(w, x, tell), (struct(8, 8), struct(4, 8)))
        return cost_of(program, whole(program), replace(PLAIN, launch_s=7.0)).forward_s

    assert 7.0 <= time_s(True) - time_s(False) < 7.1


def mlp(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jax.nn.gelu(x @ w) @ w.T
    return (x * x).mean()


ARGS = ([struct(8, 32)] * 3, struct(256, 8))


@pytest.mark.parametrize(
    "source", ["analytic", "compiled", pytest.param("measured", marks=pytest.mark.slow)]
)
def test_every_source_makes_a_certified_plan_that_says_which_it_was(source: Any) -> None:
    config = PlannerConfig(search=SEARCH, max_rounds=2, cost=source)
    plan = jax_hremat.plan_remat(mlp, budget=0.7, target="cpu", config=config)(*ARGS)
    assert plan.certificate.holds
    assert plan.cost_source == source
    assert (plan.num_compiles["blocks"] == 0) == (source == "analytic")
    assert source in str(plan)
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape), s.dtype), ARGS)
    options = jax_hremat.compiler_options("cpu")
    planned = jax.jit(
        jax.value_and_grad(jax_hremat.apply_plan(mlp, plan)), compiler_options=options
    )(*args)
    original = jax.jit(jax.value_and_grad(mlp), compiler_options=options)(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), planned, original)


@pytest.mark.slow
def test_random_keys_are_measured_too() -> None:
    def loss(w: jax.Array, x: jax.Array, key: jax.Array) -> jax.Array:
        for part in jax.random.split(key):
            x = jnp.where(jax.random.bernoulli(part, 0.5, x.shape), jnp.tanh(x @ w), x)
        return (x * x).mean()

    config = PlannerConfig(search=SEARCH, max_rounds=0, cost="measured")
    args = (struct(8, 8), struct(64, 8), jax.random.key(0))
    plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=config)(*args)
    assert plan.certificate.holds


@pytest.mark.slow
def test_a_norm_of_zeros_is_measured_while_nans_are_looked_for() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = jnp.tanh(x @ w)
            x = x / jnp.sqrt((x * x).sum(-1, keepdims=True))
        return (x * x * x).mean()

    config = PlannerConfig(search=SEARCH, max_rounds=0, cost="measured")
    with jax.debug_nans(True):
        plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=config)(
            struct(8, 8), struct(64, 8)
        )
    assert plan.certificate.holds


def test_nothing_is_measured_on_a_device_that_is_not_there() -> None:
    config = PlannerConfig(search=SEARCH, cost="measured")
    with pytest.raises(jax_hremat.TargetUnavailableError, match="'h200', and .* attached"):
        jax_hremat.plan_remat(mlp, budget=0.7, target="h200", config=config)(*ARGS)


def test_an_unknown_source_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'guessed'.*'compiled', 'analytic', 'measured'"):
        PlannerConfig(cost="guessed")  # type: ignore[arg-type]
