"""The traced kernels of a step that XLA only calls, each with its work where that is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._jax.custom_rules import asks_what_moves, is_custom_vjp
from jax_hremat._jax.effects import named_axes
from jax_hremat._jax.equations import bind_equation
from jax_hremat._jax.jaxprs import all_equations, open_jaxpr
from jax_hremat._jax.keys import is_inexact
from jax_hremat._primitives.primitives import equation_work, is_called_kernel
from jax_hremat._primitives.work import Call, Work, total

# Work of a backward, in forwards: the backward of a product is two products of the same size.
_BACKWARD = 2.0


def may_call_kernels(jaxpr: Any) -> bool:
    """Whether a program runs kernels that are only called, or custom rules, which may run some."""
    return any(is_custom_vjp(eqn) or is_called_kernel(eqn) for eqn in all_equations(jaxpr))


def traced_calls(program: Any, step: Any) -> tuple[Call, ...]:
    """The distinct kernels of a step.

    A kernel of unknown work that a custom rule runs in place of a primal program with known flops
    is priced by these flops: once for the rule's forward, twice for its backward, divided among the
    rule's unknown kernels in proportion to their bytes.

    Args:
        program: The jaxpr before differentiation.
        step: The jaxpr of the step around it.
    """
    calls = {_once(call): call.work for call in _calls(step)}
    if any(work is None for work in calls.values()):
        for eqn in all_equations(program):
            if is_custom_vjp(eqn):
                for call in _priced_by_primal(eqn):
                    calls[_once(call)] = calls.get(_once(call)) or call.work
    return tuple(replace(call, work=work) for call, work in calls.items())


def _calls(jaxpr: Any) -> Iterator[Call]:
    for eqn in open_jaxpr(jaxpr).eqns:
        yield from equation_work(eqn).calls


def _once(call: Call) -> Call:
    return replace(call, work=None, times=1.0)


def _priced_by_primal(eqn: Any) -> list[Call]:
    """The unknown kernels of a rule, each with its share of the primal's flops."""
    primal = equation_work(eqn)
    if not primal.total_flops or any(call.work is None for call in primal.calls):
        return []
    forward, backward = _rule_calls(eqn)
    known = total([primal, *(c.work.repeated(c.times) for c in primal.calls if c.work)])
    known = replace(known, calls=())
    return [*_parts(forward, known), *_parts(backward, known.repeated(_BACKWARD))]


def _parts(calls: Sequence[Call], work: Work) -> Iterator[Call]:
    unknown = [call for call in calls if call.work is None]
    moved_bytes = sum(call.times * call.moved_bytes for call in unknown)
    for call in unknown:
        part = work.repeated(call.moved_bytes / max(moved_bytes, 1.0))
        yield replace(call, work=replace(part, bytes=call.moved_bytes))


def _rule_calls(eqn: Any) -> tuple[list[Call], list[Call]]:
    """The kernels of a custom rule's forward and those of its backward, traced alone.

    Empty for a rule that communicates with other devices, which cannot be traced alone, and for a
    rule that is told which of its inputs are differentiated, which may fail if all are.
    """
    if named_axes(eqn) or asks_what_moves(eqn):
        return [], []
    moving = [i for i, v in enumerate(eqn.invars) if is_inexact(v.aval.dtype)]
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def forward(*inputs: Any) -> Any:
        def of_moving(*active: Any) -> Any:
            merged = list(inputs)
            for i, value in zip(moving, active, strict=True):
                merged[i] = value
            results = bind_equation(eqn, merged)
            return [r for r in results if is_inexact(r.dtype)]

        return jax.vjp(of_moving, *(inputs[i] for i in moving))

    def both(*inputs: Any) -> Any:
        results, pullback = forward(*inputs)
        return pullback([jnp.ones_like(r) for r in results])

    first = list(_calls(jax.make_jaxpr(forward)(*avals)))
    return first, list(_without(_calls(jax.make_jaxpr(both)(*avals)), first))


def _without(calls: Iterable[Call], those: Sequence[Call]) -> Iterator[Call]:
    left = [_once(call) for call in those]
    for call in calls:
        if _once(call) in left:
            left.remove(_once(call))
        else:
            yield call
