"""A `jax.checkpoint` that the user's program contains before anything is planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OwnCheckpoint:
    """One place in the user's code that checkpoints.

    Attributes:
        source: Its source line.
        keeps: Its policy; empty if it has none and so keeps nothing.
        count: How often it is reached in one training step; each step of a loop counts.
    """

    source: str
    keeps: str
    count: int

    def __str__(self) -> str:
        keeping = f" under {self.keeps}" if self.keeps else ""
        return f"{self.count} × jax.checkpoint{keeping} at {self.source}"


def words(found: Sequence[OwnCheckpoint]) -> str:
    """All checkpoints in one line of text; empty if there are none."""
    return ", ".join(map(str, found))
