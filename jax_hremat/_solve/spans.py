"""Spans: all columns that cover the same blocks, whatever the prices of buffers are.

At prices (`_solve/assumed_reuse.py`) a column counts less. Which columns are alike, so that they
are one family (`_solve/families.py`), is the same at all prices: those that hold the same values
and keep values of the same options; which of a family are best is not. So spans are made once, and
families of them at each set of prices.

What a group counts in its backward is its peak, less the most by which its own buffers may count
less at any moment of it. Which options the columns of a group are made of is not chosen anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import Column
from jax_hremat._solve.families import Families, Values
from jax_hremat._solve.labels import new_minima
from jax_hremat._solve.priced import Positions, Spared


@dataclass(frozen=True, slots=True)
class Span:
    """All columns of the same blocks, family by family.

    Attributes:
        columns: The columns.
        family: The family of each.
        rank: The place of each by time; the same for equal times.
        added_ms: The time of each.
        backward_bytes: The backward peak of each.
        options: The position of the option of each block, one row for each column.
        kept_bytes: What each family keeps.
        forward_bytes: The forward peaks of each family, one column for each block.
        runs: The positions of what runs in these forwards.
        holds: What each family holds, as `Values.holds` tells.
    """

    columns: tuple[Column, ...]
    family: np.ndarray
    rank: np.ndarray
    added_ms: np.ndarray
    backward_bytes: np.ndarray
    options: np.ndarray
    kept_bytes: np.ndarray
    forward_bytes: np.ndarray
    runs: np.ndarray
    holds: np.ndarray

    @property
    def blocks(self) -> range:
        """The blocks of each column."""
        return range(self.columns[0].first, self.columns[0].last + 1)

    def families(self, values: Values, spared: Spared) -> Families:
        """The Pareto-optimal columns of each family, with what they count."""
        kept, forward, backward_bytes = self._counted(spared)
        order = np.lexsort((self.rank, backward_bytes, self.family))
        family = self.family[order]
        # Of each family those that are faster than all before: ranks of later families are made
        # lower than those of earlier ones.
        better = order[new_minima(self.rank[order] - len(order) * family)]
        family = self.family[better]
        return Families(
            columns=tuple(self.columns[position] for position in better.tolist()),
            added_ms=self.added_ms[better],
            backward_bytes=backward_bytes[better],
            kept_bytes=kept,
            forward_bytes=forward,
            first=np.flatnonzero(np.append(True, family[1:] != family[:-1])),
            family=family,
            holds=self.holds,
            alone=values.effects(self.blocks, kept, forward, self.holds, values.none),
        )

    def counted(self, column: Column, spared: Spared) -> Column:
        """One of the columns, with what it counts."""
        position = self.columns.index(column)
        family = self.family[position]
        kept_bytes, forward_bytes, backward_bytes = self._counted(spared)
        return column.counting(
            float(kept_bytes[family]), forward_bytes[family], float(backward_bytes[position])
        )

    def _counted(self, spared: Spared) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What each family keeps, its forward peaks, and the backward peak of each column."""
        # What is kept of each block, and of those before it.
        kept = spared.kept_by_group[self.runs]
        kept[:, -1] = spared.kept[self.runs[:, -1]]
        before = np.cumsum(kept, axis=1) - kept
        forward_bytes = self.forward_bytes - spared.forward[self.runs] - before
        if len(self.blocks) == 1:
            backward = spared.backward[self.options[:, 0]]
        else:
            # If values of the last block are kept, it runs as the option that keeps them.
            of_last = spared.backward[self.runs[:, -1]][self.family]
            backward = np.maximum(spared.backward_inside[self.options].max(axis=1), of_last)
            # What is live since the recompute: what its blocks keep, the boundary values made in
            # the group, and what the group kept.
            made = spared.made_before[self.blocks.stop] - spared.made_before[self.blocks.start]
            of_blocks = spared.kept_inside[self.options].sum(axis=1)
            backward = backward + of_blocks + made + kept.sum(axis=1)[self.family]
        return (
            self.kept_bytes - kept.sum(axis=1),
            np.maximum(forward_bytes, 0.0),
            np.maximum(self.backward_bytes - backward, 0.0),
        )


def spans(chain: Chain, columns: Iterable[Column]) -> list[list[Span]]:
    """The spans of columns, by first block, then by last block."""
    values, positions = Values(chain), Positions(chain)
    alike: dict[tuple[int, int], dict[object, list[Column]]] = {}
    for p in columns:
        # A block alone keeps what its option keeps.
        keeps = p.keeps if p.last > p.first else p.options
        key = p.holds, p.kept_bytes, p.forward_bytes, keeps
        alike.setdefault((p.first, p.last), {}).setdefault(key, []).append(p)
    found: list[list[Span]] = [[] for _ in range(len(chain))]
    for (first, _), some in sorted(alike.items()):
        found[first].append(_span([*some.values()], values, positions))
    return found


def _span(some: Sequence[Sequence[Column]], values: Values, positions: Positions) -> Span:
    columns = tuple(p for family in some for p in sorted(family, key=lambda p: p.options))
    one_of_each = [family[0] for family in some]
    blocks = np.arange(columns[0].first, columns[0].last + 1)
    added_ms = np.array([p.added_ms for p in columns])
    runs = np.tile(positions.of_block + blocks, (len(some), 1))
    for number, p in enumerate(one_of_each):
        for block, option in p.keeps if len(blocks) > 1 else [(p.first, p.options[0])]:
            runs[number, block - p.first] = positions.of_option[block] + option
    return Span(
        columns=columns,
        family=np.repeat(np.arange(len(some)), [len(family) for family in some]),
        rank=np.unique(added_ms, return_inverse=True)[1],
        added_ms=added_ms,
        backward_bytes=np.array([p.backward_bytes for p in columns], float),
        options=np.array([p.options for p in columns]) + positions.of_option[blocks],
        kept_bytes=np.array([p.kept_bytes for p in one_of_each], float),
        forward_bytes=np.array([p.forward_bytes for p in one_of_each], float),
        runs=runs,
        holds=np.array([values.holds(p) for p in one_of_each]),
    )
