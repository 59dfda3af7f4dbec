"""Columns of the root program: single blocks, and every group that a best schedule may need.

A group is consecutive blocks, one option each, checkpointed together in one `jax.checkpoint`. Seen
from outside, the group keeps only the earlier values that its recompute reads and the constants
that its blocks share with their recomputes. The choice of options inside shows only in three
figures: the group's time, the peak of its forward and the peak of its backward. So the choices that
are Pareto-optimal in these three are enough. They are found by extending groups block by block and
dropping dominated prefixes (label setting, exact).

Glossary
    prefix      the first blocks of a group, with one option each
    label       the figures of a prefix that decide how it can continue (`_Label`)
    held        values made in the group that the prefix holds for its backwards and that a later
                block of the group may read too
    worth_ms    highest reduced cost of a column that may be in a schedule of interest
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MAX_GROUP, MIB, Column, Prices
from jax_hremat._solve.keeping import KeepingColumns


def single_columns(chain: Chain) -> list[Column]:
    """A column for every block in every option."""
    columns = []
    needs = chain.needs()
    for k, options in enumerate(chain.options):
        fastest_s = min(o.cost.time_s for o in options)
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


class Groups:
    """The groups of a chain: the groups with kept values that `Chain.keeping` lists, and all groups
    of two to `MAX_GROUP` blocks that keep nothing.

    A group that keeps nothing never contains the last block, whose backward follows its forward at
    once, so that checkpointing it gains nothing. Nor does it contain an effectful block.
    """

    def __init__(self, chain: Chain) -> None:
        needs = chain.needs()
        self._keeping = KeepingColumns(chain)
        self._starts = [
            _GroupStart(chain, needs, first, min(first + MAX_GROUP, len(chain) - 1) - 1)
            for first in range(len(chain) - 1)
        ]

    def keeping_columns(
        self, limit_bytes: float, prices: Prices | None = None, worth_ms: float = float("inf")
    ) -> list[Column]:
        """The groups that keep something, with the arguments of `columns`."""
        return self._keeping.within(limit_bytes, prices, worth_ms)

    def columns(
        self,
        limit_bytes: float,
        *,
        prices: Prices | None = None,
        worth_ms: float = float("inf"),
        by_time: bool = True,
        only: frozenset[tuple[int, int]] | None = None,
    ) -> list[Column]:
        """The groups that keep something, and the Pareto-optimal columns of every other group.

        Args:
            limit_bytes: Leave out columns whose own peak is higher (arguments and outputs not
                counted).
            prices: What the rows of the root program charge.
            worth_ms: With prices, leave out columns of a higher reduced cost.
            by_time: Whether columns are compared by time as well as by their peaks.
            only: The groups to consider, as (first block, last block); None for all.
        """
        # Kept values raise a group's peaks. Where only peaks count, no group needs to keep any.
        columns = self.keeping_columns(limit_bytes, prices, worth_ms) if by_time else []
        for start in self._starts:
            if only is None or any(first == start.first for first, _ in only):
                search = _GroupSearch(start, limit_bytes, prices, worth_ms)
                columns += search.columns(by_time)
        return [p for p in columns if only is None or (p.first, p.last) in only]


# A prefix of a group, by the figures that all its continuations share: ms added, bytes held inside,
# peak of the backward, peak of the forward, options.
_Label = tuple[float, int, int, int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Way:
    """A block of a group in one option: the figures that do not depend on the blocks before it.

    Attributes:
        option: Position of the option.
        added_ms: Time above that of the fastest option, the block's recompute included.
        spared_ms: The part of `added_ms` that is not run if the group ends with the block.
        forward_bytes: Peak of the block's forward, with everything that waits meanwhile.
        backward_bytes: Peak of the block's backward, pending cotangents included.
        kept_bytes: Bytes kept until the block's backward, boundary values not counted.
        needs: Boundary values made in the group that the block's backward reads.
    """

    option: int
    added_ms: float
    spared_ms: float
    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    needs: frozenset[int]


class _GroupStart:
    """The blocks of the groups that begin at one block, with the figures that are the same for all
    choices of options."""

    def __init__(self, chain: Chain, needs: list[list[list[int]]], first: int, last: int) -> None:
        self.chain = chain
        self.first = first
        end = min((k for k in chain.effectful if first <= k <= last), default=last + 1)
        self.blocks = range(first, end)
        near = [
            (v, c)
            for v, c in enumerate(chain.boundary_values)
            if c.producer <= last and c.readers[-1] >= first
        ]
        # Bytes that wait during the forward of each block whatever the options: values from before
        # the group that are read in the group or after it, and values made in the group until
        # they are last read.
        self.waiting = [
            sum(
                c.size_bytes
                for _, c in near
                if c.producer < first or (c.producer < k <= c.readers[-1])
            )
            for k in self.blocks
        ]
        # For each block: the values from before the group that a group ending there reads.
        self.read = [
            [v for v, c in near if c.producer < first and any(first <= r <= k for r in c.readers)]
            for k in self.blocks
        ]
        self.read_bytes = [sum(chain.boundary_values[v].size_bytes for v in r) for r in self.read]
        # Bytes of constants that the first i blocks share with their recomputes, for each i.
        self.shared_bytes = [0, *accumulate(chain.shared_bytes[k] for k in self.blocks)]
        self.holds = [self._holds(i) for i in range(len(self.blocks))]
        self.ways = [self._ways(i, needs[k]) for i, k in enumerate(self.blocks)]

    def _ways(self, i: int, needs: list[list[int]]) -> list[_Way]:
        chain, k = self.chain, self.blocks[i]
        fastest_s = min(option.cost.time_s for option in chain.options[k])
        pending = chain.pending_cotangent_bytes(k)
        return [
            _Way(
                option=o,
                added_ms=(option.cost.time_s - fastest_s + chain.recompute_s[k]) * 1e3,
                spared_ms=(chain.recompute_s[k] - chain.last_recompute_s[k][o]) * 1e3,
                forward_bytes=(
                    self.waiting[i] + self.shared_bytes[i] + option.cost.forward_peak_bytes
                ),
                backward_bytes=option.cost.backward_peak_bytes + pending,
                kept_bytes=option.cost.kept_bytes,
                needs=frozenset(
                    v for v in needs[o] if chain.boundary_values[v].producer >= self.first
                ),
            )
            for o, option in enumerate(chain.options[k])
        ]

    def _holds(self, i: int) -> tuple[tuple[int, int], ...]:
        """What a group of i + 1 blocks holds, in the form of `Column.holds`."""
        held = {
            (v, min(k, self.chain.boundary_values[v].readers[-1]))
            for v in self.read[i]
            for k in self.blocks[: i + 1]
        }
        return tuple(sorted(held))

    def least_added_ms(self, i: int) -> float:
        """The least time that the block at position i can add if another block follows."""
        return self.chain.recompute_s[self.blocks[i]] * 1e3

    def most_spared_ms(self, i: int) -> float:
        """The most time that a group can save by ending with the block at position i."""
        return max(way.spared_ms for way in self.ways[i])


class _GroupSearch:
    """All groups that begin at one block, within a peak limit and, with prices, a reduced cost."""

    def __init__(
        self, start: _GroupStart, limit_bytes: float, prices: Prices | None, worth_ms: float
    ) -> None:
        self._at = start
        self._blocks = start.blocks
        self._boundary_values = start.chain.boundary_values
        self._limit = limit_bytes
        self._worth = worth_ms
        self._charge = None if prices is None else _Charge(start, prices)

    def columns(self, by_time: bool) -> Iterator[Column]:
        """The Pareto-optimal columns, shorter groups first."""
        # Labels by the set of held values made in the group that a later block may read too.
        labels: dict[frozenset[int], list[_Label]] = {frozenset(): [(0.0, 0, 0, 0, ())]}
        for i, k in enumerate(self._blocks):
            ways = [way for way in self._at.ways[i] if way.forward_bytes <= self._limit]
            longer: dict[frozenset[int], list[_Label]] = {}
            ends: list[_Label] = []
            for held, beginnings in labels.items():
                for way in ways:
                    taken = way.needs - held
                    taken_bytes = sum(self._boundary_values[v].size_bytes for v in taken)
                    extended = self._extended(beginnings, i, way, taken_bytes)
                    if not extended:
                        continue
                    still = frozenset(
                        v for v in held | taken if self._boundary_values[v].readers[-1] > k
                    )
                    longer.setdefault(still, []).extend(extended)
                    spared_ms = way.spared_ms
                    ends += [(ms - spared_ms, 0, b, f, o) for ms, _, b, f, o in extended]
            read = self._at.read_bytes[i]
            labels = {held: _undominated(group, by_time, read) for held, group in longer.items()}
            if i > 0:
                for label in _undominated(ends, by_time, read):
                    if self._charge is None or self._charge.exact(i, label) <= self._worth:
                        yield self._column(i, label)

    def _extended(
        self, beginnings: list[_Label], i: int, way: _Way, taken_bytes: int
    ) -> list[_Label]:
        """The labels, extended by a block, that stay within the limit and may be worth their
        price."""
        own = taken_bytes + way.backward_bytes
        kept = taken_bytes + way.kept_bytes
        read = self._at.read_bytes[i]
        room = self._limit - read
        longer: list[_Label] = []
        for before_ms, held, backward, forward, options in beginnings:
            backward = max(backward, held + own)
            if backward > room:
                continue
            # A forward peak no higher than that of the backward plus the group's inputs never sets
            # the step's peak: everything else outside the group is alive in its backward too.
            forward = max(forward, way.forward_bytes, backward + read)
            ms = before_ms + way.added_ms
            if self._charge is None or self._charge.allows(i, forward, backward, self._worth - ms):
                longer.append((ms, held + kept, backward, forward, (*options, way.option)))
        return longer

    def _column(self, i: int, label: _Label) -> Column:
        added_ms, _, backward, forward, options = label
        return Column(
            first=self._at.first,
            last=self._blocks[i],
            options=options,
            added_ms=added_ms,
            kept_bytes=self._at.shared_bytes[i + 1],
            forward_bytes=tuple(forward - w for w in self._at.waiting[: i + 1]),
            backward_bytes=backward,
            holds=self._at.holds[i],
        )


class _Charge:
    """Reduced costs of the groups that begin at one block.

    That of a group ending at position i is: added ms + c_i + f_i · (forward peak) + b_i · (backward
    peak), where f_i and b_i sum the prices of the peak rows over the group's blocks.
    """

    def __init__(self, start: _GroupStart, prices: Prices) -> None:
        # For each end: c, f and b.
        self._terms: list[tuple[float, float, float]] = []
        constant = forward = backward = 0.0
        for i, k in enumerate(start.blocks):
            constant += prices.cover[k] - prices.forward[k] * start.waiting[i] / MIB
            forward += prices.forward[k] / MIB
            backward += prices.backward[k] / MIB
            held = sum(prices.hold[key] for key in start.holds[i])
            later = sum(prices.forward[k + 1 :]) + sum(prices.backward[k + 1 :])
            kept = later * start.shared_bytes[i + 1] / MIB
            self._terms.append((constant + held + kept, forward, backward))
        # For each position: c, f and b of every end from there on. For a lower bound, c includes
        # the least time that the blocks in between add, less the most that the end saves.
        self._onward: list[list[tuple[float, float, float]]] = []
        for i in range(len(self._terms)):
            extra, onward = 0.0, []
            for j in range(i, len(self._terms)):
                extra += start.least_added_ms(j) if j > i else 0.0
                c, f, b = self._terms[j]
                onward.append((c + extra - start.most_spared_ms(j), f, b))
            self._onward.append(onward)

    def allows(self, i: int, forward: int, backward: int, most_ms: float) -> bool:
        """Whether some continuation of a prefix with these peaks may have a reduced cost of at most
        `most_ms`, the time that the prefix itself adds not counted."""
        for c, f, b in self._onward[i]:
            if c + f * forward + b * backward <= most_ms:
                return True
        return False

    def exact(self, i: int, label: _Label) -> float:
        """The reduced cost of the group that ends at position i."""
        c, f, b = self._terms[i]
        added_ms, _, backward, forward, _ = label
        return added_ms + c + f * forward + b * backward


def _undominated(labels: list[_Label], by_time: bool, read_bytes: int) -> list[_Label]:
    """The labels that no other label dominates; of equal labels the first in order."""
    # In this order only earlier labels can dominate, so that only the bytes need comparing.
    if by_time:
        ordered = sorted(labels)
    else:
        ordered = sorted(labels, key=lambda x: (*x[1:], x[0]))
    kept: list[_Label] = []
    # The kept labels whose forward peak cannot set the step's peak are compared by two figures
    # only: held bytes ascending, backward peaks descending. The other labels are few.
    held_steps: list[int] = []
    backward_steps: list[int] = []
    others: list[tuple[int, int, int]] = []
    for label in ordered:
        _, held, backward, forward, _ = label
        at = bisect_right(held_steps, held)
        if at and backward_steps[at - 1] <= backward:
            continue
        if any(h <= held and b <= backward and f <= forward for h, b, f in others):
            continue
        kept.append(label)
        if forward > backward + read_bytes:
            others.append((held, backward, forward))
            continue
        end = at
        while end < len(backward_steps) and backward_steps[end] >= backward:
            end += 1
        held_steps[at:end] = [held]
        backward_steps[at:end] = [backward]
    return kept
