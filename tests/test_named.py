"""JAX's errors about values that Python needs name the planned function and its arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig

CONFIG = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2),
    cost="analytic",
)
W, X = np.ones((3, 4), np.float32), np.ones((2, 3), np.float32)


def of_a_batch(params: Any, batch: Any) -> Any:
    y = batch["x"] @ params["w"]
    return y.sum() if y[0, 0] > params["limits"][1] else y.mean()


def of_many(params: Any, *inputs: Any, scale: Any, **more: Any) -> Any:
    if params.sum() * inputs[1][0].sum() * scale * more["z"] * more["a"].sum() > 0:
        return params.sum()
    return params.mean()


class Model:
    def __call__(self, w: Any, x: Any) -> Any:
        return float((x @ w).sum())


def error_of(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(jax.errors.ConcretizationTypeError) as raised:
        fun(*args, **kwargs)
    return str(raised.value)


def words(text: str) -> set[str]:
    """What a text is made of: JAX does not always list arguments in the same order."""
    return {word.strip(".,") for word in text.split()}


@pytest.mark.parametrize(
    ("loss", "args", "kwargs"),
    [
        (of_a_batch, ({"w": W, "limits": [W[0, 0], W[0, 0]]}, {"x": X}), {}),
        (of_a_batch, ({"w": W, "limits": [W[0, 0], W[0, 0]]},), {"batch": {"x": X}}),
        (of_many, (W, X, (X,)), {"z": X[0, 0], "scale": X[0, 0], "a": X}),
        (functools.partial(of_many, scale=2.0), (W, X, [X]), {"z": X[0, 0], "a": X}),
        (Model().__call__, (W, X), {}),
    ],
)
def test_errors_say_what_they_say_under_jit(
    loss: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    plan = jax_hremat.plan_remat(loss, budget=1.0, config=CONFIG, target="cpu")
    expected = error_of(jax.jit(loss), *args, **kwargs)
    actual = error_of(plan, *args, **kwargs)
    name = getattr(loss, "func", loss).__name__
    assert f"the function {name} at {__file__}" in actual
    assert words(actual) == words(expected)


def test_values_in_objects_are_named() -> None:
    def loss(model: nnx.Linear, x: Any) -> Any:
        return float(model(x).sum())

    plan = jax_hremat.plan_remat(loss, budget=1.0, config=CONFIG, target="cpu")
    error = error_of(plan, nnx.Linear(3, 4, rngs=nnx.Rngs(0)), X)
    assert "the function loss" in error
    assert {"model.kernel", "model.bias", "x"} <= words(error)


def test_what_python_cannot_tell_the_signature_of_is_planned() -> None:
    # The parameters of a wrapper need not be what it is called with.
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum()

    def wrapper(*args: Any) -> jax.Array:
        return loss(*args)

    wrapper.__signature__ = "none"  # pyright: ignore[reportFunctionMemberAccess]
    plan = jax_hremat.plan_remat(wrapper, budget=1.0, config=CONFIG, target="cpu")(W, X)
    np.testing.assert_allclose(jax_hremat.apply_plan(wrapper, plan)(W, X), loss(W, X), rtol=1e-6)
