"""The reduced costs of the groups that a chain lists."""

from __future__ import annotations

import numpy as np

from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MIB, Column, Prices
from jax_hremat._solve.modelling import sp


class ListedColumns:
    """The groups of `Chain.listed`, their reduced costs computed all at once."""

    def __init__(self, chain: Chain) -> None:
        self._columns = chain.listed
        peaks = (max(*p.forward_bytes, p.backward_bytes) for p in self._columns)
        self._peak_bytes = np.fromiter(peaks, float)
        self._added_ms = np.array([p.added_ms for p in self._columns])
        self._holds = sorted({key for p in self._columns for key in p.holds})
        # One row for each column of the program: its coefficients in the families cover, forward,
        # backward, stock and hold. The reduced costs are T + (these rows) · (dual values).
        place = {key: 4 * len(chain) + i for i, key in enumerate(self._holds)}
        rows: list[int] = []
        places: list[int] = []
        entries: list[float] = []
        for i, p in enumerate(self._columns):
            blocks, n = range(p.first, p.last + 1), len(chain)
            places += [*blocks, *(n + k for k in blocks), *(2 * n + k for k in blocks)]
            entries += [1.0] * len(blocks)
            entries += [b / MIB for b in p.forward_bytes]
            entries += [p.backward_bytes / MIB] * len(blocks)
            places += [3 * n + p.last, *(place[key] for key in p.holds)]
            entries += [p.kept_bytes / MIB, *(1.0 for _ in p.holds)]
            rows += [i] * (len(entries) - len(rows))
        shape = (len(self._columns), 4 * len(chain) + len(self._holds))
        self._entries = sp.csr_array((entries, (rows, places)), shape=shape)

    def within(self, limit_bytes: float, prices: Prices | None, worth_ms: float) -> list[Column]:
        """The columns whose own peak is within the limit and, with prices, whose reduced cost is at
        most `worth_ms`."""
        chosen = self._peak_bytes <= limit_bytes
        if prices is not None and self._columns:
            # What a group keeps is alive in the forward and backward of every later block.
            charged = np.add(prices.forward, prices.backward)
            later = charged[::-1].cumsum()[::-1] - charged
            held = [prices.hold[key] for key in self._holds]
            row_prices = np.concatenate(
                (prices.cover, prices.forward, prices.backward, later, held)
            )
            chosen &= self._added_ms + self._entries @ row_prices <= worth_ms
        return [self._columns[i] for i in np.flatnonzero(chosen)]
