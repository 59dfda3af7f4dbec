"""What `print(plan)` says of a linen, an NNX, a scanned and a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, RematPlan, SearchConfig
from jax_hremat._plan.region import Region
from jax_hremat._planner.names import Names, OperationNames
from jax_hremat._trace.bodies import Scan, bodies_of
from jax_hremat._trace.graph import build_graph

CONFIG = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=1), max_rounds=1, cost="analytic"
)
WIDTH, HIDDEN, LAYERS = 16, 64, 3
X = jax.ShapeDtypeStruct((256, WIDTH), jnp.float32)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(HIDDEN, name="up")(x)))


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = Mlp(name=f"layer_{i}")(x)
        return x


class NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jax.nn.gelu(self.up(x)))


class NnxStack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([NnxMlp(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp(x: jax.Array, w: Any) -> jax.Array:
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def weights(*lead: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = dict(up=(WIDTH, HIDDEN), down=(HIDDEN, WIDTH))
    return {k: jax.ShapeDtypeStruct((*lead, *s), jnp.float32) for k, s in shapes.items()}


def of_linen() -> tuple[Callable[..., Any], Any]:
    model = Stack()
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    return lambda p, x: jnp.mean(model.apply(p, x) ** 2), params


def of_nnx() -> tuple[Callable[..., Any], Any]:
    return lambda m, x: jnp.mean(m(x) ** 2), NnxStack(nnx.Rngs(0))


def of_scan() -> tuple[Callable[..., Any], Any]:
    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (mlp(x, w), None), x, p)[0] ** 2)

    return loss_fn, weights(16)


def of_plain() -> tuple[Callable[..., Any], Any]:
    def loss_fn(p: Any, x: jax.Array) -> jax.Array:
        for w in p:
            x = mlp(x, w)
        return jnp.mean(x**2)

    return loss_fn, [weights() for _ in range(LAYERS)]


PLANNED = [
    of_nnx,
    of_plain,
    *(pytest.param(f, marks=pytest.mark.slow) for f in (of_linen, of_scan)),
]


@pytest.fixture(scope="module", params=PLANNED)
def said(request: pytest.FixtureRequest) -> tuple[str, RematPlan, str]:
    loss_fn, params = request.param()
    planned = jax_hremat.plan_remat(loss_fn, budget=0.7, target="cpu", config=CONFIG)
    plan = planned(params, X)
    return request.param.__name__, plan, str(plan)


def test_it_fits_80_columns(said: tuple[str, RematPlan, str]) -> None:
    _, plan, text = said
    assert plan.root.num_checkpointed > 0
    assert max(map(len, text.splitlines())) <= 80


def test_arguments_have_whole_names() -> None:
    program = trace_loss(lambda a, b: (jnp.sin(a) * jnp.cos(b)).mean(), (X, X), argnums=(0, 1))
    names = Names(build_graph(program), program.input_names)
    assert str(names.block(0, 2)) == "args[0], args[1]"


def test_a_transformation_of_nothing_is_no_name() -> None:
    def net(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(params["w"] @ x)
        with jax.named_scope("last"):
            return jnp.tanh(params["w"] @ h).sum()

    def loss(params: Any, xs: jax.Array) -> jax.Array:
        return jax.vmap(net, (None, 0))(params, xs).mean()

    program = trace_loss(loss, ({"w": jnp.ones((WIDTH, WIDTH))}, X))
    graph = build_graph(program)
    names = Names(graph, program.input_names)
    first, last = (op.id for op in graph.operations if op.primitive == "dot_general")
    assert str(names.block(first, first + 1)) == "args[0]['w']"
    assert str(names.block(first + 1, first + 2)).startswith("test_text.py:")
    assert str(names.block(last, last + 1)) == "vmap(last)"


def test_a_block_of_constants_is_named_by_its_line() -> None:
    def loss(w: jax.Array) -> jax.Array:
        return (jnp.arange(WIDTH, dtype=jnp.float32) @ w).sum()

    program = trace_loss(loss, (jnp.ones((WIDTH, WIDTH)),))
    graph = build_graph(program)
    assert not graph.operations[0].active
    assert str(Names(graph, program.input_names).block(0, 1)).startswith("test_text.py:")


def test_blocks_and_values_have_the_names_of_the_user(said: tuple[str, RematPlan, str]) -> None:
    kind, plan, text = said
    named = dict(
        of_linen="Stack/layer_", of_nnx="layers[", of_scan="args[0]: down, up", of_plain="args[0]["
    )
    assert named[kind] in text
    assert all(named[kind] in block.scope for block in plan.blocks[:-1])
    if kind in ("of_nnx", "of_plain"):
        paths = [block.scope for block in plan.blocks if block.scope.startswith(named[kind])]
        assert {int(path.split("[")[-1][0]) for path in paths} <= set(range(LAYERS))


def test_a_scan_says_what_each_step_keeps() -> None:
    loss_fn, params = of_scan()
    plan = jax_hremat.plan_remat(loss_fn, budget=0.7, target="cpu", config=CONFIG)(params, X)
    (scan,) = [
        block for block in plan.blocks if block.decision.startswith("scan of 16 steps, each")
    ]
    assert any(value.startswith("up:dot_general f32[256,64]") for value in scan.saved)
    assert all(" per step, test_text.py:" in value for value in scan.saved)
    assert RematPlan.from_json(plan.to_json()) == plan


def test_a_run_in_a_scan_has_the_names_of_the_parameters_it_reads() -> None:
    loss_fn, params = of_scan()
    program = trace_loss(loss_fn, (params, X))
    graph = build_graph(program)
    ((at, scan),) = bodies_of(program, graph).items()
    assert isinstance(scan, Scan)
    body = scan.body.graph
    names = Names(graph, program.input_names).inside(at, body)
    words = OperationNames.of(names, 0, len(body.operations)).run(Region(0, len(body.operations)))
    assert words.startswith("up:dot_general … down:dot_general (test_text.py:")


def test_an_nnx_module_is_named_by_its_path_whatever_its_name() -> None:
    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.value = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    program = trace_loss(lambda m, x: jnp.mean(m.value(x) ** 2), (Net(nnx.Rngs(0)), X))
    graph = build_graph(program)
    assert str(Names(graph, program.input_names).block(0, len(graph.operations))) == "value"
