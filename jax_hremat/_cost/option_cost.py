"""The cost of a block under one option, as every source of costs states it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OptionCost:
    """The cost of one block under one option.

    Attributes:
        forward_s: Time of the kernels before the mark.
        backward_s: Time of the kernels after the mark, recomputation included.
        kept_bytes: Buffers made by the block's forward and read by its backward; the block's
            inputs and outputs are not counted.
        kept_inputs: Positions in `Block.inputs` of computed values that the backward reads.
        kept_outputs: Positions in `Block.outputs` of values that the backward reads.
        forward_peak_bytes: Most bytes at once in the forward: buffers made inside, outputs.
        backward_peak_bytes: Most bytes at once in the backward: kept buffers, temporaries,
            cotangents of the outputs until last read, cotangents of computed inputs.
        kept_sizes: Bytes of each kept buffer; empty where only their sum is known.
        forward_sizes: Bytes of each buffer that is live at the forward's peak; empty likewise.
        backward_sizes: Bytes of each buffer that is live at the backward's peak; empty likewise.
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
        """Forward and backward together."""
        return self.forward_s + self.backward_s
