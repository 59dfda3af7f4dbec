"""The bound on the predicted peak of the next plan of a search, moved by what plans take."""

from __future__ import annotations

# After a plan above the limit, the next is predicted lower by at least this part of the limit.
_LEAST_LOWER = 0.001
# If none fits yet, it is lower by up to this part more where that takes hardly more time, and by up
# to twice as much with each that misses.
_MARGIN = 0.0025


class PeakBound:
    """The bound of one search.

    Args:
        limit: The search's limit on compiled peaks.
        first_bytes: The bound of the first plan.

    Attributes:
        bytes: The bound.
        margin_bytes: A plan that is lower by up to this is preferred if it takes hardly longer.
    """

    def __init__(self, limit: int, first_bytes: int) -> None:
        self.bytes = first_bytes
        self.margin_bytes = 0
        self._limit = limit
        self._next_margin_bytes = int(_MARGIN * limit)

    def missed(self, predicted_bytes: int, spare_bytes: int, *, any_fits: bool) -> None:
        """Move the bound below that of a plan above the limit.

        Args:
            predicted_bytes: The predicted peak of the plan.
            spare_bytes: What is expected to be left of the limit.
            any_fits: Whether a plan is known that fits. If not, the next goes lower than the
                error of this one tells, or it might just miss too.
        """
        if not any_fits:
            self.margin_bytes = self._next_margin_bytes
            self._next_margin_bytes *= 2
        self.bytes = predicted_bytes + min(spare_bytes, -int(_LEAST_LOWER * self._limit))

    def fitted(self, predicted_bytes: int, spare_bytes: int) -> None:
        """Move the bound above that of a plan within the limit, which leaves so much of it."""
        self.margin_bytes = 0
        self.bytes = predicted_bytes + spare_bytes
