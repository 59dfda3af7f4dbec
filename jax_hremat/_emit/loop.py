"""One scan as nested, checkpointed scans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._emit.checkpoint import checkpoint
from jax_hremat._jax.equations import context_of
from jax_hremat._jax.jaxprs import scan_counts


def run_scan(
    eqn: Any,
    body: Callable[..., Sequence[Any]],
    segments: Sequence[int],
    inputs: Sequence[Any],
    *,
    prevent_cse: bool,
) -> list[Any]:
    """Run a scan with `body` in place of its own body, its steps grouped in segments.

    Args:
        eqn: The scan's equation.
        body: A flat body that computes the same as the scan's own.
        segments: As `Loop.segments`. If a length does not divide the one before it, the steps left
            over are one more segment at the scan's end.
        inputs: The equation's inputs.
        prevent_cse: Whether XLA could merge the recompute of the leftover steps, which are in no
            loop of their own, with their first run. It never merges across the edge of a loop.
    """
    num_consts, num_carry = scan_counts(eqn)
    consts, carry = list(inputs[:num_consts]), list(inputs[num_consts : num_consts + num_carry])
    xs = list(inputs[num_consts + num_carry :])
    reverse, unroll = eqn.params["reverse"], eqn.params["unroll"]

    def one_scan(
        consts: list[Any], carry: list[Any], xs: list[Any], length: int
    ) -> tuple[list[Any], list[Any]]:
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outputs = body(*consts, *carry, *x)
            return list(outputs[:num_carry]), list(outputs[num_carry:])

        carry, ys = jax.lax.scan(
            step, carry, xs, length=length, reverse=reverse, unroll=min(unroll, max(length, 1))
        )
        return carry, ys

    def in_segments(
        consts: list[Any],
        carry: list[Any],
        xs: list[Any],
        length: int,
        segments: Sequence[int],
        prevent_cse: bool,
    ) -> tuple[list[Any], list[Any]]:
        if not segments or segments[0] >= length:
            return one_scan(consts, carry, xs, length)
        size = segments[0]
        count, rest = divmod(length, size)

        def segment(length: int, prevent_cse: bool) -> Callable[..., Any]:
            def run(consts: list[Any], carry: list[Any], xs: list[Any]) -> Any:
                # This segment's recompute contains the first run of the segments inside it, so XLA
                # could merge that run with their own recompute.
                return in_segments(consts, carry, xs, length, segments[1:], True)

            return checkpoint(run, prevent_cse=prevent_cse)

        def leftover(carry: list[Any]) -> tuple[list[Any], list[Any]]:
            tail = [x[count * size :] for x in xs]
            return segment(rest, prevent_cse)(consts, carry, tail)

        late: list[Any] = []
        if rest and reverse:
            carry, late = leftover(carry)
        whole = [x[: count * size].reshape(count, size, *x.shape[1:]) for x in xs]
        # A loop of one step does not count: it does not keep recompute and first run apart.
        inner = segment(size, prevent_cse and count == 1)
        carry, ys = jax.lax.scan(
            lambda carry, x: inner(consts, carry, x), carry, whole, length=count, reverse=reverse
        )
        ys = [y.reshape(count * size, *y.shape[2:]) for y in ys]
        if rest and not reverse:
            carry, late = leftover(carry)
        if rest:
            ys = [jnp.concatenate(pair) for pair in zip(ys, late, strict=True)]
        return carry, ys

    with context_of(eqn):
        carry, ys = in_segments(
            consts, carry, xs, eqn.params["length"], tuple(segments), prevent_cse
        )
    return [*carry, *ys]
