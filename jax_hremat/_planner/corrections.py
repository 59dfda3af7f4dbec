"""What the peaks of compiled plans tell about those of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from jax_hremat._plan.peak import Moment
from jax_hremat._plan.region import Region
from jax_hremat._planner.barriers import but_for_barriers, family
from jax_hremat._planner.candidate import Candidate
from jax_hremat._solve.chain import Selection
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers

# Where anything is recomputed, a compiled peak that exceeds the predicted one by this part is no
# prediction error: XLA's scheduler has delayed part of a backward.
_PUT_OFF = 0.1


@dataclass(frozen=True, slots=True)
class Corrections:
    """What to expect of compiled peaks, by the errors of the predictions so far.

    Attributes:
        compiled: The plans compiled so far.
        fixed_bytes: The bytes that no plan changes, where no prediction errs.
    """

    compiled: Sequence[Candidate]
    fixed_bytes: int

    def but_for(self, candidate: Candidate) -> Corrections:
        """What the other plans tell. A plan that recomputes nothing has no backward that could be
        delayed, and tells about itself too."""
        others = [c for c in self.compiled if c is not candidate or not _recomputes(c.root)]
        return replace(self, compiled=others)

    def expected_bytes(
        self, selection: Selection, prediction: Prediction, barriers: Barriers
    ) -> int:
        """The compiled peak to expect of a plan: the predicted peak and gaps, corrected by the
        errors of the compiled plans most like it, on straight lines between them by predicted peak,
        from no error at the bytes that no plan changes.

        Plans are alike in whether there are groups, whether groups keep values, which barriers
        there are, and which block's forward or backward sets the predicted peak.
        """
        known = self._as_predicted(selection, barriers)
        return self._corrected_bytes(known, selection, prediction, barriers)

    def peak_without_bytes(
        self, some: Barriers, selection: Selection, prediction: Prediction, barriers: Barriers
    ) -> int:
        """The compiled peak to expect of a plan without some of its barriers: corrected by the
        errors of plans without them alone, those part of whose backward was delayed included."""
        known = [c for c in self.compiled if some not in c.barriers or not _recomputes(c.root)]
        return self._corrected_bytes(known, selection, prediction, barriers & ~some)

    def undelayed_bytes(
        self, selection: Selection, prediction: Prediction, barriers: Barriers
    ) -> int:
        """The compiled peak to expect of a plan if the compiler delays no part of its backward."""
        known = self._undelayed(selection, barriers)
        return self._corrected_bytes(known, selection, prediction, barriers)

    def excess_near(self, peak_bytes: int, selection: Selection, barriers: Barriers) -> int:
        """Bytes by which a compiled peak is expected to exceed the predicted one and the predicted
        gaps, if no part of a backward is delayed: those of the plan whose compiled peak is nearest,
        among plans with these barriers if there are any. If that is larger, its error counts in
        proportion to what the plans take beyond the bytes that no plan changes.

        Args:
            peak_bytes: The compiled peak.
            selection: One of the family of the plan in question.
            barriers: The barriers of the plan in question.
        """

        def distance(c: Candidate) -> tuple[bool, int, float]:
            return c.barriers != barriers, abs(c.peak_bytes - peak_bytes), c.step_s

        nearest = min(self._undelayed(selection, barriers), key=distance)
        changed_bytes = max(1, nearest.peak_bytes - self.fixed_bytes)
        part = min(1.0, max(0, peak_bytes - self.fixed_bytes) / changed_bytes)
        return int(part * nearest.excess_bytes)

    def optimistic_peak_bytes(self, prediction: Prediction) -> float:
        """An optimistic estimate of a compiled peak: straight lines between all compiled plans, of
        whatever family, by predicted peak, from the bytes that no plan changes on.

        A plan predicted lower than another but compiled higher is counted as high as the other, for
        the compiler delayed part of its backward.
        """
        least = {self.fixed_bytes: self.fixed_bytes}
        for c in self.compiled:
            predicted_bytes = c.prediction.peak_bytes
            least[predicted_bytes] = min(c.peak_bytes, least.get(predicted_bytes, c.peak_bytes))
        predicted = sorted(least)
        from_the_largest = [least[predicted_bytes] for predicted_bytes in reversed(predicted)]
        reached = np.minimum.accumulate(from_the_largest)[::-1]
        return float(np.interp(prediction.peak_bytes, predicted, reached))

    def worst_overestimate(self, selection: Selection) -> float | None:
        """The worst ratio, at least 1, of the optimistic estimate, made from the other plans, to
        the compiled peak, both beyond the bytes that no plan changes, among the plans without
        barriers that have groups, and keep values in groups, if this one does; None if none was
        compiled."""

        def beyond_bytes(c: Candidate) -> float:
            return self.but_for(c).optimistic_peak_bytes(c.prediction) - self.fixed_bytes

        ratios = [
            beyond_bytes(c) / max(1, c.peak_bytes - self.fixed_bytes)
            for c in self.compiled
            if c.barriers == Barriers.NONE and family(c.selection) == family(selection)
        ]
        return max(1.0, *ratios) if ratios else None

    def _as_predicted(self, selection: Selection, barriers: Barriers) -> list[Candidate]:
        """The plans but for those part of whose backward the compiler delayed: those far above
        their prediction, and those that are lower with other barriers, unless they have these and
        are of the selection's family: what barriers do in one family tells nothing about another.
        The plan that checkpoints nothing is always among them."""

        def has_others(c: Candidate) -> bool:
            return c.barriers != barriers or family(c.selection) != family(selection)

        best = [
            min(alike, key=lambda c: (has_others(c), c.peak_bytes, c.step_s))
            for alike in but_for_barriers(self.compiled)
        ]
        return [
            c
            for c in best
            if c.excess_bytes <= _PUT_OFF * c.prediction.peak_bytes or not _recomputes(c.root)
        ]

    def _undelayed(self, selection: Selection, barriers: Barriers) -> list[Candidate]:
        """The same but for those that use at least as much as a plan that is predicted higher: the
        compiler delayed part of their backward, and will not do so everywhere."""
        known = self._as_predicted(selection, barriers)

        def is_delayed(c: Candidate) -> bool:
            return _recomputes(c.root) and any(
                other.prediction.peak_bytes > c.prediction.peak_bytes
                and other.used_bytes <= c.used_bytes
                for other in known
            )

        return [c for c in known if not is_delayed(c)]

    def _corrected_bytes(
        self,
        known: Sequence[Candidate],
        selection: Selection,
        prediction: Prediction,
        barriers: Barriers,
    ) -> int:
        """The predicted peak and gaps, corrected by the errors of those of the known plans that are
        most like this one."""
        traits = _traits(selection, barriers, prediction.peak)

        def differences(c: Candidate) -> int:
            theirs = _traits(c.selection, c.barriers, c.prediction.peak)
            return sum(a != b for a, b in zip(theirs, traits, strict=True))

        fewest = min(map(differences, known))
        alike = sorted((c for c in known if differences(c) == fewest), key=lambda c: c.excess_bytes)
        excess = {self.fixed_bytes: 0, **{c.prediction.peak_bytes: c.excess_bytes for c in alike}}
        predicted = sorted(excess)
        expected = np.interp(prediction.peak_bytes, predicted, [excess[p] for p in predicted])
        return prediction.peak_bytes + prediction.gaps_bytes + int(expected)


def _traits(
    selection: Selection, barriers: Barriers, peak: Moment
) -> tuple[bool, bool, Barriers, int, bool]:
    """What the error of a predicted peak depends on: whether there are groups, whether groups keep
    values, the barriers, the block at the peak, and whether that is in its backward."""
    return (*family(selection), barriers, peak.block, peak.in_backward)


def _recomputes(root: Region) -> bool:
    return any(region.checkpointed for _, region in root.walk())
