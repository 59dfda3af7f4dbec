"""A plan as code without the library: it runs, and compiles to the peak of the certificate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxlib.version
import numpy as np
import pytest
from programs import jit_bytes_but_constants, normal
from written_plans import certificate, written_plan

import jax_hremat
from jax_hremat import PlannerConfig, RematPlan, SearchConfig, UnsupportedProgramError
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.openings import Openings
from jax_hremat._plan.region import Loop, Region

OPTIONS: dict[str, Any] = dict(
    target="cpu",
    config=PlannerConfig(
        search=SearchConfig(max_packings=1, max_saved_sets=1),
        cost="analytic",
        max_rounds=1,
    ),
)
# XLA:CPU before jaxlib 0.11.1 merges recomputes with first runs, which the library prevents.
AS_WRITTEN = (
    {"xla_disable_hlo_passes": "cse_barrier_expander"}
    if jaxlib.version.__version_info__ < (0, 11, 1)
    else {}
)


def planned_of(plan: RematPlan) -> Callable[..., Any]:
    code = plan.to_code()
    assert "import jax_hremat" not in code
    namespace: dict[str, Any] = {}
    exec(compile(code, "plan.py", "exec"), namespace)
    return namespace["planned"]


def mlp(params: Any, x: jax.Array) -> jax.Array:
    # tanh and exp have derivatives that read their own results; the mask is made of literals.
    for i, (w_in, w_out) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            mask = jnp.tri(x.shape[0], w_in.shape[1], dtype=bool)
            h = jnp.where(mask, jnp.exp(-jnp.tanh(x @ w_in)), 0.0)
            x = x + jax.nn.softmax(h) @ w_out
    return jnp.mean(x**2)


def mlp_args() -> tuple[Any, jax.Array]:
    params = [(normal(layer, 16, 64) / 4, normal(4 + layer, 64, 16) / 8) for layer in range(4)]
    return params, normal(8, 512, 16)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(h, h)
        return x + nn.Dense(x.shape[-1])(nn.relu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(32, 16)(tokens)
        for _ in range(2):
            x = Layer()(x)
        return nn.Dense(32)(x)


def transformer_loss(params: Any, tokens: jax.Array) -> jax.Array:
    logits = Transformer().apply(params, tokens)
    assert isinstance(logits, jax.Array)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1))


def transformer_args() -> tuple[Any, jax.Array]:
    tokens = jax.random.randint(jax.random.key(0), (4, 48), 0, 32)
    return jax.jit(Transformer().init)(jax.random.key(1), tokens), tokens


@pytest.mark.parametrize(
    ("loss", "args_of", "budget"),
    [
        (mlp, mlp_args, 0.5),
        pytest.param(transformer_loss, transformer_args, 0.7, marks=pytest.mark.slow),
    ],
)
def test_it_computes_the_same_and_compiles_to_the_certified_peak(
    loss: Any, args_of: Callable[[], tuple[Any, ...]], budget: float
) -> None:
    args = args_of()
    plan = jax_hremat.plan_remat(loss, budget=budget, **OPTIONS)(*args)
    assert plan.root.num_checkpointed
    step = jax.jit(jax.value_and_grad(planned_of(plan)(loss)), compiler_options=AS_WRITTEN)
    certificate = plan.certificate
    # With the library there may be another scalar among the constants.
    compiled_bytes = certificate.peak_bytes - certificate.constant_bytes
    assert jit_bytes_but_constants(step, *args) == compiled_bytes
    assert plan.certificate.peak_bytes < plan.baseline_peak_bytes
    for got, expected in zip(
        *map(jax.tree.leaves, (step(*args), jax.jit(jax.value_and_grad(loss))(*args))), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-6)


@pytest.fixture(scope="module")
def plan() -> RematPlan:
    return jax_hremat.plan_remat(mlp, budget=1.0, **OPTIONS)(*mlp_args())


def test_trees_written_by_hand_compile_as_they_do_with_the_library(plan: RematPlan) -> None:
    args = mlp_args()
    count = plan.root.stop
    names = [plan.fingerprint.signatures[i].split("[")[0] for i in plan.fingerprint.operations]
    own = [i for i, name in enumerate(names) if name in ("tanh", "exp", "select_n", "dot_general")]
    half = [(i, 0) for i in own if i < count // 2]
    first = Region(0, count // 2, True, tuple(half))
    products = [i for i, name in enumerate(names) if name == "dot_general"]
    to_first = Region(0, products[1], True)
    to_second = Region(products[1], products[2], True, barrier=True)
    trees = [
        Region(0, count, checkpointed=True),
        Region(0, count, children=(first,)),
        Region(0, count, children=(dataclasses.replace(first, saved=tuple(half[1::2])),)),
        Region(
            0,
            count,
            children=(
                Region(0, count // 2, True, children=(to_first, to_second)),
                Region(count // 2, count - 4, barrier=True),
            ),
        ),
    ]
    peaks = []
    for root in trees:
        made = dataclasses.replace(plan, root=root)
        with_library = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(mlp, made)))
        as_code = jax.jit(jax.value_and_grad(planned_of(made)(mlp)), compiler_options=AS_WRITTEN)
        peaks.append(jit_bytes_but_constants(with_library, *args))
        assert jit_bytes_but_constants(as_code, *args) == peaks[-1]
    assert len(set(peaks)) == len(peaks)


def scanned(params: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, jax.Array]:
        w_in, w_out = w
        x = x + jax.nn.softmax(jnp.exp(-jnp.tanh(x @ w_in))) @ w_out
        return x, jnp.mean(x)

    x, means = jax.lax.scan(layer, x, params)
    return jnp.mean(x**2) + means.sum()


@pytest.mark.slow
def test_steps_of_a_scan_compile_as_they_do_with_the_library() -> None:
    args = jax.tree.map(lambda *leaves: jnp.stack(leaves), *mlp_args()[0]), mlp_args()[1]
    plan = jax_hremat.plan_remat(scanned, budget=0.7, **OPTIONS)(*args)
    step = jax.jit(jax.value_and_grad(planned_of(plan)(scanned)), compiler_options=AS_WRITTEN)
    compiled_bytes = plan.certificate.peak_bytes - plan.certificate.constant_bytes
    assert jit_bytes_but_constants(step, *args) == compiled_bytes
    assert plan.certificate.peak_bytes < plan.baseline_peak_bytes

    (planned,) = (region for _, region in plan.root.walk() if region.loop)
    assert planned.loop is not None
    length = planned.loop.body.stop
    inner = Region(1, 3, checkpointed=True)
    half = Region(0, length // 2, True, ((1, 0), (3, 0)), (inner,))
    behind = Region(0, length // 2, children=(inner,), barrier=True)
    expected = jax.tree.leaves(jax.value_and_grad(scanned)(*args))
    peaks = set()
    for body in (
        Region(0, length),
        Region(0, length, checkpointed=True),
        Region(0, length, True, ((2, 0),)),
        Region(0, length, children=(half,)),
        Region(0, length, True, children=(behind,)),
    ):
        scan = dataclasses.replace(planned, loop=Loop(body))
        made = dataclasses.replace(plan, root=Region(0, plan.root.stop, children=(scan,)))
        with_library = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(scanned, made)))
        step = jax.jit(jax.value_and_grad(planned_of(made)(scanned)), compiler_options=AS_WRITTEN)
        peak_bytes = jit_bytes_but_constants(with_library, *args)
        assert jit_bytes_but_constants(step, *args) == peak_bytes
        peaks.add(peak_bytes)
        for got, right in zip(jax.tree.leaves(step(*args)), expected, strict=True):
            np.testing.assert_allclose(got, right, rtol=2e-4, atol=1e-6)
    assert len(peaks) == 5


def test_a_scan_with_a_rule_of_its_own_is_refused_when_it_runs() -> None:
    @jax.custom_vjp
    def tanh(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    tanh.defvjp(lambda x: (jnp.tanh(x), jnp.tanh(x)), lambda y, g: (g * (1 - y**2),))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda h, _: (tanh(h @ w), None), x, None, length=6)[0])

    args = (jnp.eye(8), jnp.ones((64, 8)))
    plan = jax_hremat.plan_remat(loss, budget=1.0, **OPTIONS)(*args)
    names = [plan.fingerprint.signatures[i].split("[")[0] for i in plan.fingerprint.operations]
    at = names.index("scan")
    # More operations than the steps have as they are written.
    body = Region(0, 9, checkpointed=True)
    scan = Region(at, at + 1, loop=Loop(body))
    made = dataclasses.replace(plan, root=Region(0, len(names), children=(scan,)))
    with pytest.raises(ValueError, match="steps of the scan at equation"):
        planned_of(made)(loss)(*args)


def test_auxiliary_results_keywords_and_other_arguments() -> None:
    def loss(x: jax.Array, w: jax.Array, *, scale: jax.Array) -> tuple[jax.Array, dict[str, Any]]:
        y = jnp.tanh(jnp.tanh(x @ w) @ w)
        return scale * jnp.sum(y**2), {"y": y, "temperature": jnp.asarray(0.5)}

    args = (jnp.ones((64, 8)), jnp.ones((8, 8)) / 8)
    kwargs = {"scale": jnp.float32(2.0)}
    options = dict(argnums=(1,), has_aux=True)
    plan = jax_hremat.plan_remat(loss, budget=1.0, **options, **OPTIONS)(*args, **kwargs)
    code = plan.to_code()
    assert "planned(loss), argnums=(1,), has_aux=True" in code
    got = jax.value_and_grad(planned_of(plan)(loss), **options)(*args, **kwargs)
    expected = jax.value_and_grad(loss, **options)(*args, **kwargs)
    for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
        assert isinstance(a, jax.Array)


def test_another_program_is_refused(plan: RematPlan) -> None:
    def other(params: Any, x: jax.Array) -> jax.Array:
        return mlp(params[1:], x)

    with pytest.raises(ValueError, match="does not trace to the program"):
        planned_of(plan)(other)(*mlp_args())


def test_each_region_names_its_scope_and_line(plan: RematPlan) -> None:
    count = plan.root.stop
    root = Region(0, count, children=(Region(0, 20, True, ((4, 0),)),))
    lines = dataclasses.replace(plan, root=root).to_code().splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("# layer_0"))
    assert "test_to_code.py" in lines[at]
    assert lines[at + 1].strip() == "Region("
    assert lines[at + 2].strip() == "0, 20,"
    operation = plan.fingerprint.signatures[plan.fingerprint.operations[4]].split("[")[0]
    assert any(line.strip().startswith(f"(4, 0),  # {operation} ") for line in lines)


def of_operations(*signatures: str) -> Fingerprint:
    """A program of 30 operations, the first of these signatures; the others are sines."""
    texts = (*signatures, "sin[](f32[8])->f32[8]")
    order = (*range(len(signatures)), *[len(signatures)] * (30 - len(signatures)))
    return Fingerprint(("args[0]: f32[8]*",), texts, order, ("01",) * 30, "0")


UNSAID = {
    "segments of a scan": dict(
        root=Region(0, 30, children=(Region(3, 4, loop=Loop(Region(0, 2), (4, 2))),))
    ),
    "branches of a cond": dict(
        root=Region(0, 30, children=(Region(3, 4, branches=(Region(0, 2),)),))
    ),
    "of a cond in a scan": dict(
        root=Region(
            0,
            30,
            children=(
                Region(
                    3,
                    4,
                    loop=Loop(Region(0, 2, children=(Region(0, 1, branches=(Region(0, 1),)),))),
                ),
            ),
        )
    ),
    "own checkpoints opened": dict(opened=Openings(checkpoints=True)),
    "scans of up to 8 steps": dict(opened=Openings(scan_steps=8)),
    "a mesh of devices": dict(certificate=certificate(mesh=DeviceMesh((("data", 2),)))),
    "complex values": dict(fingerprint=of_operations("mul[](c64[8],c64[8])->c64[8]")),
    "values of 8 bits": dict(
        fingerprint=of_operations("convert_element_type[](f32[8])->f8_e4m3fn[8]")
    ),
    "custom_vjp": dict(fingerprint=of_operations("hremat_detach[](f32[8])->f32[8]")),
    "a max-pool": dict(
        root=Region(0, 30, checkpointed=True),
        fingerprint=of_operations("reduce_window_max[](f32[8])->f32[4]"),
    ),
}


@pytest.mark.parametrize("what", UNSAID)
def test_what_the_code_does_not_say_is_refused_by_name(what: str) -> None:
    plain = written_plan(fingerprint=of_operations())
    assert "def planned(" in plain.to_code()
    with pytest.raises(UnsupportedProgramError, match=what) as caught:
        dataclasses.replace(plain, **UNSAID[what]).to_code()
    assert "apply_plan" in str(caught.value)


def test_compiler_options_are_those_of_the_certificate() -> None:
    options = MappingProxyType({"xla_gpu_x": "true"})
    plan = written_plan(
        fingerprint=of_operations(), certificate=certificate(compiler_options=options)
    )
    assert "compiler_options={'xla_gpu_x': 'true'})" in plan.to_code()
    assert "cse_barrier_expander" not in plan.to_code()
