"""What a block costs in one mode: what every source of costs says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptionCost:
    """One block, run in one way.

    Attributes:
        forward_s: Kernels before the mark.
        backward_s: Kernels after it, recomputation included.
        kept_bytes: Buffers made by the block's forward and read by its backward; the block's
            inputs and outputs are not counted.
        kept_inputs: Positions in `Block.inputs` of computed values that the backward reads.
        kept_outputs: Positions in `Block.outputs` of values that the backward reads.
        forward_peak_bytes: Most bytes at once in the forward: buffers made inside, outputs.
        backward_peak_bytes: Most bytes at once in the backward: kept buffers, temporaries,
            cotangents of the outputs until last read, cotangents of computed inputs.
        kept_sizes: Bytes of each of the kept buffers; empty where only their sum is known.
        forward_sizes: Of each buffer that is there at the forward's peak; likewise.
        backward_sizes: Of each that is there at the backward's peak; likewise.
    """

    forward_s: float
    backward_s: float
    kept_bytes: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int
    kept_sizes: tuple[int, ...] = ()
    forward_sizes: tuple[int, ...] = ()
    backward_sizes: tuple[int, ...] = ()

    @property
    def time_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s
