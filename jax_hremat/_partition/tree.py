"""The tree over the blocks of a program: blocks, a few layers, stacks of these, the program."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._partition.layers import layer_runs

# The most children of a node.
MAX_CHILDREN = 8


@dataclass(frozen=True, slots=True)
class Node:
    """Consecutive blocks. A leaf is one block.

    Attributes:
        first: The first block.
        last: The last block.
        children: Nodes that follow one another from the first block to the last; none in a leaf.
    """

    first: int
    last: int
    children: tuple[Node, ...] = ()

    def inner_first(self) -> Iterator[Node]:
        """All nodes that have children, those inside a node before it."""
        for child in self.children:
            yield from child.inner_first()
        if self.children:
            yield self


def block_tree(kinds: Sequence[Hashable]) -> Node:
    """The tree over all blocks but the one at the loss; of a single block, that block.

    Whole layers of a stack of equal layers are put together first, as many as have at most
    `MAX_CHILDREN` blocks, and blocks between stacks likewise; then as many consecutive nodes, until
    no more than that are left. So the depth is about the logarithm of the number of blocks.

    Args:
        kinds: The kind of each block; equal kinds are equal blocks.
    """
    leaves = [Node(block, block) for block in range(max(len(kinds) - 1, 1))]
    nodes: list[Node] = []
    end = 0
    for layers in layer_runs(kinds):
        first, stop = layers[0][0], layers[-1][1] + 1
        nodes += _joined([(leaf,) for leaf in leaves[end:first]])
        nodes += _joined([tuple(leaves[a : b + 1]) for a, b in layers])
        end = stop
    nodes += _joined([(leaf,) for leaf in leaves[end:]])
    while len(nodes) > MAX_CHILDREN:
        nodes = _joined([(node,) for node in nodes])
    return _node(nodes)


def _joined(units: Sequence[tuple[Node, ...]]) -> list[Node]:
    """Consecutive units, each one or several nodes, as children of nodes of about equal size."""
    if not units:
        return []
    most = max(MAX_CHILDREN // len(units[0]), 1)
    parts = -(-len(units) // most)
    ends = [i * len(units) // parts for i in range(parts + 1)]
    return [
        _node([node for unit in units[a:b] for node in unit]) for a, b in itertools.pairwise(ends)
    ]


def _node(children: Sequence[Node]) -> Node:
    if len(children) == 1:
        return children[0]
    return Node(children[0].first, children[-1].last, tuple(children))
