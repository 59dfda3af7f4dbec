"""Parts of a program that are opened before planning, if the user asks for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Openings:
    """Parts of a program that are planned as if they were written differently.

    Attributes:
        checkpoints: Whether the program is planned as if its own `jax.checkpoint`s were not there.
        scan_steps: Scans of at most this many steps are planned as if their steps were written one
            after another; 0 for none. Scans inside longer scans, conds and custom rules stay.
    """

    checkpoints: bool = False
    scan_steps: int = 0


NOTHING_OPENED = Openings()
