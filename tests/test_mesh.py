"""Steps on a mesh of devices: certified for each device, the same values, the mesh's limits."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import jit_peak_bytes
from tracing import trace_loss

import jax_hremat
from jax_hremat import (
    HRematWarning,
    PlannerConfig,
    SearchConfig,
    UnsupportedConfigError,
    UnsupportedProgramError,
)
from jax_hremat._emit.step import own_step
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._partition.repeats import partition_by_repeats
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._trace.graph import Graph, build_graph
from jax_hremat._trace.mesh import abstract_sharding, device_mesh, sharding_on_mesh, spec_of
from jax_hremat._trace.sharding import Shardings, on_one_device
from jax_hremat._trace.trace import Program
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.inferred_sharding import inferred_shardings
from jax_hremat._xla.target import get_target

AUTO = (AxisType.Auto,) * 2
AXES = ("data", "model")
# Eight devices that are here, and eight that are nowhere.
MESH = jax.make_mesh((4, 2), AXES, axis_types=AUTO)
NOWHERE = AbstractMesh((4, 2), AXES, AUTO)
CONFIG = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2), max_rounds=2
)
# Where it does not matter which plan it is.
LEAST = SearchConfig(max_packings=0, max_saved_sets=0, max_workers=2)
ON_CPU: dict[str, Any] = dict(target="cpu", config=CONFIG)
WIDTH, HIDDEN, DEPTH, BATCH = 16, 64, 3, 512


def mlp(params: Any, x: jax.Array) -> jax.Array:
    for w_in, w_out in params:
        x = x + jax.nn.gelu(jnp.sin(x @ w_in)) @ w_out
    return (x * x).mean()


def gathering(mesh: Any) -> Any:
    """The same with weights that are split over the mesh, and gathered where they are used."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        whole = NamedSharding(mesh, P())
        return mlp([[jax.lax.with_sharding_constraint(w, whole) for w in p] for p in params], x)

    return loss


def struct(shape: tuple[int, ...], mesh: Any, *spec: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def arguments(mesh: Any, split: bool = True) -> tuple[Any, Any]:
    """Two products whose weights are split over the model axis, and a batch over the data axis."""
    w_in = struct((WIDTH, HIDDEN), mesh, None, "model" if split else None)
    w_out = struct((HIDDEN, WIDTH), mesh, "model" if split else None)
    return [(w_in, w_out)] * DEPTH, struct((BATCH, WIDTH), mesh, "data")


def filled(args: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda s: jax.device_put(rng.normal(size=s.shape).astype(s.dtype) / 4, s.sharding), args
    )


def described(x: jax.Array) -> jax.ShapeDtypeStruct:
    """What stands for an array; one that is on no mesh goes wherever the others are."""
    sharding = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def jitted(fun: Any, params: Any) -> Any:
    """As a training loop has it: each gradient lies as its parameter does."""
    return jax.jit(
        jax.value_and_grad(fun),
        out_shardings=(None, jax.tree.map(lambda w: w.sharding, params)),
        compiler_options=jax_hremat.compiler_options("cpu"),
    )


def close(one: Any, other: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), one, other)


@pytest.mark.parametrize(
    "loss",
    [mlp, pytest.param(gathering(MESH), marks=pytest.mark.slow)],
    ids=["split", "gathered"],
)
def test_the_certificate_is_of_each_device_of_the_users_step(loss: Any, tmp_path: Path) -> None:
    args = arguments(MESH)
    plan = jax_hremat.plan_remat(loss, budget=0.8, **ON_CPU)(*args)
    assert plan.certificate.holds
    assert plan.root.num_checkpointed > 0
    assert plan.certificate.mesh == DeviceMesh((("data", 4), ("model", 2)))
    assert "each of 8 cpu (data 4 × model 2)" in str(plan)
    # That for the layout, the step without rematerialization, and the plan's.
    assert plan.num_compiles["steps"] >= 3
    plan.save(tmp_path / "plan.json")
    assert jax_hremat.RematPlan.load(tmp_path / "plan.json") == plan

    planned = jitted(jax_hremat.apply_plan(loss, plan), args[0])
    assert jit_peak_bytes(planned, *args) == plan.certificate.peak_bytes
    assert jit_peak_bytes(jitted(loss, args[0]), *args) == plan.baseline_peak_bytes
    close(planned(*filled(args)), jitted(loss, args[0])(*filled(args)))


@pytest.mark.slow
def test_a_mesh_set_around_the_planning_is_the_arguments() -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return mlp(params, jax.lax.with_sharding_constraint(x, P("data")))

    with jax.set_mesh(MESH):
        plan = jax_hremat.plan_remat(loss, budget=0.8, **ON_CPU)(*arguments(MESH))
        planned = jitted(jax_hremat.apply_plan(loss, plan), arguments(MESH)[0])
        assert jit_peak_bytes(planned, *arguments(MESH)) == plan.certificate.peak_bytes


def mapped(params: Any, x: jax.Array) -> jax.Array:
    """The same, what is exchanged written out; in a scan over equal layers."""

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        def own(x: jax.Array, w_in: jax.Array, w_out: jax.Array) -> jax.Array:
            return jax.lax.psum(jax.nn.gelu(jnp.sin(x @ w_in)) @ w_out, "model")

        specs = (P("data"), P(None, "model"), P("model"))
        split = jax.shard_map(own, mesh=MESH, in_specs=specs, out_specs=P("data"))
        return x + split(x, *w), None

    stacked = jax.tree.map(lambda *w: jnp.stack(w), *params)
    x, _ = jax.lax.scan(layer, x, stacked)
    return (x * x).mean()


@pytest.mark.parametrize(
    ("target", "around"),
    [
        pytest.param("cpu", False, marks=pytest.mark.slow),
        pytest.param("cpu", True, marks=pytest.mark.slow),
        pytest.param("h200", True, marks=pytest.mark.slow),
        pytest.param("h200", False, marks=pytest.mark.slow),
    ],
)
def test_a_map_over_the_devices_is_planned_for_others(target: str, around: bool) -> None:
    args = arguments(MESH)
    config = PlannerConfig(search=CONFIG.search, max_rounds=0)
    with jax.set_mesh(MESH) if around else nullcontext():
        plan = jax_hremat.plan_remat(mapped, budget=1.0, target=target, config=config)(*args)
    assert plan.certificate.mesh is not None
    planned = jitted(jax_hremat.apply_plan(mapped, plan), args[0])
    here = target == "cpu"
    with nullcontext() if here else pytest.warns(HRematWarning, match="lowered for cpu"):
        found = planned(*filled(args))
    close(found, jitted(mapped, args[0])(*filled(args)))
    if here:
        assert jit_peak_bytes(planned, *args) == plan.certificate.peak_bytes


@pytest.mark.slow
def test_a_gpu_of_a_mesh_takes_its_share_and_prices_what_it_exchanges() -> None:
    """No such devices are here; the function names those that are."""
    args = arguments(MESH)
    config = PlannerConfig(search=LEAST, max_rounds=0)
    context = jax_hremat.plan_remat(gathering(MESH), budget=1.0, target="h200", config=config)
    plan = context(*args)
    assert plan.certificate.mesh == DeviceMesh((("data", 4), ("model", 2)))
    assert plan.certificate.argument_bytes == sum(
        s.size * s.dtype.itemsize // (4 if s.shape == (BATCH, WIDTH) else 2)
        for s in jax.tree.leaves(args)
    )
    assert not plan.unpriced
    alone = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), args)
    one = jax_hremat.plan_remat(mlp, budget=1.0, target="h200", config=config)(*alone)
    assert one.certificate.mesh is None
    assert plan.baseline_peak_bytes < 0.5 * one.baseline_peak_bytes


@pytest.mark.slow
def test_a_whole_training_step_on_a_mesh() -> None:
    optimizer = optax.adamw(1e-2)

    def make_step(loss: Any) -> Any:
        def step(state: Any, batch: jax.Array) -> Any:
            params, moments = state

            def add(total: Any, part: jax.Array) -> Any:
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

            parts = batch.reshape(-1, 2, WIDTH).swapaxes(0, 1)
            zeros = jax.tree.map(jnp.zeros_like, params)
            updates, moments = optimizer.update(jax.lax.scan(add, zeros, parts)[0], moments, params)
            return optax.apply_updates(params, updates), moments

        return step

    params, batch = filled(arguments(MESH))
    state = (params, jax.jit(optimizer.init)(params))
    args = jax.tree.map(described, (state, batch))
    step, plan = jax_hremat.fit_step(make_step, mlp, budget=0.85, **ON_CPU)(*args)
    assert plan.certificate.mesh is not None
    assert plan.root.num_checkpointed > 0
    original = jax.jit(make_step(mlp))(state, batch)
    assert jit_peak_bytes(step, *args) == plan.certificate.peak_bytes
    close(step(state, batch), original)


def graph_of(loss: Any, args: Any) -> tuple[Program, Graph]:
    program = trace_loss(loss, args)
    return program, build_graph(program)


def test_a_batch_in_microbatches_is_split_over_parts_of_an_axis(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two microbatches of a batch over four devices: no spec says how they lie, and JAX's own
    `inspect_array_sharding` does not compile."""

    def make_step(loss: Any) -> Any:
        def step(params: Any, x: jax.Array) -> Any:
            def add(total: Any, part: jax.Array) -> Any:
                return jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None

            zeros = jax.tree.map(jnp.zeros_like, params)
            return jax.lax.scan(add, zeros, x.reshape(2, -1, WIDTH))[0]

        return step

    args = filled(arguments(MESH))
    config = PlannerConfig(search=LEAST, max_rounds=0)
    fit = jax_hremat.fit_step(make_step, mlp, budget=0.95, target="cpu", config=config)
    with caplog.at_level("WARNING", logger="jax_hremat"):
        step, plan = fit(*args)
    original = jax.jit(make_step(mlp))(*args)
    close(step(*args), original)
    assert plan.certificate.mesh == DeviceMesh((("data", 4), ("model", 2)))
    (said,) = caplog.messages
    assert "over parts of the mesh's axes" in said


def test_what_lies_over_parts_of_an_axis_is_taken_to_be_in_as_many_parts() -> None:
    """Two heads of keys over four devices."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        heads = jnp.sin(x @ w).reshape(BATCH, 2, WIDTH // 2)
        return (heads**2).mean()

    args = (struct((WIDTH, WIDTH), MESH, None, "data"), struct((BATCH, WIDTH), MESH))
    program, _ = graph_of(loss, args)
    step = own_step(program)
    assert step.mesh is not None
    layout = inferred_shardings(step, step.mesh, get_target("cpu"))
    shapes = [v.aval.shape for v in program.values]
    specs = {s for shape, s in zip(shapes, layout.specs, strict=True) if len(shape) == 3}
    assert specs == {((), (), ("data",))}


def test_a_mesh_of_one_device_in_the_types_of_arrays() -> None:
    mesh = jax.make_mesh(
        (1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1]
    )
    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.eye(WIDTH), NamedSharding(mesh, P()))
        x = jax.device_put(jnp.ones((BATCH, WIDTH)), NamedSharding(mesh, P("data")))
        loss = lambda w, x: jnp.mean(jnp.sin(x @ w) ** 2)  # noqa: E731
        config = PlannerConfig(search=LEAST, max_rounds=0)
        plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=config)(w, x)
        planned = jax.jit(jax.grad(jax_hremat.apply_plan(loss, plan)))
        close(planned(w, x), jax.jit(jax.grad(loss))(w, x))


def test_what_one_device_holds_and_does_by_hand() -> None:
    program, graph = graph_of(
        lambda w, x: (x @ w).sum(), (struct((6, 8), MESH), struct((5, 6), MESH))
    )
    product = next(op for op in graph.operations if op.primitive == "dot_general")
    mesh = DeviceMesh((("data", 4), ("model", 2)))
    whole = [((),) * v.aval.ndim for v in program.values]
    x, w = product.inputs[0], product.inputs[1]
    assert x is not None and w is not None
    whole[x], whole[w] = (("data",), ()), ((), ("model",))
    whole[product.outputs[0]] = (("data",), ("model",))
    layout = Shardings(mesh, tuple(whole))
    one = on_one_device(program, graph, layout)
    # Five rows over four devices: the fullest has two.
    assert one.values[x].size_bytes == 2 * 6 * 4
    assert one.values[w].size_bytes == 6 * 4 * 4
    assert one.values[product.outputs[0]].size_bytes == 2 * 4 * 4
    per_device = one.operations[product.id]
    assert per_device.flops == 2 * 2 * 6 * 4
    assert per_device.moved_bytes == (2 * 6 + 6 * 4 + 2 * 4) * 4
    assert one.mesh == mesh


def test_blocks_that_lie_differently_are_not_alike() -> None:
    program, graph = graph_of(mlp, arguments(MESH))
    mesh = DeviceMesh((("data", 4), ("model", 2)))
    whole = [((),) * v.aval.ndim for v in program.values]
    shapes = [v.aval.shape for v in program.values]

    def kinds(specs: Any) -> int:
        one = on_one_device(program, graph, Shardings(mesh, tuple(specs)))
        return len(partition_graph(one, partition_by_repeats).unique)

    alike = kinds(whole)
    assert alike == len(partition_graph(graph, partition_by_repeats).unique)
    hidden = [i for i, shape in enumerate(shapes) if shape == (BATCH, HIDDEN)]
    last = hidden[-1]
    split = [(("data",), ()) if i == last else spec for i, spec in enumerate(whole)]
    assert kinds(split) == alike + 1


def test_the_compilers_layout_is_read_of_every_value() -> None:
    args = arguments(MESH)
    program, graph = graph_of(mlp, args)
    step = own_step(program)
    assert step.mesh is not None
    layout = inferred_shardings(step, step.mesh, get_target("cpu"))
    hidden = [
        spec
        for v, spec in zip(program.values, layout.specs, strict=True)
        if v.aval.shape == (BATCH, HIDDEN)
    ]
    assert len(hidden) > 5 * DEPTH
    assert set(hidden) == {(("data",), ("model",))}
    assert on_one_device(program, graph, layout).mesh == step.mesh


@pytest.mark.parametrize("spec", [("data",), ("data", "model")])
def test_a_constraint_that_moves_nothing_is_no_kernel(spec: Any) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return mlp(params, jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec))))

    program, graph = graph_of(loss, arguments(MESH))
    step = own_step(program)
    assert step.mesh is not None
    layout = inferred_shardings(step, step.mesh, get_target("cpu"))
    one = on_one_device(program, graph, layout)
    (said,) = (op for op in one.operations if op.primitive == "sharding_constraint")
    assert said.fusible == (spec == ("data",))


def test_a_layout_is_known_with_a_compilation_cache(tmp_path: Path) -> None:
    """What comes from JAX's own cache is not compiled, and so cannot be watched."""
    step = own_step(graph_of(mlp, arguments(MESH))[0])
    assert step.mesh is not None
    layouts = []
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        for _ in range(2):
            layouts.append(inferred_shardings(step, step.mesh, get_target("cpu")))
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert layouts[0] == layouts[1]
    assert any(any(spec) for spec in layouts[0].specs)


def test_specs_are_written_out() -> None:
    sharding = NamedSharding(MESH, P(None, ("data", "model")))
    spec = spec_of(sharding, 3)
    assert spec == ((), ("data", "model"), ())
    mesh = device_mesh(sharding.mesh)
    assert spec_of(abstract_sharding(mesh, spec), 3) == spec
    assert mesh.num_devices == 8
    assert mesh.share((3, 16, 5), spec) == 1 / 8
    assert mesh.share((0, 8, 1), spec) == 1 / 8
    assert device_mesh(NOWHERE) == mesh


def test_one_device_is_no_mesh() -> None:
    one = jax.make_mesh((1, 1), AXES, axis_types=AUTO)
    assert sharding_on_mesh(jnp.ones(3)) is None
    assert sharding_on_mesh(jax.device_put(jnp.ones(4), NamedSharding(one, P("data")))) is None
    program, _ = graph_of(mlp, arguments(one))
    assert own_step(program).mesh is None


@pytest.mark.slow
def test_inside_a_jit_it_is_planned_as_for_one_device_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """JAX does not know yet how what is traced lies."""
    config = PlannerConfig(search=LEAST, max_rounds=0)
    planned = jax_hremat.hremat(mlp, budget=1.0, target="cpu", config=config)
    args = filled(arguments(MESH))
    close(jitted(planned, args[0])(*args), jitted(mlp, args[0])(*args))
    assert planned.plans[0].certificate.mesh is None
    (record,) = caplog.records
    assert "as for one device" in record.message
    caplog.clear()
    # Outside it does, and a plan is applied inside without a word.
    plan = jax_hremat.plan_remat(mlp, budget=1.0, target="cpu", config=config)(*args)
    jitted(jax_hremat.apply_plan(mlp, plan), args[0])(*args)
    assert plan.certificate.mesh is not None
    assert not caplog.records


def test_what_cannot_be_planned_on_a_mesh_says_why() -> None:
    plan = jax_hremat.plan_remat(mlp, budget=0.8, target="cpu")
    params, batch = arguments(MESH)
    other = jax.make_mesh((8,), ("data",), axis_types=AUTO[:1])
    with pytest.raises(UnsupportedProgramError, match=r"args\[0\].*must lie on one mesh"):
        plan(params, struct((BATCH, WIDTH), other, "data"))
    with pytest.raises(UnsupportedProgramError, match="2 devices as <two>.*NamedSharding"):
        sharding_on_mesh(SimpleNamespace(sharding=_Odd()))
    with pytest.raises(UnsupportedProgramError, match="names a mesh of devices {'data': 8}, and"):
        jax_hremat.plan_remat(gathering(other), budget=0.8, **ON_CPU)(params, batch)
    for source in ("analytic", "measured"):
        config = PlannerConfig(cost=source)
        with pytest.raises(UnsupportedConfigError, match=f"'{source}'.*data 4 × model 2"):
            jax_hremat.plan_remat(mlp, budget=0.8, target="cpu", config=config)(params, batch)


class _Odd:
    num_devices = 2

    def __repr__(self) -> str:
        return "<two>"


def test_more_cpus_than_there_are() -> None:
    large = AbstractMesh((16,), ("data",), AUTO[:1])
    with pytest.raises(jax_hremat.TargetUnavailableError, match="device_count=16 before"):
        compile_flat(jnp.sin, [struct((32,), large, "data")], get_target("cpu"))


def test_sixteen_gpus_are_two_hosts() -> None:
    large = AbstractMesh((16,), ("data",), AUTO[:1])
    step = compile_flat(lambda x: x.sum(), [struct((1024,), large, "data")], get_target("h200"))
    assert step.memory.argument_bytes == 1024 * 4 // 16
    assert "all-reduce" in step.hlo_text


@pytest.mark.slow
def test_what_is_kept_of_one_device_is_not_offered_to_several(tmp_path: Path) -> None:
    config = PlannerConfig(search=LEAST, max_rounds=0, cache_dir=tmp_path)
    make = jax_hremat.plan_remat(mlp, budget=1.0, target="cpu", config=config)
    alone = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), arguments(MESH))
    whole = arguments(MESH, split=False)
    plans = [make(*args) for args in (alone, whole, arguments(MESH))]
    meshes = [plan.certificate.mesh for plan in plans]
    assert meshes[0] is None and meshes[1] == meshes[2] == DeviceMesh((("data", 4), ("model", 2)))
    peaks = [plan.certificate.argument_bytes for plan in plans]
    assert peaks[0] > peaks[1] > peaks[2]
    assert [make(*args) for args in (alone, whole, arguments(MESH))] == plans
