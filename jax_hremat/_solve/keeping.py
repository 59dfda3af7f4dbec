"""Groups that keep values: what one `jax.checkpoint` around several blocks may keep of them.

In its recompute such a group runs each block in its plain option, or in its only one. Of each block
the group keeps nothing, or the values that one of the block's own options keeps by name. Time and
kept bytes add up over the blocks:

    T = Σ_k  t_k                    if nothing is kept of block k: its forward is recomputed
             t_{k,o} − t_{k,plain}  if the values of option o are kept (at least 0), and the time to
                                    make the block's outputs again from these values
    K = Σ_k  bytes of constants shared with the recompute, or bytes that option o keeps, those for
             the outputs included

The outputs of the last block are not made again, since no block of the group reads them.

The Pareto-optimal choices in T, K, the boundary values kept and the blocks' forward peaks are found
block by block (label setting). This is the program of a parent node over its children (H-Rockmate,
Gusak et al. 2024, section 4.2) for the case that every child is recomputed: what remains to choose
is the set S of values that the checkpoint keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MAX_GROUP, Column
from jax_hremat._solve.kinds import found_once
from jax_hremat._solve.lifetimes import ending_cost, kept_cost
from jax_hremat._solve.prediction import block_recompute_s

# The most choices of kept values per range of blocks, spread over the bytes kept.
_RESOLUTION = 16


class _Label(NamedTuple):
    """A choice of the values to keep of the first blocks of a group.

    Attributes:
        added_s: Seconds of these blocks in the group's recompute.
        kept_bytes: Bytes kept of these blocks, boundary values not counted.
        held: The boundary values kept.
        forward_bytes: Peak of each block's forward, plus what is kept of the blocks before.
        keeps: As in `Column`.
    """

    added_s: float
    kept_bytes: int
    held: frozenset[int]
    forward_bytes: tuple[int, ...]
    keeps: tuple[tuple[int, int], ...]

    def dominates(self, other: _Label) -> bool:
        """Whether this label is at least as good as `other` in all that affects a schedule."""
        return (
            self.added_s <= other.added_s
            and self.kept_bytes <= other.kept_bytes
            and self.held <= other.held
            and all(a <= b for a, b in zip(self.forward_bytes, other.forward_bytes, strict=True))
        )


def keeping_columns(chain: Chain) -> tuple[Column, ...]:
    """The Pareto-optimal choices of values to keep of consecutive blocks under one checkpoint.

    Groups have two to `MAX_GROUP` blocks and contain neither effectful blocks nor the block at the
    loss. Of each range of blocks there are at most `_RESOLUTION` choices, evenly spaced by the
    bytes they keep.
    """
    keepable = [
        [o for o, option in enumerate(options) if option.origin == "names"]
        for options in chain.options
    ]
    if not any(keepable):
        return ()
    # The option with which a group runs each block: the plain one, or the only one.
    inside_group = [
        next((o for o, x in enumerate(options) if x.origin == "plain" or len(options) == 1), None)
        for options in chain.options
    ]
    needs = chain.needs()

    def extended(labels: Sequence[_Label], block: int, *, at_end: bool) -> Iterator[_Label]:
        inside = inside_group[block]
        assert inside is not None, "a group is of blocks with such an option"
        # What a block adds depends on the group only by whether the group ends with the block.
        group = (block, block if at_end else block + 1)
        choices: list[int | None] = [None, *keepable[block]]
        for saving in choices:
            added_s = block_recompute_s(chain, group, block, inside, saving)
            if saving is None:
                kept, forward_bytes = chain.shared_bytes[block], chain.handing_on_bytes[block]
            else:
                cost = kept_cost(chain, group, block, saving)
                kept, forward_bytes = cost.kept_bytes, cost.forward_peak_bytes
            held = () if saving is None else _made_in(chain, block, needs[block][saving])
            keeps = () if saving is None else ((block, saving),)
            for label in labels:
                yield _Label(
                    label.added_s + added_s,
                    label.kept_bytes + kept,
                    label.held.union(held),
                    (*label.forward_bytes, label.kept_bytes + forward_bytes),
                    (*label.keeps, *keeps),
                )

    def found(blocks: range) -> Iterator[Column]:
        first = blocks.start
        labels = [_Label(0.0, 0, frozenset(), (), ())]
        for last in blocks:
            if last in chain.effectful or inside_group[last] is None:
                break
            if last > first:
                ends = _few(chain, extended(labels, last, at_end=True))
                options = [o for o in inside_group[first : last + 1] if o is not None]
                keeping = [end for end in ends if end.keeps]
                yield from _columns(chain, needs, first, options, keeping)
            labels = _few(chain, extended(labels, last, at_end=False))

    end = len(chain) - 1
    several = (range(first, min(first + MAX_GROUP, end)) for first in range(end - 1))
    return tuple(found_once(chain, several, found))


def _made_in(chain: Chain, block: int, values: Sequence[int]) -> list[int]:
    return [v for v in values if chain.boundary_values[v].producer == block]


def _columns(
    chain: Chain,
    needs: Sequence[Sequence[Sequence[int]]],
    first: int,
    options: Sequence[int],
    labels: Sequence[_Label],
) -> Iterator[Column]:
    """The columns of the groups that begin with block `first`, recompute their blocks in these
    options, and keep what the labels say."""
    blocks = range(first, first + len(options))
    read = set(chain.held_throughout(chain.read_from_before(blocks), blocks))
    costs = [chain.options[k][o].cost for k, o in zip(blocks, options, strict=True)]
    pending = [chain.pending_cotangent_bytes(k) for k in blocks]
    over_fastest_s = sum(
        cost.time_s - chain.fastest_s(k) for k, cost in zip(blocks, costs, strict=True)
    )
    for label in labels:
        # Between forward and backward the group keeps the chosen values of its blocks; in its own
        # backward, after the recompute, it keeps what the recomputed options keep.
        holds = read | {(v, chain.boundary_values[v].producer) for v in label.held}
        held = {v for v, _ in holds}
        kept_values = [
            (chain.boundary_values[v].producer, chain.boundary_values[v].size_bytes)
            for v in label.held
        ]
        inside_bytes = backward_bytes = 0
        last = ending_cost(chain, blocks[-1], options[-1], dict(label.keeps).get(blocks[-1]))
        peaks = [cost.backward_peak_bytes for cost in (*costs[:-1], last)]
        own_bytes = map(operator.add, peaks, pending)
        for k, o, cost, own in zip(blocks, options, costs, own_bytes, strict=True):
            read_here = [v for v in needs[k][o] if v not in held]
            inside_bytes += sum(chain.boundary_values[v].size_bytes for v in read_here)
            held.update(needs[k][o])
            # A group counts all values that it keeps at its one peak; here those made later are
            # gone.
            gone_bytes = sum(size for producer, size in kept_values if producer > k)
            backward_bytes = max(backward_bytes, inside_bytes + own - gone_bytes)
            inside_bytes += cost.kept_bytes
        yield Column(
            first=first,
            last=blocks[-1],
            options=tuple(options),
            added_ms=(over_fastest_s + label.added_s) * 1e3,
            kept_bytes=label.kept_bytes,
            forward_bytes=label.forward_bytes,
            backward_bytes=backward_bytes,
            holds=tuple(sorted(holds)),
            keeps=label.keeps,
        )


def _few(chain: Chain, labels: Iterator[_Label]) -> list[_Label]:
    """The labels that no other label dominates. If these are more than `_RESOLUTION`, only the
    fastest of each set that keeps about the same number of bytes."""

    def total_bytes(label: _Label) -> int:
        return label.kept_bytes + sum(chain.boundary_values[v].size_bytes for v in label.held)

    kept: list[_Label] = []
    for label in sorted(labels, key=lambda x: (x.added_s, x.kept_bytes, sorted(x.held), x.keeps)):
        if not any(other.dominates(label) for other in kept):
            kept.append(label)
    if len(kept) <= _RESOLUTION:
        return kept
    most = max(map(total_bytes, kept))
    alike: dict[int, _Label] = {}
    for label in kept:
        alike.setdefault(-(-(_RESOLUTION - 1) * total_bytes(label) // max(most, 1)), label)
    return list(alike.values())
