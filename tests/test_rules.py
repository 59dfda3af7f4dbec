"""Custom derivative rules taken apart: values, gradients, and what a checkpointed region spares."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import SymbolicZero

from jax_hremat._program.bodies import branch_bodies, scan_body
from jax_hremat._program.emit import emit, emit_flat
from jax_hremat._program.flat import flatten
from jax_hremat._program.graph import Graph, build_graph
from jax_hremat._program.region import Loop, Region
from jax_hremat._program.replay import replay
from jax_hremat._program.trace import Program, trace_call, trace_loss
from jax_hremat._shared import compat

SIZE = 4
X = jnp.linspace(0.1, 0.9, SIZE * SIZE).reshape(SIZE, SIZE)
Y = jnp.cos(X) + 0.3

# Stands for a kernel: one primitive of its own, with no derivative that is used.
kernel = functools.partial(jax.lax.cumsum, axis=0)
KERNEL = "cumsum"


@jax.custom_vjp
def fused(x: jax.Array, y: jax.Array) -> jax.Array:
    return kernel(jnp.sin(x)) * y


def _fused_forward(x: jax.Array, y: jax.Array) -> Any:
    sums = kernel(jnp.sin(x))
    return sums * y, (x, y, sums)


def _fused_backward(kept: Any, g: jax.Array) -> Any:
    x, y, sums = kept
    return jax.lax.cumsum(g * y, axis=0, reverse=True) * jnp.cos(x), g * sums


fused.defvjp(_fused_forward, _fused_backward)


def primitives(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in compat.open_jaxpr(program.jaxpr).eqns]


def count(jaxpr: Any, primitive: str) -> int:
    """Live equations of a primitive, bodies included."""
    total = 0
    for equation in flatten(jaxpr).equations:
        total += equation.eqn.primitive.name == primitive
        total += sum(count(compat.open_jaxpr(b), primitive) for b in compat.inner_jaxprs(equation.eqn))
    return total


def kernels(program: Program, region: Region, primitive: str = KERNEL) -> int:
    """Forward kernels in the step of a program under a plan."""
    step = program.step(emit_flat(program, region))
    return count(jax.make_jaxpr(step)(*program.in_avals, *program.cotangent_avals), primitive)


def whole(program: Program, *, saved: Any = (), wrapped: bool = True) -> Region:
    return Region(0, program.num_operations, wrapped=wrapped, saved=tuple(saved))


def made_by(program: Program, primitive: str) -> list[tuple[int, int]]:
    names = primitives(program)
    eqns = compat.open_jaxpr(program.jaxpr).eqns
    return [(i, k) for i, n in enumerate(names) if n == primitive for k in range(len(eqns[i].outvars))]


def same(found: Any, expected: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, expected)


def check(loss: Callable[..., Any], *args: Any, argnums: Any = 0) -> Program:
    """The loss has the same value and gradient with its rules apart, bare, wrapped, and with every
    value saved."""
    program = trace_loss(loss, args, {}, argnums=argnums)
    everything = [
        (i, k)
        for i, eqn in enumerate(compat.open_jaxpr(program.jaxpr).eqns)
        for k in range(len(eqn.outvars))
    ]
    expected = jax.value_and_grad(loss, argnums)(*args)
    modes = [whole(program, wrapped=False), whole(program), whole(program, saved=everything)]
    for region in modes:
        emitted = emit(program, region)
        same(jax.jit(jax.value_and_grad(emitted, argnums))(*args), expected)
        same(jax.jit(emitted)(*args), expected[0])
    return program


def test_a_rule_is_its_forward_and_an_operation_that_only_hands_on() -> None:
    program = check(lambda x: (fused(x * 2, Y) * x).sum(), X)
    assert primitives(program)[1:6] == [compat.DETACH, "sin", "cumsum", "mul", "custom_vjp_call"]
    graph = build_graph(program)
    attached = graph.operations[5]
    assert attached.active
    assert attached.flops == attached.moved_bytes == attached.opaque_bytes == 0
    assert attached.fusible
    _, _, sums, product = (op.outputs[0] for op in graph.operations[1:5])
    computed = {v for v in attached.needs if graph.values[v].kind == "computed"}
    assert computed == {graph.operations[0].outputs[0], sums}
    assert attached.reads == (product,)
    assert [op.of_rule for op in graph.operations[:7]] == [False, False, *[True] * 3, False, False]


def test_kept_residuals_spare_the_kernel() -> None:
    program = trace_loss(lambda x: jnp.sin(fused(jnp.sin(x), Y)).sum(), (X,), {})
    assert kernels(program, whole(program, wrapped=False)) == 2
    assert kernels(program, whole(program)) == 3
    saved = made_by(program, KERNEL)
    assert kernels(program, whole(program, saved=saved)) == 2
    # The result alone is not what the backward reads.
    assert kernels(program, whole(program, saved=made_by(program, "custom_vjp_call"))) == 3
    seen = replay(program, whole(program, saved=saved))
    assert not any(seen.recomputed[op] for op, _ in saved)
    assert seen.forward_flops == replay(program, whole(program)).forward_flops


# --- rules of many kinds


@jax.custom_vjp
def with_integers(x: jax.Array, shift: jax.Array, unused: jax.Array) -> Any:
    return x * shift + unused, shift * 2


with_integers.defvjp(
    lambda x, shift, unused: ((x * shift + unused, shift * 2), shift),
    # The cotangent of an integer is of no use, that of an integer result has no values.
    lambda shift, g: (g[0] * shift, np.zeros((), jax.dtypes.float0), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(fun: Callable[[jax.Array], jax.Array], x: jax.Array, power: int) -> jax.Array:
    return fun(x) ** power


applied.defvjp(
    lambda fun, x, power: (fun(x) ** power, (x, fun(x))),
    lambda fun, power, kept, g: (g * power * kept[1] ** (power - 1) * jnp.cos(kept[0]),),
)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return fused(x, x) * 2


# The rule calls a function with a rule of its own, and another one in its backward.
doubled.defvjp(
    lambda x: (fused(x, x) * 2, x),
    lambda x, g: (sum(jax.vjp(fused, x, x)[1](g * 2)),),
)


@jax.custom_vjp
def lazy(x: jax.Array, y: jax.Array) -> jax.Array:
    return kernel(x) * jnp.sin(y)


def _lazy_forward(x: Any, y: Any) -> Any:
    kept = (jnp.cos(y.value) if y.perturbed else None, kernel(x.value), x.perturbed and y.value)
    return kept[1] * jnp.sin(y.value), kept


def _lazy_backward(kept: Any, g: Any) -> Any:
    cos, sums, y = kept
    if isinstance(g, SymbolicZero):
        return None, None
    in_x = None if y is False else jax.lax.cumsum(g * jnp.sin(y), axis=0, reverse=True)
    return in_x, None if cos is None else g * sums * cos


lazy.defvjp(_lazy_forward, _lazy_backward, symbolic_zeros=True)


@jax.custom_vjp
def remade(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2


remade.defvjp(
    lambda x: (jnp.sin(x) * 2, kernel(jnp.cos(x))),
    lambda sums, g: (g * jnp.diff(sums, axis=0, prepend=0) * 2,),
    optimize_remat=True,
)


@jax.custom_gradient
def graded(x: jax.Array) -> Any:
    sums = kernel(x)
    return sums * x, lambda g: g * sums + jax.lax.cumsum(g * x, axis=0, reverse=True)


def closing_over(x: jax.Array, table: Any) -> jax.Array:
    @jax.custom_vjp
    def scaled(x: jax.Array) -> jax.Array:
        return x * table

    scaled.defvjp(lambda x: (x * table, jnp.sin(x)), lambda sin, g: (g * table + 0 * sin,))
    return scaled(x)


CASES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fused": lambda x: fused(x, x),
    "second input only": lambda x: fused(Y, x),
    "integers": lambda x: with_integers(x, jnp.int32(3), x)[0] * with_integers(x, 2, 1.0)[1],
    "nondiff_argnums": lambda x: applied(jnp.sin, x, 3),
    "nested": lambda x: doubled(x) * x,
    "optimize_remat": lambda x: remade(jnp.tanh(x)),
    "custom_gradient": lambda x: graded(jnp.tanh(x)),
    "symbolic zeros, both": lambda x: lazy(x, x),
    "symbolic zeros, first": lambda x: lazy(x, Y),
    "symbolic zeros, second": lambda x: lazy(Y, x),
    "closed-over constant": lambda x: closing_over(x, Y),
    "twice the same": lambda x: fused(fused(x, Y), Y),
    "in a jit": lambda x: jax.jit(lambda x: fused(x, Y))(x * 2),
    "in a vmap": lambda x: jax.vmap(fused, (0, None))(jnp.stack([x, x * x]), x).sum(0),
    "batched closure": lambda x: jax.vmap(lambda a: graded(a * x))(jnp.arange(3.0)).sum(0),
    "bfloat16": lambda x: fused(x.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_second_derivatives(case: str) -> None:
    fun = CASES[case]

    def loss(x: jax.Array) -> jax.Array:
        return (fun(jnp.sin(x)) * x).astype(jnp.float32).sum()

    program = check(loss, X)
    assert compat.DETACH in primitives(program)
    if case == "bfloat16":
        return
    emitted = emit(program, whole(program))
    direction = jnp.flip(X)

    def hessian_vector(loss: Callable[..., Any]) -> Any:
        grad = jax.grad(loss)
        outer = jax.grad(lambda x: (grad(x) * direction).sum())(X)
        return outer, jax.jvp(grad, (X,), (direction,))[1], jax.linearize(grad, X)[1](direction)

    same(hessian_vector(emitted), hessian_vector(loss))
    batch = jnp.stack([X, X * 0.5])
    same(jax.vmap(jax.value_and_grad(emitted))(batch), jax.vmap(jax.value_and_grad(loss))(batch))
