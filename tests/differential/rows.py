"""Tables as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

from differential.program import programs_in


def rows_of(*tables: Any, quick: bool) -> list[Any]:
    """The programs of the default suite, or all; each of them fails as long as it is said to."""
    found = []
    for name, program in programs_in(*tables).items():
        waits_for = program.waits_for
        marks = [] if waits_for is None else [pytest.mark.xfail(reason=waits_for, strict=True)]
        if program.quick or not quick:
            found.append(pytest.param(program, id=name, marks=marks))
    return found
