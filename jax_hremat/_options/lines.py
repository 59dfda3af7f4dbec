"""Kinds of blocks of one form whose sizes lie on a line, as those of layers that read ever more
channels do.

Along a line the bytes and the arithmetic of an operation are affine in the position if at most one
of its dimensions changes, and so is its time by a roofline; where XLA fuses alike, so is the cost
of a block.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

# On fewer kinds, a line says nothing: two points always lie on one.
_LEAST_KINDS = 3


def lines(sizes: Mapping[int, Sequence[int]]) -> list[tuple[int, ...]]:
    """The lines of at least three kinds, each kind on one line at most, smallest kinds first.

    Args:
        sizes: For each kind, the sizes of its values, which for all kinds are as many.
    """
    left = sorted(sizes, key=lambda kind: (sum(sizes[kind]), kind))
    found: list[tuple[int, ...]] = []
    while left:
        first, *others = left
        by_direction: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for kind in others:
            by_direction[_direction(sizes[first], sizes[kind])].append(kind)
        line = (first, *max(by_direction.values(), key=len, default=[]))
        if len(line) >= _LEAST_KINDS:
            found.append(line)
            left = [kind for kind in left if kind not in line]
        else:
            left = others
    return found


def _direction(start: Sequence[int], end: Sequence[int]) -> tuple[int, ...]:
    """The direction from one point to another, with coprime coordinates."""
    steps = [b - a for a, b in zip(start, end, strict=True)]
    length = math.gcd(*steps) or 1
    return tuple(step // length for step in steps)
