"""Keys for what equations do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_hremat._jax.describe import equation_key

X = jnp.ones((2, 3))


@jax.custom_jvp
def halved(x: jax.Array) -> jax.Array:
    return x / 2


@halved.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return halved(*primals), tangents[0] / 2


@jax.custom_jvp
def halved_with_another_rule(x: jax.Array) -> jax.Array:
    return x / 2


@halved_with_another_rule.defjvp
def _(primals: Any, tangents: Any) -> Any:
    y = halved_with_another_rule(*primals)
    return y, tangents[0] * y


def last_key(fun: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    return equation_key(jax.make_jaxpr(fun)(*args).eqns[-1])


@pytest.mark.parametrize("fun", [jnp.tanh, jnp.sum, halved, lambda x: x**2.5, lambda x: x[:, 1:]])
def test_equal_equations_have_one_key(fun: Callable[..., Any]) -> None:
    first, *_, last = jax.make_jaxpr(lambda x: (fun(x), fun(x + 1)))(X).eqns
    assert first is not last
    assert equation_key(first) == equation_key(last)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (jnp.tanh, jnp.sin),
        (lambda x: x.sum(0), lambda x: x.sum(1)),
        (lambda x: x**2.5, lambda x: x**0.0),
        (lambda x: x * jnp.float32(2), lambda x: x * x),
        (jax.jit(jnp.tanh), jax.jit(jnp.sin)),
        (halved, halved_with_another_rule),
    ],
)
def test_other_operations_parameters_literals_and_rules_have_other_keys(
    one: Callable[..., Any], other: Callable[..., Any]
) -> None:
    assert last_key(one, X) != last_key(other, X)


@pytest.mark.parametrize("other", [X.T, X[0], X.astype(jnp.bfloat16)])
def test_other_shapes_and_types_have_other_keys(other: jax.Array) -> None:
    assert last_key(jnp.tanh, X) != last_key(jnp.tanh, other)
