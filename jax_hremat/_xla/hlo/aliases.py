"""Finds the buffer behind each leaf of each instruction. An instruction makes no new buffer if it
forwards its operand, writes in place, or takes over a donated parameter's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from jax_hremat._xla.hlo.parse import (
    Computation,
    HloModule,
    Instruction,
    Shape,
    in_place_operands,
    leaf_number,
)

# A buffer's identity is the first instruction that defines it and the leaf's number.
Key: TypeAlias = tuple[str, int]
Leaves: TypeAlias = tuple[Key, ...]

_FORWARDS = frozenset(
    {"bitcast", "opt-barrier", "while", "add-dependency", "domain", "copy-done", "all-reduce-done"}
)
_PAIRED_STARTS = frozenset({"all-gather-start", "collective-permute-start", "async-start"})


class Values:
    """The buffers behind each instruction of one computation, and when they are used.

    Attributes:
        computation: The computation.
        leaves: For each instruction, the buffer behind each leaf of its result.
        shapes: Shape of each buffer.
        start: For each buffer, the position where it is first written.
        end: For each buffer, the position of its last use; its ``start`` if it is never used.
    """

    def __init__(self, module: HloModule, computation: Computation) -> None:
        self.computation = computation
        self.leaves: dict[str, Leaves] = {}
        self.shapes: dict[Key, Shape] = {}
        self.start: dict[Key, int] = {}
        self.end: dict[Key, int] = {}
        for position, instruction in enumerate(computation.instructions):
            leaves = self._leaves_of(module, instruction)
            self.leaves[instruction.name] = leaves
            for key, shape in zip(leaves, instruction.shape.leaves, strict=True):
                if key not in self.start:
                    self.shapes[key] = shape
                    self.start[key] = self.end[key] = position
            if instruction.opcode in ("tuple", "get-tuple-element"):
                continue
            for operand in instruction.operands:
                for key in self.leaves[operand]:
                    self.end[key] = position

    def _leaves_of(self, module: HloModule, instruction: Instruction) -> Leaves:
        opcode = instruction.opcode
        operands = [self.leaves[name] for name in instruction.operands]
        own = tuple((instruction.name, leaf) for leaf in range(len(instruction.shape.leaves)))
        if opcode == "tuple":
            return tuple(key for leaves in operands for key in leaves)
        if opcode == "get-tuple-element":
            whole = self.computation[instruction.operands[0]].shape
            index = int(instruction.attribute("index") or 0)
            first = leaf_number(whole, (index,))
            return operands[0][first : first + len(own)]
        if opcode in _FORWARDS:
            return operands[0][: len(own)]
        if opcode == "copy-start":
            return (own[0], operands[0][0], *own[2:])
        if opcode.endswith("-start") and _is_paired(instruction):
            taken = tuple(key for leaves in operands for key in leaves)
            return self._in_place(module, instruction, taken + own[len(taken) :], len(taken))
        if opcode == "call":
            return self._called(module, instruction, own)
        if opcode.endswith(("-done", "-update")):
            return self._done(instruction, operands[0], own)
        return self._in_place(module, instruction, own, 0)

    def _called(self, module: HloModule, call: Instruction, own: Leaves) -> Leaves:
        inner = Values(module, module.computations[call.called[0]])
        given = dict(
            pair
            for operand, parameter in zip(call.operands, inner.computation.parameters, strict=True)
            for pair in zip(inner.leaves[parameter.name], self.leaves[operand], strict=True)
        )
        results = inner.leaves[inner.computation.root.name]
        return tuple(given.get(result, key) for result, key in zip(results, own, strict=True))

    def _done(self, done: Instruction, started: Leaves, own: Leaves) -> Leaves:
        if done.opcode.endswith("-update"):
            return started
        shape = self.computation[done.operands[0]].shape
        if not _is_paired(self.computation[done.operands[0]]):
            return started[: len(own)] if len(started) >= len(own) else own
        first = leaf_number(shape, (1,))
        return started[first : first + len(own)]

    def _in_place(
        self, module: HloModule, instruction: Instruction, leaves: Leaves, offset: int
    ) -> Leaves:
        opcode = instruction.opcode.removesuffix("-start")
        plain = replace(instruction, opcode=opcode) if offset else instruction
        result = list(leaves)
        for leaf, operand, _ in in_place_operands(module, plain):
            result[offset + leaf] = self.leaves[instruction.operands[operand]][0]
        return tuple(result)


def _is_paired(start: Instruction) -> bool:
    """Whether an async start returns (operands, results, context)."""
    if start.opcode in _PAIRED_STARTS:
        return True
    return (
        start.shape.is_tuple
        and len(start.shape.elements) > 1
        and bool(start.called)
        and (start.shape.elements[0].is_tuple)
    )


def label(computation: Computation, key: Key) -> str:
    """A buffer's name."""
    name, leaf = key
    return f"{name}{{{leaf}}}" if computation[name].shape.is_tuple else name


def flat_parameters(values: Values) -> Mapping[Key, int]:
    """The number of each parameter's buffer, counting flattened parameters."""
    keys = [key for p in values.computation.parameters for key in values.leaves[p.name]]
    return {key: number for number, key in enumerate(keys)}


def donations(module: HloModule, values: Values) -> Mapping[Key, Key]:
    """For each output buffer that takes a donated parameter's memory, the parameter's buffer."""
    entry = values.computation
    found = {}
    for alias in module.output_aliases:
        parameter = entry.parameters[alias.parameter]
        source = (parameter.name, leaf_number(parameter.shape, alias.parameter_index))
        leaf = leaf_number(entry.root.shape, alias.output_index)
        found[values.leaves[entry.root.name][leaf]] = source
    return found
