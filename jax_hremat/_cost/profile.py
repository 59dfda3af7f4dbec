"""What the operations of a plain block take, and the scopes that tell them apart in its step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

_SCOPE = "hremat_op"
_POSITION = re.compile(rf"{_SCOPE}(\d+)")


class Residual(NamedTuple):
    """A buffer that a plain block keeps from its forward to its backward.

    Attributes:
        size_bytes: Its size.
        made_by: The operation that makes it, by its position in the block.
        first_reader: The first operation whose backward reads it.
        last_reader: The last one.
    """

    size_bytes: int
    made_by: int
    first_reader: int
    last_reader: int

    def is_within(self, operations: range) -> bool:
        """Whether operations of a range make it, and no other backward reads it after them."""
        return self.made_by in operations and self.last_reader in operations


@dataclass(frozen=True, slots=True)
class Profile:
    """What the operations of a plain block take.

    Attributes:
        residuals: What the block keeps from its forward to its backward.
        forward_s: Seconds of each operation in the block's forward; a kernel that computes several
            operations counts as one of them.
        written: The operations whose results kernels of the forward write; others are fused into
            their readers.
    """

    residuals: tuple[Residual, ...]
    forward_s: tuple[float, ...]
    written: frozenset[int]

    def scaled(self, scale: float) -> Profile:
        """The same with all times multiplied."""
        return replace(self, forward_s=tuple(scale * time_s for time_s in self.forward_s))


def operation_scope(position: int) -> str:
    """The name of the scope in which an operation of a block is traced."""
    return f"{_SCOPE}{position}"


def operations_in(names: Iterable[str]) -> Iterator[int]:
    """The positions of the operations in whose scopes names were traced, in the order of the
    names; a name that was traced in none is left out."""
    return (int(found.group(1)) for found in map(_POSITION.search, names) if found is not None)
