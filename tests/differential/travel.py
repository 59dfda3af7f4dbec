"""Plans and planned functions that go elsewhere: copies, files, exported programs."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import jax
import jax.numpy as jnp
from jax import export

import jax_hremat
from differential.program import Uses, Wrap, layers, program, rows, weights

LOSS = layers(lambda x, w: jnp.tanh(x @ w))
ARGS = (list(weights()), rows())


def module_loss(ws: Any, x: Any) -> Any:
    """A function that pickle finds by its name."""
    return LOSS(ws, x)


@program()
def exported() -> Uses:
    def use(wrap: Wrap) -> Any:
        return export.export(wrap.jit(jax.value_and_grad(wrap(LOSS))))(*ARGS).call(*ARGS)

    return Uses(use)


@program()
def exported_with_a_gradient() -> Uses:
    """The forward goes out, with its pullback."""

    def use(wrap: Wrap) -> Any:
        return jax.value_and_grad(export.export(wrap.jit(wrap(LOSS)))(*ARGS).call)(*ARGS)

    return Uses(use)


@program()
def a_planned_function_pickled() -> Uses:
    def use(wrap: Wrap) -> Any:
        planned = wrap(module_loss)
        before = wrap.jit(jax.value_and_grad(planned))(*ARGS)
        again = pickle.loads(pickle.dumps(planned))
        return before, wrap.jit(jax.value_and_grad(again))(*ARGS)

    return Uses(use)


@program()
def a_planned_function_pickled_before_its_use() -> Uses:
    def use(wrap: Wrap) -> Any:
        planned = wrap(module_loss)
        again = pickle.loads(pickle.dumps(planned))
        seen = wrap.jit(jax.value_and_grad(again))(*ARGS)
        return seen, wrap.jit(jax.value_and_grad(planned))(*ARGS)

    return Uses(use)


@program()
def a_planned_function_copied() -> Uses:
    def use(wrap: Wrap) -> Any:
        planned = wrap(LOSS)
        before = wrap.jit(jax.value_and_grad(planned))(*ARGS)
        after = [
            wrap.jit(jax.value_and_grad(c(planned)))(*ARGS) for c in (copy.copy, copy.deepcopy)
        ]
        return before, after

    return Uses(use)


def through(change: Any) -> Uses:
    """The loss under a plan that has been changed and back."""

    def planner(fun: Any, **options: Any) -> Any:
        plan = jax_hremat.plan_remat(fun, **options)(*ARGS)
        changed = change(plan)
        assert changed == plan and repr(changed) == repr(plan)
        return jax_hremat.apply_plan(fun, changed)

    return Uses(lambda wrap: wrap.jit(jax.value_and_grad(wrap(LOSS)))(*ARGS), planner)


@program()
def a_plan_as_json() -> Uses:
    def change(plan: Any) -> Any:
        text = json.dumps(json.loads(plan.to_json()))
        return jax_hremat.RematPlan.from_json(text)

    return through(change)


@program()
def a_plan_pickled() -> Uses:
    return through(lambda plan: pickle.loads(pickle.dumps(plan)))


@program()
def a_plan_copied() -> Uses:
    return through(copy.deepcopy)
