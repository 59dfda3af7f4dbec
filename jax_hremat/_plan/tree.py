"""`RematPlan` -> its region tree, as lines to show: groups of blocks and the blocks in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.region import Region
from jax_hremat._shared.format import format_signed_seconds


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive blocks under one `jax.checkpoint`.

    Attributes:
        region: Its region in the plan's tree.
        inside: Its blocks and inner groups; an inner group holds its own blocks.
    """

    region: Region
    inside: tuple[Node, ...]


Node = BlockReport | Group


@dataclass(frozen=True, slots=True)
class Line:
    """A block or a group, or several consecutive equal ones.

    Attributes:
        depth: Number of groups around it.
        count: Number of equal blocks or groups that it stands for.
        report: What is done with the first of them. For a group, the figures are sums over its
            blocks, and values kept by name are listed only in the lines of the blocks.
        last_scope: Scope of the last block of the last of them.
    """

    depth: int
    count: int
    report: BlockReport
    last_scope: str


def tree_lines(root: Region, blocks: Sequence[BlockReport]) -> list[Line]:
    """The lines of a plan, each group before its contents.

    Args:
        root: The plan's region tree.
        blocks: What the plan does with each block, in program order.
    """
    return list(_lines(_nodes(root, blocks), 0))


def _nodes(region: Region, blocks: Sequence[BlockReport]) -> tuple[Node, ...]:
    checkpointed = {child.start: child for child in region.children if child.checkpointed}
    nodes: list[Node] = []
    at = 0
    while at < len(blocks):
        child = checkpointed.get(blocks[at].start)
        inside = [b for b in blocks[at:] if b.stop <= child.stop] if child else []
        # A single block is not a group: its own report says how it is checkpointed.
        if child and len(inside) > 1:
            nodes.append(Group(child, _nodes(child, inside)))
            at += len(inside)
        else:
            nodes.append(blocks[at])
            at += 1
    return tuple(nodes)


def _lines(nodes: Sequence[Node], depth: int) -> Iterator[Line]:
    for _, equal in groupby(nodes, key=_alike):
        first, *more = equal
        last = more[-1] if more else first
        report = _whole(first) if isinstance(first, Group) else first
        yield Line(depth, 1 + len(more), report, _blocks(last)[-1].scope)
        if isinstance(first, Group):
            yield from _lines(first.inside, depth + 1)


def _whole(group: Group) -> BlockReport:
    """All blocks of a group as one report."""
    blocks = _blocks(group)
    keeps = f", keeps {len(group.region.saved)} values" if group.region.saved else ""
    return BlockReport(
        start=group.region.start,
        stop=group.region.stop,
        scope=blocks[0].scope,
        mode=f"one checkpoint around {len(blocks)} blocks{keeps}",
        kept_bytes=sum(b.kept_bytes for b in blocks),
        plain_bytes=sum(b.plain_bytes for b in blocks),
        added_s=sum(b.added_s for b in blocks),
        recomputed=sum(b.recomputed for b in blocks),
        saved=(),
        source="",
    )


def _blocks(node: Node) -> list[BlockReport]:
    if isinstance(node, BlockReport):
        return [node]
    return [block for inner in node.inside for block in _blocks(inner)]


def _alike(node: Node) -> tuple[object, ...]:
    """A key that is equal for neighbours with the same decisions and costs, as displayed."""
    if isinstance(node, BlockReport):
        added = format_signed_seconds(node.added_s)
        return (node.mode, node.kept_bytes, node.plain_bytes, added, node.saved)
    return (len(node.region.saved), *map(_alike, node.inside))
