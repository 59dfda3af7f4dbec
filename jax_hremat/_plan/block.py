"""Report of what a plan does with one block, in words and bytes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What was decided for one block.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        scope: `jax.named_scope` path of the block (Flax linen: the module path); where there is
            none, the path of the parameters that it reads (Flax NNX: the module path); where there
            are none either, `source`.
        decision: What is done, in words.
        kept_bytes: Bytes of its residuals: what is held between the block's forward and its
            backward, without its inputs.
        plain_bytes: Bytes of its residuals without rematerialization.
        added_s: Estimated seconds added to the step; negative if the step gets faster.
        recomputed: Number of operations that are recomputed.
        saved: Names, shapes, bytes and source lines of the values kept by name, largest first; of a
            scan, the values made in a step that each step keeps.
        source: The line of the user's code that the block's first differentiated operation comes
            from; empty if all come from installed packages.
        runs: The runs of operations that have a checkpoint of their own inside the block, or inside
            each step of its scan.
    """

    start: int
    stop: int
    scope: str
    decision: str
    kept_bytes: int
    plain_bytes: int
    added_s: float
    recomputed: int
    saved: tuple[str, ...]
    source: str
    runs: tuple[str, ...] = ()
