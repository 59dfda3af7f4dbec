"""`RematPlan` -> the rows of its table of blocks, from stacks of layers down to operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.fingerprint import RULES
from jax_hremat._plan.plan import RematPlan
from jax_hremat._plan.tree import Line, tree_lines


@dataclass(frozen=True)
class Operation:
    """One operation: its position in the program, its primitive, the types of its results, and
    whether any of these is kept by name."""

    index: int
    primitive: str
    results: str
    is_kept: bool


@dataclass(frozen=True)
class Row:
    """A line of the plan's tree.

    Attributes:
        line: The line.
        layers: The blocks that it stands for; none for a group, whose blocks have rows below.
        operations: Those of the first of them.
    """

    line: Line
    layers: Sequence[BlockReport]
    operations: Sequence[Operation]


@dataclass(frozen=True)
class Totals:
    """Sums over all blocks."""

    kept_bytes: int
    plain_bytes: int
    added_s: float
    recomputed: int


def rows(plan: RematPlan) -> list[Row]:
    """The rows, each group before its blocks."""
    return list(_rows(plan))


def totals(plan: RematPlan) -> Totals:
    """The foot of the table."""
    return Totals(
        kept_bytes=sum(b.kept_bytes for b in plan.blocks),
        plain_bytes=sum(b.plain_bytes for b in plan.blocks),
        added_s=sum(b.added_s for b in plan.blocks),
        recomputed=sum(b.recomputed for b in plan.blocks),
    )


def _rows(plan: RematPlan) -> Iterator[Row]:
    position = {(b.start, b.stop): i for i, b in enumerate(plan.blocks)}
    kept = {index for _, region in plan.root.walk() for index, _ in region.saved}
    for line in tree_lines(plan.root, plan.blocks):
        at = position.get((line.report.start, line.report.stop))
        if at is None:
            yield Row(line, (), ())
        else:
            layers = plan.blocks[at : at + line.count]
            yield Row(line, layers, list(_operations(plan, layers[0], kept)))


def _operations(plan: RematPlan, block: BlockReport, kept: set[int]) -> Iterator[Operation]:
    program = plan.fingerprint
    for index in range(block.start, block.stop):
        signature = program.signatures[program.operations[index]].split(RULES)[0]
        primitive, results = signature.split("[")[0], signature.rpartition("->")[2]
        yield Operation(index, primitive, results, index in kept)
