"""`RematPlan` -> its blocks by module, from the whole program down to operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.fingerprint import RULES
from jax_hremat._plan.place import Place
from jax_hremat._plan.plan import RematPlan


@dataclass(frozen=True)
class Operation:
    """One operation: its position in the program, its primitive, the types of its results, and
    whether any of these is kept by name."""

    index: int
    primitive: str
    results: str
    is_kept: bool


@dataclass(frozen=True)
class Totals:
    """Sums over blocks."""

    num_blocks: int
    kept_bytes: int
    plain_bytes: int
    added_s: float
    recomputed: int

    @staticmethod
    def of(blocks: Sequence[BlockReport]) -> Totals:
        """The sums over these blocks."""
        return Totals(
            num_blocks=len(blocks),
            kept_bytes=sum(b.kept_bytes for b in blocks),
            plain_bytes=sum(b.plain_bytes for b in blocks),
            added_s=sum(b.added_s for b in blocks),
            recomputed=sum(b.recomputed for b in blocks),
        )


@dataclass(frozen=True)
class Module:
    """A scope and what is in it, or several consecutive ones with the same decisions.

    Attributes:
        name: Its scope, without that of the module around it.
        last_name: That of the last of several.
        count: How many.
        totals: Sums over the blocks of the first of them.
        source: The source line of its first block.
        inside: The modules in the first of them; none if it is one block.
        operations: Those of the block, if it is one.
    """

    name: str
    last_name: str
    count: int
    totals: Totals
    source: str
    inside: Sequence[Module]
    operations: Sequence[Operation]


def modules(plan: RematPlan) -> list[Module]:
    """The outermost modules, in program order."""
    return list(_modules(plan, [(_path(block.place), block) for block in plan.blocks]))


# A block and the names of the modules around it, from some module on.
_Placed = tuple[tuple[str, ...], BlockReport]


def _path(place: Place) -> tuple[str, ...]:
    """The modules, and the parts as one."""
    return (*place.modules, *filter(None, [place.listed])) or (str(place),)


def _modules(plan: RematPlan, placed: Sequence[_Placed]) -> Iterator[Module]:
    # The blocks of one module come after each other; a block of which only its own name is left
    # is alone.
    found: list[list[_Placed]] = []
    for path, block in placed:
        if found and len(path) > 1 and len(found[-1][0][0]) > 1 and found[-1][0][0][0] == path[0]:
            found[-1].append((path, block))
        else:
            found.append([(path, block)])
    for _, equal in groupby(found, key=_decisions):
        first, *more = equal
        yield _module(plan, first, (more[-1] if more else first)[0][0][0], 1 + len(more))


def _module(plan: RematPlan, first: Sequence[_Placed], last_name: str, count: int) -> Module:
    blocks = [block for _, block in first]
    path = first[0][0]
    # A module of a single block is that block.
    alone = len(first) == 1
    return Module(
        name="/".join(path) if alone else path[0],
        last_name=last_name,
        count=count,
        totals=Totals.of(blocks),
        source=blocks[0].source,
        inside=[] if alone else list(_modules(plan, [(path[1:], b) for path, b in first])),
        operations=list(_operations(plan, blocks[0])) if alone else [],
    )


def _decisions(module: Sequence[_Placed]) -> tuple[object, ...]:
    """A key that is equal for modules with the same decisions."""
    return tuple(
        (path[1:], b.decision, b.kept_bytes, b.plain_bytes, b.recomputed, b.saved)
        for path, b in module
    )


def _operations(plan: RematPlan, block: BlockReport) -> Iterator[Operation]:
    kept = {index for _, region in plan.root.walk() for index, _ in region.saved}
    program = plan.fingerprint
    for index in range(block.start, block.stop):
        signature = program.signatures[program.operations[index]].split(RULES)[0]
        primitive, results = signature.split("[")[0], signature.rpartition("->")[2]
        yield Operation(index, primitive, results, index in kept)
