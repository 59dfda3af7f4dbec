"""Steps in a `shard_map`, on explicit axes, and on meshes that only the program names."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import jit_peak_bytes
from tracing import emit, loss_call, trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig, UnsupportedProgramError
from jax_hremat._calls.planned import Loss
from jax_hremat._emit.step import Step, own_step, training_step
from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.region import Loop, Region
from jax_hremat._trace.call import Arguments
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay
from jax_hremat._xla.certify import compile_step
from jax_hremat._xla.inferred_sharding import inferred_shardings
from jax_hremat._xla.target import get_target

AXES = ("data", "model")
AUTO = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Auto,) * 2)
EXPLICIT = jax.make_mesh((4, 2), AXES)
CPU = get_target("cpu")
OPTIONS = jax_hremat.compiler_options("cpu")
QUICK = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2), max_rounds=1
)
WIDTH, HIDDEN, DEPTH, BATCH = 8, 32, 3, 256
RNG = np.random.default_rng(0)
WEIGHTS = [
    (RNG.normal(size=(WIDTH, HIDDEN)) / 4, RNG.normal(size=(HIDDEN, WIDTH)) / 4)
    for _ in range(DEPTH)
]
PARAMS, X = jax.tree.map(jnp.float32, (WEIGHTS, RNG.normal(size=(BATCH, WIDTH))))


def layer(x: jax.Array, w: Any) -> jax.Array:
    return x + jax.nn.gelu(jnp.sin(x @ w[0])) @ w[1]


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for w in params:
        x = layer(x, w)
    return (x * x).mean()


def scanned(params: Any, x: jax.Array) -> jax.Array:
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *params)
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, stacked)
    return (x * x).mean()


def exchanging(params: Any, x: jax.Array) -> jax.Array:
    """What devices compute depends on what others have, in a scan and at the end."""
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *params)

    def centred(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        x = layer(x, w)
        return x - jax.lax.pmean(x.mean(0), "data"), None

    x, _ = jax.lax.scan(centred, x, stacked)
    return jax.lax.pmean((x * x).mean(), "data")


def regions(program: Program) -> Region:
    """Each step of a scan checkpointed, or, where there is none, two thirds of the operations."""
    eqns = open_jaxpr(program.jaxpr).eqns
    whole = len(eqns)
    scans = [
        Region(at, at + 1, loop=Loop(Region(0, len(body.eqns), checkpointed=True)))
        for at, eqn in enumerate(eqns)
        if eqn.primitive.name == "scan"
        for body in [open_jaxpr(eqn.params["jaxpr"])]
    ]
    thirds = [
        Region(start, start + whole // 3, checkpointed=True, barrier=True)
        for start in (0, whole // 3)
    ]
    return Region(0, whole, children=tuple(scans or thirds))


def planned_by_hand(loss: Callable[..., Any]) -> tuple[Callable[..., Any], list[Step]]:
    """The loss with its regions, and the steps that it was traced for."""
    steps: list[Step] = []

    def run(*args: Any) -> Any:
        call = loss_call(loss, args)
        program = call.program
        steps.append(own_step(program))
        return emit(call, regions(program))(*args)

    return run, steps


def close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, other)


def check(make_step: Callable[[Any], Any], loss: Any, args: Any) -> Step:
    """The values of the original, and the peak that is certified, less than the original's."""
    planned, steps = planned_by_hand(loss)
    original, step = make_step(loss), make_step(planned)
    close(step(*args), original(*args))
    program = steps[0].program
    certified = compile_step(steps[0], regions(program), CPU)
    assert certified.memory.peak_bytes == jit_peak_bytes(step, *args)
    baseline = compile_step(steps[0], Region(0, program.num_operations), CPU)
    assert baseline.memory.peak_bytes == jit_peak_bytes(original, *args)
    assert certified.memory.peak_bytes < baseline.memory.peak_bytes
    plain = Region(0, program.num_operations)
    assert replay(program, regions(program)).flops > replay(program, plain).flops
    return steps[0]


def gradient_step(loss: Any) -> Any:
    return jax.jit(jax.value_and_grad(loss), compiler_options=OPTIONS)


def mapped_step(check_vma: bool = True, mesh: Any = AUTO, axes: Any = AXES) -> Any:
    """A user's step inside a `shard_map`; each device's loss, the gradients of all."""

    def make(loss: Any) -> Any:
        def body(params: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x)
            return value[None], jax.tree.map(lambda g: g[None], gradients)

        def sums(params: Any, x: jax.Array) -> Any:
            value, gradients = jax.value_and_grad(loss)(params, x)
            return value[None], gradients

        spec = P(tuple(axes))
        mapped = jax.shard_map(
            sums if check_vma else body,
            mesh=mesh,
            in_specs=(P(), spec),
            out_specs=(spec, P() if check_vma else spec),
            axis_names=set(axes),
            check_vma=check_vma,
        )
        return jax.jit(mapped, compiler_options=OPTIONS)

    return make


@pytest.mark.parametrize(
    ("loss", "check_vma"),
    [
        (scanned, True),
        pytest.param(mlp, False, marks=pytest.mark.slow),
        pytest.param(mlp, True, marks=pytest.mark.slow),
        pytest.param(scanned, False, marks=pytest.mark.slow),
    ],
    ids=["scanned-vma", "mlp-no-vma", "mlp-vma", "scanned-no-vma"],
)
def test_inside_a_shard_map(loss: Any, check_vma: bool) -> None:
    step = check(mapped_step(check_vma), loss, (PARAMS, X))
    assert step.mesh == DeviceMesh((("data", 4), ("model", 2)), manual=AXES)


@pytest.mark.slow
def test_what_is_exchanged_inside_a_shard_map() -> None:
    def make(loss: Any) -> Any:
        body = jax.value_and_grad(loss)
        mapped = jax.shard_map(body, mesh=AUTO, in_specs=(P(), P("data")), out_specs=P())
        return jax.jit(mapped, compiler_options=OPTIONS)

    check(make, exchanging, (PARAMS, X))


@pytest.mark.slow
def test_inside_a_shard_map_of_explicit_axes() -> None:
    args = jax.device_put(PARAMS, NamedSharding(EXPLICIT, P()))
    x = jax.device_put(X, NamedSharding(EXPLICIT, P(AXES)))
    check(mapped_step(mesh=EXPLICIT), mlp, (args, x))


def test_it_is_planned_inside_a_shard_map() -> None:
    planned = jax_hremat.hremat(mlp, budget=0.9, target="cpu", config=QUICK)
    make = mapped_step()
    close(make(planned)(PARAMS, X), make(mlp)(PARAMS, X))
    (plan,) = planned.plans
    assert plan.certificate.peak_bytes == jit_peak_bytes(make(planned), PARAMS, X)
    assert plan.baseline_peak_bytes == jit_peak_bytes(make(mlp), PARAMS, X)
    assert jax_hremat.RematPlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_some_axes_are_left_to_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    planned = jax_hremat.hremat(mlp, budget=1.0, target="cpu", config=QUICK)
    make = mapped_step(axes=("data",))
    close(make(planned)(PARAMS, X), make(mlp)(PARAMS, X))
    assert "as if they lay as the compiler likes" in caplog.text


def test_an_axis_of_a_vmap_is_refused() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.pmean(jnp.tanh(x @ w).sum(), "rows")

    run, _ = planned_by_hand(loss)
    with pytest.raises(UnsupportedProgramError, match="the axes rows of a surrounding `vmap`"):
        jax.vmap(run, (None, 0), axis_name="rows")(jnp.ones((2, 2)), jnp.ones((3, 2, 2)))


def constrained(params: Any, x: jax.Array) -> jax.Array:
    return mlp(params, jax.lax.with_sharding_constraint(x, NamedSharding(AUTO, P("data"))))


def mapping(params: Any, x: jax.Array) -> jax.Array:
    specs = (P("data"), P())
    for w in params:
        x = jax.shard_map(layer, mesh=AUTO, in_specs=specs, out_specs=P("data"))(x, w)
    return (x * x).mean()


@pytest.mark.parametrize("loss", [constrained, pytest.param(mapping, marks=pytest.mark.slow)])
def test_a_mesh_that_only_the_program_names(loss: Any) -> None:
    step = check(gradient_step, loss, (PARAMS, X))
    assert step.mesh == DeviceMesh((("data", 4), ("model", 2)))
    planned, _ = planned_by_hand(loss)
    close(planned(PARAMS, X), loss(PARAMS, X))


@pytest.mark.slow
def test_a_mesh_in_force_around_plain_arguments() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return mlp(params, jax.lax.with_sharding_constraint(x, P("data")))

    with jax.set_mesh(AUTO):
        step = check(gradient_step, loss, jax.tree.map(np.asarray, (PARAMS, X)))
        assert step.mesh is not None
        layout = inferred_shardings(step, step.mesh, CPU)
    assert (("data",), ()) in layout.specs


@pytest.mark.slow
def test_it_is_planned_for_a_mesh_that_only_the_program_names() -> None:
    make = jax_hremat.plan_remat(constrained, budget=0.9, target="cpu", config=QUICK)
    plan = make(PARAMS, X)
    assert plan.certificate.mesh == DeviceMesh((("data", 4), ("model", 2)))
    planned = gradient_step(jax_hremat.apply_plan(constrained, plan))
    assert jit_peak_bytes(planned, PARAMS, X) == plan.certificate.peak_bytes


def test_a_training_step_around_a_shard_map() -> None:
    def make_step(loss: Any) -> Any:
        def body(params: Any, x: jax.Array) -> Any:
            return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params, x))

        return jax.shard_map(body, mesh=AUTO, in_specs=(P(), P(AXES)), out_specs=P())

    loss, _ = Loss.of(mlp, (0,), has_aux=False)
    arguments = Arguments.of((PARAMS, X), {})
    step = training_step(make_step, mlp, [loss.trace], arguments, has_aux=False, donate_argnums=())
    planned, _ = planned_by_hand(mlp)
    compiled = jax.jit(make_step(planned), compiler_options=OPTIONS)
    close(compiled(PARAMS, X), jax.jit(make_step(mlp))(PARAMS, X))
    certified = compile_step(step, regions(step.program), CPU)
    assert certified.memory.peak_bytes == jit_peak_bytes(compiled, PARAMS, X)
    assert certified.mesh == DeviceMesh((("data", 4), ("model", 2)))
    assert step.program.mesh == DeviceMesh((("data", 4), ("model", 2)), manual=AXES)


def put(mesh: Any, *specs: Any) -> Any:
    """The arguments on a mesh: both weights of a layer, the batch."""
    w_in, w_out, rows = (NamedSharding(mesh, spec) for spec in specs)
    params = [(jax.device_put(a, w_in), jax.device_put(b, w_out)) for a, b in PARAMS]
    return params, jax.device_put(X, rows)


def tensor_parallel(params: Any, x: jax.Array) -> jax.Array:
    for w_in, w_out in params:
        hidden = jax.nn.gelu(jnp.sin(x @ w_in))
        x = x + jnp.einsum("bh,hd->bd", hidden, w_out, out_sharding=P("data", None))
    return (x * x).mean()


def gathered(params: Any, x: jax.Array) -> jax.Array:
    return mlp(jax.tree.map(lambda w: jax.sharding.reshard(w, P()), params), x)


SPLIT = (P(None, "model"), P("model", None), P("data"))


@pytest.mark.parametrize(
    ("loss", "specs"),
    [
        (scanned, (P(), P(), P("data"))),
        (tensor_parallel, SPLIT),
        pytest.param(gathered, (P("data"), P("data"), P("data")), marks=pytest.mark.slow),
    ],
)
def test_explicit_axes(loss: Any, specs: Any) -> None:
    with jax.set_mesh(EXPLICIT):
        step = check(gradient_step, loss, put(EXPLICIT, *specs))
    assert step.mesh == DeviceMesh((("data", 4), ("model", 2)), explicit=AXES)


@pytest.mark.slow
def test_it_is_planned_on_explicit_axes() -> None:
    args = put(EXPLICIT, *SPLIT)
    structs = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), args
    )
    make = jax_hremat.plan_remat(tensor_parallel, budget=0.9, target="cpu", config=QUICK)
    with jax.set_mesh(EXPLICIT):
        plan = make(*structs)
        planned = gradient_step(jax_hremat.apply_plan(tensor_parallel, plan))
        assert plan.root.num_checkpointed > 0
        assert plan.certificate.peak_bytes == jit_peak_bytes(planned, *args)
        close(planned(*args), gradient_step(tensor_parallel)(*args))
    assert jax_hremat.RematPlan.from_json(plan.to_json()) == plan


@pytest.mark.slow
def test_explicit_axes_are_known_inside_a_jit(caplog: pytest.LogCaptureFixture) -> None:
    args = put(EXPLICIT, P(), P(), P("data"))
    planned = jax_hremat.hremat(mlp, budget=1.0, target="cpu", config=QUICK)
    close(gradient_step(planned)(*args), gradient_step(mlp)(*args))
    (plan,) = planned.plans
    assert plan.certificate.peak_bytes == jit_peak_bytes(gradient_step(planned), *args)
    assert not caplog.records


@pytest.mark.slow
def test_some_axes_are_explicit() -> None:
    mesh = jax.make_mesh((4, 2), AXES, axis_types=(AxisType.Explicit, AxisType.Auto))
    args = put(mesh, *SPLIT)
    step = own_step(trace_loss(mlp, args))
    assert step.mesh == DeviceMesh((("data", 4), ("model", 2)), explicit=("data",))
    planned, _ = planned_by_hand(mlp)
    compiled = gradient_step(planned)
    close(compiled(*args), gradient_step(mlp)(*args))
    certified = compile_step(step, regions(step.program), CPU)
    assert certified.memory.peak_bytes == jit_peak_bytes(compiled, *args)


@pytest.mark.slow
def test_one_device_of_an_explicit_axis() -> None:
    one = jax.make_mesh((1, 1), AXES)
    with jax.set_mesh(one):
        step = check(gradient_step, tensor_parallel, put(one, *SPLIT))
    assert compile_step(step, Region(0, step.program.num_operations), CPU).mesh is None


_DIGESTS = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 8)
from jax.sharding import AxisType, PartitionSpec as P
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph
from tracing import trace_loss

axes = ("data", "model", "pipe")
mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
rows = P(axes)
own = lambda w, x: jnp.sin(x @ w).mean(keepdims=True)

def loss(w, x):
    split = dict(mesh=mesh, in_specs=(P(), rows), out_specs=rows)
    some = jax.shard_map(own, **split)(w, x).sum()
    share = lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos, rocm=jnp.cos)
    return some + jax.vmap(share)(x).sum()

def exchanged(w, x):
    return jax.lax.pmean(jnp.sin(x @ w).mean(), axes)

def digest(loss, *args):
    program = trace_loss(loss, args)
    print(fingerprint(program, build_graph(program)).digest)
    return args[1]

w, x = jnp.ones((4, 4)), jnp.ones((16, 4))
digest(loss, w, x)
inside = jax.shard_map(
    lambda w, x: digest(exchanged, w, x), mesh=mesh, in_specs=(P(), rows), out_specs=rows
)
jax.make_jaxpr(inside)(w, x)
"""


@pytest.mark.slow
def test_a_program_is_the_same_under_another_hash_seed() -> None:
    root = Path(jax_hremat.__file__).parents[1]
    found = [
        subprocess.Popen(
            [sys.executable, "-c", _DIGESTS],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{root}:{root / 'tests'}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2", "3")
    ]
    outputs = {process.communicate()[0] for process in found}
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 2
