"""The cost of operations from their shapes alone. It is good enough to choose what to compile,
and to plan with where nothing but the whole step is compiled.

Elementwise operations and the like are assumed to be fused into a neighbour; matrix products and
convolutions run at the target's rate for their dtype; a loop takes its body's time for each step;
the arithmetic and traffic of all other operations come from `_primitives.primitives`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_hremat._cost.block_step import MARK, BlockStep
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._cost.profile import Profile, Residual, operations_in
from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr
from jax_hremat._jax.sizes import size_bytes_of
from jax_hremat._primitives.elementwise import FUSIBLE
from jax_hremat._primitives.primitives import equation_work, runs_bodies
from jax_hremat._trace.flat import Equation, Flat, flatten, live_bytes
from jax_hremat._trace.graph import Graph, Operation
from jax_hremat._xla.rates import Rates

# An operation that is fused into a neighbour's kernel adds little traffic of its own: this share of
# the bytes of its results.
_FUSED_TRAFFIC = 0.25


def operation_times_s(graph: Graph, rates: Rates) -> tuple[float, ...]:
    """Seconds to run each operation once in a recompute, by a roofline on shapes.

    Unchecked: what XLA really fuses; `_cost.compiled` takes that from the executable.
    """
    return tuple(_time_s(graph, op, rates) for op in graph.operations)


def analytic_cost(step: BlockStep, rates: Rates) -> OptionCost:
    """The cost of a block's step from its equations, without compiling it.

    The kept values are the residuals of JAX's linearization.

    Unchecked: that XLA keeps fewer of them where it can compute some from others; what XLA fuses.
    """
    flat = flatten(jax.make_jaxpr(step.function)(*step.avals))
    equations = flat.equations
    mark = next(
        i for i, e in enumerate(equations) if e.eqn.primitive.name == "fft" and MARK in e.path
    )
    last_read = {v: i for i, e in enumerate(equations) for v in e.inputs}
    results = flat.outputs[: step.num_outputs]
    made_after = {
        i: value
        for i, value in zip(step.active_inputs, flat.outputs[step.num_outputs :], strict=False)
        if i in step.computed_inputs
    }
    made = {v for e in equations[:mark] for v in e.outputs}
    kept = {v for v in made if last_read.get(v, -1) > mark}
    # The constants come before the parameters among the inputs.
    parameters = flat.inputs[len(flat.inputs) - len(step.avals) :]
    written = _written(equations) | kept
    own = {v for e in equations for v in e.outputs} - written - {*flat.outputs}
    weights = {*flat.outputs[step.num_outputs :]} - {*made_after.values()}
    forward = live_bytes(equations, flat.sizes_bytes, own | weights, results)
    backward = live_bytes(
        equations, flat.sizes_bytes, own | weights | {*results} - kept, made_after.values()
    )
    for i in step.cotangent_parameters:
        for at in range(mark, max(mark, last_read.get(parameters[i], mark)) + 1):
            backward[at] += flat.sizes_bytes[parameters[i]]
    return OptionCost(
        forward_s=sum(_equation_s(e.eqn, rates) for e in equations[:mark]),
        backward_s=sum(_equation_s(e.eqn, rates) for e in equations[mark + 1 :]),
        kept_bytes=sum(flat.sizes_bytes[v] for v in kept.difference(results)),
        kept_inputs=tuple(
            i for i in step.computed_inputs if last_read.get(parameters[i], -1) > mark
        ),
        kept_outputs=tuple(i for i, v in enumerate(results) if last_read.get(v, -1) > mark),
        forward_peak_bytes=max(forward[: mark + 1]),
        backward_peak_bytes=max(backward[mark:]),
        profile=_profile(flat, mark, kept.difference(results), written, rates, step.num_scopes)
        if step.num_scopes
        else None,
    )


def _profile(
    flat: Flat,
    mark: int,
    kept: set[int],
    written: set[int],
    rates: Rates,
    num_operations: int,
) -> Profile:
    forward_s = [0.0] * num_operations
    made_by: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    writers: set[int] = set()
    for position, equation in enumerate(flat.equations):
        operation = next(operations_in([equation.path]), None)
        if operation is None:
            continue
        if position < mark:
            forward_s[operation] += _equation_s(equation.eqn, rates)
            made_by.update(dict.fromkeys(kept.intersection(equation.outputs), operation))
            if not written.isdisjoint(equation.outputs):
                writers.add(operation)
        for v in kept.intersection(equation.inputs) if position > mark else ():
            readers.setdefault(v, []).append(operation)
    residuals = (
        Residual(flat.sizes_bytes[v], at, min(readers.get(v, [at])), max(readers.get(v, [at])))
        for v, at in sorted(made_by.items())
    )
    return Profile(tuple(residuals), tuple(forward_s), frozenset(writers))


def _written(equations: Sequence[Equation]) -> set[int]:
    """The values that are in memory at some time: those that an operation which is not fused makes
    or reads."""
    heavy = [e for e in equations if e.eqn.primitive.name not in FUSIBLE]
    return {v for e in heavy for v in (*e.inputs, *e.outputs) if v is not None}


def _equation_s(eqn: Any, rates: Rates) -> float:
    name = eqn.primitive.name
    written_bytes = sum(size_bytes_of(v.aval) for v in eqn.outvars)
    if name in FUSIBLE:
        return _FUSED_TRAFFIC * written_bytes / rates.bytes_per_s
    work = equation_work(eqn)
    if not runs_bodies(eqn):
        return rates.busy_s(work) + rates.launch_s
    bodies = [flatten(open_jaxpr(body)) for body in inner_jaxprs(eqn)]
    times_s = [sum(_equation_s(e.eqn, rates) for e in body.equations) for body in bodies]
    if name == "scan":
        return eqn.params["length"] * sum(times_s) + work.bytes / rates.bytes_per_s
    return max(times_s) if name == "cond" else sum(times_s)


def _time_s(graph: Graph, op: Operation, rates: Rates) -> float:
    if op.fusible:
        under_policy = sum(graph.values[v].size_bytes for v in op.outputs)
        return _FUSED_TRAFFIC * under_policy / rates.bytes_per_s
    return rates.busy_s(op.work) + rates.launch_s
