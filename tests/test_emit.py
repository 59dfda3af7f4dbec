"""The emission law: whatever the regions, the emitted function is the function."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_plans import WIDTH, losses, region_trees
from tracing import emit, loss_call, trace_call, trace_loss

import jax_hremat
from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._plan.region import Region
from jax_hremat._trace.call import TracedCall
from jax_hremat._trace.trace import Program
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.target import Target

# Without the first XLA:CPU merges a recompute with the first forward, and tests less.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}
QUICK = settings(
    max_examples=examples(8),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def assert_same(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        wide = np.complex128 if jnp.issubdtype(a.dtype, np.complexfloating) else np.float64
        a, b = np.asarray(a, wide), np.asarray(b, wide)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * (1 + np.abs(b).max()))


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
    values = np.random.default_rng(sum(shape)).normal(size=shape) * 0.5
    return jnp.asarray(values, dtype)


# What each case is about is in its name; all take (weights, data) and return a scalar or
# (scalar, auxiliary).


def typed_dropout_keys(w, data):
    x, key = data
    for layer, one in enumerate(w):
        keep = jax.random.bernoulli(jax.random.fold_in(key, layer), 0.7, x.shape)
        x = jnp.where(keep, jnp.tanh(x @ one) / 0.7, 0)
    return (x**2).sum(), {"next": jax.random.split(key)[0]}


_clipped = jax.custom_vjp(lambda x: jnp.sin(x) * x)
_clipped.defvjp(
    lambda x: (jnp.sin(x) * x, (jnp.cos(x), x)),
    lambda kept, g: (jnp.clip(g * kept[0] * kept[1], -0.1, 0.1),),
)


def a_custom_vjp(w, x):
    return (_clipped(_clipped(x @ w[0]) @ w[1]) ** 2).sum()


def custom_jvps(w, x):
    hidden = jax.nn.relu(x @ w[0])
    return (jax.nn.softmax(hidden @ w[1]) * jax.nn.silu(hidden)).sum()


def auxiliary_outputs(w, x):
    hidden = jnp.exp(-((x @ w[0]) ** 2))
    step = jnp.asarray(3, jnp.int32)
    aux = {"hidden": hidden, "input": x, "count": (hidden > 0.5).sum(), "three": step}
    return (hidden @ w[1]).sum(), aux


def integer_inputs(w, tokens):
    embedded = w[0][tokens]
    logits = jnp.sin(embedded) @ w[1]
    picked = jnp.take_along_axis(logits, tokens[:, None], axis=-1)
    return (jax.nn.logsumexp(logits, -1) - picked[:, 0]).mean()


def bfloat16(w, x):
    low = [v.astype(jnp.bfloat16) for v in w]
    x = jax.nn.gelu(x.astype(jnp.bfloat16) @ low[0])
    return (jnp.exp(-x * x) @ low[1]).astype(jnp.float32).mean()


def a_branch(w, x):
    x = jnp.sin(x @ w[0])
    x = jax.lax.cond(x.sum() > 0, lambda v: jnp.cos(v) @ w[1], lambda v: v * 2, x)
    return (x * x).sum()


def a_scan(w, x):
    def body(carry, one):
        carry = jnp.tanh(carry @ one)
        return carry, (carry * carry).sum()

    x, sums = jax.lax.scan(body, jnp.sin(x), w)
    return (x * x).sum() + sums.mean(), sums


def a_while(w, x):
    scale = jax.lax.while_loop(
        lambda s: s > 1.0, lambda s: s / 2, jax.lax.stop_gradient(jnp.abs(x @ w[0]).sum())
    )
    return (jnp.sin(x @ w[1]) * scale).sum()


def complex_values(w, x):
    turn = jnp.exp(jax.lax.complex(-jnp.abs(w[0]), w[1]))

    def body(state, one):
        state = jnp.tanh(state @ turn) + one
        return state, jnp.real(state * jnp.conj(state))

    mixed = (x @ turn) * jnp.conj(x @ w[0] + 1j)
    state, powers = jax.lax.scan(body, mixed[0], mixed)
    return jnp.abs(state).sum() + powers.mean(), state


def own_checkpoint_and_gradient(w, x):
    @jax.checkpoint
    def block(x, one):
        return jnp.sin(jnp.tanh(x @ one))

    slope = jax.grad(lambda v: jnp.cos(v @ w[0]).sum())(x)
    return (block(block(x, w[0]), w[1]) * slope).sum()


def pools(w, x):
    # The rectifier makes ties, of which the pool's gradient goes to one.
    hidden = jax.nn.relu(x @ w[0])
    highest = jax.lax.reduce_window(hidden, -jnp.inf, jax.lax.max, (2, 3), (1, 2), "SAME")
    lowest = jax.lax.reduce_window(hidden, jnp.inf, jax.lax.min, (2, 1), (1, 1), "VALID")
    return (highest**2).sum() + (lowest @ w[1]).sum()


CONSTANT = np.linspace(0, 1, WIDTH, dtype=np.float32)


def closed_over_constant(w, x):
    return (jnp.tanh(x @ w[0] + jnp.asarray(CONSTANT)) @ w[1]).sum()


class Case(NamedTuple):
    fun: Any
    args: Any
    has_aux: bool
    call: TracedCall
    tolerance: float


AUXILIARY = (typed_dropout_keys, auxiliary_outputs, a_scan, complex_values)
CASES = (
    *AUXILIARY,
    a_custom_vjp,
    custom_jvps,
    integer_inputs,
    bfloat16,
    a_branch,
    a_while,
    own_checkpoint_and_gradient,
    pools,
    closed_over_constant,
)


@cache
def case(fun: Any) -> Case:
    x: Any = normal(3, WIDTH)
    if fun is typed_dropout_keys:
        x = (x, jax.random.key(7))
    if fun is integer_inputs:
        x = jnp.asarray([0, 3, 1], jnp.int32)
    args = (normal(2, WIDTH, WIDTH), x)
    has_aux = fun in AUXILIARY
    call = loss_call(fun, args, has_aux=has_aux)
    return Case(fun, args, has_aux, call, 3e-2 if fun is bfloat16 else 2e-5)


def whole(program: Program) -> Region:
    return Region(0, program.num_operations, checkpointed=True)


def every_operation(program: Program) -> Region:
    number = program.num_operations
    return Region(0, number, children=tuple(Region(i, i + 1, True) for i in range(number)))


def nested_saving_all(program: Program) -> Region:
    number = program.num_operations
    equations = open_jaxpr(program.jaxpr).eqns
    edges = (0, number // 3, 2 * number // 3, number)
    thirds = []
    for start, stop in zip(edges, edges[1:], strict=False):
        values = [(op, k) for op in range(start, stop) for k in range(len(equations[op].outvars))]
        thirds.append(Region(start, stop, True, tuple(values)))
    inner = Region(edges[1], number, True, (), tuple(thirds[1:]))
    return Region(0, number, True, (), (thirds[0], inner))


PLANS = (whole, every_operation, nested_saving_all)
# Those that the default run has in every plan and under `vmap`; the others it has in the plan with
# most in it.
THOROUGHLY = (typed_dropout_keys, a_custom_vjp, a_scan)


def in_plans(*plans: Any, quick: Any = None) -> list[Any]:
    """Each case in each plan, slow but for some."""
    return [
        pytest.param(
            fun,
            plan,
            marks=[] if fun in THOROUGHLY or plan is quick else [pytest.mark.slow],
            id=f"{fun.__name__}-{plan.__name__}",
        )
        for fun in CASES
        for plan in plans
    ]


@cache
def step_of(fun: Any) -> Any:
    found = case(fun)
    return jax.value_and_grad(fun, has_aux=found.has_aux)(*found.args)


@pytest.mark.parametrize(("fun", "plan"), in_plans(*PLANS, quick=nested_saving_all))
def test_value_gradient_and_auxiliaries_are_the_same(fun, plan):
    found, expected = case(fun), step_of(fun)
    emitted = emit(found.call, plan(found.call.program))
    assert_same(emitted(*found.args), expected[0], found.tolerance)
    for transform in (lambda f: f, lambda f: jax.jit(f, compiler_options=QUICK_COMPILE)):
        step = transform(jax.value_and_grad(emitted, has_aux=found.has_aux))
        assert_same(step(*found.args), expected, found.tolerance)


@pytest.mark.parametrize(("fun", "plan"), in_plans(*PLANS[1:]))
def test_under_vmap_and_the_gradient_of_vmap(fun, plan):
    found = case(fun)
    emitted = emit(found.call, plan(found.call.program))
    weights, data = found.args

    def batched(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.split(leaf, 2)
        return jnp.stack([leaf, leaf[::-1]])

    data = jax.tree.map(batched, data)

    def mean_loss(function):
        def mean(weights):
            out = jax.vmap(function, (None, 0))(weights, data)
            return (out[0] if found.has_aux else out).mean(), out

        return jax.jit(jax.value_and_grad(mean, has_aux=True), compiler_options=QUICK_COMPILE)

    assert_same(mean_loss(emitted)(weights), mean_loss(fun)(weights), found.tolerance)


@pytest.mark.parametrize("fun", CASES, ids=lambda f: f.__name__)
@QUICK
@given(data=st.data())
def test_any_tree_of_regions(fun, data):
    found = case(fun)
    root = data.draw(region_trees(found.call.program))
    emitted = emit(found.call, root)
    actual = jax.value_and_grad(emitted, has_aux=found.has_aux)(*found.args)
    assert_same(actual, step_of(fun), found.tolerance)


@settings(QUICK, max_examples=examples(60))
@given(loss=losses(), data=st.data())
def test_any_small_program_under_any_tree_of_regions(loss, data):
    args = (normal(WIDTH, WIDTH), normal(WIDTH + 1, WIDTH)[1:])
    call = loss_call(loss, args, argnums=(0, 1))
    program = call.program
    root = data.draw(region_trees(program))
    emitted = emit(call, root)
    assert_same(jax.value_and_grad(emitted, (0, 1))(*args), jax.value_and_grad(loss, (0, 1))(*args))


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.__name__)
def test_complex_parameters(plan):
    def loss(w, x):
        return jnp.abs(jnp.tanh(x @ w) @ w).sum()

    args = (
        jax.lax.complex(normal(WIDTH, WIDTH), normal(WIDTH, WIDTH + 1)[:, 1:]),
        normal(3, WIDTH),
    )
    call = loss_call(loss, args)
    program = call.program
    emitted = emit(call, plan(program))
    assert_same(jax.value_and_grad(emitted)(*args), jax.value_and_grad(loss)(*args))


EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3", "float8_e3m4", "float8_e4m3fnuz")


def scaled(x, dtype):
    """A product as it is written for 8 bits: its operands fill the range of the type."""
    most = jnp.finfo(dtype).max.astype(jnp.float32)
    scale = jax.lax.stop_gradient(jnp.abs(x).max()) / most
    return jnp.clip(x / scale, -most, most).astype(dtype), scale


@pytest.mark.parametrize("dtype", EIGHT_BITS)
@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.__name__)
def test_values_of_eight_bits_are_kept_as_they_are(plan, dtype):
    def forward(x, w):
        (some, x_scale), (others, w_scale) = scaled(x, dtype), scaled(w, dtype)
        made = some.astype(jnp.float32) @ others.astype(jnp.float32) * (x_scale * w_scale)
        return made, (some, x_scale, others, w_scale)

    def backward(kept, g):
        some, x_scale, others, w_scale = kept
        of_x = g @ others.astype(jnp.float32).T * w_scale
        return of_x, some.astype(jnp.float32).T @ g * x_scale

    product = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    product.defvjp(forward, backward)

    def loss(w, x):
        return (jnp.tanh(product(jnp.sin(product(x, w[0])), w[1])) ** 2).sum()

    args = (normal(2, WIDTH, WIDTH), normal(3, WIDTH))
    call = loss_call(loss, args)
    emitted = emit(call, plan(call.program))
    assert_same(jax.value_and_grad(emitted)(*args), jax.value_and_grad(loss)(*args), 1e-6)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_any_differentiated_value_of_eight_bits_is_kept_as_it_is(dtype):
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), dtype)
    finite = np.isfinite(np.asarray(every, np.float32))
    every = jnp.asarray(np.asarray(every)[finite])

    def loss(w, scale):
        kept = w * jnp.ones((), dtype)
        return (kept.astype(jnp.float32) * scale).sum()

    args = (every, jnp.ones(len(every)))
    call = loss_call(loss, args, argnums=(0, 1))
    equations = open_jaxpr(call.program.jaxpr).eqns
    made = next(i for i, eqn in enumerate(equations) if eqn.outvars[0].aval.dtype == dtype)
    emitted = emit(call, Region(0, len(equations), checkpointed=True, saved=((made, 0),)))
    actual, expected = (jax.value_and_grad(f, (0, 1))(*args) for f in (emitted, loss))
    assert actual[1][0].dtype == expected[1][0].dtype == dtype
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.__name__)
def test_a_call_with_its_pullback(plan):
    def layer(w, x, mask):
        hidden = jnp.exp(-((x @ w[0]) ** 2))
        return {"out": jnp.where(mask, hidden @ w[1], x), "flips": mask.sum()}

    args = (normal(2, WIDTH, WIDTH), normal(3, WIDTH), normal(3, WIDTH) > 0)
    program = trace_call(layer, args, (0, 1))
    cotangent = normal(3, WIDTH)
    expected = program.step(emit_flat(program, Region(0, program.num_operations)))
    actual = program.step(emit_flat(program, plan(program)))
    flat = (*args, cotangent)
    assert_same(actual(*flat), expected(*flat))
    _, pullback = jax.vjp(lambda w, x: layer(w, x, args[2])["out"], *args[:2])
    assert_same(actual(*flat)[2], list(pullback(cotangent)))


def test_a_checkpointed_root_is_checkpointed():
    found = case(custom_jvps)
    jaxpr = str(jax.make_jaxpr(emit(found.call, whole(found.call.program)))(*found.args))
    assert jaxpr.count("checkpoint[") + jaxpr.count("remat2[") == 1


def test_the_forward_alone_holds_no_barrier():
    found = case(a_custom_vjp)
    emitted = emit(found.call, nested_saving_all(found.call.program))
    assert "barrier" not in jax.jit(emitted).lower(*found.args).as_text()


_NAME = r"%([\w.-]+)"


def test_with_nothing_checkpointed_the_compiled_step_is_the_original_but_for_names() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = x + jax.nn.gelu(jnp.tanh(x @ w))
        return (x * x).mean()

    args = (jnp.ones((8, 8)), jnp.ones((16, 8)))
    call = loss_call(loss, args)
    program = call.program
    emitted = emit(call, Region(0, program.num_operations))

    def compiled(fun: Any) -> str:
        step = jax.jit(jax.value_and_grad(fun), compiler_options=jax_hremat.compiler_options("cpu"))
        text = step.lower(*args).compile().as_text()
        # From the first computation on, without sources, and instructions named by their order.
        text = re.sub(r", metadata=\{[^}]*\}", "", text[text.index("\n%") :])
        names = {name: f"v{i}" for i, name in enumerate(dict.fromkeys(re.findall(_NAME, text)))}
        return re.sub(r"[\w.-]+", lambda word: names.get(word[0], word[0]), text)

    assert compiled(emitted) == compiled(loss)


class Stem(nn.Module):
    """The beginning of a residual network."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(CHANNELS, (3, 3), dtype=x.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=x.dtype)(x))
        return nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


class Images(nn.Module):
    """A stem and layers, which keep more for the backward than the stem works with."""

    remat: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = (nn.remat(Stem) if self.remat else Stem)(name="stem")(x)
        for _ in range(16):
            x = x + jnp.sin(nn.Dense(CHANNELS, dtype=x.dtype)(x))
        return x


CHANNELS = 16


@pytest.mark.slow
def test_a_checkpointed_max_pool_keeps_no_zeros_through_the_step(h200: Target) -> None:
    images = jax.ShapeDtypeStruct((32, 64, 64, CHANNELS), jnp.bfloat16)
    variables = jax.eval_shape(Images().init, jax.random.key(0), images)

    def traced(*, remat: bool) -> Program:
        def loss(params: Any, stats: Any, x: jax.Array) -> Any:
            model, given = Images(remat), {"params": params, "batch_stats": stats}
            x, changed = model.apply(given, x, mutable="batch_stats")
            return jnp.square(x.astype(jnp.float32)).mean(), changed

        args = (variables["params"], variables["batch_stats"], images)
        return trace_loss(loss, args, has_aux=True)

    def peak_bytes(program: Program, *children: Region) -> int:
        flat = emit_flat(program, Region(0, program.num_operations, children=children))
        return compile_flat(program.step(flat), program.in_avals, h200).memory.peak_bytes

    program = traced(remat=False)
    names = [eqn.primitive.name for eqn in open_jaxpr(program.jaxpr).eqns]
    stem = Region(0, names.index("reduce_window_max") + 1, checkpointed=True)
    written_bytes = peak_bytes(traced(remat=True))
    # Two arrays of this size with jax 0.10, one with 0.12.
    zeros_bytes = 2 * images.size
    assert peak_bytes(program, stem) <= written_bytes - 0.99 * zeros_bytes
