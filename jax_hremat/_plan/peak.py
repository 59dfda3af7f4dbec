"""Live memory of a step: predicted for each moment, and as compiled, at the peak."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Moment:
    """Predicted maximum of live memory while one block runs, but for arguments, results and
    constants.

    Attributes:
        block: The block.
        in_backward: Whether the block's backward runs, rather than its forward.
        kept_bytes: What blocks hold for their backwards.
        passed_bytes: Values that pass from block to block, and their cotangents.
        working_bytes: Working memory of the block itself.
        reused_bytes: The part of these bytes that XLA places in the memory of results that are not
            written yet.
        duration_s: Predicted seconds of the moment; a backward includes the recompute of the block,
            which in a group runs earlier, before the backward of the group's last block.
    """

    block: int
    in_backward: bool
    kept_bytes: int
    passed_bytes: int
    working_bytes: int
    reused_bytes: int = 0
    duration_s: float = 0.0

    @property
    def live_bytes(self) -> int:
        """Live bytes, without those placed in the memory of results."""
        return self.kept_bytes + self.passed_bytes + self.working_bytes - self.reused_bytes


@dataclass(frozen=True, slots=True)
class BufferReport:
    """One of the largest buffers alive at the compiled step's peak.

    Attributes:
        size_bytes: Its size.
        text: Its dtype and shape.
        kind: "temp", "parameter", "output" or "constant".
        made_by: The operation that made it, with its scope; for an argument, its path; for a
            constant, an operation that reads it, or empty if XLA does not say.
    """

    size_bytes: int
    text: str
    kind: str
    made_by: str
