"""A program against its plans: nothing that a user sees differs, and budgets are kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from differential.program import Case, Outcome, Program, Setting, Uses
from jax_hremat import InfeasibleBudgetError, RematPlan

# What recomputing in other fusions may change, by the coarsest type that takes part.
_EPSILONS = 64
# Where all of an array is below this, it is zero but for rounding: of a bias before a batch norm,
# say, the gradient.
_ZERO = 1e-2
_FRACTION = 0.9
# A refusal names what will do; where several functions are planned, each of them may be refused.
_REFUSALS = 4


def check_quickly(program: Program) -> int:
    """Plans for nine tenths of the memory, or for the least that a refusal names.

    Returns:
        How many plans were looked at.
    """
    with program.context():
        case, setting = program.make(), Setting.make(cost=program.cost)
        expected = case.run(None, setting).seen
        return _compare(_planned_from(_FRACTION, case, setting), expected)


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
    whole = _planned_from(1.0, case, setting)
    least = _planned_from(1, case, setting)
    baseline_bytes = max(plan.baseline_peak_bytes for plan in whole.plans)
    assert least.budget <= baseline_bytes, (
        f"the least budget is {least.budget}, and no rematerialization takes {baseline_bytes}"
    )
    middle = _planned_from(int(least.budget + baseline_bytes) // 2, case, setting)
    return sum(_compare(planned, expected) for planned in (whole, least, middle))


@dataclass(frozen=True)
class _Planned:
    """A case that was run within a budget."""

    case: Case
    budget: int | float
    outcome: Outcome
    plans: Sequence[RematPlan]


def _planned_from(budget: int | float, case: Case, setting: Setting) -> _Planned:
    """Planned for a budget, or for the least that its refusal names.

    Where several functions are planned, each may name a larger one.
    """
    for _ in range(_REFUSALS if isinstance(case, Uses) else 2):
        try:
            planned = case.plan(budget, setting)
            outcome = case.run(planned, setting)
            return _Planned(case, budget, outcome, case.plans(planned))
        except InfeasibleBudgetError as error:
            assert isinstance(budget, float) or error.min_budget_bytes > budget
            budget = error.min_budget_bytes
    raise AssertionError(f"refused, and refused at what the refusals named: {budget}")


def _compare(planned: _Planned, expected: Any) -> int:
    assert planned.plans, "nothing was planned"
    assert_same(planned.outcome.seen, expected, planned.case.tolerance)
    for plan in planned.plans:
        certificate = plan.certificate
        assert certificate.peak_bytes <= certificate.budget_bytes
        if isinstance(planned.budget, int):
            assert certificate.budget_bytes == planned.budget
    peak_bytes = planned.outcome.peak_bytes
    if peak_bytes is not None:
        (plan,) = planned.plans
        assert peak_bytes == plan.certificate.peak_bytes, (
            f"compiled to {peak_bytes}, certified {plan.certificate.peak_bytes}"
        )
    return len(planned.plans)


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
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(scale, _ZERO))


@contextlib.contextmanager
def _located(where: str) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        error.add_note(f"at {where or 'the root'}")
        raise
