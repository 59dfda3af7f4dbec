"""Columns of the root program: single blocks, and every group that a best schedule may need.

A group is consecutive blocks, one option each, checkpointed together in one `jax.checkpoint`. Seen
from outside, the group keeps only the earlier values that its recompute reads and the constants
that its blocks share with their recomputes, and its forward only hands on. The choice of options
inside shows only in two figures: the group's time and the peak of its backward. So the choices that
are Pareto-optimal in these two are enough. They are found by extending groups block by block and
dropping dominated prefixes (label setting, exact). Groups that keep something, and groups with
groups inside, are listed once for a chain (`_solve/keeping.py`, `_solve/nests.py`).

Glossary
    prefix      the first blocks of a group, with one option each
    label       the figures of a prefix that decide how it can continue (`_Labels`)
    held        values made in the group that the prefix holds for its backwards and that a later
                block of the group may read too
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MAX_GROUP, Column
from jax_hremat._solve.kinds import found_once


def single_columns(chain: Chain) -> list[Column]:
    """A column for every block in every option."""
    columns = []
    needs = chain.needs()
    for k, options in enumerate(chain.options):
        fastest_s = chain.fastest_s(k)
        pending = chain.pending_cotangent_bytes(k)
        columns += [
            Column(
                first=k,
                last=k,
                options=(o,),
                added_ms=(option.cost.time_s - fastest_s) * 1e3,
                kept_bytes=option.cost.kept_bytes,
                forward_bytes=(option.cost.forward_peak_bytes,),
                backward_bytes=option.cost.backward_peak_bytes + pending,
                holds=tuple((v, k) for v in needs[k][o]),
            )
            for o, option in enumerate(options)
        ]
    return columns


def group_columns(chain: Chain) -> list[Column]:
    """The groups of a chain: those that `Chain.listed` has, and the Pareto-optimal columns of all
    groups of two to `MAX_GROUP` blocks that keep nothing and have no group inside.

    Of the latter, none contains the last block, whose backward follows its forward at once, so that
    checkpointing it gains nothing, or an effectful block.
    """
    needs, end = chain.needs(), len(chain) - 1
    several = (range(first, min(first + MAX_GROUP, end)) for first in range(end))
    groups = found_once(chain, several, lambda blocks: _columns(_GroupStart(chain, needs, blocks)))
    return [*chain.listed, *groups]


class _Labels(NamedTuple):
    """Prefixes of a group of one length that hold the same values; one row each.

    Attributes:
        added_ms: Time that the prefix adds.
        held_bytes: Bytes held for its backwards.
        backward_bytes: Peak of its backwards.
        options: Position of the option of each block; one column a block.
    """

    added_ms: np.ndarray
    held_bytes: np.ndarray
    backward_bytes: np.ndarray
    options: np.ndarray

    def only(self, rows: np.ndarray) -> _Labels:
        """Some of the prefixes."""
        return _Labels(*(column[rows] for column in self))


def _together(labels: Sequence[_Labels]) -> _Labels:
    return _Labels(*map(np.concatenate, zip(*labels, strict=True)))


_NO_BLOCK = _Labels(np.zeros(1), np.zeros(1, int), np.zeros(1, int), np.zeros((1, 0), int))


@dataclass(frozen=True, slots=True)
class _BlockOption:
    """A block of a group in one option: the figures that do not depend on the blocks before it.

    Attributes:
        position: Position of the option among those of the block.
        added_ms: Time above that of the fastest option, the block's recompute included.
        spared_ms: The part of `added_ms` that is not run if the group ends with the block.
        backward_bytes: Peak of the block's backward, pending cotangents included.
        ending_bytes: The same if the group ends with the block.
        kept_bytes: Bytes kept until the block's backward, boundary values not counted.
        needs: Boundary values made in the group that the block's backward reads.
    """

    position: int
    added_ms: float
    spared_ms: float
    backward_bytes: int
    ending_bytes: int
    kept_bytes: int
    needs: frozenset[int]

    @property
    def as_last(self) -> _BlockOption:
        """The block at the end of the group."""
        added_ms = self.added_ms - self.spared_ms
        return replace(self, added_ms=added_ms, backward_bytes=self.ending_bytes)

    def dominates(self, other: _BlockOption, is_first: bool) -> bool:
        """Whether this option is at least as good as `other` in any group; of equal ones, the first
        is."""
        mine, others = (
            (
                w.added_ms,
                w.added_ms - w.spared_ms,
                w.backward_bytes,
                w.ending_bytes,
                w.kept_bytes,
            )
            for w in (self, other)
        )
        no_worse = all(a <= b for a, b in zip(mine, others, strict=True))
        is_better = mine != others or self.needs != other.needs
        return no_worse and self.needs <= other.needs and (is_better or is_first)


class _GroupStart:
    """The blocks of the groups that begin at one block, with the figures that are the same for all
    choices of options."""

    def __init__(self, chain: Chain, needs: list[list[list[int]]], blocks: range) -> None:
        self.chain = chain
        self.first = first = blocks.start
        end = min((k for k in chain.effectful if k in blocks), default=blocks.stop)
        self.blocks = range(first, end)
        near = [
            (v, c)
            for v, c in enumerate(chain.boundary_values)
            if c.producer < blocks.stop and c.readers[-1] >= first
        ]
        # For each block: the values from before the group that a group ending there reads.
        read = [
            [v for v, c in near if c.producer < first and any(first <= r <= k for r in c.readers)]
            for k in self.blocks
        ]
        # Bytes of constants that the first i blocks share with their recomputes, for each i.
        self.shared_bytes = [0, *accumulate(chain.shared_bytes[k] for k in self.blocks)]
        self.forward_bytes = chain.handing_on_peaks(self.blocks)
        # For each block: what a group ending there holds.
        self.holds = [
            chain.held_throughout(some, self.blocks[: i + 1]) for i, some in enumerate(read)
        ]
        self.options = [self._options(i, needs[k]) for i, k in enumerate(self.blocks)]

    def _options(self, i: int, needs: list[list[int]]) -> list[_BlockOption]:
        chain, k = self.chain, self.blocks[i]
        fastest_s = chain.fastest_s(k)
        pending = chain.pending_cotangent_bytes(k)
        options = [
            _BlockOption(
                position=o,
                added_ms=(option.cost.time_s - fastest_s + chain.recompute_s[k]) * 1e3,
                spared_ms=(chain.recompute_s[k] - chain.last_recompute_s[k][o]) * 1e3,
                backward_bytes=option.cost.backward_peak_bytes + pending,
                ending_bytes=option.ending.backward_peak_bytes + pending,
                kept_bytes=option.cost.kept_bytes,
                needs=frozenset(
                    v for v in needs[o] if chain.boundary_values[v].producer >= self.first
                ),
            )
            for o, option in enumerate(chain.options[k])
        ]
        return [
            option
            for n, option in enumerate(options)
            if not any(other.dominates(option, m < n) for m, other in enumerate(options) if m != n)
        ]


def _columns(start: _GroupStart) -> Iterator[Column]:
    """The Pareto-optimal columns of the groups that begin at one block, shorter groups first."""
    # Labels by the set of held values made in the group that a later block may read too.
    labels = {frozenset[int](): _NO_BLOCK}
    values = start.chain.boundary_values
    for i, k in enumerate(start.blocks):
        longer: dict[frozenset[int], list[_Labels]] = {}
        ends: list[_Labels] = []
        for held, beginnings in labels.items():
            for option in start.options[i]:
                taken = option.needs - held
                taken_bytes = sum(values[v].size_bytes for v in taken)
                extended = _extended(beginnings, option, taken_bytes)
                at_end = _extended(beginnings, option.as_last, taken_bytes)
                still = frozenset(v for v in held | taken if values[v].readers[-1] > k)
                longer.setdefault(still, []).append(extended)
                ends.append(at_end._replace(held_bytes=np.zeros_like(at_end.held_bytes)))
        labels = {held: _undominated(_together(some)) for held, some in longer.items()}
        if i > 0:
            yield from _ended(start, i, _undominated(_together(ends)))


def _extended(beginnings: _Labels, option: _BlockOption, taken_bytes: int) -> _Labels:
    """The labels, extended by a block that takes hold of values of that size."""
    count = beginnings.added_ms.size
    own_bytes = taken_bytes + option.backward_bytes
    return _Labels(
        added_ms=beginnings.added_ms + option.added_ms,
        held_bytes=beginnings.held_bytes + taken_bytes + option.kept_bytes,
        backward_bytes=np.maximum(beginnings.backward_bytes, beginnings.held_bytes + own_bytes),
        options=np.column_stack((beginnings.options, np.full(count, option.position))),
    )


def _ended(start: _GroupStart, i: int, labels: _Labels) -> Iterator[Column]:
    """The groups that end at position i, as columns."""
    for added_ms, _, backward_bytes, options in zip(*map(np.ndarray.tolist, labels), strict=True):
        yield Column(
            first=start.first,
            last=start.blocks[i],
            options=tuple(options),
            added_ms=added_ms,
            kept_bytes=start.shared_bytes[i + 1],
            forward_bytes=start.forward_bytes[: i + 1],
            backward_bytes=backward_bytes,
            holds=start.holds[i],
        )


def _undominated(labels: _Labels) -> _Labels:
    """The labels that no other label dominates; of equal labels the first in order."""
    figures = (labels.added_ms, labels.held_bytes, labels.backward_bytes)
    # In this order only earlier labels can dominate, so that only the bytes need comparing.
    order = np.lexsort((*reversed(labels.options.T), *reversed(figures)))
    rows = order.tolist()
    kept: list[int] = []
    # Of the labels kept: held bytes ascending, backward peaks descending.
    held_steps: list[int] = []
    backward_steps: list[int] = []
    held_bytes, backward_bytes = (column[order].tolist() for column in figures[1:])
    for row, held, backward in zip(rows, held_bytes, backward_bytes, strict=True):
        at = bisect_right(held_steps, held)
        if at and backward_steps[at - 1] <= backward:
            continue
        kept.append(row)
        end = at
        while end < len(backward_steps) and backward_steps[end] >= backward:
            end += 1
        held_steps[at:end] = [held]
        backward_steps[at:end] = [backward]
    return labels.only(np.array(kept, int))
