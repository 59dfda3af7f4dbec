"""The shape of a plan: a tree of regions over the operations of a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

# An operation and the position of one of its outputs.
ValueRef = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Loop:
    """How one `jax.lax.scan` is run.

    Attributes:
        body: The scan's body, its operations counted from 0.
        segments: Number of steps in each checkpointed segment of the scan, outer segments before
            the segments inside them; empty if it is run as one scan. Of a segment, only the carry
            it starts with is kept.
    """

    body: Region
    segments: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(s < 1 for s in self.segments) or list(self.segments) != sorted(
            set(self.segments), reverse=True
        ):
            raise ValueError(f"segments {self.segments} are not decreasing lengths")


@dataclass(frozen=True, slots=True)
class Region:
    """Operations `start … stop − 1`, plain or checkpointed together.

    A plain region is differentiated in place: JAX keeps its residuals. A checkpointed one is
    `jax.checkpoint(region, policy=save_only_these_names(*saved))`: between its forward and its
    backward it keeps the inputs its backward reads and the saved values, and recomputes the
    rest, each inner region according to its own fields.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        checkpointed: Whether the region is under `jax.checkpoint`.
        saved: Values made inside that a checkpointed region keeps, in program order.
        children: Regions inside, disjoint and in program order; operations between them
            belong to this region itself.
        barrier: Whether the cotangents of all inputs pass a barrier together, so that no part of
            the region's backward is delayed (`_emit/emit.py`). For a plain region the barrier
            includes the cotangents of the function's arguments, for a checkpointed one it does not.
        late_arguments: Whether the arguments of the function that the region reads pass a barrier,
            in the forward, together with the last made of the values that it reads, so that nothing
            is made of them earlier (`_emit/emit.py`).
        loop: How the region's only operation, a scan, is run; None if it is unchanged.
        branches: How each branch of the region's only operation, a cond, is run, the branch's
            operations counted from 0; empty if they are unchanged.
    """

    start: int
    stop: int
    checkpointed: bool = False
    saved: tuple[ValueRef, ...] = ()
    children: tuple[Region, ...] = ()
    barrier: bool = False
    late_arguments: bool = False
    loop: Loop | None = None
    branches: tuple[Region, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"region [{self.start}, {self.stop}) is not a range")
        if self.saved and not self.checkpointed:
            raise ValueError(f"plain region [{self.start}, {self.stop}) saves {self.saved}")
        alone = self.stop - self.start == 1 and not (self.checkpointed or self.children)
        if self.bodies and not (alone and (self.loop is None or not self.branches)):
            raise ValueError(f"region [{self.start}, {self.stop}) is not one plain scan or cond")
        edges = [self.start, *(e for c in self.children for e in (c.start, c.stop)), self.stop]
        if edges != sorted(edges):
            raise ValueError(
                f"children of region [{self.start}, {self.stop}) overlap or leave it: "
                f"{[(c.start, c.stop) for c in self.children]}"
            )
        if any(not self.start <= op < self.stop for op, _ in self.saved):
            raise ValueError(
                f"region [{self.start}, {self.stop}) saves values made outside it: {self.saved}"
            )

    def shifted(self, offset: int) -> Region:
        """The same decisions for a copy of the region `offset` operations later."""
        return Region(
            start=self.start + offset,
            stop=self.stop + offset,
            checkpointed=self.checkpointed,
            saved=tuple((op + offset, k) for op, k in self.saved),
            barrier=self.barrier,
            late_arguments=self.late_arguments,
            loop=self.loop,
            branches=self.branches,
            children=tuple(c.shifted(offset) for c in self.children),
        )

    def with_barriers(self) -> Region:
        """The same region with a barrier of cotangents at every checkpointed region in it."""
        return replace(
            self,
            barrier=self.barrier or self.checkpointed,
            children=tuple(child.with_barriers() for child in self.children),
            branches=tuple(branch.with_barriers() for branch in self.branches),
            loop=self.loop and replace(self.loop, body=self.loop.body.with_barriers()),
        )

    def without_barriers(self) -> Region:
        """The same region without any barriers of cotangents or arguments, and without the plain
        regions inside that are there for a barrier alone."""
        children: list[Region] = []
        for child in (c.without_barriers() for c in self.children):
            children += [child] if child.checkpointed or child.bodies else child.children
        return replace(self, barrier=False, late_arguments=False, children=tuple(children))

    @property
    def bodies(self) -> tuple[Region, ...]:
        """How the body of its scan, or the branches of its cond, are run; empty if unchanged."""
        return self.branches if self.loop is None else (self.loop.body,)

    def walk(self, depth: int = 0) -> Iterator[tuple[int, Region]]:
        """This region and all regions inside it, outermost first, with their depth; without the
        bodies of scans and conds, which have operations of their own."""
        yield depth, self
        for child in self.children:
            yield from child.walk(depth + 1)

    @property
    def num_checkpointed(self) -> int:
        """How many `jax.checkpoint` calls the region emits, leftover steps of scans not counted."""
        regions = [region for _, region in self.walk()]
        segments = sum(len(r.loop.segments) for r in regions if r.loop is not None)
        bodies = sum(body.num_checkpointed for r in regions for body in r.bodies)
        return sum(r.checkpointed for r in regions) + segments + bodies

    @property
    def depth(self) -> int:
        """The deepest nesting of `jax.checkpoint` calls."""
        segments = 0 if self.loop is None else len(self.loop.segments)
        inside = max((r.depth for r in (*self.children, *self.bodies)), default=0)
        return self.checkpointed + segments + inside
