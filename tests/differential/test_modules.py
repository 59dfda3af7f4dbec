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
# Quick ones that take longest, or that have others like them: the slow run has them.
LONG = {
    "linen_modules-attention_and_embeddings_tied",
    "linen_modules-blocks_in_training",
    "nnx_modules-class_in_a_model",
    "nnx_modules-keys_in_the_module",
    "other_libraries-haiku_with_state_and_dropout",
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
