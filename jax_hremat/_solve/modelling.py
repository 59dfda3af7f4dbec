"""cvxpy and SciPy's sparse matrices, imported when the first program is built.

A user who only applies a saved plan solves no program, and so needs neither of them nor
the time to import them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax_hremat._shared.deferred import Deferred

if TYPE_CHECKING:
    import cvxpy as cp
    import scipy.sparse as sp
else:
    cp = Deferred("cvxpy")
    sp = Deferred("scipy.sparse")

__all__ = ["cp", "sp"]
