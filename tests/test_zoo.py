"""The benchmark models: wrapping their blocks by hand changes no number."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import zoo

NAMES = zoo.names()
CONFIGS = {"gpt2-6": {"dropout": 0.0, "layers": 2}}


class Step(NamedTuple):
    """A tiny problem, its compiled step, its arguments and what the step returns."""

    problem: zoo.Problem
    run: Any
    args: tuple[Any, ...]
    out: Any
    grads: Any

    @property
    def loss(self) -> float:
        return float(self.out[0] if self.problem.has_aux else self.out)


def tiny(name: str, **options: Any) -> zoo.Problem:
    return zoo.make(name, "tiny", **{"dropout": 0.1, **CONFIGS.get(name, {}), **options})


def run(problem: zoo.Problem, args: tuple[Any, ...]) -> Step:
    fast_compile = {"xla_backend_optimization_level": 0}
    step = jax.jit(problem.value_and_grad, compiler_options=fast_compile)
    return Step(problem, step, args, *step(*args))


@cache
def plain(name: str) -> Step:
    problem = tiny(name)
    return run(problem, problem.concrete(0))


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_full_size_is_described_without_arrays(name):
    problem = zoo.make(name, "full")
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(problem.args))
    out = jax.eval_shape(problem.loss_fn, *problem.args)
    loss = out[0] if problem.has_aux else out
    assert loss.shape == () and loss.dtype == jnp.float32


@pytest.mark.parametrize("name", NAMES)
def test_plain_step_is_finite_and_matches_the_described_arguments(name):
    step = plain(name)
    assert np.isfinite(step.loss)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(step.grads))
    described = jax.tree.map(lambda x: (x.shape, x.dtype), step.problem.args)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), step.args) == described


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *((name, "block") for name in NAMES),
        ("gpt2-6", "dots_saveable"),
        ("gpt2-small", "dots_with_no_batch_dims_saveable"),
        ("encdec", "dots_with_no_batch_dims_saveable"),
    ],
)
def test_remat_gives_the_same_step(name, remat):
    expected = plain(name)
    problem = tiny(name, remat=remat)
    eqns = jax.make_jaxpr(problem.loss_fn)(*problem.args).eqns
    assert any(eqn.primitive.name.startswith(("remat", "checkpoint")) for eqn in eqns)
    step = run(problem, expected.args)
    assert_same(step.out, expected.out)
    assert_same(step.grads, expected.grads)


@pytest.mark.parametrize("name", NAMES)
def test_dropout_draws_from_the_key(name):
    step = plain(name)
    params, batch, *rest = step.args
    if name == "gpt2-6":
        assert "dropout_key" not in batch
        return
    out, _ = step.run(params, {**batch, "dropout_key": jax.random.key(7)}, *rest)
    assert float(out[0] if step.problem.has_aux else out) != step.loss


def test_batch_statistics_are_updated():
    step = plain("resnet50")
    before, (_, after) = step.args[2], step.out
    assert jax.tree.structure(before) == jax.tree.structure(after)
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), before, after)
    assert all(jax.tree.leaves(changed))


def test_overrides_and_untied_head():
    problem = zoo.make("gpt2-small", "tiny", layers=1, dtype="bfloat16", tied=False, batch=3)
    params, batch = problem.args
    assert set(params) == {"tokens", "positions", "block_0", "norm", "head"}
    assert batch["tokens"].shape[0] == 3
    assert "bfloat16" in problem.description


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        (("lenet",), {}, "unknown problem"),
        (("gpt2-6", "huge"), {}, "unknown size"),
        (("gpt2-6", "tiny"), {"remat": "everything"}, "unknown remat"),
    ],
)
def test_unknown_options_are_refused(args, kwargs, message):
    with pytest.raises(ValueError, match=message):
        zoo.make(*args, **kwargs)
