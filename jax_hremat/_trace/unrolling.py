"""A scan's steps written one after another.

`jax.lax.scan(..., unroll=True)` gives the same values. Here each step's inputs are parts of one
`split`, whose gradients are joined by one concatenation, and each step's operations are operations
of the program, so that every step can be planned separately.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._jax.equations import context_of
from jax_hremat._jax.jaxprs import scan_counts

# From the inputs of a step and which of them are moving, to its outputs and which of them are.
Step = Callable[[Sequence[Any], Sequence[bool]], tuple[list[Any], list[bool]]]


def unrolled(
    eqn: Any, step: Step, inputs: Sequence[Any], moving: Sequence[bool]
) -> tuple[list[Any], list[bool]]:
    """The outputs of a scan's equation, of at least one step, and which of them are moving.

    Args:
        eqn: The equation.
        step: Runs its body.
        inputs: The equation's inputs: constants, carry, arrays scanned over.
        moving: Which of the inputs are moving.
    """
    num_consts, num_carry = scan_counts(eqn)
    start = num_consts + num_carry
    length, order = eqn.params["length"], range(eqn.params["length"])
    consts, on_consts = list(inputs[:num_consts]), list(moving[:num_consts])
    carry, on_carry = list(inputs[num_consts:start]), list(moving[num_consts:start])
    ys: list[list[Any]] = [[]] * length
    on_ys: list[list[bool]] = [[]] * length
    with context_of(eqn):
        xs = [_parts(x, length) for x in inputs[start:]]
        for i in reversed(order) if eqn.params["reverse"] else order:
            outputs, made = step(
                [*consts, *carry, *(x[i] for x in xs)], [*on_consts, *on_carry, *moving[start:]]
            )
            carry, on_carry = outputs[:num_carry], made[:num_carry]
            ys[i], on_ys[i] = outputs[num_carry:], made[num_carry:]
        stacked = [jnp.stack(parts) for parts in zip(*ys, strict=True)]
    return [*carry, *stacked], [*on_carry, *map(any, zip(*on_ys, strict=True))]


def _parts(x: Any, length: int) -> list[Any]:
    return [part.reshape(part.shape[1:]) for part in jax.lax.split(x, (1,) * length)]
