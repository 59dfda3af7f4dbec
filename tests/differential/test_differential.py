"""Every program of the tables: a part of them planned once, the slow run all at three budgets."""

from __future__ import annotations

from pathlib import Path

import pytest

from differential.check import check_quickly, check_thoroughly
from differential.program import Program
from differential.tables import PROGRAMS


def _row(name: str, program: Program) -> pytest.param:
    waits_for = program.waits_for
    marks = [] if waits_for is None else [pytest.mark.xfail(reason=waits_for, strict=True)]
    return pytest.param(program, id=name, marks=marks)


QUICK = [_row(name, program) for name, program in PROGRAMS.items() if program.quick]
ALL = [_row(name, program) for name, program in PROGRAMS.items()]


@pytest.mark.parametrize("program", QUICK)
def test_planned_once_it_is_the_original(program: Program) -> None:
    assert check_quickly(program) > 0


@pytest.mark.slow
@pytest.mark.parametrize("program", ALL)
def test_planned_at_three_budgets_it_is_the_original(program: Program, tmp_path: Path) -> None:
    assert check_thoroughly(program, tmp_path) >= 3
