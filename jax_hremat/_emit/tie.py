"""The cotangent barrier: a region's backward ends with all cotangents of its inputs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from jax_hremat._emit.barrier import barrier
from jax_hremat._jax.meshes import varying_axes


def tie(values: Sequence[Any], joined: Sequence[int]) -> list[Any]:
    """The values; the cotangents of the joined ones, given by position, become available together.

    Without this barrier XLA's scheduler may delay the part of a region's backward that leads to one
    input, and the values that the region recomputed stay alive until then. An example is an
    encoder's memory, which every decoder layer reads: its cotangent is summed at the end.
    """
    tied = list(values)
    for alike in _of_one_type(values, joined):
        for i, value in zip(alike, _tie(*(values[i] for i in alike)), strict=True):
            tied[i] = value
    return tied


def _of_one_type(values: Sequence[Any], joined: Sequence[int]) -> list[list[int]]:
    """Groups of two or more values that vary along the same axes of an enclosing `shard_map`: a
    barrier makes all values that go through it vary along the same axes."""
    groups: dict[Any, list[int]] = {}
    for i in joined:
        groups.setdefault(varying_axes(jax.typeof(values[i])), []).append(i)
    return [group for group in groups.values() if len(group) > 1]


@jax.custom_jvp
def _tie(*values: Any) -> tuple[Any, ...]:
    return values


@_tie.defjvp
def _tie_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _tie(*primals), tuple(barrier(tangents))
