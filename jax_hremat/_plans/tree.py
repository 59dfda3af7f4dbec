"""`RematPlan` -> its region tree, as lines to show: groups of blocks and the blocks in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._plans.plan import BlockReport
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
        count: How many equal ones it stands for; bytes and seconds are of one of them.
        first: Scope of the first block.
        last: Scope of the last block.
        source: Line of code of a block; empty for a group.
        mode: What is done, in words.
        kept_bytes: Held between forward and backward.
        bare_bytes: What would be held without rematerialization.
        added_s: Estimated seconds added to the step.
        recomputed: Operations that run again.
        saved: Values kept by name, of a group's blocks in their own lines.
    """

    depth: int
    count: int
    first: str
    last: str
    source: str
    mode: str
    kept_bytes: int
    bare_bytes: int
    added_s: float
    recomputed: int
    saved: tuple[str, ...]


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
        first, last = _blocks(run[0]), _blocks(run[-1])
        node = run[0]
        alone = isinstance(node, BlockReport)
        yield Line(
            depth=depth,
            count=len(run),
            first=first[0].scope,
            last=last[-1].scope,
            source=node.source if alone else "",
            mode=node.mode if alone else _group_words(node, len(first)),
            kept_bytes=sum(b.kept_bytes for b in first),
            bare_bytes=sum(b.bare_bytes for b in first),
            added_s=sum(b.added_s for b in first),
            recomputed=sum(b.recomputed for b in first),
            saved=node.saved if alone else (),
        )
        if not alone:
            yield from _lines(node.inside, depth + 1)


def _blocks(node: Node) -> list[BlockReport]:
    if isinstance(node, BlockReport):
        return [node]
    return [block for inner in node.inside for block in _blocks(inner)]


def _group_words(group: Group, num_blocks: int) -> str:
    """Such as `one checkpoint around 3 blocks, keeps 2 values`."""
    keeps = f", keeps {len(group.region.saved)} values" if group.region.saved else ""
    return f"one checkpoint around {num_blocks} blocks{keeps}"


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
