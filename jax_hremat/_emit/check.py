"""Checks that a region tree fits a program."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax_hremat._jax.effects import run_once_equation
from jax_hremat._jax.scopes import source_line
from jax_hremat._plan.region import Region
from jax_hremat._shared.errors import PlanFormatError

# How many operations the error message shows before and after the faulty one.
_AROUND = 2


def check_region(jaxpr: Any, root: Region) -> None:
    """Check a region tree against its program. (`Region` itself checks that it is a tree.)

    - The root contains every operation.
    - No checkpointed region contains an operation that must run exactly once.
    - Each saved value is an output of its operation.
    - A region with a `loop` is a scan.
    - A region with `branches` is a cond with the same number of branches.

    The bodies of scans and conds are programs of their own and are not checked here. Unchecked:
    that the forward rule of a custom derivative runs nothing that must run once, if the function
    itself runs nothing of the kind.

    Args:
        jaxpr: An open jaxpr.
        root: The tree.

    Raises:
        PlanFormatError: One of these conditions does not hold; the message shows the operations
            around the faulty one.
    """
    eqns = jaxpr.eqns
    if (root.start, root.stop) != (0, len(eqns)):
        raise PlanFormatError(
            f"the regions of the plan are of operations {root.start} to {root.stop}, and the "
            f"program has {len(eqns)}. Make the plan again"
        )
    once = [run_once_equation(eqn) is not None for eqn in eqns]
    for _, region in root.walk():
        for index, position in region.saved:
            if not 0 <= position < len(eqns[index].outvars):
                raise _wrong(eqns, index, f"saves output {position} of it")
        if region.checkpointed and any(once[region.start : region.stop]):
            index = once.index(True, region.start)
            raise _wrong(eqns, index, "recomputes it, and it must run exactly once")
        if region.loop is not None and eqns[region.start].primitive.name != "scan":
            raise _wrong(eqns, region.start, "runs it as a scan")
        if region.branches:
            eqn, count = eqns[region.start], len(region.branches)
            if eqn.primitive.name != "cond" or len(eqn.params["branches"]) != count:
                raise _wrong(eqns, region.start, f"runs it as a cond of {count} branches")


def _wrong(eqns: Sequence[Any], index: int, what: str) -> PlanFormatError:
    nearby = range(max(0, index - _AROUND), min(len(eqns), index + _AROUND + 1))
    lines = "".join(
        f"\n{'→' if i == index else ' '} {i} {eqns[i].primitive.name}  {source_line(eqns[i])}"
        for i in nearby
    )
    return PlanFormatError(
        f"the plan does not fit the program: at operation {index} it {what}. Make the plan again"
        f"{lines}"
    )
