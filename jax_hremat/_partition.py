"""`Graph` -> `Partition`: consecutive blocks of operations, equal ones recognised.

A block is a stretch of the program, contiguous in program order, between two places where
little is handed on. The levels of a plan are runs of operations inside a block, the blocks, and
groups of consecutive blocks; runs and groups are chosen by the solver, blocks here.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from jax_hremat._graph import Graph, is_loop

# A boundary is a valley of the width if the width on either side rises to this many times it.
_PROMINENCE = 1.2
# A value that outlives this many heavy operations is a skip connection: whatever the cuts, it
# is held, so it says nothing about where to cut.
_SKIP_SPAN = 16
_MAX_OPERATIONS = 240


@dataclass(frozen=True, slots=True)
class Block:
    """Operations `start … stop − 1`, and what crosses the boundary.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        inputs: Values read inside and made outside, in order of first use; arguments too.
        outputs: Values made inside and read outside or returned, in order.
        fingerprint: Equal for blocks that compute the same on the same shapes.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fingerprint: str

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive blocks that cover the program, and which of them are alike.

    Attributes:
        blocks: In program order.
        kinds: For each block, the position of the first block with its fingerprint.
    """

    blocks: tuple[Block, ...]
    kinds: tuple[int, ...]

    @property
    def unique(self) -> tuple[int, ...]:
        """The first block of each kind."""
        return tuple(dict.fromkeys(self.kinds))

    def __repr__(self) -> str:
        return f"Partition({len(self.blocks)} blocks, {len(self.unique)} unique)"


def partition_graph(graph: Graph) -> Partition:
    """Cut the program at the valleys of its width.

    The width at a position is the bytes of the values made before it and read after it, long
    skip connections left out. Between any two heavy operations (matrix products, convolutions,
    loops, opaque calls) the narrowest position stands for all; of those, the ones where the
    width rises by `_PROMINENCE` on both sides are the boundaries. The rule only looks at what
    is near, so equal stretches of a program are cut alike and need no search for repetition.
    """
    width = _widths(graph)
    heavy = _heavy_operations(graph)
    # A scan is a block of its own: it has a body to be planned.
    loops = [i for op in graph.operations if is_loop(op) for i in (op.id, op.id + 1)]
    edges = {0, *_valleys(width, heavy), *loops, len(graph.operations)}
    cuts = _split_long(width, sorted(edges))
    blocks = [make_block(graph, a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    blocks = _split_off_known(graph, blocks)
    first: dict[str, int] = {}
    kinds = tuple(first.setdefault(b.fingerprint, i) for i, b in enumerate(blocks))
    return Partition(blocks=tuple(blocks), kinds=kinds)


def _split_off_known(graph: Graph, blocks: Sequence[Block]) -> list[Block]:
    """Split blocks that begin or end with a copy of a repeated block.

    The first and the last layer of a stack often stand in one block with what is before or
    after the stack.
    """
    count = Counter(b.fingerprint for b in blocks)
    repeated = {b.fingerprint: len(b) for b in blocks if count[b.fingerprint] > 1}
    result: list[Block] = []
    for block in blocks:
        pieces = [block]
        for fingerprint, length in repeated.items():
            if length >= len(block) or block.fingerprint in repeated:
                continue
            head = make_block(graph, block.start, block.start + length)
            tail = make_block(graph, block.stop - length, block.stop)
            if tail.fingerprint == fingerprint:
                pieces = [make_block(graph, block.start, tail.start), tail]
                break
            if head.fingerprint == fingerprint:
                pieces = [head, make_block(graph, head.stop, block.stop)]
                break
        result += pieces
    return result


def _heavy_operations(graph: Graph) -> list[int]:
    """Active operations that XLA does not fuse away, reductions only if there are no others."""
    unfused = [op.id for op in graph.operations if op.active and not op.fusible]
    heavy = [i for i in unfused if not graph.operations[i].primitive.startswith("reduce")]
    return heavy if len(heavy) > 1 else unfused


def _widths(graph: Graph) -> list[int]:
    """Bytes that cross the cut before each operation, and after the last."""
    n = len(graph.operations)
    heavy = set(_heavy_operations(graph))
    heavy_before = list(accumulate((i in heavy for i in range(n)), initial=0))
    change = [0] * (n + 2)
    for value in graph.values:
        if value.producer is None or value.last_use <= value.producer:
            continue
        if heavy_before[value.last_use] - heavy_before[value.producer] > _SKIP_SPAN:
            continue
        change[value.producer + 1] += value.size_bytes
        change[value.last_use + 1] -= value.size_bytes
    return list(accumulate(change))[: n + 1]


def _valleys(width: Sequence[int], heavy: Sequence[int]) -> list[int]:
    """Positions of the prominent minima of the width, in order."""
    edges = [0, *(h + 1 for h in heavy)]
    narrowest = [_narrowest(width, a, b) for a, b in zip(edges, heavy, strict=False)]
    valleys: list[int] = []
    low: int | None = None
    high = 0
    for position in narrowest:
        here = width[position]
        if low is not None and here >= _PROMINENCE * width[low]:
            valleys.append(low)
            low, high = None, here
        elif low is None and high >= _PROMINENCE * here:
            low = position
        elif low is not None and here < width[low]:
            low = position
        if low is None:
            high = max(high, here)
    # After the last heavy operation comes the loss: nothing rises again, nothing is cut.
    return [v for v in valleys if v > 0]


def _narrowest(width: Sequence[int], first: int, last: int) -> int:
    """The last of the narrowest positions: what follows a block element by element, such as an
    activation, belongs to it, or XLA would hold its argument and its result."""
    least = min(width[first : last + 1])
    return max(i for i in range(first, last + 1) if width[i] == least)


def _split_long(width: Sequence[int], cuts: list[int]) -> list[int]:
    """Halve blocks of too many operations at the narrowest position of their middle half."""
    result = [cuts[0]]
    for stop in cuts[1:]:
        start = result[-1]
        if stop - start > _MAX_OPERATIONS:
            quarter = (stop - start) // 4
            middle = min(range(start + quarter, stop - quarter), key=lambda i: (width[i], i))
            result = _split_long(width, [*result, middle]) + _split_long(width, [middle, stop])[1:]
        else:
            result.append(stop)
    return result


def make_block(graph: Graph, start: int, stop: int) -> Block:
    """The block of operations `start … stop − 1`, with its boundary and fingerprint."""
    inputs, outputs = boundary(graph, start, stop)
    return Block(
        start=start,
        stop=stop,
        inputs=inputs,
        outputs=outputs,
        fingerprint=_fingerprint(graph, start, stop, inputs, outputs),
    )


def boundary(graph: Graph, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Values read in `start … stop − 1` but made outside, and made there but used outside."""
    inputs: dict[int, None] = {}
    outputs: list[int] = []
    for op in graph.operations[start:stop]:
        for v in op.inputs:
            if v is None:
                continue
            producer = graph.values[v].producer
            if producer is None or not start <= producer < stop:
                inputs[v] = None
        outputs += [
            v for v in op.outputs if graph.values[v].last_use >= stop or graph.values[v].is_output
        ]
    return tuple(inputs), tuple(outputs)


def has_deferrable_input(graph: Graph, block: Block, start: int, stop: int) -> bool:
    """Whether part of the backward of `start … stop − 1` is not needed next.

    Next comes the cotangent of the block's stream, the latest of its active inputs. An input of
    the stretch that comes from another of them and not from the stream (an encoder's memory,
    a skip connection) has a cotangent that XLA's scheduler may leave for later.
    """
    moving = [
        v for v in block.inputs if graph.values[v].active and graph.values[v].kind == "computed"
    ]
    if not moving:
        return False
    stream = max(moving, key=lambda v: graph.values[v].producer or 0)
    from_any, from_stream = set(moving), {stream}
    for op in graph.operations[block.start : start]:
        outputs = [v for v in op.outputs if graph.values[v].active]
        if from_any.intersection(op.inputs):
            from_any.update(outputs)
        if from_stream.intersection(op.inputs):
            from_stream.update(outputs)
    inputs = set(boundary(graph, start, stop)[0])
    return bool(inputs & (from_any - from_stream))


def _fingerprint(
    graph: Graph, start: int, stop: int, inputs: Sequence[int], outputs: Sequence[int]
) -> str:
    """Structure only: signatures, wiring by position, what is an argument, active, an output."""
    names: dict[int | None, str] = {None: "lit"}
    for i, v in enumerate(inputs):
        value = graph.values[v]
        names[v] = f"in{i}{value.kind[0]}{'*' if value.active else ''}:{value.text}"
    lines = [names[v] for v in inputs]
    for op in graph.operations[start:stop]:
        for k, v in enumerate(op.outputs):
            names[v] = f"{op.id - start}.{k}"
        wires = ",".join(names[v] for v in op.inputs)
        lines.append(f"{op.signature}({wires}){'*' if op.active else ''}{'!' * op.pinned}")
    lines += [f"{names[v]}{'*' if graph.values[v].active else ''}" for v in outputs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
