"""Values made of constants alone are never kept, and are no inputs of checkpointed regions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import normal
from tracing import emit, loss_call

from jax_hremat._emit.emit import emit_range
from jax_hremat._jax.checkpoints import is_checkpoint
from jax_hremat._jax.jaxprs import Literal, all_equations, open_jaxpr
from jax_hremat._plan.region import Region, ValueRef
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import saved_value_sets
from jax_hremat._trace.call import TracedCall
from jax_hremat._trace.constants import constant_makers
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay

HEADS, LENGTH, WIDTH = 3, 8, 4
W = normal(0, HEADS, WIDTH, WIDTH)
X = normal(1, HEADS, LENGTH, WIDTH)
SLOPES = np.linspace(0.5, 1.0, HEADS)


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    """With a causal mask of two iotas, and a bias made of a captured array."""
    rows, columns = (jax.lax.broadcasted_iota(int, (LENGTH, LENGTH), axis) for axis in (0, 1))
    mask = jnp.broadcast_to(rows >= columns, (HEADS, LENGTH, LENGTH))
    bias = jnp.asarray(SLOPES)[:, None, None] * (columns - rows)
    keys = jnp.tanh(x @ w)
    scores = jnp.where(mask, keys @ x.swapaxes(1, 2) + bias, -1e9)
    return jnp.mean((jax.nn.softmax(scores) @ x) ** 2)


@pytest.fixture(scope="module")
def call() -> TracedCall:
    return loss_call(attention, (W, X), argnums=(0, 1))


@pytest.fixture(scope="module")
def program(call: TracedCall) -> Program:
    return call.program


@pytest.fixture(scope="module")
def masks(program: Program) -> list[ValueRef]:
    """The booleans of the program."""
    eqns = open_jaxpr(program.jaxpr).eqns
    found = [(i, 0) for i, eqn in enumerate(eqns) if eqn.outvars[0].aval.dtype == bool]
    assert len(found) >= 2, "the comparison, and its broadcast"
    return found


def test_what_depends_on_no_argument_is_made_of_constants(
    program: Program, masks: list[ValueRef]
) -> None:
    jaxpr = open_jaxpr(program.jaxpr)
    makers = constant_makers(jaxpr)
    assert all(jaxpr.eqns[i].outvars[k] in makers for i, k in masks)
    assert all(var in jaxpr.eqns[i].outvars for var, i in makers.items())
    captured = {v for eqn in jaxpr.eqns for v in eqn.outvars if v.aval.shape == (HEADS, 1, 1)}
    assert captured and captured.isdisjoint(makers)
    assert all(jaxpr.eqns[i].primitive.name not in ("dot_general", "tanh") for i in makers.values())
    with_argument = jax.make_jaxpr(lambda x: (x + jnp.arange(3.0)) * jnp.arange(3.0).sum())(1.0)
    made = {eqn.primitive.name for eqn in open_jaxpr(with_argument).eqns}
    # A reduction is a kernel of its own, and is not run again.
    assert {"add", "mul", "reduce_sum"} <= made
    indices = constant_makers(open_jaxpr(with_argument)).values()
    assert {open_jaxpr(with_argument).eqns[i].primitive.name for i in indices} == {"iota"}


def test_the_leaf_program_keeps_none(program: Program) -> None:
    graph = build_graph(program)
    times = [1.0] * len(graph.operations)
    sets = saved_value_sets(graph, 0, len(graph.operations), times, SolverConfig(), 4)
    assert sets
    assert not any(graph.values[v].of_constants for found in sets for v in found.values)
    assert any(found.values for found in sets)


def test_a_region_makes_its_own_wherever_it_begins(call: TracedCall) -> None:
    eqns = open_jaxpr(call.program.jaxpr).eqns

    def planned_from(start: int) -> Callable[..., jax.Array]:
        region = Region(start, len(eqns), checkpointed=True)
        return emit(call, Region(0, len(eqns), children=(region,)))

    select = next(i for i, eqn in enumerate(eqns) if eqn.primitive.name == "select_n")
    for start in range(select + 1):
        made = jax.make_jaxpr(planned_from(start))(W, X)
        (checkpoint,) = filter(is_checkpoint, all_equations(made))
        assert not any(v.aval.dtype == bool for v in checkpoint.invars)
    expected, actual = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(W, X) for f in (attention, planned_from(select))
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), actual, expected
    )


def test_a_part_of_the_program_by_itself(program: Program, masks: list[ValueRef]) -> None:
    """As blocks are priced: given what the part reads, and not what makes its constants."""
    jaxpr = open_jaxpr(program.jaxpr)
    start = masks[-1][0] + 1
    own = jaxpr.eqns[start:]
    made = {v for eqn in own for v in eqn.outvars}
    inputs = list(
        dict.fromkeys(
            v for eqn in own for v in eqn.invars if not isinstance(v, Literal) and v not in made
        )
    )
    assert jaxpr.eqns[masks[-1][0]].outvars[0] in inputs
    region = Region(start, len(jaxpr.eqns), checkpointed=True)
    part = emit_range(
        program, replace(region, checkpointed=False, children=(region,)), inputs, jaxpr.outvars
    )
    assert jax.eval_shape(part, *(v.aval for v in inputs))[0].shape == ()


def test_a_plan_that_names_them_keeps_none(program: Program, masks: list[ValueRef]) -> None:
    whole = Region(0, program.num_operations, checkpointed=True)
    named = Region(0, program.num_operations, checkpointed=True, saved=tuple(masks))
    assert replay(program, named).kept_bytes == replay(program, whole).kept_bytes
