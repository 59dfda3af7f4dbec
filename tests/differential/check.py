"""A program against its plans: nothing that a user sees differs, and budgets are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from differential.program import Case, Program, Setting
from jax_hremat import InfeasibleBudgetError, RematPlan

# What recomputing in other fusions may change, by the coarsest type that takes part.
_EPSILONS = 64
_FRACTION = 0.75


def check_quickly(program: Program) -> int:
    """Plans for three quarters of the memory, or for the least that a refusal names.

    Returns:
        How many plans were looked at.
    """
    with program.context():
        case, setting = program.make(), Setting.make(cost=program.cost)
        expected = case.run(None, setting).seen
        try:
            return _check_plan(case, _FRACTION, expected, setting)
        except InfeasibleBudgetError as error:
            return _check_plan(case, error.min_budget_bytes, expected, setting)


def check_thoroughly(program: Program, cache_dir: Any) -> int:
    """Plans for the least memory that a refusal names, for half of what is above it, and for no
    less than without rematerialization.

    Args:
        program: The program.
        cache_dir: An empty folder, for what is compiled.

    Returns:
        How many plans were looked at.
    """
    with program.context():
        return check_case(program.make(), Setting.make(cost=program.cost, cache_dir=cache_dir))


def check_case(case: Case, setting: Setting) -> int:
    """The same of a case."""
    expected = case.run(None, setting).seen
    found: list[RematPlan] = []
    count = _check_plan(case, 1.0, expected, setting, found)
    baseline_bytes = max(plan.baseline_peak_bytes for plan in found)
    floor_bytes = least_budget_bytes(case, setting)
    assert floor_bytes <= baseline_bytes, (
        f"the least budget is {floor_bytes}, and no rematerialization takes {baseline_bytes}"
    )
    for budget_bytes in (floor_bytes, (floor_bytes + baseline_bytes) // 2):
        count += _check_plan(case, budget_bytes, expected, setting)
    return count


def least_budget_bytes(case: Case, setting: Setting) -> int:
    """What the refusal of a byte names; the largest of several, where several are planned."""
    budget_bytes, tries = 1, 0
    while True:
        try:
            case.run(case.plan(budget_bytes, setting), setting)
            assert budget_bytes > 1, "a plan for one byte"
            return budget_bytes
        except InfeasibleBudgetError as error:
            assert error.min_budget_bytes > budget_bytes, "a refusal of what would do"
            budget_bytes = error.min_budget_bytes
        tries += 1
        assert tries < 4, "refusals without end"


def _check_plan(
    case: Case,
    budget: int | float,
    expected: Any,
    setting: Setting,
    found: list[RematPlan] | None = None,
) -> int:
    planned = case.plan(budget, setting)
    outcome = case.run(planned, setting)
    plans = case.plans(planned)
    assert plans, "nothing was planned"
    assert_same(outcome.seen, expected, case.tolerance)
    for plan in plans:
        certificate = plan.certificate
        assert certificate.peak_bytes <= certificate.budget_bytes
        if isinstance(budget, int):
            assert certificate.budget_bytes == budget
    if outcome.peak_bytes is not None:
        (plan,) = plans
        assert outcome.peak_bytes == plan.certificate.peak_bytes, (
            f"compiled to {outcome.peak_bytes}, certified {plan.certificate.peak_bytes}"
        )
    if found is not None:
        found.extend(plans)
    return len(plans)


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    """Equal structures, types and values; floating ones within a tolerance."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, a), b in pairs:
        with _located(jax.tree_util.keystr(path)):
            _assert_same_leaf(a, b, tolerance)


def _assert_same_leaf(a: Any, b: Any, tolerance: float) -> None:
    assert type(a) is type(b)
    if not isinstance(b, (jax.Array, np.ndarray, np.generic)):
        assert a == b
        return
    assert jax.typeof(a) == jax.typeof(b), f"{jax.typeof(a)} for {jax.typeof(b)}"
    if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
        assert jax.random.key_impl(a) == jax.random.key_impl(b)
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        np.testing.assert_array_equal(a, b)
        return
    tolerance = max(tolerance, _EPSILONS * float(jnp.finfo(b.dtype).eps))
    wide = np.complex128 if jnp.issubdtype(b.dtype, np.complexfloating) else np.float64
    a, b = np.asarray(a).astype(wide), np.asarray(b).astype(wide)
    finite = np.abs(b[np.isfinite(b)])
    scale = float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale + 1e-30)


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(f"at {where or 'the root'}")
        raise
