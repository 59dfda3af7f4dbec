"""Arithmetic and traffic of an operation or a kernel, and how long a device takes for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


class MatrixUnit(NamedTuple):
    """What a matmul or a convolution runs on: the HLO type of its operands, and which it is."""

    dtype: str
    convolves: bool


class Array(NamedTuple):
    """Type and shape of an operand or a result; the type as HLO writes it, such as "bf16"."""

    dtype: str
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel that XLA only calls.

    Attributes:
        names: What it may be known by: the target it calls, its own name, its primitive.
        operands: What it reads.
        results: What it makes.
        moved_bytes: Both together, each array once.
        work: What is known of it; None if nothing is.
        times: How often it runs.
    """

    names: tuple[str, ...]
    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    moved_bytes: float
    work: Work | None = None
    times: float = 1.0

    @property
    def work_or_bytes(self) -> Work:
        """What one execution takes; of a kernel that nothing is known of, its bytes."""
        return self.work or Work(bytes=self.moved_bytes)


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and traffic of one execution.

    Attributes:
        flops: Matrix flops by their unit, each unit once.
        vector_flops: All other flops.
        bytes: Bytes read and written.
        concurrent: Whether both kinds of flops run side by side, as in an attention kernel.
        calls: Kernels that are only called, which come on top.
    """

    flops: tuple[tuple[MatrixUnit, float], ...] = ()
    vector_flops: float = 0.0
    bytes: float = 0.0
    concurrent: bool = False
    calls: tuple[Call, ...] = ()

    @property
    def matrix_flops(self) -> float:
        """Matrix flops of all units, those of calls not included."""
        return sum(flops for _, flops in self.flops)

    @property
    def total_flops(self) -> float:
        """All flops, those of calls included."""
        called = sum(c.times * c.work.total_flops for c in self.calls if c.work is not None)
        return self.matrix_flops + self.vector_flops + called

    def repeated(self, times: float) -> Work:
        """The same, so many times."""
        return replace(
            self,
            flops=tuple((unit, times * flops) for unit, flops in self.flops),
            vector_flops=times * self.vector_flops,
            bytes=times * self.bytes,
            calls=tuple(replace(call, times=times * call.times) for call in self.calls),
        )


def total(works: Iterable[Work]) -> Work:
    """All of them, one after another."""
    works = tuple(works)
    flops: dict[MatrixUnit, float] = {}
    for work in works:
        for unit, count in work.flops:
            flops[unit] = flops.get(unit, 0.0) + count
    calls: dict[Call, float] = {}
    for call in (call for work in works for call in work.calls):
        once = replace(call, times=1.0)
        calls[once] = calls.get(once, 0.0) + call.times
    return Work(
        flops=tuple(flops.items()),
        vector_flops=sum(work.vector_flops for work in works),
        bytes=sum(work.bytes for work in works),
        calls=tuple(replace(call, times=times) for call, times in calls.items()),
    )


def one_product(dtype: str, flops: float, *, convolves: bool = False) -> Work:
    """One matrix product or convolution of operands of a type."""
    return Work(flops=((MatrixUnit(dtype, convolves), flops),))
