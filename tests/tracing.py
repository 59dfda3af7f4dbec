"""Calls traced and emitted as planned functions trace and emit theirs, but without a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax_hremat._calls.planned import Loss
from jax_hremat._emit.run import run_call
from jax_hremat._plan.region import Region
from jax_hremat._trace.call import Arguments, TracedCall, trace_arguments
from jax_hremat._trace.trace import Program


def loss_call(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> TracedCall:
    """A call of a loss."""
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    return Loss(fun, positions, has_aux).trace(args, kwargs or {})


def trace_loss(*args: Any, **kwargs: Any) -> Program:
    """The program of a call of a loss."""
    return loss_call(*args, **kwargs).program


def trace_call(fun: Callable[..., Any], args: Sequence[Any], argnums: Sequence[int]) -> Program:
    """The program of a call of any function, differentiated in some of its arguments."""
    arguments = Arguments.of(
        args,
        {},
        is_differentiated=lambda leaf: leaf.path[0].idx == 0 and leaf.path[1].idx in argnums,
    )
    return trace_arguments(fun, arguments, is_loss=False).program


def emit(call: TracedCall, root: Region) -> Callable[..., Any]:
    """The function that was called, with the regions of `root` applied."""

    def emitted(*args: Any, **kwargs: Any) -> Any:
        return run_call(replace(call, arguments=call.arguments.like(args, kwargs)), root)

    return emitted
