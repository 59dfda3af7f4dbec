"""Tables as parameters of tests."""

from __future__ import annotations

from typing import Any

import pytest

from differential.program import programs_in


def rows_of(*tables: Any, quick: bool) -> list[Any]:
    """The programs of the default suite, or all."""
    rows = programs_in(*tables).items()
    return [pytest.param(row, id=name) for name, row in rows if row.quick or not quick]
