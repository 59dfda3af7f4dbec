"""From a `Program` and a `Region` tree to what the step computes, recomputes and keeps alive.

This is an independent check of a plan: it uses no cost model, partition or solver. It
differentiates the emitted function, opens the resulting jaxpr as lowering would, and reads the
facts off it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.describe import describe_params
from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr, wrapped_body
from jax_hremat._jax.scopes import is_rematted, is_transposed, with_scopes
from jax_hremat._plan.region import Region
from jax_hremat._primitives.primitives import equation_flops
from jax_hremat._trace.flat import Equation, flatten, live_bytes
from jax_hremat._trace.trace import Program

Phase = Literal["forward", "recompute", "backward"]

_TAG = re.compile(r"hremat_operation_(\d+)_")


@dataclass(frozen=True, slots=True)
class Replay:
    """One step under a plan, before XLA touches it.

    Attributes:
        flops: Floating-point operations of the step, counted by `equation_flops`.
        recomputed: For each operation of the program, how many times the step runs it beyond
            its first forward. An operation that has a body (a `custom_jvp`, a `custom_vjp`, a
            user's `jax.checkpoint`) counts as run if any equation of its body does.
        peak_bytes: Largest sum of live bytes over the step in program order: arguments,
            constants and outputs at all times, and every other value from the equation that
            makes it to the last one that reads it, both included.
        peak_operation: The operation that the equation at the peak belongs to (its forward, a
            recompute or its derivative), or None.
        num_barriers: Optimization barriers in the lowered step outside loops: one before each
            checkpointed region's recompute, one before the forward of a region that a recompute
            two levels further out runs, and those of the program itself.
        kept_bytes: Bytes of the values made in the first forward, without arguments, that a
            recompute or the backward reads.
    """

    flops: int
    recomputed: tuple[int, ...]
    peak_bytes: int
    peak_operation: int | None
    num_barriers: int
    kept_bytes: int


def replay(program: Program, root: Region) -> Replay:
    """Differentiate the program with the regions of `root`, and read off what the step does.

    Dead code is removed first. Names, barriers and the `reduce_precision` that
    `jax.checkpoint` puts on the values it keeps are free and make no new buffer.

    Recomputed equations are recognised by scope names: each operation is evaluated under a scope of
    its own; JAX carries the scope through differentiation and marks what a region recomputes. Of
    the equations of an operation, those count as a run that have its primitive and parameters and
    do not read a value of the operation's own derivative rule.

    Unchecked: fusion, layouts, padding, in-place updates and XLA's schedule, so
    `peak_bytes` serves to compare plans and is not a prediction. The body of a loop or branch adds
    the peak of the values it computes, without its slices of the stacked inputs; Pallas and other
    custom kernels add none. Flops of elementwise operations are one per element; `while` loops
    count once.

    Limits of `recomputed`: it is 0 for an operation whose derivative rule computes its value by
    other equations (`scatter`, `cummax`), though `flops` counts them. It also leaves out what a
    scan or cond with its own regions (`Region.loop`, `Region.branches`) recomputes inside, and a
    rerun that the operation's own derivative makes under every plan (a flash-attention
    `custom_vjp`, a user's `jax.checkpoint`). A rerun may cost more or less than the forward: more
    for `sort`, which carries positions along; less for a branch or loop, which only runs what is
    needed. In an operation with a body, a derivative equation that looks like one of the body's
    counts as its rerun.
    """
    with program.context.entered():
        return _replay(program, root)


def _replay(program: Program, root: Region) -> Replay:
    equations = open_jaxpr(program.jaxpr).eqns
    tagged = with_scopes(program.jaxpr, [f"hremat_operation_{i}_" for i in range(len(equations))])
    body = emit_flat(replace(program, jaxpr=tagged), root)
    avals = (*program.in_avals, *program.cotangent_avals)
    flat = flatten(jax.make_jaxpr(program.step(body))(*avals))
    steps = _with_phases(flat.equations)
    live = live_bytes(flat.equations, flat.sizes_bytes, {*flat.inputs, *flat.outputs})
    peak_bytes, peak_equation = max(
        ((size, -index) for index, size in enumerate(live)), default=(0, 1)
    )
    always_bytes = flat.output_bytes + sum(flat.sizes_bytes[v] for v in flat.inputs)
    return Replay(
        flops=sum(equation_flops(run.eqn) for run in flat.equations),
        recomputed=_recomputed(equations, steps),
        peak_bytes=always_bytes + peak_bytes,
        peak_operation=_operation(flat.equations[-peak_equation]) if live else None,
        num_barriers=flat.num_barriers,
        kept_bytes=_kept_bytes(steps, flat.sizes_bytes),
    )


def _with_phases(runs: Iterable[Equation]) -> list[tuple[Equation, Phase]]:
    """Each equation with its phase. The first forward ends at the first transposed equation, which
    JAX places after it."""
    steps: list[tuple[Equation, Phase]] = []
    forward = True
    for run in runs:
        # Scopes inside the tag are the program's own: a loss may contain a gradient itself.
        outer = _TAG.split(run.path)[0]
        forward = forward and not is_transposed(outer)
        rematted = is_rematted(outer)
        steps.append((run, "forward" if forward else "recompute" if rematted else "backward"))
    return steps


def _operation(run: Equation) -> int | None:
    tag = _TAG.search(run.path)
    return int(tag.group(1)) if tag else None


def _recomputed(
    equations: Sequence[Any], steps: Iterable[tuple[Equation, Phase]]
) -> tuple[int, ...]:
    """For each operation, its runs in the recompute phase divided by those in its first forward."""
    first: list[Counter[str]] = [Counter() for _ in equations]
    again: list[Counter[str]] = [Counter() for _ in equations]
    makers: dict[int | None, int | None] = {}
    for run, phase in steps:
        operation = _operation(run)
        makers.update(dict.fromkeys(run.outputs, operation))
        if operation is None or phase == "backward":
            continue
        eqn = equations[operation]
        if wrapped_body(eqn) is not None or _is_run_of(eqn, operation, run, makers):
            counts = first if phase == "forward" else again
            counts[operation][_signature(run.eqn)] += 1
    return tuple(
        max((math.ceil(count / one[key]) for key, count in more.items() if key in one), default=0)
        for one, more in zip(first, again, strict=True)
    )


def _is_run_of(
    eqn: Any, operation: int, run: Equation, makers: Mapping[int | None, int | None]
) -> bool:
    """Whether an equation is the operation itself, not one of its derivative rule."""
    if run.eqn.primitive.name != eqn.primitive.name:
        return False
    if _has_body(eqn):
        return True
    # A rule may add operands (`sort` carries the permutation along) but not change the rest.
    own = any(makers.get(v) == operation for v in run.inputs[: len(eqn.invars)] if v is not None)
    params = describe_params
    return not own and params(run.eqn.params) == params(eqn.params)


def _signature(eqn: Any) -> str:
    """A text for what an equation computes. An equation with a body is described by its primitive
    alone, since loops change their body when they are differentiated."""
    if _has_body(eqn):
        return eqn.primitive.name
    shape = eqn.outvars[0].aval.str_short() if eqn.outvars else ""
    return f"{eqn.primitive.name}[{describe_params(eqn.params)}]->{shape}"


def _kept_bytes(steps: Sequence[tuple[Equation, Phase]], sizes_bytes: Mapping[int, int]) -> int:
    made = {v for run, phase in steps if phase == "forward" for v in run.outputs}
    read = {v for run, phase in steps if phase != "forward" for v in run.inputs}
    return sum(sizes_bytes[v] for v in made & read)


def _has_body(eqn: Any) -> bool:
    return next(inner_jaxprs(eqn), None) is not None
