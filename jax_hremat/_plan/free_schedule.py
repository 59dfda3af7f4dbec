"""What a schedule takes that nested checkpoints cannot say."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FreeSchedule:
    """A schedule that drops and computes the values of blocks in any order, as simulated. No
    program is emitted for it, so nothing of it is compiled or certified.

    Attributes:
        peak_bytes: Its simulated peak, with arguments, results and constants.
        step_s: Predicted seconds of the step with it; in a strategy's choices, those of the blocks.
        found_by: What found it, and what that proved.
    """

    peak_bytes: int
    step_s: float
    found_by: str
