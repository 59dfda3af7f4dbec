"""`RematPlan` -> its region tree, as lines to show: groups of blocks and the blocks in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.place import Place
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
    """A block, a group, or a sequence of them; or several consecutive equal ones.

    The lines of one depth below a line add up to it, and those of depth 0 to the whole plan.

    Attributes:
        depth: Number of lines around it.
        count: Number of equal ones that follow one another.
        report: What is done with the first of them. For a group or a sequence, the figures are sums
            over its blocks, and values kept by name are listed only in the lines of the blocks.
        last: Where the last of them is.
        kept_bytes: Residuals kept, summed over everything that the line stands for, also in
            repetitions of the lines around it.
        plain_bytes: The same sum of the residuals without rematerialization.
        added_s: The same sum of the added seconds.
    """

    depth: int
    count: int
    report: BlockReport
    last: Place
    kept_bytes: int
    plain_bytes: int
    added_s: float


def tree_lines(root: Region, blocks: Sequence[BlockReport]) -> list[Line]:
    """The lines of a plan, each group and each repeated sequence before its contents.

    Args:
        root: The plan's region tree.
        blocks: What the plan does with each block, in program order.
    """
    return list(_lines([_nodes(root, blocks)], 0))


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


def _lines(copies: Sequence[Sequence[Node]], depth: int) -> Iterator[Line]:
    """The lines of a sequence of nodes, given with all its equal copies."""
    keys = [_alike(node) for node in copies[0]]
    at = 0
    while at < len(keys):
        period, count = _repetition(keys, at)
        inside = [
            nodes[at + period * k : at + period * (k + 1)] for nodes in copies for k in range(count)
        ]
        yield _line(inside, count, depth)
        first = inside[0][0]
        if period > 1:
            yield from _lines(inside, depth + 1)
        elif isinstance(first, Group):
            groups = [node for (node,) in inside if isinstance(node, Group)]
            yield from _lines([group.inside for group in groups], depth + 1)
        at += period * count


def _repetition(keys: Sequence[object], at: int) -> tuple[int, int]:
    """The length of the sequence that starts here and is repeated, and how often it comes: the one
    that covers most, of those the shortest; (1, 1) if nothing is repeated."""
    best = (1, 1)
    for period in range(1, (len(keys) - at) // 2 + 1):
        sequence = keys[at : at + period]
        count = 1
        while keys[at + period * count : at + period * (count + 1)] == sequence:
            count += 1
        if count > 1 and period * count > best[0] * best[1]:
            best = period, count
    return best


def _line(copies: Sequence[Sequence[Node]], count: int, depth: int) -> Line:
    first, last = _blocks(copies[0]), _blocks(copies[count - 1])
    every = [block for nodes in copies for block in _blocks(nodes)]
    report = first[0] if len(first) == 1 else _whole(copies[0], first)
    return Line(
        depth=depth,
        count=count,
        report=report,
        last=last[0].place if len(last) == 1 else last[-1].place.around,
        kept_bytes=sum(b.kept_bytes for b in every),
        plain_bytes=sum(b.plain_bytes for b in every),
        added_s=sum(b.added_s for b in every),
    )


def _whole(nodes: Sequence[Node], blocks: Sequence[BlockReport]) -> BlockReport:
    """All blocks of a group or a sequence as one report."""
    decision = "each as below"
    if len(nodes) == 1 and isinstance(nodes[0], Group):
        count = len(nodes[0].region.saved)
        decision = f"one checkpoint around {len(blocks)} blocks"
        if count:
            decision += f"; {count} {'value' if count == 1 else 'values'} kept by name"
    return BlockReport(
        start=blocks[0].start,
        stop=blocks[-1].stop,
        place=blocks[0].place.around,
        decision=decision,
        kept_bytes=sum(b.kept_bytes for b in blocks),
        plain_bytes=sum(b.plain_bytes for b in blocks),
        added_s=sum(b.added_s for b in blocks),
        recomputed=sum(b.recomputed for b in blocks),
        saved=(),
    )


def _blocks(nodes: Sequence[Node]) -> list[BlockReport]:
    found: list[BlockReport] = []
    for node in nodes:
        found += [node] if isinstance(node, BlockReport) else _blocks(node.inside)
    return found


def _alike(node: Node) -> tuple[object, ...]:
    """A key that is equal for nodes with the same decisions and costs, as displayed."""
    if isinstance(node, BlockReport):
        added = format_signed_seconds(node.added_s)
        return (node.decision, node.kept_bytes, node.plain_bytes, added, node.saved, node.runs)
    return (len(node.region.saved), *map(_alike, node.inside))
