"""Conds whose branches are run in other modes: the same values, less kept, budgets held."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from programs import normal
from random_plans import QUICK, struct
from tracing import emit, loss_call, trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._options.branch_options import _together
from jax_hremat._partition.blocks import partition_graph
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._plan.region import Loop, Region
from jax_hremat._trace.bodies import Cond, Scan, bodies_of, branch_bodies
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay

WIDTH = 16
FEW = PlannerConfig(
    search=SearchConfig(max_packings=2, max_saved_sets=1, max_workers=2), max_rounds=1
)


def deep(x: jax.Array, ws: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.tanh(x @ w) * x
    return x


def switched(ws: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """Three branches, one of them with random numbers, one with hardly anything in it."""

    def noisy(x: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(jax.random.key(0), 0.8, x.shape)
        return deep(jnp.where(keep, jnp.sin(x), 0.0), ws[:2])

    y = jax.lax.switch(index, [lambda x: deep(x, ws), noisy, lambda x: x * x], x) + x
    return jnp.mean(deep(y, ws[:1]) ** 2)


def in_a_scan(ws: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
    """A cond in every step of a scan, with a scan in one of its branches."""

    def step(x: jax.Array, at: jax.Array) -> Any:
        def inner(x: jax.Array) -> jax.Array:
            return jax.lax.scan(lambda h, w: (jnp.sin(h @ w), None), x, ws)[0]

        return jax.lax.cond(at % 2 == 0, inner, lambda x: deep(x, ws[:2]), x) + x, None

    return jnp.mean(jax.lax.scan(step, x, jnp.arange(4) + index)[0] ** 2)


ARGS = (struct(4, WIDTH, WIDTH), struct(32, WIDTH), jax.ShapeDtypeStruct((), np.int32))


def traced(fun: Any) -> Program:
    return trace_loss(fun, ARGS, argnums=(0, 1))


def inputs(index: int) -> list[jax.Array]:
    ws, x = (0.3 * normal(seed, *a.shape) for seed, a in enumerate(ARGS[:2]))
    return [ws, x, jnp.int32(index)]


def branch_modes(count: int) -> list[Region]:
    """Of a branch of some operations."""
    half = count // 2
    checkpointed = Region(0, count, checkpointed=True)
    runs = (Region(0, half, checkpointed=True), Region(half, count, checkpointed=True))
    return [
        Region(0, count),
        checkpointed,
        Region(0, count, checkpointed=True, saved=((half, 0),)),
        Region(0, count, children=runs),
        Region(0, count, checkpointed=True, children=runs),
    ]


def cond_in(program: Program, modes: tuple[int, ...]) -> Region:
    """The program with each branch of its cond in a mode."""
    ((at, cond),) = bodies_of(program, build_graph(program)).items()
    assert isinstance(cond, Cond)
    branches = [
        branch_modes(len(body.graph.operations))[mode]
        for body, mode in zip(cond.branches, modes, strict=True)
    ]
    child = Region(at, at + 1, branches=tuple(branches))
    return Region(0, program.num_operations, children=(child,))


def assert_same_step(program: Program, root: Region, *indices: int) -> None:
    plain = jax.jit(program.step(emit_flat(program, Region(0, root.stop))))
    planned = jax.jit(program.step(emit_flat(program, root)))
    for index in indices:
        assert_close(plain(*inputs(index)), planned(*inputs(index)))


def assert_close(expected: Any, actual: Any) -> None:
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize(
    "modes",
    [
        (2, 3, 1),
        *(
            pytest.param(modes, marks=pytest.mark.slow)
            for modes in ((1, 0, 0), (3, 4, 0), (4, 2, 1))
        ),
    ],
)
def test_every_branch_gives_the_same_step(modes: tuple[int, ...]) -> None:
    program = traced(switched)
    assert_same_step(program, cond_in(program, modes), 0, 1, 2)


def test_under_vmap_with_an_index_for_each() -> None:
    program = traced(switched)
    ws, x, _ = inputs(0)
    many = (ws, jnp.stack([x, 2 * x, 3 * x]), jnp.arange(3))
    plain, planned = (
        jax.jit(jax.vmap(program.step(emit_flat(program, root)), (None, 0, 0)))(*many)
        for root in (Region(0, program.num_operations), cond_in(program, (2, 3, 1)))
    )
    assert_close(plain, planned)


def test_a_cond_in_a_scan_and_a_scan_in_that() -> None:
    program = traced(in_a_scan)
    ((at, scan),) = bodies_of(program, build_graph(program)).items()
    assert isinstance(scan, Scan)
    ((inner_at, cond),) = scan.body.inner.items()
    assert isinstance(cond, Cond) and cond.branches[1].inner.keys() == {0}
    count = len(scan.body.graph.operations)
    sizes = [len(body.graph.operations) for body in cond.branches]
    branches = (Region(0, sizes[0], checkpointed=True), branch_modes(sizes[1])[1])
    child = Region(inner_at, inner_at + 1, branches=branches)
    step = Region(0, count, checkpointed=True, children=(child,))
    one = Region(at, at + 1, loop=Loop(step, (2,)))
    root = Region(0, program.num_operations, children=(one,))
    assert (root.num_checkpointed, root.depth) == (4, 3)
    assert_same_step(program, root, 0)


def test_a_cond_is_a_block_of_its_own_if_its_branches_keep_something() -> None:
    graph = build_graph(traced(switched))
    at = next(op.id for op in graph.operations if op.primitive == "cond")
    edges = [(b.start, b.stop) for b in partition_graph(graph, partition_by_width).blocks]
    assert (at, at + 1) in edges

    def idle(ws: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        """Of one cond nothing flows back, and the other's backward reads its operands alone."""
        kept = jax.lax.cond(index > 0, jnp.sin, jnp.cos, jax.lax.stop_gradient(x))
        return jnp.sum(jax.lax.cond(index > 0, jnp.add, jnp.subtract, x, kept) @ ws[0])

    program = traced(idle)
    assert bodies_of(program, build_graph(program)) == {}


@pytest.mark.parametrize(
    "wrong",
    [
        dict(checkpointed=True),
        dict(stop=2),
        dict(loop=Loop(Region(0, 1))),
        dict(children=(Region(0, 1),)),
    ],
)
def test_branches_are_of_one_bare_cond(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not one plain scan or cond"):
        Region(**{"start": 0, "stop": 1, "branches": (Region(0, 1), Region(0, 1)), **wrong})


@pytest.mark.parametrize(
    "fun, budget, cost",
    [
        pytest.param(switched, 0.85, "compiled", marks=pytest.mark.slow),
        pytest.param(switched, 0.85, "analytic", marks=pytest.mark.slow),
        (in_a_scan, 0.7, "analytic"),
    ],
)
def test_a_budget_is_held_by_what_is_done_in_branches(fun: Any, budget: float, cost: Any) -> None:
    config = dataclasses.replace(FEW, cost=cost)
    args = (ARGS[0], struct(512, WIDTH), ARGS[2])
    plan = jax_hremat.plan_remat(fun, budget=budget, target="cpu", config=config)(*args)
    assert plan.certificate.peak_bytes <= budget * plan.baseline_peak_bytes
    again = jax_hremat.RematPlan.from_json(plan.to_json())
    assert again.root == plan.root
    ws, x, index = inputs(1)
    step, planned = (
        jax.jit(jax.value_and_grad(f)) for f in (fun, jax_hremat.apply_plan(fun, again))
    )
    many = jnp.tile(x, (16, 1))
    assert_close(step(ws, many, index), planned(ws, many, index))
    if fun is switched:
        # Only the branches keep much, so only there can as much be saved at little cost.
        assert any(region.branches for _, region in plan.root.walk())
        assert any(block.decision.startswith("branches: ") for block in plan.blocks)


costs = st.builds(
    lambda time_s, kept: OptionCost(
        forward_s=time_s,
        backward_s=0.0,
        kept_bytes=kept,
        kept_inputs=(),
        kept_outputs=(),
        forward_peak_bytes=0,
        backward_peak_bytes=0,
    ),
    st.integers(1, 20).map(float),
    st.integers(0, 20),
)


@given(st.lists(st.lists(costs, min_size=1, max_size=4), min_size=1, max_size=3))
@QUICK
def test_options_of_branches_are_put_together_as_no_others_are_better(
    of_branches: list[list[OptionCost]],
) -> None:
    named = [{Region(i, i + 1): c for i, c in enumerate(found)} for found in of_branches]

    def total(modes: tuple[Region, ...]) -> tuple[float, int]:
        chosen = [found[mode] for found, mode in zip(named, modes, strict=True)]
        return sum(c.time_s for c in chosen), sum(c.kept_bytes for c in chosen)

    everything = [total(modes) for modes in itertools.product(*named)]
    answers = _together(named, 100)
    assert len(set(answers)) == len(answers) <= len(_together(named, 1000))
    for time_s, kept in map(total, answers):
        assert not any(
            t <= time_s and k <= kept and (t, k) != (time_s, kept) for t, k in everything
        )
    assert total(answers[0])[1] == min(kept for _, kept in everything)
    assert _together(named, 1) == answers[:1]


def test_branches_of_other_platforms_are_not_lowered() -> None:
    """A kernel of another platform is there, and stays there, in every mode of the branches."""

    def kernel(h: jax.Array) -> jax.Array:
        def body(read: Any, write: Any) -> None:
            write[...] = jnp.sin(read[...])

        return pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype))(h)

    on_gpu = jax.custom_jvp(kernel)
    on_gpu.defjvp(lambda x, dx: (kernel(*x), dx[0] * jnp.cos(x[0])))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.lax.platform_dependent(x @ w, cpu=lambda h: jnp.sin(jnp.sin(h)), cuda=on_gpu)
        return (h * h).mean()

    def of_rows(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.vmap(loss, (None, 0))(w, x).mean()

    w, x = jnp.ones((4, 4)) / 8, jnp.linspace(0.0, 1.0, 96).reshape(3, 8, 4)
    call = loss_call(of_rows, (w, x))
    program = call.program
    (at,) = (
        i for i, eqn in enumerate(open_jaxpr(program.jaxpr).eqns) if eqn.primitive.name == "cond"
    )
    bodies = branch_bodies(open_jaxpr(program.jaxpr).eqns[at])
    branches = tuple(Region(0, body.num_operations, checkpointed=True) for body in bodies)
    root = Region(0, program.num_operations, children=(Region(at, at + 1, branches=branches),))
    planned = jax.jit(jax.value_and_grad(emit(call, root)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
        planned(w, x),
        jax.jit(jax.value_and_grad(of_rows))(w, x),
    )
    np.testing.assert_allclose(emit(call, root)(w, x), of_rows(w, x), rtol=1e-6)


def on_a_tie(ws: jax.Array, x: jax.Array) -> jax.Array:
    """Which branch is run depends on rounding: the sum is zero but for that."""
    y = jnp.tanh(x @ ws[0])
    y = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var() + 1.0)
    y = jax.lax.cond(y.sum() > 0, jnp.sin, lambda y: jnp.exp(y @ ws[1]), y)
    return (y * jnp.cos(y)).mean()


def nested(region: Region) -> Region:
    middle = (region.start + region.stop) // 2
    inner = (Region(0, middle, checkpointed=True), Region(middle, region.stop, checkpointed=True))
    return dataclasses.replace(region, children=inner)


@pytest.mark.parametrize(
    "seed, every", [(0, 4), *(pytest.param(seed, 1, marks=pytest.mark.slow) for seed in range(3))]
)
def test_the_backward_is_of_the_branch_that_was_run(seed: int, every: int) -> None:
    ws, x = normal(seed, 2, 4, 4), normal(seed + 10, 16, 4)
    call = loss_call(on_a_tie, (ws, x))
    program = call.program
    eqns = open_jaxpr(program.jaxpr).eqns
    (cond,) = [i for i, eqn in enumerate(eqns) if eqn.primitive.name == "cond"]
    chooser = next(i for i, eqn in enumerate(eqns) if eqns[cond].invars[0] in eqn.outvars)
    quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    expected = quick_jit(jax.value_and_grad(on_a_tie))(ws, x)
    whole = Region(0, len(eqns), checkpointed=True)
    floating = [
        (i, 0) for i in range(cond) if jnp.issubdtype(eqns[i].outvars[0].aval.dtype, jnp.floating)
    ]
    saving = [dataclasses.replace(whole, saved=(v,)) for v in floating[::every]]
    for root in (whole, nested(whole), *saving):
        actual = quick_jit(jax.value_and_grad(emit(call, root)))(ws, x)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), actual, expected
        )
        assert replay(program, root).recomputed[chooser] == 0
