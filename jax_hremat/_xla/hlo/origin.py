"""Which traced operation makes a buffer, and which read it, by the names of instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jax_hremat._xla.hlo.aliases import Key, Values
from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction

# What passes its operand on; its readers are the operand's.
_PASSES_ON = frozenset({"tuple", "get-tuple-element", "bitcast"})


def maker_names(module: HloModule, computation: Computation, key: Key) -> Iterator[str]:
    """The names of the traced operations that may have made a buffer, the likeliest first: what
    writes it inside of a fused computation, the instruction itself, and what that reads."""
    name, leaf = key
    first = computation[name]
    if first.opcode == "fusion":
        fused = module.computations[first.called[0]]
        made = fused.root.operands[leaf] if fused.root.opcode == "tuple" else fused.root.name
        yield from maker_names(module, fused, (made, 0))
    seen = {name}
    stack = [first]
    while stack:
        instruction = stack.pop()
        if op_name := _op_name(module, instruction):
            yield op_name
        new = [name for name in reversed(instruction.operands) if name not in seen]
        seen.update(new)
        stack += map(computation.__getitem__, new)


@dataclass(frozen=True, slots=True)
class Reader:
    """A kernel that reads a buffer.

    Attributes:
        name: The name of its instruction.
        op_names: The names of traced operations: first that which reads the buffer, then those that
            the kernel computes from it.
    """

    name: str
    op_names: tuple[str, ...]


def readers(
    module: HloModule, values: Values, key: Key, first_position: int = 0
) -> Iterator[Reader]:
    """The kernels that read a buffer of a computation.

    Args:
        module: The module.
        values: The buffers of the computation.
        key: The buffer.
        first_position: The first position of the schedule at which readers count.
    """
    for instruction in values.computation.instructions[first_position:]:
        if instruction.opcode in _PASSES_ON:
            continue
        for number, operand in enumerate(instruction.operands):
            if key in values.leaves[operand]:
                names = tuple(_names_of_reader(module, instruction, number))
                yield Reader(instruction.name, names)


def _names_of_reader(module: HloModule, instruction: Instruction, number: int) -> Iterator[str]:
    if instruction.opcode != "fusion":
        yield instruction.op_name
        return
    fused = module.computations[instruction.called[0]]
    reached = {fused.parameters[number].name}
    for reader in fused.instructions:
        if not reached.isdisjoint(reader.operands):
            reached.add(reader.name)
            yield _op_name(module, reader)


def _op_name(module: HloModule, instruction: Instruction) -> str:
    """The name of the traced operation that an instruction computes. Where XLA leaves it out of a
    reduction, what combines two elements still has it."""
    if instruction.op_name or instruction.opcode != "reduce":
        return instruction.op_name
    return module.computations[instruction.called[0]].root.op_name
