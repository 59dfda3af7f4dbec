"""`Candidate`: a whole plan, compiled."""

from __future__ import annotations

from dataclasses import dataclass

from jax_hremat._plan.region import Region
from jax_hremat._solve.backend import Outcome
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers
from jax_hremat._xla.certify import CompiledStep

# Barriers at plain blocks, which take time, are tried only for cotangents of at least this part of
# the peak without rematerialization.
WORTH_A_BARRIER = 0.01
# A plan is compiled with more than the usual barriers if it exceeds the peak expected of it by more
# than this part, which is more than expectations usually err.
_DELAYED = 0.02


@dataclass(frozen=True, slots=True)
class Candidate:
    """A whole plan, compiled."""

    chain: Chain
    selection: Selection
    root: Region
    barriers: Barriers
    prediction: Prediction
    step: CompiledStep
    outcome: Outcome

    @property
    def peak_bytes(self) -> int:
        """The compiled peak."""
        return self.step.memory.peak_bytes

    @property
    def used_bytes(self) -> int:
        """The compiled peak without fragmentation, which no predicted peak includes."""
        return self.peak_bytes - self.step.fragmentation_bytes

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the compiled peak exceeds the predicted peak and gaps; negative if it is
        lower."""
        return self.peak_bytes - self.prediction.peak_bytes - self.prediction.gaps_bytes

    @property
    def step_s(self) -> float:
        """The estimated time of the compiled step."""
        return self.step.step_s

    def is_delayed(self, expected_bytes: int) -> bool:
        """Whether so much more is used at the peak than expected that the compiler seems to have
        delayed parts of the backward: then more is alive than predicted, or at another moment. If
        as much is alive as predicted, less is placed in the memory of results."""
        alive_bytes = self.used_bytes + self.step.reused_bytes
        predicted_bytes = self.prediction.peak_bytes + self.prediction.peak.reused_bytes
        least_bytes = _DELAYED * expected_bytes
        return (
            self.used_bytes - expected_bytes > least_bytes
            and abs(alive_bytes - predicted_bytes) > least_bytes
        )
