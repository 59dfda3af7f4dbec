"""Arithmetic and memory traffic of an operation or a kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple


class MatrixUnit(NamedTuple):
    """The unit for a matmul or convolution: the operands' HLO type, and which of the two it is."""

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
        names: Names it may be known by: the target it calls, its own name, its primitive.
        operands: Arrays it reads.
        results: Arrays it writes.
        moved_bytes: Bytes of operands and results, each array counted once.
        work: The work of one execution; None if nothing is known about it.
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
        """The work of one execution; only its bytes if nothing else is known about it."""
        return self.work or Work(bytes=self.moved_bytes)


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and traffic of one execution.

    Attributes:
        flops: Matrix flops by their unit, each unit once.
        vector_flops: All other flops.
        bytes: Bytes read and written.
        concurrent: Whether matrix and vector flops run concurrently, as in an attention kernel.
        calls: Kernels that are only called, in addition to the above.
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
        """The work of `times` executions."""
        return replace(
            self,
            flops=tuple((unit, times * flops) for unit, flops in self.flops),
            vector_flops=times * self.vector_flops,
            bytes=times * self.bytes,
            calls=tuple(replace(call, times=times * call.times) for call in self.calls),
        )


def total(works: Iterable[Work]) -> Work:
    """The sum of all, executed one after another."""
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
    """One matrix product or convolution with operands of one type."""
    return Work(flops=((MatrixUnit(dtype, convolves), flops),))
