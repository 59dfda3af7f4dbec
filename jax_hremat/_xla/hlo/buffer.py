"""A piece of device memory, and the part of a schedule that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["parameter", "temp", "output", "constant"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of device memory and the part of the schedule that needs it.

    Attributes:
        name: The instruction that first writes it, with the leaf's number behind a ``.`` and
            in braces when that instruction has several results: ``"fusion.3{1}"``.
        nbytes: Its size in bytes.
        start: First position that needs it.
        end: Last position that needs it, inclusive. A temporary that an element-wise kernel
            overwrites with another one ends one position before that kernel, if both have memory
            of their own.
        kind: Parameters and constants exist before the step, outputs after it.
        parameter_index: Number of the parameter, counting flattened entry parameters; None
            for other kinds.
        op_name: The traced operation that first writes it.
        opcode: Opcode of the instruction that first writes it.
        inside: The output or parameter whose memory this buffer reuses; None if it has its own.
            Temporaries are placed in results that are not yet written, outputs in donated
            parameters.
    """

    name: str
    nbytes: int
    start: int
    end: int
    kind: Kind
    parameter_index: int | None
    op_name: str
    opcode: str
    inside: str | None = None


def own_temps(buffers: Sequence[Buffer]) -> list[Buffer]:
    """The temporaries with memory of their own."""
    return [b for b in buffers if b.kind == "temp" and b.inside is None]
