"""Kernels that may overwrite a buffer while they still read it.

XLA places the result of a fusion in the buffer of an operand that is not read afterwards, if the
fusion reads that operand only at the place that it writes. It asks this of each operand by itself.
Behind an optimization barrier, such as that of `jax.checkpoint`, the same buffer has another name,
and a fusion that reads it under both names may read other places of it under the other: it then
reads what it has overwritten. XLA:CPU and XLA:GPU of JAX 0.10 do that; those of JAX 0.12 remove
barriers before they assign buffers. Results are wrong without a word, also with a checkpoint
written by hand: `lax.cummax` under a checkpoint of its own, of a `tanh` whose derivative reads the
same values, has a gradient that is off by several times its size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from jax_hremat._xla.hlo.aliases import Key, Values
from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction
from jax_hremat._xla.hlo.reuse import ELEMENTWISE

# How far along each dimension an element has moved from its place in the buffer; None if it has not
# moved by the same distance as all others.
_Offset: TypeAlias = tuple[int, ...] | None

_SAME_PLACE = ELEMENTWISE | {"complex", "stochastic-convert"}


def may_overwrite(module: HloModule) -> tuple[str, ...]:
    """The names of the fusions that may overwrite what they still read.

    They read one buffer under several names, under one of them only at the place that they write
    and under another elsewhere; it is not read afterwards, and one of their results is as large.

    Unchecked: whether XLA does place the result there; layouts.
    """
    fused = {
        name
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode == "fusion"
        for name in instruction.called
    }
    return tuple(
        fusion.name
        for computation in module.computations.values()
        if computation.name not in fused
        for fusion in _found(module, computation)
    )


def _found(module: HloModule, computation: Computation) -> Iterator[Instruction]:
    fusions = [(n, i) for n, i in enumerate(computation.instructions) if i.opcode == "fusion"]
    if not fusions:
        return
    values = Values(module, computation)
    # Arguments are not overwritten; those that are donated have their own rules.
    fixed = {"constant", "parameter"} if computation is module.entry else {"constant"}
    for position, fusion in fusions:
        read_as: dict[Key, set[int]] = {}
        for number, operand in enumerate(fusion.operands):
            for key in values.leaves[operand]:
                if values.end[key] == position and computation[key[0]].opcode not in fixed:
                    read_as.setdefault(key, set()).add(number)
        sizes_bytes = {leaf.nbytes for leaf in fusion.shape.leaves}
        body = module.computations[fusion.called[0]]
        if any(
            len(numbers) > 1
            and values.shapes[key].nbytes in sizes_bytes
            and len({_reads_elsewhere(fusion, body, number) for number in numbers}) > 1
            for key, numbers in read_as.items()
        ):
            yield fusion


def _reads_elsewhere(fusion: Instruction, body: Computation, number: int) -> bool:
    """Whether a fusion reads one of its operands at other places than those that it writes."""
    operand = body.parameters[number]
    here = (0,) * len(operand.shape.dims)
    moved: dict[str, set[_Offset]] = {operand.name: {here}}
    for instruction in body.instructions:
        came = [(n, o) for n, o in enumerate(instruction.operands) if o in moved]
        if not came:
            continue
        if instruction.opcode == "reduce" and _is_read_once(fusion, body, instruction):
            if any(offset is None or any(offset) for _, o in came for offset in moved[o]):
                return True
            continue
        moved[instruction.name] = {
            _moved(instruction, body, n, offset) for n, o in came for offset in moved[o]
        }
    results = moved.get(body.root.name, set())
    return any(offset is None or any(offset) for offset in results)


def _is_read_once(fusion: Instruction, body: Computation, reduce: Instruction) -> bool:
    """Whether what a reduction reads is read in the same pass as other results are written: it is a
    result itself, or a Triton kernel has loaded all of its tile before it writes any of it."""
    is_result = reduce is body.root or reduce.name in body.root.operands
    return is_result or "__triton" in fusion.attributes


def _moved(instruction: Instruction, body: Computation, number: int, offset: _Offset) -> _Offset:
    """Where an instruction moves elements of one of its operands to, that have moved already."""
    if offset is None:
        return None
    if instruction.opcode in ("bitcast", "reshape"):
        return None if any(offset) else (0,) * len(instruction.shape.dims)
    if instruction.opcode in _SAME_PLACE:
        return offset
    if instruction.opcode == "slice":
        limits = re.findall(r"\[(\d+):\d+(?::(\d+))?\]", instruction.attribute("slice") or "")
        if any(stride not in ("", "1") for _, stride in limits):
            return None
        return tuple(at - int(start) for at, (start, _) in zip(offset, limits, strict=True))
    if instruction.opcode == "pad" and number == 0:
        padding = (instruction.attribute("padding") or "").split("x")
        edges = [[int(part) for part in edge.split("_")] for edge in padding]
        if any(len(edge) > 2 and edge[2] for edge in edges):
            return None
        return tuple(at + edge[0] for at, edge in zip(offset, edges, strict=True))
    if instruction.opcode == "concatenate":
        axis = int((instruction.attribute("dimensions") or "{0}").strip("{}"))
        before = (body[o].shape.dims[axis] for o in instruction.operands[:number])
        return (*offset[:axis], offset[axis] + sum(before), *offset[axis + 1 :])
    return None
