"""The program of one level of a hierarchy: the option of each part, what is kept, what runs again.

The hierarchical program of H-Rockmate (2023) and HiRemate (Gusak et al., ICML 2025): Checkmate's
stages (`checkmate.py`) with parts in place of operations. A part runs its forward in one of several
options, and its backward in the option of a forward. What is kept inside a part is one value for
each option: it is made by a forward in that option, and read by the backward. Here a backward runs
once, in the stage of its own, so what gradients take in each stage is known beforehand.

Glossary
  indices
    t           stages: the forward of each part in order, then the backward of each in reverse
    c           parts; b(c) is the stage of the backward of c
    o           options of a part; option 0 of a forward only hands on, and has no backward
    i           values that pass between parts; c(i) makes i
    q           readers of i in a stage, in order
  variables
    C_{t,c,o}   1 if the forward of c runs in option o in stage t
    Q_{c,o}     1 if the backward of c is that of option o
    S_{t,i}     1 if i is there when stage t begins
    K_{t,c,o}   1 if what option o keeps inside c is there when stage t begins
    H_{t,i,q}   1 if i is held in stage t until its q-th reader or longer
  data
    f_{c,o}, F_{c,o}    time and peak of the forward of c in option o
    b_{c,o}, B_{c,o}    time and peak of the backward of c in option o
    m_i, k_{c,o}        bytes of i, and of what option o keeps inside c
    g_t                 bytes of gradients in stage t that are not its own
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_hremat._solve.backend import SolverConfig, Status, solve
from jax_hremat._solve.expressions import Index, Term, Vector, at_most, equal, linear
from jax_hremat._solve.modelling import cp


@dataclass(frozen=True, slots=True)
class PartOption:
    """One complete way to run a part, forward and backward.

    Attributes:
        forward_s: Seconds of the forward.
        forward_peak_bytes: Its peak, what it makes and keeps included, what it reads not.
        kept_bytes: What it keeps inside the part for its backward.
        keeps: Whether there is anything of that, were it of no size; if not, its forward is the one
            that hands on.
        backward_s: Seconds of the backward.
        backward_peak_bytes: Its peak, what it makes and what was kept inside the part included.
        backward_reads: The values passing between parts that the backward reads.
    """

    forward_s: float
    forward_peak_bytes: int
    kept_bytes: int
    keeps: bool
    backward_s: float
    backward_peak_bytes: int
    backward_reads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a level.

    Attributes:
        reads: The values passing between parts that its forward reads.
        makes: Those that it makes.
        hand_on_s: Seconds of the forward that only makes these.
        hand_on_peak_bytes: Its peak, what it makes included, what it reads not.
        options: Its options; none if it has no backward.
        gradient_bytes: Gradients that are there during its backward, and are not of its own making.
    """

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    hand_on_s: float
    hand_on_peak_bytes: int
    options: tuple[PartOption, ...]
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class Level:
    """Parts in the order of their forwards, and what passes between them.

    Attributes:
        parts: Each reads only what earlier ones make.
        value_bytes: Sizes of the values passing between parts.
        handed_on: Values that what follows the level reads: they are there when its last forward
            has run, and their keeping is for others to count.
        results: Values that must be there at the end.
    """

    parts: tuple[Part, ...]
    value_bytes: tuple[int, ...]
    handed_on: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Run:
    """A forward or a backward of a part.

    Attributes:
        part: Which part.
        option: Which of its options; None for the forward that only hands on.
        is_backward: Whether it is the backward.
    """

    part: int
    option: int | None
    is_backward: bool


def fastest_runs(
    level: Level, peak_bytes: int, kept_bytes: int | None, config: SolverConfig
) -> tuple[tuple[Run, ...], tuple[Run, ...]] | None:
    """The fastest runs, before and after the last forward has run for the first time.

    Args:
        level: The parts.
        peak_bytes: Bound on the peak.
        kept_bytes: Bound on what is kept between these, values handed on left out; None for none.
        config: The solver's limits.

    Returns:
        The runs; None if there are none within the bounds, or if none were found within the limit
        of nodes.

    Raises:
        SolverError: The solver failed.
    """
    if _exceeds(level, peak_bytes):
        return None
    program = _Program(level)
    rows = program.rows(peak_bytes, kept_bytes)
    problem = cp.Problem(cp.Minimize(program.passes()), rows)
    outcome = solve(problem, config)
    if outcome.status in (Status.INFEASIBLE, Status.UNDECIDED):
        return None
    return program.runs()


def _exceeds(level: Level, peak_bytes: int) -> bool:
    """Whether some part takes more than this by itself, in all of its options."""
    return any(
        min(
            [
                part.hand_on_peak_bytes,
                *(option.forward_peak_bytes for option in part.options if option.keeps),
            ]
        )
        > peak_bytes
        or (
            part.options
            and part.gradient_bytes + min(option.backward_peak_bytes for option in part.options)
            > peak_bytes
        )
        for part in level.parts
    )


class _Program:
    """Variables and rows over one level."""

    def __init__(self, level: Level) -> None:
        self._level = level
        parts = level.parts
        n = self._n = len(parts)
        # Stage t is the forward of part t, or a backward.
        self._backward = [c for c in reversed(range(n)) if parts[c].options]
        self._stage_of = {c: n + k for k, c in enumerate(self._backward)}
        self._num_stages = n + len(self._backward)
        self._maker = {i: c for c, part in enumerate(parts) for i in part.makes}
        self._readers = {t: self._readers_in(t) for t in range(self._num_stages)}
        options = [(c, o) for c, part in enumerate(parts) for o in range(1, len(part.options) + 1)]
        kept = [(c, o) for c, o in options if parts[c].options[o - 1].keeps]
        # A forward that keeps nothing inside is the one that hands on.
        runs = {c: [0, *(o for d, o in kept if d == c)] for c in range(n)}
        self._vectors = {
            "C": Vector.of(
                "C",
                [
                    (t, c, o)
                    for t in range(self._num_stages)
                    for c in range(self._num_forwards(t))
                    for o in runs[c]
                    if o == 0 or t <= self._stage_of[c]
                ],
                binary=True,
            ),
            "Q": Vector.of("Q", options, binary=True),
            "S": Vector.of(
                "S",
                [
                    (t, i)
                    for t in range(1, self._num_stages + 1)
                    for i, c in self._maker.items()
                    if c < t and (t <= n or c < self._num_forwards(t) or i in level.results)
                ],
                binary=True,
            ),
            "K": Vector.of(
                "K",
                [(t, c, o) for c, o in kept for t in range(c + 1, self._stage_of[c] + 1)],
                binary=True,
            ),
            "H": Vector.of(
                "H",
                [
                    (t, i, q)
                    for t, readers in self._readers.items()
                    for i in readers
                    for q in range(len(readers[i]))
                ],
                binary=False,
            ),
        }

    def _num_forwards(self, t: int) -> int:
        """How many parts, from the first, may run their forward in stage t."""
        if t < self._n:
            return t + 1
        return self._backward[t - self._n] + 1 if t < self._num_stages else 0

    def _readers_in(self, t: int) -> dict[int, list[int]]:
        """For each value, the runs of the stage that may read it: forwards by their part, and the
        backward, behind all of them, as the number of parts."""
        readers: dict[int, list[int]] = {}
        for c in range(self._num_forwards(t)):
            for i in self._level.parts[c].reads:
                readers.setdefault(i, []).append(c)
        if t >= self._n:
            options = self._level.parts[self._backward[t - self._n]].options
            for i in sorted({i for option in options for i in option.backward_reads}):
                readers.setdefault(i, []).append(self._n)
        return readers

    def passes(self) -> Any:
        """Objective:  min Σ f_{c,o} C_{t,c,o} + Σ b_{c,o} Q_{c,o}, in units of running all once."""
        parts = self._level.parts
        total_s = math.fsum(
            part.hand_on_s + max((option.backward_s for option in part.options), default=0.0)
            for part in parts
        )
        row: list[Term] = []
        for t, c, o in self._vectors["C"].places:
            time_s = parts[c].options[o - 1].forward_s if o else parts[c].hand_on_s
            row.append((time_s / (total_s or 1.0), "C", (t, c, o)))
        for c, o in self._vectors["Q"].places:
            time_s = parts[c].options[o - 1].backward_s
            row.append((time_s / (total_s or 1.0), "Q", (c, o)))
        return linear(self._vectors, [row])[0]

    def rows(self, peak_bytes: int, kept_bytes: int | None) -> list[Any]:
        """All constraints."""
        return [*self._run_rows(), *self._keep_rows(), *self._peak_rows(peak_bytes, kept_bytes)]

    def _run_rows(self) -> list[Any]:
        parts, n = self._level.parts, self._n
        # Stage t < n runs the forward of part t; no forward runs twice in a stage.
        #   Σ_o C_{t,t,o} = 1,   Σ_o C_{t,c,o} ≤ 1.
        ones = [self._forward(c, c) for c in range(n)]
        once = [
            self._forward(t, c)
            for t in range(self._num_stages)
            for c in range(self._num_forwards(t))
        ]
        # What a forward reads is there or is made:  Σ_o C_{t,c,o} ≤ S_{t,i} + Σ_o C_{t,c(i),o}.
        reads = [
            [*self._forward(t, c), *self._there(t, i, -1.0)]
            for t in range(self._num_stages)
            for c in range(self._num_forwards(t))
            for i in parts[c].reads
        ]
        # Each backward runs in one option:  Σ_o Q_{c,o} = 1, with what it reads:
        #   Q_{c,o} ≤ S_{b(c),i} + Σ_o C_{b(c),c(i),o},   Q_{c,o} ≤ K_{b(c),c,o} + C_{b(c),c,o}.
        for c, stage in self._stage_of.items():
            ones.append([(1.0, "Q", (c, o)) for o in range(1, len(parts[c].options) + 1)])
            for o, option in enumerate(parts[c].options, 1):
                chosen: Term = (1.0, "Q", (c, o))
                reads += [[chosen, *self._there(stage, i, -1.0)] for i in option.backward_reads]
                if option.keeps:
                    inside = [(-1.0, "K", (stage, c, o)), (-1.0, "C", (stage, c, o))]
                    reads.append([chosen, *inside])
        return [
            *equal(self._vectors, ones, 1),
            *at_most(self._vectors, once, 1),
            *at_most(self._vectors, reads, 0),
        ]

    def _keep_rows(self) -> list[Any]:
        # What is kept was there or was made:
        #   S_{t+1,i} ≤ S_{t,i} + Σ_o C_{t,c(i),o},   K_{t+1,c,o} ≤ K_{t,c,o} + C_{t,c,o}.
        kept: list[list[Term]] = [
            [(1.0, "S", (t, i)), *self._there(t - 1, i, -1.0)] for t, i in self._vectors["S"].places
        ]
        for t, c, o in self._vectors["K"].places:
            before = [(-1.0, "K", (t - 1, c, o)), (-1.0, "C", (t - 1, c, o))]
            kept.append([(1.0, "K", (t, c, o)), *before])
        # A forward that keeps something inside is for later, or for the backward of its option:
        #   C_{t,c,o} ≤ K_{t+1,c,o},   C_{b(c),c,o} ≤ Q_{c,o},   for o > 0.
        for t, c, o in self._vectors["C"].places:
            if o:
                last = t == self._stage_of[c]
                use: Term = (-1.0, "Q", (c, o)) if last else (-1.0, "K", (t + 1, c, o))
                kept.append([(1.0, "C", (t, c, o)), use])
        # Held until a reader that runs, or kept after the stage:
        #   H_{t,i,q} ≥ Σ_o C_{t,c,o} or Q_{b,o},   H_{t,i,q} ≥ H_{t,i,q+1},   at last S_{t+1,i}.
        for t, readers in self._readers.items():
            for i, runs in readers.items():
                for q, run in enumerate(runs):
                    held: Term = (-1.0, "H", (t, i, q))
                    kept.append([*self._reading(t, i, run), held])
                    kept.append([self._holds(t, i, q + 1, 1.0), held])
        # Results are there at the end, and what is handed on when the backwards begin.
        wanted = [(self._num_stages, i) for i in sorted(self._level.results)]
        wanted += [(self._n, i) for i in sorted(self._level.handed_on)]
        ends = [[(1.0, "S", index)] for index in wanted]
        return [*at_most(self._vectors, kept, 0), *equal(self._vectors, ends, 1)]

    def _peak_rows(self, peak_bytes: int, kept_bytes: int | None) -> list[Any]:
        # While a run takes its turn, there are its own peak if it runs, what is held for it or
        # longer, what later forwards of the stage would make and is there, what is kept inside
        # parts, and gradients:
        #   Σ_o F_{c,o} C_{t,c,o} + Σ_i m_i (H or S) + Σ k_{c',o} K_{c',o} + g_t ≤ B.
        parts = self._level.parts
        whole_bytes = max(peak_bytes, 1)
        rows, room = [], []
        for t in range(self._num_stages):
            runs: list[int] = [*range(self._num_forwards(t))]
            gradient_bytes = 0
            if t >= self._n:
                runs.append(self._n)
                gradient_bytes = parts[self._backward[t - self._n]].gradient_bytes
            for run in runs:
                there = [*self._own_peak(t, run), *self._values(t, run), *self._inside(t, run)]
                rows.append([(size / whole_bytes, name, index) for size, name, index in there])
                room.append((peak_bytes - gradient_bytes) / whole_bytes)
        found = at_most(self._vectors, rows, np.array(room))
        if kept_bytes is not None:
            # What is kept when the backwards begin:  Σ_i m_i S_{n,i} + Σ k_{c,o} K_{n,c,o} ≤ kept.
            sizes = self._level.value_bytes
            kept: list[Term] = [
                (float(sizes[i]), "S", (self._n, i))
                for i in self._maker
                if i not in self._level.handed_on
            ]
            kept += [
                (float(parts[c].options[o - 1].kept_bytes), "K", (t, c, o))
                for t, c, o in self._vectors["K"].places
                if t == self._n
            ]
            whole_bytes = max(kept_bytes, 1)
            row = [(size / whole_bytes, name, index) for size, name, index in kept]
            found += at_most(self._vectors, [row], kept_bytes / whole_bytes)
        return found

    def _own_peak(self, t: int, run: int) -> list[Term]:
        parts = self._level.parts
        if run == self._n:
            c = self._backward[t - self._n]
            return [
                (float(option.backward_peak_bytes), "Q", (c, o))
                for o, option in enumerate(parts[c].options, 1)
            ]
        return [
            (
                float(
                    parts[run].options[o - 1].forward_peak_bytes
                    if o
                    else parts[run].hand_on_peak_bytes
                ),
                name,
                (t, c, o),
            )
            for _, name, (t, c, o) in self._forward(t, run)
        ]

    def _values(self, t: int, run: int) -> list[Term]:
        row = []
        for i, c in self._maker.items():
            size = float(self._level.value_bytes[i])
            if c >= run:
                row.append((size, "S", (t, i)))
            else:
                runs = self._readers[t].get(i, [])
                q = next((q for q, reader in enumerate(runs) if reader >= run), len(runs))
                row.append(self._holds(t, i, q, size))
        return row

    def _inside(self, t: int, run: int) -> list[Term]:
        row: list[Term] = []
        for c, stage in self._stage_of.items():
            for o, option in enumerate(self._level.parts[c].options, 1):
                size = float(option.kept_bytes)
                if t > stage or (t == stage and run == self._n):
                    # The backward's own peak has it.
                    continue
                if c >= run:
                    row.append((size, "K", (t, c, o)))
                elif t < stage:
                    row.append((size, "K", (t + 1, c, o)))
                else:
                    row += [(size, "K", (t, c, o)), (size, "C", (t, c, o))]
        return row

    def _forward(self, t: int, c: int) -> list[Term]:
        """Σ_o C_{t,c,o}."""
        options = range(len(self._level.parts[c].options) + 1)
        return [(1.0, "C", (t, c, o)) for o in options if (t, c, o) in self._vectors["C"].places]

    def _there(self, t: int, i: int, factor: float) -> list[Term]:
        """The factor times S_{t,i} + Σ_o C_{t,c(i),o}."""
        made = [(factor, name, index) for _, name, index in self._forward(t, self._maker[i])]
        return [(factor, "S", (t, i)), *made]

    def _reading(self, t: int, i: int, run: int) -> list[Term]:
        """One if a run of the stage reads i."""
        if run < self._n:
            return self._forward(t, run)
        c = self._backward[t - self._n]
        return [
            (1.0, "Q", (c, o))
            for o, option in enumerate(self._level.parts[c].options, 1)
            if i in option.backward_reads
        ]

    def _holds(self, t: int, i: int, q: int, factor: float) -> Term:
        if q < len(self._readers[t].get(i, [])):
            return (factor, "H", (t, i, q))
        return (factor, "S", (t + 1, i))

    def runs(self) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
        """The answer, in order."""
        chosen = {name: self._chosen(vector) for name, vector in self._vectors.items()}
        halves: tuple[list[Run], list[Run]] = ([], [])
        for t in range(self._num_stages):
            half = halves[t >= self._n]
            for c in range(self._num_forwards(t)):
                for _, _, (_, _, o) in self._forward(t, c):
                    if (t, c, o) in chosen["C"]:
                        half.append(Run(c, o - 1 if o else None, is_backward=False))
            if t >= self._n:
                c = self._backward[t - self._n]
                (chosen_option,) = (o for d, o in chosen["Q"] if d == c)
                half.append(Run(c, chosen_option - 1, is_backward=True))
        return tuple(halves[0]), tuple(halves[1])

    def _chosen(self, vector: Vector) -> frozenset[Index]:
        values = vector.variable.value
        if values is None:
            assert not vector.places, "only what is in no row has no value"
            return frozenset()
        return frozenset(index for index, place in vector.places.items() if values[place] > 0.5)
