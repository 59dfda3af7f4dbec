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


@pytest.mark.parametrize("program", rows_of(*TABLES, quick=True))
def test_planned_once_it_is_the_original(program: Program) -> None:
    assert check_quickly(program) > 0


@pytest.mark.slow
@pytest.mark.parametrize("program", rows_of(*TABLES, quick=False))
def test_planned_at_three_budgets_it_is_the_original(program: Program, tmp_path: Path) -> None:
    assert check_thoroughly(program, tmp_path) >= 3
