"""Groups that keep values: what one `jax.checkpoint` around several blocks may keep of them.

In its recompute such a group runs its blocks as they are; of each block it keeps what one of the
block's own options by name keeps, or nothing. Time and kept bytes add up over the blocks, so of all
choices those that are Pareto in them are found block by block (label setting). This is the program
of a parent node over its children (H-Rockmate, Gusak et al. 2024, section 4.2) where every child is
to be recomputed: what is left to choose is the set of values S that the checkpoint keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jax_hremat._solve.chain import Chain, KeepingGroup
from jax_hremat._solve.groups import MAX_GROUP
from jax_hremat._solve.prediction import block_recompute_s

# Ways to keep values that are told apart for each range of blocks, by the bytes kept.
_RESOLUTION = 16


class _Label(NamedTuple):
    """A choice of what to keep of the first blocks of a group.

    Attributes:
        added_s: Seconds that the group's recompute takes for them.
        kept_bytes: Kept of them, without values that cross a boundary.
        held: Of the values that cross a boundary, those that are kept.
        forward_bytes: Peak of the forward of each, with what is kept of the blocks before it.
        keeps: As in `KeepingGroup`.
    """

    added_s: float
    kept_bytes: int
    held: frozenset[int]
    forward_bytes: tuple[int, ...]
    keeps: tuple[tuple[int, int], ...]

    def dominates(self, other: _Label) -> bool:
        """Whether it is at least as good in every respect that a schedule can notice."""
        return (
            self.added_s <= other.added_s
            and self.kept_bytes <= other.kept_bytes
            and self.held <= other.held
            and all(a <= b for a, b in zip(self.forward_bytes, other.forward_bytes, strict=True))
        )


def keeping_groups(chain: Chain) -> tuple[KeepingGroup, ...]:
    """The Pareto-optimal ways to keep values of consecutive blocks under one checkpoint.

    Of two to `MAX_GROUP` blocks, none of them effectful, the block at the loss left out; of each range
    at most `_RESOLUTION` ways, evenly spaced by the bytes they keep.
    """
    keepable = [
        [o for o, opt in enumerate(opts) if opt.origin == "names"] for opts in chain.options
    ]
    if not any(keepable):
        return ()
    plain = [
        next((o for o, option in enumerate(options) if option.origin == "plain"), None)
        for options in chain.options
    ]
    kept_outputs: dict[tuple[int, int], list[int]] = {}
    for v, boundary_value in enumerate(chain.boundary_values):
        for block, option in boundary_value.needed:
            if block == boundary_value.producer:
                kept_outputs.setdefault((block, option), []).append(v)

    def extended(labels: Sequence[_Label], block: int, *, at_end: bool) -> Iterator[_Label]:
        inside = plain[block]
        assert inside is not None, "a group is of blocks that may be left as they are"
        # Only where the group ends matters to what its last block adds.
        group = (block, block if at_end else block + 1)
        options = chain.options[block]
        ways: list[int | None] = [None, *keepable[block]]
        for way in ways:
            added_s = block_recompute_s(chain, group, block, inside, way)
            cost = options[inside if way is None else way].cost
            kept = chain.shared_bytes[block] if way is None else cost.kept_bytes
            held = () if way is None else kept_outputs.get((block, way), ())
            keeps = () if way is None else ((block, way),)
            for label in labels:
                yield _Label(
                    label.added_s + added_s,
                    label.kept_bytes + kept,
                    label.held.union(held),
                    (*label.forward_bytes, label.kept_bytes + cost.forward_peak_bytes),
                    (*label.keeps, *keeps),
                )

    found: list[KeepingGroup] = []
    for first in range(len(chain) - 2):
        labels = [_Label(0.0, 0, frozenset(), (), ())]
        for last in range(first, min(first + MAX_GROUP, len(chain) - 1)):
            if last in chain.effectful or plain[last] is None:
                break
            if last > first:
                ends = _few(chain, extended(labels, last, at_end=True))
                options = tuple(o for o in plain[first : last + 1] if o is not None)
                found += [KeepingGroup(first, last, options, e.keeps) for e in ends if e.keeps]
            labels = _few(chain, extended(labels, last, at_end=False))
    return tuple(found)


def _few(chain: Chain, labels: Iterator[_Label]) -> list[_Label]:
    """Those that no other dominates; of more than `_RESOLUTION` that keep about as much as each
    other, the fastest."""

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
