"""Loss functions of arrays: a part of them planned once, the slow run all at three budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from differential import (
    control_flow,
    custom_rules,
    dtypes,
    linear_algebra,
    mutable_state,
    random_keys,
)
from differential.check import check_quickly, check_thoroughly
from differential.program import Program
from differential.rows import rows_of

TABLES = (control_flow, custom_rules, dtypes, linear_algebra, mutable_state, random_keys)
# Quick ones that take longest, or that have others like them: the slow run has them.
LONG = {
    "control_flow-scan_plain",
    "control_flow-scan_unrolled_by_two",
    "custom_rules-vjp_with_clipped_gradient",
    "dtypes-bfloat16",
    "dtypes-complex_parameters",
    "linear_algebra-attention_by_einsum",
    "linear_algebra-cholesky",
    "linear_algebra-convolutions",
    "linear_algebra-fourier_transform",
    "linear_algebra-gather_and_scatter",
    "linear_algebra-top_k_of_experts",
    "random_keys-typed_keys_split",
}
QUICK = [
    pytest.param(*row.values, id=row.id, marks=[pytest.mark.slow] if row.id in LONG else [])
    for row in rows_of(*TABLES, quick=True)
]


@pytest.mark.parametrize("program", QUICK)
def test_planned_once_it_is_the_original(program: Program) -> None:
    assert check_quickly(program) > 0


@pytest.mark.slow
@pytest.mark.parametrize("program", rows_of(*TABLES, quick=False))
def test_planned_at_three_budgets_it_is_the_original(program: Program, tmp_path: Path) -> None:
    assert check_thoroughly(program, tmp_path) >= 3
