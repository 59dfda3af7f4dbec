"""What is alive while a step runs: as predicted, moment by moment, and as compiled, at the peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """What is predicted to be alive at most while one block runs, arguments and results apart.

    Attributes:
        block: The block.
        in_backward: Whether it is its backward.
        kept_bytes: What blocks hold for their backwards.
        passed_bytes: Values that pass from block to block, and their cotangents.
        working_bytes: What the block itself takes.
        reused_bytes: Of all that, what lies in the memory of results that are not there yet.
    """

    block: int
    in_backward: bool
    kept_bytes: int
    passed_bytes: int
    working_bytes: int
    reused_bytes: int = 0

    @property
    def live_bytes(self) -> int:
        """What is alive, in memory of its own."""
        return self.kept_bytes + self.passed_bytes + self.working_bytes - self.reused_bytes


@dataclass(frozen=True, slots=True)
class BufferReport:
    """One of the largest buffers alive at the compiled step's peak.

    Attributes:
        size_bytes: Its bytes.
        text: Its dtype and shape.
        kind: "temp", "parameter" or "output".
        made_by: The operation that made it, with its scope; for an argument, its path.
    """

    size_bytes: int
    text: str
    kind: str
    made_by: str
