"""The layers of a model, as the kinds of its blocks tell them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from jax_hremat._solve.chain import Group

# The longest repeated sequence of blocks that is looked for.
_MAX_PERIOD = 8


def layer_runs(kinds: Sequence[Hashable]) -> list[list[Group]]:
    """The layers of each stack of equal ones, a layer as its first and last block: the shortest
    sequence of kinds that is repeated. The block at the loss is in none."""
    runs = []
    block = 0
    while block < len(kinds):
        period, count = _repeats(kinds[block:-1])
        if count > 1:
            stop = block + period * count
            runs.append([(a, a + period - 1) for a in range(block, stop, period)])
        block += period * count
    return runs


def _repeats(kinds: Sequence[Hashable]) -> tuple[int, int]:
    """Length of the shortest sequence that `kinds` begins with twice, and how often it is
    repeated; (1, 1) if there is none."""
    for period in range(1, min(_MAX_PERIOD, len(kinds) // 2) + 1):
        count = 1
        while kinds[count * period : (count + 1) * period] == kinds[:period]:
            count += 1
        if count > 1:
            return period, count
    return 1, 1
