"""cvxpy, imported when the first program is built.

Who only applies a plan builds none, and needs neither cvxpy nor the time that importing it takes.
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
