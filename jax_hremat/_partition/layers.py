"""The layers of a model, found as repeated sequences of block kinds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

# The most blocks in a layer.
_MAX_PERIOD = 8


def layer_runs(kinds: Sequence[Hashable]) -> list[list[tuple[int, int]]]:
    """The layers of each stack of equal layers, each layer as its first and last block.

    A layer is the shortest sequence of kinds that is repeated. The block at the loss is in none.
    """
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
    """Length of the shortest sequence that `kinds` begins with at least twice in a row, and the
    number of its repetitions; (1, 1) if there is none."""
    for period in range(1, min(_MAX_PERIOD, len(kinds) // 2) + 1):
        count = 1
        while kinds[count * period : (count + 1) * period] == kinds[:period]:
            count += 1
        if count > 1:
            return period, count
    return 1, 1
