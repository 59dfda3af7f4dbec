"""Optimal persistent schedules of a chain, by dynamic programming.

A schedule is persistent if what it keeps for a backward stays until that backward. For a chain
these are nested checkpoints: a range of blocks is run either block by block, the first in one of
its options, or as a group, which hands on its last output and is run again when its backward
comes, followed by the rest.

Glossary
    s, t        first and last block of a range
    c           first block after a group that begins the range
    m           slots of memory for the range, beyond what is held at its beginning
    T[s, t][m]  least time of the range's forwards and backwards
    K_o, F_o, B_o   bytes that a block keeps in option o; peaks of its forward and its backward
    V[s, c]     bytes of the values made in s … c − 1 and read from c on
    R[s, c]     seconds of the second forward of a group s … c − 1

    T[s, t][m] = min of
        T_o + T[s + 1, t][m − K_o − V[s, s + 1]]      for each o with F_o, B_o ≤ m
        R[s, c] + T[s, c − 1][m] + T[c, t][m − V[s, c]]   for each c with all first forwards ≤ m

This is Beaumont et al. 2019 (Optimal checkpointing for heterogeneous chains, theorem 1), with
several options a block as in Rockmate (Zhao et al. 2023, section 3.3), and with values that skip
blocks, which are held for the whole range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._strategies.segments import weights_bytes

# Sizes are rounded up to slots; this many are what the chain takes without rematerialization.
NUM_SLOTS = 400


def persistent_selections(chain: Chain) -> Iterator[Selection]:
    """The optimal persistent schedules of a chain for every number of slots, from the most memory
    to the least that suffices; consecutive equal ones once."""
    table = _Table(chain)
    before = None
    for slots in range(NUM_SLOTS, -1, -1):
        if np.isfinite(table.times[0, len(chain) - 1][slots]):
            selection = table.selection(slots)
            if selection != before:
                yield selection
            before = selection


@dataclass(frozen=True, slots=True)
class _Step:
    """How a block is run alone: option, time, and slots for its peaks and for what it keeps."""

    option: int
    time_s: float
    peak_slots: int
    kept_slots: int


class _Table:
    """The dynamic program of one chain.

    Attributes:
        times: T, by range; an array over slots.
    """

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        peaks = [
            max(o.cost.forward_peak_bytes, o.cost.backward_peak_bytes)
            + chain.pending_cotangent_bytes(k)
            for k, options in enumerate(chain.options)
            for o in options
        ]
        # Everything kept, and the highest of all peaks on top: no range takes more.
        self._slot = max(1, math.ceil((sum(weights_bytes(chain)) + max(peaks)) / NUM_SLOTS))
        n = len(chain)
        self._crossing = self._crossing_slots()
        self._steps = [self._steps_of(k) for k in range(n)]
        self.times: dict[Group, np.ndarray] = {}
        # What begins the best schedule of a range: −1 − i for the i-th step of the first block,
        # else the c of a group.
        self._begins: dict[Group, np.ndarray] = {}
        for s in range(n - 1, -1, -1):
            for t in range(s, n):
                self._fill(s, t)

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self._slot)

    def _crossing_slots(self) -> list[list[int]]:
        """V in slots, by s and c."""
        n = len(self._chain)
        crossing = [[0] * (n + 1) for _ in range(n + 1)]
        for s in range(n):
            for c in range(s + 1, n + 1):
                crossing[s][c] = self._slots(
                    sum(
                        v.size_bytes
                        for v in self._chain.boundary_values
                        if s <= v.producer < c <= v.readers[-1]
                    )
                )
        return crossing

    def _steps_of(self, block: int) -> list[_Step]:
        chain = self._chain
        pending = chain.pending_cotangent_bytes(block)
        own = [v for v in chain.boundary_values if v.producer == block]
        steps = []
        for o, option in enumerate(chain.options[block]):
            reads = sum(v.size_bytes for v in own if (block, o) in v.needed)
            cost = option.cost
            steps.append(
                _Step(
                    option=o,
                    time_s=cost.time_s,
                    peak_slots=self._slots(
                        max(cost.forward_peak_bytes, cost.backward_peak_bytes + pending + reads)
                    ),
                    kept_slots=self._slots(cost.kept_bytes),
                )
            )
        return steps

    def _fill(self, s: int, t: int) -> None:
        times = np.full(NUM_SLOTS + 1, np.inf)
        begins = np.zeros(NUM_SLOTS + 1, np.int32)

        def offer(candidate: np.ndarray, code: int) -> None:
            better = candidate < times
            times[better] = candidate[better]
            begins[better] = code

        for i, step in enumerate(self._steps[s]):
            rest = np.zeros(NUM_SLOTS + 1)
            if s < t:
                held = step.kept_slots + self._crossing[s][s + 1]
                rest = _later(self.times[s + 1, t], held)
            offer(_from(step.time_s + rest, step.peak_slots), -1 - i)
        for c, forward_slots, again_s in self._groups(s, t):
            rest = _later(self.times[c, t], self._crossing[s][c])
            offer(_from(again_s + self.times[s, c - 1] + rest, forward_slots), c)
        self.times[s, t] = times
        self._begins[s, t] = begins

    def _groups(self, s: int, t: int) -> Iterator[tuple[int, int, float]]:
        """The groups of two blocks or more that can begin a range: the block after the group, slots
        for its first forward, seconds of its second."""
        chain = self._chain
        forward_slots, again_s = 0, 0.0
        for c in range(s + 1, t + 1):
            block = c - 1
            if block in chain.effectful:
                return
            first = chain.options[block][-1].cost.forward_peak_bytes
            forward_slots = max(forward_slots, self._crossing[s][block] + self._slots(first))
            if c - s >= 2:
                yield c, forward_slots, again_s + chain.last_recompute_s[block][0]
            again_s += chain.recompute_s[block]

    def selection(self, slots: int) -> Selection:
        """The best schedule in an amount of memory for which there is one."""
        options = [0] * len(self._chain)
        groups: list[Group] = []
        ranges = [(0, len(self._chain) - 1, slots)]
        while ranges:
            s, t, m = ranges.pop()
            begin = int(self._begins[s, t][m])
            if begin >= 0:
                groups.append((s, begin - 1))
                ranges += [(s, begin - 1, m), (begin, t, m - self._crossing[s][begin])]
                continue
            step = self._steps[s][-1 - begin]
            options[s] = step.option
            if s < t:
                ranges.append((s + 1, t, m - step.kept_slots - self._crossing[s][s + 1]))
        return Selection(tuple(options), tuple(sorted(groups, key=lambda g: (g[0], -g[1]))))


def _later(times: np.ndarray, held_slots: int) -> np.ndarray:
    """The times of a range that has `held_slots` fewer slots than the index says."""
    shifted = np.full_like(times, np.inf)
    if held_slots <= NUM_SLOTS:
        shifted[held_slots:] = times[: NUM_SLOTS + 1 - held_slots]
    return shifted


def _from(times: np.ndarray, least_slots: int) -> np.ndarray:
    """The times, infinite below a least number of slots."""
    bounded = times.copy()
    bounded[:least_slots] = np.inf
    return bounded
