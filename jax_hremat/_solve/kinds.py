"""Which consecutive blocks of a chain are like others: what is found for one holds for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import Column


class Kind(NamedTuple):
    """What the groups of consecutive blocks depend on.

    Attributes:
        key: Equal for blocks whose groups are equal but for their place.
        first: The first block.
        values: The boundary values that are made or read there, or pass by. Those of equal blocks
            correspond to each other, in this order.
    """

    key: Hashable
    first: int
    values: tuple[int, ...]

    def onto(self, other: Kind) -> tuple[int, Mapping[int, int]]:
        """By how many blocks equal blocks are later, and their values for the values here."""
        return other.first - self.first, dict(zip(self.values, other.values, strict=True))


class Kinds:
    """The kinds of a chain's blocks."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        numbers: dict[Hashable, int] = {}
        self._own = [numbers.setdefault(own, len(numbers)) for own in _own(chain)]

    def of(self, blocks: range) -> Kind:
        """The kind of consecutive blocks."""
        values = tuple(
            v
            for v, c in enumerate(self._chain.boundary_values)
            if c.producer < blocks.stop and c.readers[-1] >= blocks.start
        )
        passing = tuple(
            (
                c.size_bytes,
                max(c.producer - blocks.start, -1),
                tuple(r - blocks.start for r in c.readers if r in blocks),
                c.readers[-1] >= blocks.stop,
                tuple(sorted((k - blocks.start, o) for k, o in c.needed if k in blocks)),
            )
            for c in (self._chain.boundary_values[v] for v in values)
        )
        own = tuple(self._own[blocks.start : blocks.stop])
        return Kind((own, passing), blocks.start, values)


def found_once(
    chain: Chain, several: Iterable[range], find: Callable[[range], Iterable[Column]]
) -> list[Column]:
    """The groups that `find` finds in each of several ranges of blocks. Equal blocks have equal
    groups, so they are found once, and moved."""
    kinds, known = Kinds(chain), dict[Hashable, tuple[Kind, list[Column]]]()
    columns: list[Column] = []
    for blocks in several:
        kind = kinds.of(blocks)
        if kind.key not in known:
            known[kind.key] = kind, [*find(blocks)]
        like, some = known[kind.key]
        by, value_of = like.onto(kind)
        columns += some if like is kind else (p.moved(by, value_of) for p in some)
    return columns


def _own(chain: Chain) -> list[Hashable]:
    """What groups depend on of each block alone."""
    return [
        (
            chain.options[k],
            chain.recompute_s[k],
            chain.handing_on_bytes[k],
            chain.last_recompute_s[k],
            chain.shared_bytes[k],
            chain.pending_cotangent_bytes(k),
            k in chain.effectful,
        )
        for k in range(len(chain))
    ]
