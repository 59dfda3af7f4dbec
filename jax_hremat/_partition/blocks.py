"""From a `Graph` and a partitioner to a `Partition`: consecutive blocks of operations, with equal
blocks recognised.

A block is a range of operations, contiguous in program order. The levels of a plan are runs of
operations inside a block, the blocks, and groups of consecutive blocks. The solver chooses runs and
groups; this module makes the blocks. A partitioner decides where to cut; everything else about a
block is the same for all partitioners.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from jax_hremat._partition.width import widths
from jax_hremat._trace.graph import Graph, is_cond, is_loop

# Decides where a program is cut: returns the positions of operations that begin a block, in any
# order. The beginning and the end of the program need not be among them.
Partitioner = Callable[[Graph], Sequence[int]]

_MAX_OPERATIONS = 240


@dataclass(frozen=True, slots=True)
class Block:
    """Operations `start … stop − 1`, and the values that cross the block's boundary.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        inputs: Values read inside and made outside, in order of first use; arguments included.
        outputs: Values made inside and read outside or returned, in order.
        fingerprint: A text that is equal for blocks that compute the same on the same shapes.
        form: A text that is equal for blocks of the same primitives, wired in the same way, of
            whatever shapes and parameters. Operands in a row that come from outside in the same
            way count as one, such as those of a concatenation.
        input_roles: For each input, a number that says where it is read; equal for operands that
            count as one, and for inputs of blocks of one form that stand in the same place.
    """

    start: int
    stop: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fingerprint: str
    form: str
    input_roles: tuple[int, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    def inputs_alike(self, positions: Collection[int], other: Block) -> tuple[int, ...]:
        """The inputs of this block in the place of those inputs of another block of its form."""
        roles = {other.input_roles[i] for i in positions}
        return tuple(i for i, role in enumerate(self.input_roles) if role in roles)


@dataclass(frozen=True, slots=True)
class Partition:
    """Consecutive blocks that cover the program, and which of them are alike.

    Attributes:
        blocks: The blocks in program order.
        kinds: For each block, the position of the first block with its fingerprint.
    """

    blocks: tuple[Block, ...]
    kinds: tuple[int, ...]

    @property
    def unique(self) -> tuple[int, ...]:
        """The first block of each kind."""
        return tuple(dict.fromkeys(self.kinds))

    @property
    def block_of(self) -> Sequence[int]:
        """For each operation, the position of its block."""
        return [i for i, block in enumerate(self.blocks) for _ in range(block.start, block.stop)]

    @property
    def families(self) -> tuple[tuple[int, ...], ...]:
        """The kinds, those of one form together."""
        families: dict[str, list[int]] = {}
        for kind in self.unique:
            families.setdefault(self.blocks[kind].form, []).append(kind)
        return tuple(map(tuple, families.values()))

    def __repr__(self) -> str:
        return f"Partition({len(self.blocks)} blocks, {len(self.unique)} unique)"


def partition_graph(graph: Graph, partitioner: Partitioner) -> Partition:
    """Cut the program where the partitioner says.

    A scan or a cond with a backward is a block of its own, because its bodies are planned. So is an
    operation that must run exactly once, because no checkpointed region may contain it. Blocks of
    very many operations are split near the middle, where few bytes are handed on.

    Raises:
        ValueError: The partitioner names a position outside the program.
    """
    count = len(graph.operations)
    cuts = partitioner(graph)
    odd = [c for c in cuts if not 0 <= c <= count]
    if odd:
        raise ValueError(
            f"the partitioner cuts at {odd[0]}, and the program has {count} operations; return "
            f"positions from 0 to {count}"
        )
    alone = [op.id for op in graph.operations if is_loop(op) or is_cond(op) or op.effectful]
    inner = {*cuts, *(edge for op in alone for edge in (op, op + 1))} - {0, count}
    cuts = _split_long(widths(graph), [0, *sorted(inner), count])
    blocks = [make_block(graph, a, b) for a, b in itertools.pairwise(cuts)]
    first: dict[str, int] = {}
    kinds = tuple(first.setdefault(b.fingerprint, i) for i, b in enumerate(blocks))
    return Partition(blocks=tuple(blocks), kinds=kinds)


def _split_long(width: Sequence[int], cuts: list[int]) -> list[int]:
    """Split blocks of too many operations at the narrowest position of their middle half."""
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
    roles = _input_roles(graph, start, stop, inputs)
    return Block(
        start=start,
        stop=stop,
        inputs=inputs,
        outputs=outputs,
        fingerprint=_fingerprint(graph, start, stop, inputs, outputs),
        form=_form(graph, start, stop, dict(zip(inputs, roles, strict=True)), outputs),
        input_roles=roles,
    )


def boundary(graph: Graph, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values read in `start … stop − 1` but made outside, and those made there but used
    outside."""
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


def made_of_arguments(graph: Graph, start: int, stop: int) -> set[int]:
    """The values that operations `start … stop − 1` make of the program's arguments and nothing
    else."""
    made: set[int] = set()
    for op in graph.operations[start:stop]:
        read = [v for v in op.inputs if v is not None]
        if read and all(v in made or graph.values[v].kind == "argument" for v in read):
            made.update(op.outputs)
    return made


def makes_of_arguments(graph: Graph, start: int, stop: int) -> bool:
    """Whether one of the operations `start … stop − 1` makes something of arguments alone, so that
    XLA's scheduler could run it at any time, and another reads what was made before these. A
    transpose or a broadcast of a weight makes nothing: it is part of the kernel that reads it."""
    inputs, _ = boundary(graph, start, stop)
    if all(graph.values[v].kind != "computed" for v in inputs):
        return False
    made = made_of_arguments(graph, start, stop)
    return any(
        not op.is_view and not made.isdisjoint(op.outputs) for op in graph.operations[start:stop]
    )


def has_deferrable_input(graph: Graph, block: Block, start: int, stop: int) -> bool:
    """Whether XLA's scheduler could delay part of the backward of operations `start … stop − 1`.

    The cotangent needed next is that of the block's stream, which is the last made of the block's
    active inputs. If an input of these operations depends on another active input and not on the
    stream (an encoder's memory, a skip connection), the scheduler may delay its cotangent.
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
    """A hash of the structure only: signatures, wiring by position, which values are arguments,
    active or outputs, and on a mesh the sharding of each value."""
    names: dict[int | None, str] = {None: "lit"}
    for i, v in enumerate(inputs):
        value = graph.values[v]
        names[v] = f"in{i}{_origin(graph, v)}:{value.text}"
    lines = [names[v] for v in inputs]
    for op in graph.operations[start:stop]:
        for k, v in enumerate(op.outputs):
            names[v] = f"{op.id - start}.{k}"
        wires = ",".join(names[v] for v in op.inputs)
        lines.append(f"{op.signature}({wires}){'*' if op.active else ''}{'!' * op.effectful}")
    lines += [f"{names[v]}{'*' if graph.values[v].active else ''}" for v in outputs]
    made = [v for op in graph.operations[start:stop] for v in op.outputs]
    lines += [f"{names[v]}@{spec}" for v in (*inputs, *made) if (spec := graph.values[v].spec)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _origin(graph: Graph, value: int) -> str:
    return f"{graph.values[value].kind[0]}{'*' if graph.values[value].active else ''}"


def _input_roles(graph: Graph, start: int, stop: int, inputs: Sequence[int]) -> tuple[int, ...]:
    """See `Block.input_roles`."""
    outside = set(inputs)
    roles: dict[int, int] = {}
    for op in graph.operations[start:stop]:
        before = ""
        for v in op.inputs:
            new = v is not None and v in outside and v not in roles
            # The first of its role, or one more like the operand before.
            origin = _origin(graph, v) if v is not None and new else ""
            if v is not None and new:
                roles[v] = len(set(roles.values())) - (origin == before)
            before = origin
    return tuple(roles[v] for v in inputs)


def _form(
    graph: Graph, start: int, stop: int, roles: Mapping[int, int], outputs: Sequence[int]
) -> str:
    """A hash of the structure without shapes and parameters: see `Block.form`."""
    names: dict[int | None, str] = {None: "lit"}
    names |= {v: f"in{role}{_origin(graph, v)}" for v, role in roles.items()}
    lines = []
    for op in graph.operations[start:stop]:
        for k, v in enumerate(op.outputs):
            names[v] = f"{op.id - start}.{k}"
        wires = ",".join(name for name, _ in groupby(names[v] for v in op.inputs))
        lines.append(f"{op.primitive}({wires}){'*' if op.active else ''}{'!' * op.effectful}")
    lines += [f"{names[v]}{'*' if graph.values[v].active else ''}" for v in outputs]
    made = [v for op in graph.operations[start:stop] for v in op.outputs]
    lines += [f"{names[v]}@{spec}" for v in (*roles, *made) if (spec := graph.values[v].spec)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
