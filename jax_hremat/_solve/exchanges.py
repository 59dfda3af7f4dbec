"""Exchanges: one column in place of one or two columns of a schedule.

The root program bounds what output-buffer reuse saves (`_solve/assumed_reuse.py`), and under what
one schedule really saves it finds no faster one, since another saves more elsewhere. So a schedule
that fits is made faster step by step, each step predicted with its own reuse. Looked at are the
exchanges that fit as far as the bound tells, with all other columns as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jax_hremat._solve.ahead import ROUNDING_MS, ByBlock, Room
from jax_hremat._solve.column import Column
from jax_hremat._solve.families import Families, Sets

# The most columns of a schedule that one column replaces.
_MOST_REPLACED = 2


class Exchange(NamedTuple):
    """One column in place of others.

    Attributes:
        saved_ms: The time that it saves.
        at: The position in the schedule of the first column that it replaces.
        num_replaced: How many it replaces.
        column: The column.
    """

    saved_ms: float
    at: int
    num_replaced: int
    column: Column

    def made_in(self, schedule: Sequence[Column]) -> tuple[Column, ...]:
        """The schedule after the exchange."""
        return (*schedule[: self.at], self.column, *schedule[self.at + self.num_replaced :])


def exchanges(schedule: Sequence[Column], families: ByBlock, room: Room) -> list[Exchange]:
    """The exchanges that make a schedule faster and fit, those that save most first.

    Args:
        schedule: The columns of the schedule, with what they count.
        families: The columns to choose from.
        room: What memory there is.
    """
    rest = _Rest(schedule, room)
    found: list[Exchange] = []
    stock_bytes, held = 0.0, room.values.none
    for at, column in enumerate(schedule):
        for count in range(1, min(_MOST_REPLACED, len(schedule) - at) + 1):
            replaced = schedule[at : at + count]
            own_ms = sum(p.added_ms for p in replaced)
            blocks = range(column.first, replaced[-1].last + 1)
            for some in (each for each in families[column.first] if each.blocks == blocks):
                saved_ms = own_ms - some.added_ms
                saves = saved_ms > ROUNDING_MS
                fits = _fits(some, room, stock_bytes, held, rest, at + count)
                found += [
                    Exchange(float(saved_ms[position]), at, count, some.columns[position])
                    for position in np.flatnonzero(saves & fits).tolist()
                ]
        met, most_bytes = room.of_column(column, held)
        if stock_bytes > most_bytes:
            # It has to be exchanged itself.
            break
        stock_bytes += float(met.stock_bytes[0, 0])
        held = met.held[0]
    return sorted(
        found, key=lambda exchange: (-exchange.saved_ms, exchange.at, exchange.num_replaced)
    )


def _fits(
    some: Families, room: Room, stock_bytes: float, held: Sets, rest: _Rest, after: int
) -> np.ndarray:
    """Whether each column fits after a stock and held values, and the rest of the schedule, from
    position `after` on, after it."""
    met, most_bytes, room_bytes = room.of(some, held)
    after_bytes = np.array([rest.most_bytes(after, each) for each in met.held])
    fits = (stock_bytes <= most_bytes[:, 0]) & (stock_bytes + met.stock_bytes[:, 0] <= after_bytes)
    own_bytes = room_bytes[:, 0] - stock_bytes
    return fits[some.family] & (some.backward_bytes <= own_bytes[some.family])


class _Rest:
    """What a schedule needs from each of its columns on."""

    def __init__(self, schedule: Sequence[Column], room: Room) -> None:
        self._schedule = schedule
        self._room = room
        self._most_bytes: dict[tuple[int, bytes], float] = {}

    def most_bytes(self, at: int, held: Sets) -> float:
        """The largest stock before a column with which it and all later ones fit, given the values
        held before it."""
        walked: list[tuple[tuple[int, bytes], float, float]] = []
        most_bytes = math.inf
        for position in range(at, len(self._schedule)):
            key = position, held.tobytes()
            if key in self._most_bytes:
                most_bytes = self._most_bytes[key]
                break
            met, own_bytes = self._room.of_column(self._schedule[position], held)
            walked.append((key, own_bytes, float(met.stock_bytes[0, 0])))
            held = met.held[0]
        for key, own_bytes, kept_bytes in reversed(walked):
            most_bytes = min(own_bytes, most_bytes - kept_bytes)
            self._most_bytes[key] = most_bytes
        return most_bytes
