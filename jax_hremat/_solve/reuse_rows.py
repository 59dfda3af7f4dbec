"""Output-buffer reuse as rows of the root program.

How XLA places buffers in results (`output_reuse.py`) depends on the whole schedule. The rows state
what a placement needs: a buffer goes into a result that is no smaller and not yet written, and what
is kept of the blocks up to k is all alive in the backward of block k, each buffer in a result of
its own. They count in bytes, so that a result may hold parts of buffers, and they leave out values
that only wait for their readers, and cotangents. So a schedule's reuse is predicted afterwards, and
where the rows exceed it the program is solved again with a part of it (`with_reuse.py`).

Glossary
  indices
    k           blocks in program order
    p           columns of single blocks; groups are taken to reuse nothing
    v           boundary values
    c           classes of results by size; a buffer is of the first class that it fits in
  variables, MiB
    Y_{k,c}     of what block k keeps, and of the values it makes, placed in results
    F_{k,c}     of the buffers alive at the peak of the forward of block k, placed in results
    U_{k,c}     the same of its backward
  data
    t_c         size of the results of class c, MiB
    R_{k,c}     number of results of class c or larger that blocks before k complete
    K, A, B     for a column, block and class: MiB kept, alive at the peak of the forward, and of
                the backward
    b_v         size of v, MiB
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MIB, Column
from jax_hremat._solve.modelling import cp, sp
from jax_hremat._solve.output_reuse import Result

# The most classes; results of sizes between count as the next larger class.
_MAX_CLASSES = 8


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a schedule reuses, as expressions in MiB for each block, and the rows that bound it."""

    forward: Any
    backward: Any
    rows: list[Any]

    def scaled(self, forward: Sequence[float], backward: Sequence[float]) -> Reuse:
        """A part of this for each block's forward and backward."""
        parts = [sp.diags_array(np.array(part)) for part in (forward, backward)]
        return Reuse(parts[0] @ self.forward, parts[1] @ self.backward, self.rows)


def reuse_rows(
    chain: Chain,
    results: Sequence[Result],
    columns: Sequence[Column],
    x: cp.Variable,
    held: Sequence[tuple[int, int]],
    h: cp.Variable,
) -> Reuse:
    """The rows over the columns chosen and the values held.

    Args:
        chain: Blocks and their options.
        results: The results.
        columns: The columns.
        x: Whether each column is chosen.
        held: For each position in `h`, the boundary value and the block.
        h: Whether the value is held for the backward of that block or an earlier one.
    """
    n = len(chain)
    sizes = _classes(results)
    count = len(sizes)

    def class_of(size_bytes: int) -> int | None:
        place = bisect_left(sizes, size_bytes)
        return place if size_bytes and place < count else None

    kept, ahead, behind = (_Cells(n, count) for _ in range(3))
    values = _Cells(n, count)
    for i, p in enumerate(columns):
        if p.last > p.first:
            continue
        cost = chain.options[p.first][p.options[0]].cost
        for cells, buffers in (
            (kept, cost.kept_sizes),
            (ahead, cost.forward_sizes),
            (behind, cost.backward_sizes),
        ):
            for size in buffers:
                cells.add(p.first, class_of(size), i, size / MIB)
    for i, (v, k) in enumerate(held):
        value = chain.boundary_values[v]
        if k == value.readers[-1]:
            values.add(value.producer, class_of(value.size_bytes), i, value.size_bytes / MIB)

    y, f, u = (cp.Variable(n * count, name=name, nonneg=True) for name in "YFU")
    per_result = np.array([MIB / size for size in sizes])
    # From (block, class) to the number of buffers in that class or a larger one.
    larger = sp.kron(sp.eye_array(n), np.triu(np.ones((count, count))) * per_result, format="csr")
    before = sp.kron(np.tri(n, k=-1), sp.eye_array(count), format="csr")
    up_to = sp.kron(np.tri(n), sp.eye_array(count), format="csr")
    every_class = sp.kron(sp.eye_array(n), np.ones((1, count)), format="csr")
    room = np.array(
        [
            sum(r.size_bytes > smaller for r in results if r.block < k)
            for k in range(n)
            for smaller in (0, *sizes[:-1])
        ]
    )
    all_room = np.tile([sum(r.size_bytes > s for r in results) for s in (0, *sizes[:-1])], n)
    rows: list[Any] = [
        # kept: only what is kept can be placed,  Y_{k,c} ≤ Σ_p K_{p,c} x_p + Σ_v b_v h_v.
        y <= kept.matrix(len(columns)) @ x + values.matrix(h.size) @ h,
        # working: likewise,  F_{k,c} ≤ Σ_p A_{p,c} x_p  and  U_{k,c} ≤ Σ_p B_{p,c} x_p.
        f <= ahead.matrix(len(columns)) @ x,
        u <= behind.matrix(len(columns)) @ x,
        # room, in the backward of k: what is kept of the blocks up to k, and its own, each in a
        # result that an earlier block completes,
        #   Σ_{c' ≥ c} (Σ_{k' ≤ k} Y_{k',c'} + U_{k,c'}) / t_{c'} ≤ R_{k,c}.
        larger @ (up_to @ y + u) <= room,
        # room, in the forward of k, in any result:
        #   Σ_{c' ≥ c} (Σ_{k' < k} Y_{k',c'} + F_{k,c'}) / t_{c'} ≤ R_{n,c}.
        larger @ (before @ y + f) <= all_room,
    ]
    return Reuse(every_class @ (before @ y + f), every_class @ (before @ y + u), rows)


def _classes(results: Sequence[Result]) -> list[int]:
    """The sizes of the classes, ascending."""
    sizes = sorted({r.size_bytes for r in results if r.size_bytes})
    while len(sizes) > _MAX_CLASSES:
        # The class closest to the next larger one, by ratio, is joined with it.
        ratios = [b / a for a, b in zip(sizes, sizes[1:], strict=False)]
        del sizes[ratios.index(min(ratios))]
    return sizes


class _Cells:
    """Coefficients of variables in one row for each block and class."""

    def __init__(self, num_blocks: int, num_classes: int) -> None:
        self._shape = (num_blocks, num_classes)
        self._entries: list[tuple[int, int, float]] = []

    def add(self, block: int, of_class: int | None, variable: int, mib: float) -> None:
        if of_class is not None:
            self._entries.append((block * self._shape[1] + of_class, variable, mib))

    def matrix(self, width: int) -> Any:
        rows, variables, values = zip(*self._entries, strict=True) if self._entries else ((),) * 3
        height = self._shape[0] * self._shape[1]
        return sp.csr_array((values, (rows, variables)), shape=(height, width), dtype=float)
