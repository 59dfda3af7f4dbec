"""What a program is known by: what its rules, callbacks and kernels do, not their names."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig, StalePlanError
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import Graph, build_graph

W, X = jnp.ones((16, 16)), jnp.ones((64, 16))


def graph_of(loss: Callable[..., Any], *args: Any) -> Graph:
    return build_graph(trace_loss(loss, args or (W, X)))


def print_of(loss: Callable[..., Any], *args: Any) -> Fingerprint:
    program = trace_loss(loss, args or (W, X))
    return fingerprint(program, build_graph(program))


def vjp_rule(forward: Any, backward: Any) -> Callable[..., Any]:
    @jax.custom_vjp
    def act(x: Any) -> Any:
        return jnp.tanh(x)

    act.defvjp(forward, backward)
    return act


def lean() -> Callable[..., Any]:
    return vjp_rule(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),))


def keeping(count: int) -> Callable[..., Any]:
    def forward(x: Any) -> Any:
        return jnp.tanh(x), [jnp.sort(jnp.sin(x * k), axis=0) for k in range(count)]

    return vjp_rule(forward, lambda kept, g: (g * sum(kept),))


def other_backward() -> Callable[..., Any]:
    return vjp_rule(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 + jnp.tanh(x) ** 2),))


def jvp_rule(factor: float) -> Callable[..., Any]:
    @jax.custom_jvp
    def act(x: Any) -> Any:
        return jnp.tanh(x)

    act.defjvp(lambda p, t: (act(*p), factor * t[0]))
    return act


def plainly(act: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        return (act(x @ w) ** 2).mean()

    return loss


def in_a_scan(act: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        return (jax.lax.scan(lambda x, _: (act(x @ w), None), x, None, length=3)[0] ** 2).mean()

    return loss


def in_a_cond(act: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        return (jax.lax.cond(x[0, 0] > 0, act, jnp.sin, x @ w) ** 2).mean()

    return loss


@pytest.mark.parametrize("around", [plainly, in_a_scan, in_a_cond])
@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        # The operations of a forward rule are those of the program.
        (lean, functools.partial(keeping, 2), "operation"),
        (lean, other_backward, "derivative rule"),
        (functools.partial(jvp_rule, 1.0), functools.partial(jvp_rule, 2.0), "derivative rule"),
    ],
)
def test_an_edited_rule_is_another_program(
    around: Callable[..., Any], before: Callable[..., Any], after: Callable[..., Any], words: str
) -> None:
    first, again, edited = (print_of(around(make())) for make in (before, before, after))
    assert first == again
    difference = first.first_difference(edited)
    assert difference is not None and words in difference


def test_rules_with_one_primal_keep_what_each_of_them_keeps() -> None:
    few, many = lean(), keeping(3)
    graph = graph_of(lambda w, x: (few(x @ w) + many(x @ w)).sum())
    kept = [
        sum(graph.values[v].size_bytes for v in op.needs)
        for op in graph.operations
        if op.primitive == "custom_vjp_call"
    ]
    assert kept == [X.nbytes, 3 * X.nbytes]


def test_a_rule_that_is_never_used_is_not_run() -> None:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError("no derivative")

    act = vjp_rule(lambda x: (jnp.tanh(x), x), refuse)
    # Of what is not differentiated, and of what no cotangent comes back to.
    print_of(lambda w, x: (x @ w).sum() + act(x).sum())
    program = trace_loss(lambda w, x: ((x @ w).sum(), act(x @ w)), (W, X), has_aux=True)
    assert build_graph(program).operations


def test_one_rule_used_often_is_differentiated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax_hremat._trace import graph

    seen = []
    differentiated = graph._differentiated
    monkeypatch.setattr(
        graph, "_differentiated", lambda *args: seen.append(args) or differentiated(*args)
    )
    act = lean()

    def loss(w: Any, x: Any) -> Any:
        for _ in range(12):
            x = jax.nn.relu(act(x @ w))
        return x.sum()

    graph_of(loss)
    assert len(seen) == 2


def scaled(x: np.ndarray) -> np.ndarray:
    return 2 * x


def called_back(function: Callable[..., Any]) -> Callable[..., Any]:
    def loss(w: Any, x: Any) -> Any:
        x = jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        jax.debug.callback(lambda x: function(x), x)
        return (x @ w).sum()

    return loss


def test_a_callback_is_known_by_its_code_and_not_by_what_it_closes_over() -> None:
    def step(number: int) -> Callable[..., Any]:
        return called_back(lambda x: scaled(x) + number)

    assert print_of(step(1)) == print_of(step(2))
    assert print_of(called_back(lambda x: 3 * x)) != print_of(called_back(lambda x: 4 * x))

    def recursive(x: Any, depth: int = 2) -> Any:
        return recursive(x, depth - 1) if depth else x

    assert print_of(called_back(recursive)) == print_of(called_back(recursive))
    assert print_of(called_back(functools.partial(np.add, 1))).digest


def kernel(factor: float, column: int) -> Callable[..., Any]:
    def body(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * factor

    def loss(w: Any, x: Any) -> Any:
        x = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct((64, 8), x.dtype),
            grid=(2,),
            in_specs=[pl.BlockSpec((32, 8), lambda i: (i, column))],
            out_specs=pl.BlockSpec((32, 8), lambda i: (i, 0)),
            interpret=True,
        )(x)
        return (x @ w[:8]).sum()

    return loss


def test_a_kernel_is_known_by_its_body_and_its_blocks() -> None:
    first = print_of(kernel(2.0, 0))
    assert first == print_of(kernel(2.0, 0))
    assert first != print_of(kernel(3.0, 0))
    assert first != print_of(kernel(2.0, 1))


def test_a_users_checkpoint_is_known_by_its_policy() -> None:
    def loss(name: str) -> Callable[..., Any]:
        def layer(w: Any, x: Any) -> Any:
            a = checkpoint_name(jnp.sin(x @ w), "a")
            return jnp.sin(checkpoint_name(jnp.exp(a), "b"))

        policy = jax.checkpoint_policies.save_only_these_names(name)
        return lambda w, x: jax.checkpoint(layer, policy=policy)(w, x).sum()

    assert print_of(loss("a")) == print_of(loss("a")) != print_of(loss("b"))


QUICK = PlannerConfig(
    search=SearchConfig(max_packings=1, max_saved_sets=0),
    cost="analytic",
    max_rounds=0,
)


def test_a_saved_plan_is_refused_after_an_edit_of_a_rule(tmp_path: Path) -> None:
    plan = jax_hremat.plan_remat(plainly(lean()), budget=1.0, target="cpu", config=QUICK)(W, X)
    plan.save(tmp_path / "plan.json")
    loaded = jax_hremat.RematPlan.load(tmp_path / "plan.json")
    jax_hremat.apply_plan(plainly(lean()), loaded)(W, X)
    with pytest.raises(StalePlanError, match="is not for `loss`.*operation"):
        jax_hremat.apply_plan(plainly(keeping(4)), loaded)(W, X)


IN_ANOTHER_PROCESS = """
import sys
sys.path[:0] = {path!r}
from tests.test_fingerprint import *
for loss in (in_a_scan(lean()), called_back(lambda x: x in {{1, "a", 2.5}}), kernel(2.0, 0)):
    print(print_of(loss).digest)
"""


@pytest.mark.slow
def test_it_is_the_same_in_every_process() -> None:
    code = IN_ANOTHER_PROCESS.format(path=[str(Path(__file__).parents[1])])
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
