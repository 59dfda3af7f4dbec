"""Whole training steps: what is bounded is what the user jits, and it computes the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import jit_peak_bytes

import jax_hremat
from jax_hremat import (
    InfeasibleBudgetError,
    PlannerConfig,
    SearchConfig,
    UnsupportedProgramError,
    _batch,
)
from jax_hremat._calls.planned import Loss
from jax_hremat._emit.step import training_step
from jax_hremat._trace.call import Arguments

CONFIG = PlannerConfig(search=SearchConfig(max_packings=1, max_saved_sets=0), max_rounds=2)
OPTIONS: dict[str, Any] = dict(target="cpu", config=CONFIG)
WIDTH, DEPTH, MICROBATCHES = 16, 4, 4
OPTIMIZER = optax.adamw(1e-2)


def loss_fn(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    for w_in, w_out in params:
        x = x + jax.nn.gelu(x @ w_in) @ w_out
    return jnp.mean(x**2), jnp.max(x)


def make_step(loss: Any) -> Any:
    """AdamW over four microbatches, gradients clipped."""

    def step(state: Any, batch: jax.Array) -> Any:
        params, opt_state = state
        grad = jax.value_and_grad(loss, has_aux=True)

        def add(total: Any, x: jax.Array) -> Any:
            (value, most), grads = grad(params, x)
            return jax.tree.map(jnp.add, total, grads), (value, most)

        zeros = jax.tree.map(jnp.zeros_like, params)
        parts = batch.reshape(MICROBATCHES, -1, WIDTH)
        grads, (values, most) = jax.lax.scan(add, zeros, parts)
        grads = jax.tree.map(lambda g: jnp.clip(g / MICROBATCHES, -1.0, 1.0), grads)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (values.mean(), most.max())

    return step


def new_state() -> Any:
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) * 0.1, jnp.float32)

    params = [(weights(WIDTH, 4 * WIDTH), weights(4 * WIDTH, WIDTH)) for _ in range(DEPTH)]
    return params, OPTIMIZER.init(params)


def batch_of(size: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(size, WIDTH)), jnp.float32)


@pytest.fixture(scope="module")
def fitted() -> jax_hremat.FittedStep:
    fit = jax_hremat.fit_step(make_step, loss_fn, budget=0.6, has_aux=True, **OPTIONS)
    return fit(new_state(), batch_of(4096))


def test_a_step_in_place_of_its_maker_is_refused() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - x.sum()

    with pytest.raises(TypeError, match=r"`step\(w: .*` cannot be called with a loss alone.*'x'"):
        jax_hremat.fit_step(step, loss_fn, budget=0.6)


def test_the_whole_step_is_what_is_bounded(fitted: jax_hremat.FittedStep) -> None:
    plan, args = fitted.plan, (new_state(), batch_of(4096))
    options = jax_hremat.compiler_options("cpu")
    plain = jax.jit(make_step(loss_fn), donate_argnums=0, compiler_options=options)
    assert plan.baseline_peak_bytes == jit_peak_bytes(plain, *args)
    assert plan.certificate.peak_bytes == jit_peak_bytes(fitted.step, *args)
    assert plan.certificate.peak_bytes <= plan.certificate.budget_bytes
    assert plan.certificate.budget_bytes == int(0.6 * plan.baseline_peak_bytes)
    assert plan.root.num_checkpointed > 0
    # Arguments are the state and the batch, by their paths.
    assert any("args[" in buffer.made_by for buffer in plan.buffers)
    # So are the activations, which are in the loop over microbatches.
    inside = [b for b in plan.buffers if b.made_by.startswith("(loop)")]
    assert any(b.text == f"f32[{4096 // MICROBATCHES},{4 * WIDTH}]" for b in inside)
    # Kernels and copies without a name of their own say what is in them.
    assert {b.made_by for b in plan.buffers}.isdisjoint({"fusion", "copy", "call"})


def test_training_is_unchanged(fitted: jax_hremat.FittedStep) -> None:
    options = jax_hremat.compiler_options("cpu")
    plain = jax.jit(make_step(loss_fn), compiler_options=options)
    ours, theirs, batch = new_state(), new_state(), batch_of(4096)
    for _ in range(5):
        ours, outputs = fitted.step(ours, batch)
        theirs, expected = plain(theirs, batch)
        np.testing.assert_allclose(outputs, expected, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_predicted_time_counts_every_microbatch(fitted: jax_hremat.FittedStep) -> None:
    loss = Loss(loss_fn, (0,), has_aux=True)
    step = training_step(
        make_step,
        loss_fn,
        [loss.trace],
        Arguments.of((new_state(), batch_of(4096)), {}),
        has_aux=True,
        donate_argnums=(0,),
    )
    assert step.calls == MICROBATCHES
    assert step.program.in_avals[-1].shape == (4096 // MICROBATCHES, WIDTH)
    num_state = len(jax.tree.leaves(new_state()))
    assert step.donated == tuple(range(num_state))
    assert fitted.plan.predicted_step_s == pytest.approx(fitted.plan.estimated_step_s, rel=0.2)


@pytest.mark.slow
def test_the_refusal_names_the_least_budget_of_the_whole_step() -> None:
    fit = jax_hremat.fit_step(make_step, loss_fn, budget=1000, has_aux=True, **OPTIONS)
    args = (new_state(), batch_of(1024))
    with pytest.raises(InfeasibleBudgetError) as caught:
        fit(*args)
    least = caught.value.min_budget_bytes
    fit = jax_hremat.fit_step(make_step, loss_fn, budget=least, has_aux=True, **OPTIONS)
    assert fit(*args).plan.certificate.peak_bytes == least
    assert caught.value.plan is not None
    assert caught.value.plan.certificate.peak_bytes == least


def test_a_flag_inside_an_argument_is_static() -> None:
    def loss(model: Any, x: jax.Array) -> jax.Array:
        for w_in, w_out in model["blocks"]:
            hidden = jax.nn.gelu(x @ w_in)
            if not model["inference"]:
                hidden = 0.9 * hidden
            x = x + hidden @ w_out
        return jnp.mean(x**2)

    def make(loss: Any) -> Any:
        def step(model: Any, x: jax.Array) -> Any:
            grads = jax.grad(lambda blocks: loss({**model, "blocks": blocks}, x))(model["blocks"])
            blocks = jax.tree.map(lambda w, g: w - 0.1 * g, model["blocks"], grads)
            return {**model, "blocks": blocks}

        return step

    blocks, x = new_state()[0], batch_of(64)
    for inference in (False, True):
        model = {"blocks": blocks, "inference": inference}
        step, plan = jax_hremat.fit_step(make, loss, budget=1.0, donate_argnums=(), **OPTIONS)(
            model, x
        )
        assert plan.certificate.holds
        stepped = step(step(model, x), x)
        assert stepped["inference"] is inference
        expected = make(loss)(make(loss)(model, x), x)
        for got, wanted in zip(*map(jax.tree.leaves, (stepped, expected)), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)


class Scaled(eqx.Module):
    """With numbers and a flag among its leaves, as `eqx.nn.Dropout` has them."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    scale: float = 0.5

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return x + self.scale * self.dropout(jnp.tanh(self.linear(x)), key=key)


def test_numbers_beside_flags_stay_numbers() -> None:
    """A filter for arrays must not find them: the optimizer has no state for them."""
    optimizer = optax.adamw(1e-2)

    def loss(model: Scaled, x: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.mean(jax.vmap(model)(x, jax.random.split(key, len(x))) ** 2)

    def make(loss: Any) -> Any:
        def step(model: Scaled, state: Any, x: jax.Array, key: jax.Array) -> Any:
            value, grads = eqx.filter_value_and_grad(loss)(model, x, key)
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, state = optimizer.update(grads, state, params)
            return eqx.apply_updates(model, updates), state, value

        return step

    model = Scaled(eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.2))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x, key = batch_of(16)[:, :8], jax.random.key(1)
    fit = jax_hremat.fit_step(make, loss, budget=1.0, donate_argnums=(), **OPTIONS)
    ours, theirs = fit(model, state, x, key).step, eqx.filter_jit(make(loss))
    (a, b, _), (c, d, _) = ours(model, state, x, key), theirs(model, state, x, key)
    assert a.scale == 0.5 and a.dropout.p == 0.2 and a.dropout.inference is False
    np.testing.assert_allclose(ours(a, b, x, key)[2], theirs(c, d, x, key)[2], rtol=1e-5)


def test_static_values_that_are_equal_are_told_apart_by_their_types() -> None:
    def make(loss: Any) -> Any:
        def step(state: Any, x: jax.Array, factor: Any) -> Any:
            grads = jax.grad(loss)(state, x)
            state = jax.tree.map(lambda w, g: w - 0.1 * g, state, grads)
            return state, jnp.arange(3) * factor["of"]

        return step

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return (jnp.tanh(x @ state) ** 2).mean()

    state, x = jnp.eye(8), jnp.ones((4, 8))
    step, _ = jax_hremat.fit_step(make, loss, budget=1.0, donate_argnums=(), **OPTIONS)(
        state, x, {"of": True}
    )
    for factor in (True, 1, 1.0):
        assert step(state, x, {"of": factor})[1].dtype == (jnp.arange(3) * factor).dtype


def tempered(w: jax.Array, x: jax.Array, temperature: Any) -> jax.Array:
    if not isinstance(temperature, float):
        temperature = jax.nn.softplus(temperature)
    return jnp.mean(jnp.tanh(x @ w / temperature) ** 2)


def scaled(w: jax.Array, x: jax.Array, scale: float) -> Any:
    return scale * jnp.mean(jnp.tanh(x @ w) ** 2), {"scale": scale}


def test_a_number_that_the_step_gives_stays_one() -> None:
    def make_step(loss: Any) -> Any:
        return lambda w, x: w - jax.grad(loss)(w, x, 2.0)

    w, x = jnp.eye(8), batch_of(4)[:, :8]
    step, _ = jax_hremat.fit_step(make_step, tempered, budget=1.0, **OPTIONS)(w, x)
    expected = jax.jit(make_step(tempered))(w, x)
    np.testing.assert_allclose(step(w, x), expected, rtol=1e-6)


def test_numbers_may_differ_from_call_to_call() -> None:
    def make_step(loss: Any) -> Any:
        grad = jax.grad(loss, has_aux=True)

        def step(w: jax.Array, x: jax.Array) -> Any:
            found = [grad(w, x, scale) for scale in (1.0, 2.0)]
            return w - sum(g for g, _ in found), [aux for _, aux in found]

        return step

    w, x = jnp.eye(8), batch_of(4)[:, :8]
    fit = jax_hremat.fit_step(make_step, scaled, budget=1.0, has_aux=True, **OPTIONS)
    step, plan = fit(w, x)
    expected, scales = jax.jit(make_step(scaled))(w, x)
    assert plan.certificate.peak_bytes == jit_peak_bytes(step, w, x)
    updated, ours = step(w, x)
    np.testing.assert_allclose(updated, expected, rtol=1e-6)
    assert ours == scales == [{"scale": 1.0}, {"scale": 2.0}]


def test_a_step_that_ignores_its_loss_is_refused() -> None:
    fit = jax_hremat.fit_step(lambda loss: make_step(loss_fn), loss_fn, budget=0.5, **OPTIONS)
    with pytest.raises(UnsupportedProgramError, match="does not call the loss"):
        fit(new_state(), batch_of(64))


def test_a_step_with_two_shapes_is_refused() -> None:
    def two(loss: Any) -> Any:
        return lambda p, x: (jax.grad(loss, has_aux=True)(p, x), loss(p, x[:2]))

    fit = jax_hremat.fit_step(two, loss_fn, budget=0.5, has_aux=True, **OPTIONS)
    with pytest.raises(UnsupportedProgramError, match=r"different structures.*\[2, 16\]"):
        fit(new_state()[0], batch_of(64))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of a GPU the memory is known")
def test_the_memory_of_a_cpu_is_no_budget() -> None:
    with pytest.raises(jax_hremat.TargetUnavailableError, match="names no limit"):
        jax_hremat.fit_step(make_step, loss_fn, budget="device", **OPTIONS)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([512, 2048], marks=pytest.mark.slow),
        pytest.param([256 * n for n in range(1, 9)], marks=pytest.mark.slow),
    ],
    ids=["two", "eight"],
)
def test_the_largest_batch(sizes: list[int]) -> None:
    # What is looked for is a size; which plan it has does not matter.
    config = replace(CONFIG, cost="analytic", max_rounds=0, floor_rounds=0)
    options = dict(target="cpu", config=config)
    find = jax_hremat.max_batch(
        make_step, loss_fn, budget="600KiB", sizes=sizes, has_aux=True, max_trials=5, **options
    )
    found = find(new_state(), batch_of)
    assert 2 <= len(found.trials) <= 5
    assert [t.size for t in found.trials] == sorted({t.size for t in found.trials})
    for trial in found.trials:
        if trial.fitted is None:
            assert trial.min_budget_bytes is not None
            assert trial.min_budget_bytes > found.budget_bytes == 600 * 1024
        else:
            assert trial.fitted.plan.certificate.peak_bytes <= 600 * 1024
    larger = [t.size for t in found.trials if t.fitted is None]
    assert larger and found.largest.size < min(larger)
    assert found.best.per_s == max(t.per_s for t in found.trials) > 0
    assert "best" in str(found) and "needs a budget of" in str(found)
    assert max(map(len, str(found).splitlines())) <= 80
    state, _ = found.best.fitted.step(new_state(), batch_of(found.best.size))
    assert jax.tree.structure(state) == jax.tree.structure(new_state())


@pytest.mark.parametrize("bare_fits", [0.5, 3, 11.5, 40])
@pytest.mark.parametrize("recompute", [0.05, 0.3, 2.0])
def test_the_batch_of_the_highest_throughput_is_found(
    monkeypatch: pytest.MonkeyPatch, bare_fits: float, recompute: float
) -> None:
    """Peaks that grow evenly, steps that recompute more the less of them fits."""
    budget, arguments, sizes = 1000, 100, range(1, 33)

    def planned(size: int) -> Any:
        peak = arguments + int(size * (budget - arguments) / bare_fits)
        if size > 4 * bare_fits + 1:
            raise jax_hremat.InfeasibleBudgetError(
                min_budget_bytes=peak, budget_bytes=budget, bottleneck="the batch"
            )
        over = max(0.0, size / bare_fits - 1)
        certificate = SimpleNamespace(
            budget_bytes=budget, headroom_bytes=0, argument_bytes=arguments, constant_bytes=0
        )
        step_s = (1 + size) * (1 + recompute * over)
        plan = SimpleNamespace(
            certificate=certificate, baseline_peak_bytes=peak, estimated_step_s=step_s
        )
        return SimpleNamespace(plan=plan)

    monkeypatch.setattr(_batch, "fit_step", lambda *_, **__: lambda state, batch: planned(batch))
    search = jax_hremat.max_batch(make_step, loss_fn, budget=budget, sizes=sizes)
    found = search(None, lambda size: size)
    fitting = [size for size in sizes if size <= 4 * bare_fits + 1]
    fastest = max(size / planned(size).plan.estimated_step_s for size in fitting)
    assert found.best.per_s >= 0.99 * fastest
    assert len(found.trials) <= 8
    assert found.largest.size >= 0.8 * max(fitting)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(budget="1GiB", sizes=[]), "to choose from"),
        (dict(budget="1GiB", sizes=[0, 8]), "all positive"),
        (dict(budget=0.5, sizes=[8]), "for each batch size; give bytes"),
        (dict(budget="50%", sizes=[8]), "for each batch size; give bytes"),
    ],
)
def test_bad_batch_searches(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        jax_hremat.max_batch(make_step, loss_fn, **options)


def test_if_no_batch_fits_the_smallest_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise InfeasibleBudgetError(min_budget_bytes=2000, budget_bytes=1000, bottleneck="it")

    monkeypatch.setattr(_batch, "fit_step", lambda *_, **__: refused)
    search = jax_hremat.max_batch(make_step, loss_fn, budget=1000, sizes=[16, 8])
    with pytest.raises(InfeasibleBudgetError) as caught:
        search(None, lambda size: size)
    assert caught.value.__notes__ == ["This is the smallest of the batch sizes, 8."]


def test_a_batch_search_needs_batches_of_all_sizes() -> None:
    find = jax_hremat.max_batch(make_step, loss_fn, budget="1GiB", sizes=[8], target="cpu")
    with pytest.raises(TypeError, match="a function from a size to the batch"):
        find(new_state(), batch_of(8))
