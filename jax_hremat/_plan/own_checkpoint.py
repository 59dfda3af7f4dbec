"""A `jax.checkpoint` that a program has of its own, before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnCheckpoint:
    """One place of the user's code that checkpoints.

    Attributes:
        source: Its line.
        keeps: Its policy; empty for none, which keeps nothing.
        count: How often a step runs into it; each step of a loop counts.
    """

    source: str
    keeps: str
    count: int

    def __str__(self) -> str:
        keeping = f" under {self.keeps}" if self.keeps else ""
        return f"{self.count} × jax.checkpoint{keeping} at {self.source}"


def words(found: Sequence[OwnCheckpoint]) -> str:
    """All of them in one line; empty if there are none."""
    return ", ".join(map(str, found))
