"""Report of what a plan does with one block, in words and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from jax_hremat._plan.place import Place


@dataclass(frozen=True, slots=True)
class BlockReport:
    """What was decided for one block.

    Attributes:
        start: First operation.
        stop: One past the last operation.
        place: Where it is: by the `jax.named_scope`s of its operations (Flax linen: the module
            path); where there are none, by the parameters that it reads (Flax NNX: the module
            path); with the line of its first differentiated operation, empty if all come from
            installed packages.
        decision: What is done, in words.
        kept_bytes: Bytes of its residuals: what is held between the block's forward and its
            backward, without its inputs.
        plain_bytes: Bytes of its residuals without rematerialization.
        added_s: Estimated seconds added to the step; negative if the step gets faster.
        recomputed: Number of operations that are recomputed.
        saved: Names, shapes, bytes and source lines of the values kept by name, largest first; of a
            scan, the values made in a step that each step keeps.
        runs: The runs of operations that have a checkpoint of their own inside the block, or inside
            each step of its scan.
    """

    start: int
    stop: int
    place: Place
    decision: str
    kept_bytes: int
    plain_bytes: int
    added_s: float
    recomputed: int
    saved: tuple[str, ...]
    runs: tuple[str, ...] = ()

    @property
    def scope(self) -> str:
        """Where it is, as text."""
        return str(self.place)

    @property
    def source(self) -> str:
        """The line of its first differentiated operation; empty if that is not known."""
        return self.place.source
