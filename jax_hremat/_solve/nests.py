"""Nests: groups with smaller groups inside, found node by node from the bottom of a tree.

A node's children are blocks, or nodes whose own groups are known. A group is two or more
consecutive children under one `jax.checkpoint`; each child is a block in one of its options, or
one of the groups made of that child, or part of a smaller group of consecutive children. So the
same step, from the options of the children to the options of the node as one group, is taken at
every level (H-Rockmate, Gusak et al. 2024, section 4.2; Chen et al. 2016, section 4.3, nest groups
of equal size in this manner). n equal blocks in r levels of groups hold about r·n^(1/r) boundaries
at once and cost at most r further forwards.

What a group takes, as any larger group sees it, adds up over its children c = 1 … m:

    T = Σ_c (t_c + a_c) with a_m = z_m    t_c: the child's own time, with the recomputes inside it;
                                          a_c: its forward in the group's recompute; z_c: the same
                                          where nothing of the group follows, 0 for a group
    B = max_c (H_c + B_c)                 H_c: what the group holds for its earlier children and c;
                                          B_c: the peak of c's backward, of the last block's as in
                                          a checkpoint of its own

Glossary
    option    one way to run a child or a node inside a larger group
    label     the figures of the first children of a group that decide how it can continue
    held      values made in the group that are held for its backwards, and may be read later
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from jax_hremat._partition.tree import Node
from jax_hremat._solve.chain import Chain, Group
from jax_hremat._solve.column import Column
from jax_hremat._solve.kinds import Kind, Kinds

_T = TypeVar("_T")

# The most options that a block or a node hands up.
HANDED_UP = 8
# The most labels that are kept of the first children of a group.
_LABELS = 4 * HANDED_UP


@dataclass(frozen=True, slots=True)
class _NodeOption:
    """A child of a group: a block in one option, or a smaller group.

    Attributes:
        first: First block.
        last: Last block.
        options: Position of the option of each block.
        groups: The groups it is made of, outer ones first; none for a block.
        added_s: Seconds above those of the fastest options, its own recomputes included.
        again_s: Seconds of its forward in the recompute of a group around it.
        ending_s: The same where that group ends with it.
        kept_bytes: Bytes kept until its backward, boundary values not counted.
        backward_bytes: Peak of its backward, with everything held since its own recompute and the
            cotangents pending there.
        ending_bytes: The same where the group around it ends with it.
        needs: Boundary values that its backward reads.
    """

    first: int
    last: int
    options: tuple[int, ...]
    groups: tuple[Group, ...]
    added_s: float
    again_s: float
    ending_s: float
    kept_bytes: int
    backward_bytes: int
    ending_bytes: int
    needs: frozenset[int]

    def moved(self, by: int, value_of: Mapping[int, int]) -> _NodeOption:
        """The same option in an equal node, `by` blocks later, given its values for those read."""
        return replace(
            self,
            first=self.first + by,
            last=self.last + by,
            groups=tuple((a + by, b + by) for a, b in self.groups),
            needs=frozenset(value_of[v] for v in self.needs),
        )


# The options of consecutive children of a node as one group, by the first and last of them.
_GroupsOf = dict[tuple[int, int], list[_NodeOption]]


class _Label(NamedTuple):
    """The first children of a group. Among labels that hold the same values, only these figures
    decide which is better.

    Attributes:
        added_s: Seconds, with the forwards of these children in the group's recompute.
        held_bytes: Bytes held for the backwards of these children.
        backward_bytes: Peak of these backwards.
        options: Position of the option of each block.
        groups: The groups inside.
    """

    added_s: float
    held_bytes: int
    backward_bytes: int
    options: tuple[int, ...]
    groups: tuple[Group, ...]


def nest_columns(chain: Chain, tree: Node, handed_up: int = HANDED_UP) -> tuple[Column, ...]:
    """The groups with smaller groups inside that a tree over the blocks offers.

    Args:
        chain: Blocks and their options.
        tree: Nodes over the blocks but the last. No group is made of children of two nodes, or of
            blocks with effects.
        handed_up: The most options of a block or a node that larger groups choose from.
    """
    maker = _Maker(chain, handed_up)
    columns: list[Column] = []
    options_of = {block: maker.block(block) for block in range(len(chain))}
    handed: dict[Node, list[_NodeOption]] = {}
    # Equal nodes have equal groups: what one has, by all that its groups depend on.
    solved: dict[Hashable, tuple[Kind, _GroupsOf]] = {}
    kinds = Kinds(chain)
    for node in tree.inner_first():
        kind = kinds.of(range(node.first, node.last + 1))
        shape = tuple((c.first - node.first, c.last - node.first) for c in node.children)
        question = shape, kind.key
        if question in solved:
            like, its_groups = solved[question]
            by, value_of = like.onto(kind)
            groups = {
                span: [option.moved(by, value_of) for option in options]
                for span, options in its_groups.items()
            }
        else:
            children = [handed[c] if c.children else options_of[c.first] for c in node.children]
            groups = _groups(maker, children)
            solved[question] = kind, groups
        handed[node] = groups.get((0, len(node.children) - 1), [])
        columns += [
            maker.column(option)
            for options in groups.values()
            for option in options
            if option.groups[1:]
        ]
    return tuple(columns)


def _groups(maker: _Maker, children: Sequence[Sequence[_NodeOption]]) -> _GroupsOf:
    """The options of each two or more consecutive children as one group."""
    found: _GroupsOf = {}

    def options_from(i: int, j: int) -> Sequence[_NodeOption]:
        return children[i] if i == j else found.get((i, j), ())

    for start in reversed(range(len(children))):
        if not children[start]:
            continue
        first = children[start][0].first
        # By position: labels of the children from `start` up to there, by what they hold.
        labels: list[dict[frozenset[int], list[_Label]]] = [{} for _ in range(len(children) + 1)]
        labels[start] = {frozenset(): [_Label(0.0, 0, 0, (), ())]}
        for end in range(start, len(children)):
            if not children[end]:
                break
            if end > start:
                closed = [
                    maker.closed(first, label, option)
                    for at in range(start + 1, end + 1)
                    for held, some in labels[at].items()
                    for option in options_from(at, end)
                    for label in maker.extended(first, held, some, option, at_end=True)
                ]
                found[start, end] = maker.few(closed)
            longer: dict[frozenset[int], list[_Label]] = {}
            for at in range(start, end + 1):
                for held, some in labels[at].items():
                    for option in options_from(at, end):
                        after = maker.still_read(
                            held | maker.made_since(first, option), option.last
                        )
                        longer.setdefault(after, []).extend(
                            maker.extended(first, held, some, option, at_end=False)
                        )
            labels[end + 1] = {held: _few_labels(some) for held, some in longer.items()}
    return found


class _Maker:
    """Options and columns over the blocks of one chain."""

    def __init__(self, chain: Chain, handed_up: int) -> None:
        self._chain = chain
        self._handed_up = handed_up
        self._needs = chain.needs()
        self._fastest_s = [*map(chain.fastest_s, range(len(chain)))]
        self._pending = [chain.pending_cotangent_bytes(k) for k in range(len(chain))]

    def block(self, k: int) -> list[_NodeOption]:
        """The options of one block; none for a block with an effect."""
        chain = self._chain
        if k in chain.effectful:
            return []
        return self.few(
            _NodeOption(
                first=k,
                last=k,
                options=(o,),
                groups=(),
                added_s=option.cost.time_s - self._fastest_s[k],
                again_s=chain.recompute_s[k],
                ending_s=chain.last_recompute_s[k][o],
                kept_bytes=option.cost.kept_bytes,
                backward_bytes=option.cost.backward_peak_bytes + self._pending[k],
                ending_bytes=option.ending.backward_peak_bytes + self._pending[k],
                needs=frozenset(self._needs[k][o]),
            )
            for o, option in enumerate(chain.options[k])
        )

    def made_since(self, first: int, option: _NodeOption) -> frozenset[int]:
        """The values, made in block `first` or later, that an option's backward reads."""
        values = self._chain.boundary_values
        return frozenset(v for v in option.needs if values[v].producer >= first)

    def still_read(self, held: frozenset[int], block: int) -> frozenset[int]:
        """Those values that blocks after this one may read."""
        values = self._chain.boundary_values
        return frozenset(v for v in held if values[v].readers[-1] > block)

    def extended(
        self,
        first: int,
        held: frozenset[int],
        labels: Iterable[_Label],
        option: _NodeOption,
        *,
        at_end: bool,
    ) -> Iterator[_Label]:
        """The labels of a group from block `first` on, with one more child."""
        values = self._chain.boundary_values
        taken = self.made_since(first, option) - held
        taken_bytes = sum(values[v].size_bytes for v in taken)
        added_s = option.added_s + (option.ending_s if at_end else option.again_s)
        backward_bytes = option.ending_bytes if at_end else option.backward_bytes
        for label in labels:
            yield _Label(
                added_s=label.added_s + added_s,
                held_bytes=label.held_bytes + taken_bytes + option.kept_bytes,
                backward_bytes=max(
                    label.backward_bytes, label.held_bytes + taken_bytes + backward_bytes
                ),
                options=label.options + option.options,
                groups=label.groups + option.groups,
            )

    def closed(self, first: int, label: _Label, last_child: _NodeOption) -> _NodeOption:
        """The group of all children of a label, as a child of larger groups."""
        chain, last = self._chain, last_child.last
        blocks = range(first, last + 1)
        return _NodeOption(
            first=first,
            last=last,
            options=label.options,
            groups=((first, last), *label.groups),
            added_s=label.added_s,
            again_s=sum(chain.recompute_s[k] for k in blocks),
            # A group at the end of a larger one is not recomputed for it: nothing would read it.
            ending_s=0.0,
            kept_bytes=sum(chain.shared_bytes[k] for k in blocks),
            backward_bytes=label.backward_bytes,
            ending_bytes=label.backward_bytes,
            needs=frozenset(chain.read_from_before(blocks)),
        )

    def few(self, options: Iterable[_NodeOption]) -> list[_NodeOption]:
        """The options that no other is at least as good as; if these are too many, those of them
        that lose the least time."""
        best: list[_NodeOption] = []
        for option in sorted(
            options, key=lambda w: (w.added_s + w.ending_s, w.backward_bytes, w.options)
        ):
            if not any(_at_least_as_good(other, option) for other in best):
                best.append(option)
        best.sort(key=lambda w: (w.kept_bytes + w.backward_bytes, w.added_s))
        return _spread(best, [w.added_s + w.ending_s for w in best], self._handed_up)

    def column(self, option: _NodeOption) -> Column:
        """A group as a column of the root program."""
        chain = self._chain
        blocks = range(option.first, option.last + 1)
        return Column(
            first=option.first,
            last=option.last,
            options=option.options,
            added_ms=1e3 * option.added_s,
            kept_bytes=option.kept_bytes,
            forward_bytes=chain.handing_on_peaks(blocks),
            backward_bytes=option.backward_bytes,
            holds=chain.held_throughout(option.needs, blocks),
            inner=option.groups[1:],
        )


def _at_least_as_good(one: _NodeOption, other: _NodeOption) -> bool:
    return (
        one.added_s <= other.added_s
        and one.added_s + one.ending_s <= other.added_s + other.ending_s
        and one.again_s <= other.again_s
        and one.kept_bytes <= other.kept_bytes
        and one.backward_bytes <= other.backward_bytes
        and one.ending_bytes <= other.ending_bytes
        and one.needs <= other.needs
    )


def _few_labels(labels: Sequence[_Label]) -> list[_Label]:
    best: list[_Label] = []
    for label in sorted(labels):
        if not any(
            o.held_bytes <= label.held_bytes and o.backward_bytes <= label.backward_bytes
            for o in best
        ):
            best.append(label)
    best.sort(key=lambda x: (x.held_bytes + x.backward_bytes, x.added_s))
    return _spread(best, [x.added_s for x in best], _LABELS)


def _spread(ordered: Sequence[_T], times_s: Sequence[float], most: int) -> list[_T]:
    """At most so many of some things that take ever more bytes, the first among them. One after
    the other, that is left out which loses the least time if the one before it takes its place."""
    kept, kept_s = list(ordered), np.array(times_s)
    while len(kept) > most:
        lost_s = np.maximum(kept_s[:-1] - kept_s[1:], 0.0)
        out = int(lost_s.argmin()) + 1
        del kept[out]
        kept_s = np.delete(kept_s, out)
    return kept
