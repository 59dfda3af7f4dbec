"""The benchmark models: checkpointing their blocks by hand changes no number."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import zoo

# Without those that differ from another in the number of layers alone.
SAME_BUT_FOR_LAYERS = ("gpt2-2", "gpt2-48", "gpt2-96", "gpt2-96-wide", "encdec-36")
DISTINCT = [name for name in zoo.names() if name not in SAME_BUT_FOR_LAYERS]
# A transformer in a scan; the others are run in the slow tests.
QUICKLY = ("llama-scan",)
RUN = [pytest.param(n, marks=[] if n in QUICKLY else [pytest.mark.slow]) for n in DISTINCT]
CONFIGS = {"gpt2-6": {"dropout": 0.0, "layers": 2}}
POLICIES = [
    ("gpt2-6", "dots_saveable"),
    ("gpt2-small", "dots_with_no_batch_dims_saveable"),
    ("encdec", "dots_with_no_batch_dims_saveable"),
    ("llama", "dots_saveable"),
    ("llama", "dots_with_no_batch_dims_saveable"),
    ("llama-scan", "dots_with_no_batch_dims_saveable"),
]


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


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a program, and of the bodies of its scans."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name == "scan":
            yield from equations(eqn.params["jaxpr"])


def remat_equations(problem: zoo.Problem) -> list[Any]:
    eqns = equations(jax.make_jaxpr(problem.loss_fn)(*problem.args))
    return [eqn for eqn in eqns if eqn.primitive.name.startswith(("remat", "checkpoint"))]


def assert_same(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def stack_layers(params: dict[str, Any]) -> dict[str, Any]:
    """The unrolled model's parameters, as the scanned model has them."""
    rest = {key: value for key, value in params.items() if not key.startswith("layer_")}
    layers = [params[f"layer_{i}"] for i in range(len(params) - len(rest))]
    return {**rest, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)}


@pytest.mark.parametrize("name", RUN)
def test_full_size_is_described_without_arrays(name):
    problem = zoo.make(name, "full")
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(problem.args))
    out = jax.eval_shape(problem.loss_fn, *problem.args)
    loss = out[0] if problem.has_aux else out
    assert loss.shape == () and loss.dtype == jnp.float32


@pytest.mark.parametrize("name", RUN)
def test_plain_step_is_finite_and_matches_the_described_arguments(name):
    step = plain(name)
    assert np.isfinite(step.loss)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(step.grads))
    described = jax.tree.map(lambda x: (x.shape, x.dtype), step.problem.args)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), step.args) == described


@pytest.mark.parametrize("name", RUN)
def test_every_parameter_has_a_gradient(name):
    for path, gradient in jax.tree_util.tree_leaves_with_path(plain(name).grads):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        # A softmax does not see what is added to all its scores.
        if not where.endswith("key/bias"):
            assert np.any(gradient != 0), where


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("llama-scan", "dots_saveable"),
        *(pytest.param(n, "block", marks=pytest.mark.slow) for n in DISTINCT),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in POLICIES),
    ],
)
def test_remat_gives_the_same_step(name, remat):
    expected = plain(name)
    problem = tiny(name, remat=remat)
    assert remat_equations(problem)
    step = run(problem, expected.args)
    assert_same(step.out, expected.out)
    assert_same(step.grads, expected.grads)


@pytest.mark.parametrize("name", RUN)
def test_dropout_draws_from_the_key(name):
    step = plain(name)
    params, batch, *rest = step.args
    if name == "gpt2-6":
        assert "dropout_key" not in batch
        return
    out, _ = step.run(params, {**batch, "dropout_key": jax.random.key(7)}, *rest)
    assert float(out[0] if step.problem.has_aux else out) != step.loss


@pytest.mark.parametrize(
    ("name", "scans", "prevent_cse"),
    [("gpt2-small", 0, True), ("llama", 0, True), ("llama-scan", 1, False), ("lstm", 2, False)],
)
def test_only_a_scan_does_without_barriers(name, scans, prevent_cse):
    problem = tiny(name, remat="block")
    eqns = jax.make_jaxpr(problem.loss_fn)(*problem.args).eqns
    assert sum(eqn.primitive.name == "scan" for eqn in eqns) == scans
    # Two layers each, so two blocks, unless they are the one body of a scan.
    checkpointed = remat_equations(problem)
    assert len(checkpointed) == (scans or 2)
    assert all(np.all(eqn.params["prevent_cse"]) == prevent_cse for eqn in checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "block"])
def test_scanned_layers_are_the_unrolled_ones(remat):
    unrolled, scanned = (tiny(name, dropout=0.0, remat=remat) for name in ("llama", "llama-scan"))
    params, batch = unrolled.concrete(0)
    expected = run(unrolled, (params, batch))
    actual = run(scanned, (stack_layers(params), batch))
    np.testing.assert_allclose(actual.loss, expected.loss, rtol=1e-6)
    assert_same(actual.grads, stack_layers(expected.grads))


@pytest.mark.parametrize("name", [p for p in RUN if p.values[0] in ("resnet50", "densenet121")])
def test_batch_statistics_are_updated(name):
    step = plain(name)
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
