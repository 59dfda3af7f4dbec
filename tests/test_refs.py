"""Mutable arrays in a loss, and errors that a `checkify` collects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from programs import normal
from tracing import emit, loss_call

import jax_hremat
from jax_hremat import PlannerConfig, UnsupportedProgramError
from jax_hremat._options.checkpoint_all import checkpoint_all
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import build_graph

QUICK = PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)
W = normal(0, 3, 8, 8) / 3


def written_by_index(w: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.zeros_like(w))
    for i in range(3):
        ref[i] = jnp.sin(w[i] @ w[i])
    ref[0] = ref[1] * ref[2]
    return (ref[...] ** 2).sum()


def added_to_in_a_scan(w: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.zeros_like(w[0]))

    def step(i: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        ref[...] += jnp.tanh(w @ ref[...] + w)
        return i + 1, None

    lax.scan(step, jnp.int32(0), w)
    return jax.freeze(ref).sum()


def handed_to_a_jit(w: jax.Array) -> jax.Array:
    @jax.jit
    def put(ref: Any, i: jax.Array) -> None:
        ref[i] = jnp.sin(w[i])

    ref = jax.new_ref(jnp.zeros_like(w))
    put(ref, 0)
    put(ref, 2)
    return (ref[...] @ w).sum()


def in_branches(w: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.sin(w))

    def write() -> None:
        ref[0] = jnp.cos(w[1])

    lax.cond(w[0, 0, 0] > 0, write, lambda: None)
    lax.cond(w[0, 0, 0] <= 0, write, lambda: None)
    return (ref[...] ** 2).sum()


@jax.custom_vjp
def _scaled(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[...] *= 2.0
    return ref[...]


_scaled.defvjp(lambda x: (_scaled(x), None), lambda _, g: (3 * g,))


def inside_a_rule(w: jax.Array) -> jax.Array:
    ref = jax.new_ref(jnp.sin(w))
    ref[...] += _scaled(jnp.sin(w))
    return (ref[...] ** 2).sum()


@pytest.mark.parametrize(
    "loss", [written_by_index, added_to_in_a_scan, handed_to_a_jit, in_branches, inside_a_rule]
)
def test_mutable_arrays_made_inside(loss: Callable[[jax.Array], jax.Array]) -> None:
    call = loss_call(loss, [W])
    program = call.program
    whole = Region(0, program.num_operations)
    graph = build_graph(program)
    modes = [whole, checkpoint_all(graph, whole, lambda a, b: Region(a, b, checkpointed=True))]
    assert modes[1].checkpointed
    value, gradient = jax.jit(jax.value_and_grad(loss))(W)
    for mode in modes:
        planned_value, planned_gradient = jax.jit(jax.value_and_grad(emit(call, mode)))(W)
        np.testing.assert_allclose(planned_value, value, rtol=1e-6)
        np.testing.assert_allclose(planned_gradient, gradient, rtol=1e-5, atol=1e-6)


def test_a_plan_with_mutable_arrays() -> None:
    plan = jax_hremat.plan_remat(added_to_in_a_scan, budget=1.0, target="cpu", config=QUICK)(W)
    planned = jax_hremat.apply_plan(added_to_in_a_scan, plan)
    np.testing.assert_allclose(
        jax.jit(jax.grad(planned))(W), jax.grad(added_to_in_a_scan)(W), rtol=1e-5
    )


@jax.custom_vjp
def _noting(ref: Any, x: jax.Array) -> jax.Array:
    ref[...] = x
    return jnp.sin(x)


_noting.defvjp(lambda ref, x: (_noting(ref, x), x), lambda x, g: (None, g * jnp.cos(x)))


def test_mutable_arrays_that_cannot_be_planned() -> None:
    outer = jax.new_ref(jnp.zeros(3))

    def closes_over(w: jax.Array) -> jax.Array:
        outer[0] += 1.0
        return (w**2).sum()

    def takes(w: jax.Array, ref: Any) -> jax.Array:
        ref[0] += 1.0
        return (w**2).sum()

    def notes(w: jax.Array) -> jax.Array:
        return _noting(jax.new_ref(jnp.zeros_like(w)), w).sum()

    def scans_over_a_rule(w: jax.Array) -> jax.Array:
        ref = jax.new_ref(jnp.zeros_like(w))

        def step(i: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            ref[i] = _scaled(w)
            return i + 1, None

        lax.scan(step, jnp.int32(0), w)
        return ref[...].sum()

    plan = jax_hremat.plan_remat
    with pytest.raises(UnsupportedProgramError, match="closes over a mutable array"):
        plan(closes_over, budget=1.0, target="cpu")(W)
    with pytest.raises(UnsupportedProgramError, match=r"mutable array, or is given one.*\[3\]"):
        plan(takes, budget=1.0, target="cpu")(W, outer)
    for fun, at in ((notes, "custom_vjp_call"), (scans_over_a_rule, "scan")):
        with pytest.raises(UnsupportedProgramError, match=f"derivative rule.*`{at}` at .*test_ref"):
            plan(fun, budget=1.0, target="cpu")(W)
    assert outer[0] == 0


def logarithms(w: jax.Array) -> jax.Array:
    return jnp.sin(jnp.log(w)).sum()


def checked(w: jax.Array) -> jax.Array:
    checkify.check(w[0, 0, 0] > 0, "first is {}", w[0, 0, 0])
    return jnp.sin(w).sum()


def test_checkify_around_a_planned_function() -> None:
    call = loss_call(logarithms, [W])
    planned = emit(call, Region(0, 3, children=(Region(0, 3, checkpointed=True),)))
    for fun in (planned, jax.value_and_grad(planned)):
        error, _ = checkify.checkify(jax.jit(fun), errors=checkify.all_checks)(-abs(W))
        assert "nan generated by primitive: log" in str(error.get())
        error, _ = checkify.checkify(jax.jit(fun), errors=checkify.all_checks)(abs(W) + 0.1)
        assert error.get() is None


def test_checks_inside_a_planned_function() -> None:
    planned = jax_hremat.hremat(checked, budget=1.0, target="cpu")
    with pytest.raises(UnsupportedProgramError, match="FailedCheckError.*has_aux=True"):
        checkify.checkify(planned)(W)

    def functionalized(w: jax.Array) -> tuple[jax.Array, checkify.Error]:
        error, value = checkify.checkify(checked)(w)
        return value, error

    planned = jax_hremat.hremat(
        functionalized, budget=1.0, has_aux=True, target="cpu", config=QUICK
    )
    step = jax.value_and_grad(planned, has_aux=True)
    for w, message in ((abs(W), None), (-abs(W), "first is")):
        (value, error), gradient = jax.jit(step)(w)
        np.testing.assert_allclose(value, jnp.sin(w).sum(), rtol=1e-5)
        np.testing.assert_allclose(gradient, jnp.cos(w), rtol=1e-5)
        assert error.get() is None if message is None else message in error.get()
