"""cvxpy, imported when the first program is built.

A user who only applies a saved plan solves no program, and so needs neither cvxpy nor the time to
import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import cvxpy as cp
else:

    class _Deferred:
        def __getattr__(self, name: str) -> Any:
            return getattr(importlib.import_module("cvxpy"), name)

    cp = _Deferred()

__all__ = ["cp"]
