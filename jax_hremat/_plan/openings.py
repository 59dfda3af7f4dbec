"""What of a program is taken apart before it is planned, where its user asks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Openings:
    """Parts of a program that are planned as if they were written in another way.

    Attributes:
        checkpoints: Whether its own `jax.checkpoint`s are as if they were not there.
        scan_steps: Scans of at most so many steps are as if their steps were written one after
            another; 0 for none. Those inside longer scans, conds and custom rules stay.
    """

    checkpoints: bool = False
    scan_steps: int = 0


NOTHING_OPENED = Openings()
