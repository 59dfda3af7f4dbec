"""What a schedule takes that nested checkpoints cannot say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreeSchedule:
    """A schedule that drops and computes the values of blocks in any order, as simulated. No
    program is emitted for it, so nothing of it is compiled or certified.

    Attributes:
        peak_bytes: Its simulated peak, arguments and results included.
        added_s: Predicted seconds that it adds to the step without rematerialization.
        found_by: What found it, and what that proved.
    """

    peak_bytes: int
    added_s: float
    found_by: str
