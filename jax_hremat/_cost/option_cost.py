"""The cost of a block under one option, as every source of costs states it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from jax_hremat._cost.profile import Profile

# As the last position of a buffer: it is alive up to the end of the phase.
TO_THE_END = sys.maxsize


class LiveRange(NamedTuple):
    """A buffer, and the positions of a phase at which it is alive.

    Attributes:
        size_bytes: Its size.
        first: The first position.
        last: The last one.
        of_constants: Whether it is made of constants alone, such as the zeros that a scatter adds
            to.
    """

    size_bytes: int
    first: int = 0
    last: int = TO_THE_END
    of_constants: bool = False

    def is_alive(self, position: int) -> bool:
        """Whether it is alive at a position."""
        return self.first <= position <= self.last


class Phase(NamedTuple):
    """The memory of a block's forward or backward, position by position in the order of its
    schedule. The positions are those at which buffers begin to be alive.

    Attributes:
        buffers: Its buffers, but for those that the block keeps from its forward to its backward,
            and those below; empty where they are not known.
        live_bytes: At each position, the bytes alive in the block, kept ones and what loops need
            inside included; empty where they are not known.
        cotangents: What a backward receives from those of later blocks: cotangents of the block's
            outputs, by position in `Block.outputs`.
        gradients: What a backward makes for those of earlier blocks: cotangents of the block's
            inputs, and its parts of the gradients of arguments that earlier blocks read, too, by
            position in `Block.inputs`.
    """

    buffers: tuple[LiveRange, ...] = ()
    live_bytes: tuple[int, ...] = ()
    cotangents: tuple[tuple[int, LiveRange], ...] = ()
    gradients: tuple[tuple[int, LiveRange], ...] = ()

    @property
    def peak(self) -> int:
        """The first position with most bytes alive."""
        return self.live_bytes.index(max(self.live_bytes)) if self.live_bytes else 0

    @property
    def sizes_at_peak(self) -> tuple[int, ...]:
        """Bytes of each of its buffers that is alive there."""
        peak = self.peak
        passed = (buffer for _, buffer in (*self.cotangents, *self.gradients))
        return tuple(b.size_bytes for b in (*self.buffers, *passed) if b.is_alive(peak))


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
            cotangents of the outputs until last read, cotangents of computed inputs, partial
            gradients.
        kept_buffers: Each kept buffer, alive from a position of the forward to one of the backward;
            empty where only their sum is known.
        forward: The forward, position by position, where it is known.
        backward: The backward, likewise.
        profile: What each operation takes; of a plain block alone.
    """

    forward_s: float
    backward_s: float
    kept_bytes: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int
    kept_buffers: tuple[LiveRange, ...] = ()
    forward: Phase = Phase()
    backward: Phase = Phase()
    profile: Profile | None = field(default=None, repr=False, compare=False)

    @property
    def kept_sizes(self) -> tuple[int, ...]:
        """Bytes of each kept buffer."""
        return tuple(buffer.size_bytes for buffer in self.kept_buffers)

    @property
    def forward_sizes(self) -> tuple[int, ...]:
        """Bytes of each buffer that is alive at the forward's peak; empty if not known."""
        kept = (b.size_bytes for b in self.kept_buffers if b.first <= self.forward.peak)
        return (*kept, *self.forward.sizes_at_peak)

    @property
    def backward_sizes(self) -> tuple[int, ...]:
        """The same at the backward's peak."""
        kept = (b.size_bytes for b in self.kept_buffers if self.backward.peak <= b.last)
        return (*kept, *self.backward.sizes_at_peak)

    @property
    def unbound_bytes(self) -> int:
        """Bytes of what the backward makes of constants alone: nothing that it reads keeps XLA from
        making it earlier in the step, where it waits for the backward."""
        return sum(b.size_bytes for b in self.backward.buffers if b.of_constants)

    @property
    def time_s(self) -> float:
        """Forward and backward together."""
        return self.forward_s + self.backward_s
