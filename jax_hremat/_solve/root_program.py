"""The root program: one option for every block, and which blocks are checkpointed together.

A schedule partitions the chain into columns. A column is a block in one of its options, or a group
of blocks, one option each, checkpointed together in one `jax.checkpoint` (`_solve/groups.py`).

Glossary
  indices
    k           blocks in program order
    p           columns; p ∋ k if column p contains block k; p holds v as of k if it holds v, from
                the forward on, for the backward of block k
    v           boundary values: made in one block, read in later ones
  variables
    x_p         1 if column p is in the schedule
    h_{v,k}     1 if v is held, from its forward, for the backward of some block ≤ k
    s_k         bytes kept before block k for later backwards: by the columns before block k, and
                by held values that are last read before block k
  data
    P           the bound on the peak, arguments and outputs not counted
    T_p, K_p    ms that p adds; bytes that p keeps (a group: constants, and values of its blocks)
    A_{p,k}     peak of the forward of block k in p, plus what p keeps of the blocks before k
    B_p         peak of the backward of p, including the cotangents pending there
    b_v         bytes of v
    F_k         bytes that output-buffer reuse saves in the forward of block k
    G_{p,k}     bytes that it saves in the backward of block k in p

The peak rows are Checkmate's memory accounting (MLSys 2020, eq. 3), restricted to the schedules
that nested checkpoints can express: one row for each block's forward and one for its backward
(rotor's persistent schedules, Beaumont et al. 2020, with skip values).

Label setting solves the program (`_solve/schedule.py`), some hundred times as fast as HiGHS does
with these rows. HiGHS solves its linear relaxation, whose duals bound what may follow a beginning
(`_solve/relaxation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jax_hremat._solve.assumed_reuse import NO_REUSE, AssumedReuse
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MIB, Column
from jax_hremat._solve.modelling import cp, sp

# A row and a column of a sparse matrix, and the value there.
_Entry: TypeAlias = tuple[int, int, float]


class Rows(NamedTuple):
    """The families of rows, in the words of the comments at them."""

    cover: Any
    hold: Any
    forward: Any
    backward: Any
    stock: Any
    monotone: Any

    @property
    def all(self) -> list[Any]:
        """All rows."""
        return [row for row in self if row is not None]


class RootProgram:
    """Variables and rows over one chain.

    Attributes:
        x: Whether each column is in the schedule.
        h: Whether each value is held for the backward of each block or an earlier one.
        position: Position in `h` of each pair of value and block.
    """

    def __init__(self, chain: Chain, columns: Sequence[Column], *, boolean: bool = True) -> None:
        self._chain = chain
        self._columns = columns
        # For each value, the blocks from its producer to its last reader.
        keys = (
            (v, k)
            for v, c in enumerate(chain.boundary_values)
            for k in range(c.producer, c.readers[-1] + 1)
        )
        self.position = {key: position for position, key in enumerate(keys)}
        self._known_mib, self._held_there, self._held_on = self._value_rows()
        self.x = cp.Variable(len(columns), name="x", boolean=boolean, nonneg=not boolean)
        self.h = cp.Variable(max(len(self.position), 1), nonneg=True, name="h")

    def rows(self, peak: Any, reused: AssumedReuse = NO_REUSE) -> Rows:
        """All rows, for a peak in MiB, and what is assumed of output-buffer reuse."""
        n = len(self._chain)
        saved_forward = np.array(reused.forward or (0,) * n) / MIB
        covered, held, kept, forward, backward = (list[_Entry]() for _ in range(5))
        for i, p in enumerate(self._columns):
            blocks = range(p.first, p.last + 1)
            behind = p.backward_bytes - reused.in_backward(blocks)
            for k, own, own_behind in zip(blocks, p.forward_bytes, behind.tolist(), strict=True):
                covered.append((k, i, 1.0))
                forward.append((k, i, own / MIB))
                backward.append((k, i, own_behind / MIB))
            for key in p.holds:
                held.append((self.position[key], i, 1.0))
            if p.last + 1 < n:
                kept.append((p.last + 1, i, p.kept_bytes / MIB))
        width, x, h = len(self._columns), self.x, self.h
        s = cp.Variable(n, name="s")
        # cover: each block is in exactly one column,  Σ_{p ∋ k} x_p = 1.
        cover = _matrix(covered, n, width) @ x == 1
        # hold: v is held as of block k if a chosen column holds it as of k,
        #   h_{v,k} ≥ Σ_{p holds v as of k} x_p.
        hold = h >= _matrix(held, h.size, width) @ x
        # forward: what is kept before block k, the forward's own peak, and the values made before
        # k and still to be read fit within the peak,
        #   s_k + Σ_{p ∋ k} A_{p,k} x_p + Σ_{v made before k, read from k on} b_v ≤ P + F_k.
        ahead = s + _matrix(forward, n, width) @ x + self._known_mib <= peak + saved_forward
        # backward: likewise for the backward of the column that contains block k,
        #   s_k + Σ_{p ∋ k} (B_p − G_{p,k}) x_p
        #       + Σ_{v made up to k, read from k on} b_v h_{v,k} ≤ P.
        behind = s + _matrix(backward, n, width) @ x + self._held_there @ h <= peak
        # stock: s_k adds up what the columns before block k keep, and the held values whose last
        # reader is before k,
        #   s_0 = 0,  s_k = s_{k−1} + Σ_{p ends at k−1} K_p x_p + Σ_{v last read in k−1} b_v h_v.
        before = sp.eye_array(n, format="csr") - sp.eye_array(n, k=-1, format="csr")
        stock: Any = before @ s == _matrix(kept, n, width) @ x + self._held_on @ h
        # monotone: held for some block ≤ k − 1 implies held for some block ≤ k,
        #   h_{v,k} ≥ h_{v,k−1}.
        steps = [
            (c, self.position[v, k - 1])
            for (v, k), c in self.position.items()
            if (v, k - 1) in self.position
        ]
        later, earlier = ([pair[i] for pair in steps] for i in (0, 1))
        monotone = h[later] >= h[earlier] if steps else None
        return Rows(cover, hold, ahead, behind, stock, monotone)

    def _value_rows(self) -> tuple[np.ndarray, sp.csr_matrix, sp.csr_matrix]:
        """Coefficients of boundary values in the rows of each block k, in MiB: of the values that
        wait in the forward row (a constant), of h in the backward row, and of h in the stock row
        (the held values whose last reader is block k − 1)."""
        n = len(self._chain)
        known = np.zeros(n)
        there, on = list[_Entry](), list[_Entry]()
        for v, c in enumerate(self._chain.boundary_values):
            last, size_mib = c.readers[-1], c.size_bytes / MIB
            known[c.producer + 1 : last + 1] += size_mib
            for k in range(c.producer, last + 1):
                there.append((k, self.position[v, k], size_mib))
            if last + 1 < n:
                on.append((last + 1, self.position[v, last], size_mib))
        width = max(len(self.position), 1)
        return known, _matrix(there, n, width), _matrix(on, n, width)


def _matrix(entries: Sequence[_Entry], height: int, width: int) -> sp.csr_matrix:
    rows, columns, values = ([entry[i] for entry in entries] for i in range(3))
    return sp.csr_matrix((values, (rows, columns)), shape=(height, width))
