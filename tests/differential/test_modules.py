"""Modules and training steps: a part of them planned once, the slow run all at three budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from differential import (
    linen_modules,
    nnx_modules,
    other_libraries,
    published_models,
    training_steps,
)
from differential.check import check_quickly, check_thoroughly
from differential.program import Program
from differential.rows import rows_of

TABLES = (linen_modules, nnx_modules, other_libraries, published_models, training_steps)


@pytest.mark.parametrize("program", rows_of(*TABLES, quick=True))
def test_planned_once_it_is_the_original(program: Program) -> None:
    assert check_quickly(program) > 0


@pytest.mark.slow
@pytest.mark.parametrize("program", rows_of(*TABLES, quick=False))
def test_planned_at_three_budgets_it_is_the_original(program: Program, tmp_path: Path) -> None:
    assert check_thoroughly(program, tmp_path) >= 3
