"""`RematPlan` -> its region tree, as lines to show: groups of blocks and the blocks in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._plans.block import BlockReport
from jax_hremat._program.region import Region
from jax_hremat._shared.format import format_signed_seconds


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive blocks under one `jax.checkpoint`.

    Attributes:
        region: Where the tree has it.
        inside: Its blocks, those of groups inside it in these.
    """

    region: Region
    inside: tuple[Node, ...]


Node = BlockReport | Group


@dataclass(frozen=True, slots=True)
class Line:
    """A block or a group, or several equal ones that follow each other.

    Attributes:
        depth: How many groups it is in.
        count: Equal ones that it stands for.
        report: What is done with one of them: the first; of a group, the sums over its blocks,
            and what is kept by name said in their lines.
        last_scope: Scope of the last block in any of them.
    """

    depth: int
    count: int
    report: BlockReport
    last_scope: str


def tree_lines(root: Region, blocks: Sequence[BlockReport]) -> list[Line]:
    """The lines of a plan, a group before what is in it.

    Args:
        root: The plan's region tree.
        blocks: What it does with each block, in program order.
    """
    return list(_lines(_nodes(root, blocks), 0))


def _nodes(region: Region, blocks: Sequence[BlockReport]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    at = 0
    while at < len(blocks):
        group, inside = next(_groups_from(region, blocks[at:]), (None, ()))
        nodes.append(Group(group, _nodes(group, inside)) if group else blocks[at])
        at += len(inside) or 1
    return tuple(nodes)


def _groups_from(
    region: Region, blocks: Sequence[BlockReport]
) -> Iterator[tuple[Region, Sequence[BlockReport]]]:
    """The region's child that is a group and begins with the first of the blocks, and its
    blocks."""
    for child in region.children:
        inside = [b for b in blocks if child.start <= b.start and b.stop <= child.stop]
        if child.wrapped and child.start == blocks[0].start and len(inside) > 1:
            yield child, inside


def _lines(nodes: Sequence[Node], depth: int) -> Iterator[Line]:
    for run in _runs_of_equal(nodes):
        first = run[0]
        report = _whole(first) if isinstance(first, Group) else first
        yield Line(depth, len(run), report, _blocks(run[-1])[-1].scope)
        if isinstance(first, Group):
            yield from _lines(first.inside, depth + 1)


def _whole(group: Group) -> BlockReport:
    """All blocks of a group as one."""
    blocks = _blocks(group)
    keeps = f", keeps {len(group.region.saved)} values" if group.region.saved else ""
    return BlockReport(
        start=group.region.start,
        stop=group.region.stop,
        scope=blocks[0].scope,
        mode=f"one checkpoint around {len(blocks)} blocks{keeps}",
        kept_bytes=sum(b.kept_bytes for b in blocks),
        bare_bytes=sum(b.bare_bytes for b in blocks),
        added_s=sum(b.added_s for b in blocks),
        recomputed=sum(b.recomputed for b in blocks),
        saved=(),
        source="",
    )


def _blocks(node: Node) -> list[BlockReport]:
    if isinstance(node, BlockReport):
        return [node]
    return [block for inner in node.inside for block in _blocks(inner)]


def _runs_of_equal(nodes: Sequence[Node]) -> list[list[Node]]:
    runs: list[list[Node]] = []
    for node in nodes:
        if runs and _alike(runs[-1][-1]) == _alike(node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _alike(node: Node) -> tuple[object, ...]:
    """What two neighbours have in common that do the same at the same cost, as it is shown."""
    if isinstance(node, BlockReport):
        added = format_signed_seconds(node.added_s)
        return (node.mode, node.kept_bytes, node.bare_bytes, added, node.saved)
    return (len(node.region.saved), *map(_alike, node.inside))
