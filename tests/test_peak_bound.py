"""The bound on the predicted peak of a search's next plan."""

from __future__ import annotations

from jax_hremat._planner.peak_bound import PeakBound
from jax_hremat._solve.regions import Barriers

LIMIT = 10_000
FEW, USUAL = Barriers.CHECKPOINTED, Barriers.USUAL


def missed(bound: PeakBound, predicted_bytes: int, over_bytes: int, barriers: Barriers) -> None:
    bound.missed(predicted_bytes, -over_bytes, barriers, any_fits=True)


def test_the_bound_goes_below_a_plan_that_misses_and_not_above_it_again() -> None:
    bound = PeakBound(LIMIT, 9_900, 20_000)
    assert bound.highest_bytes == LIMIT
    missed(bound, 9_800, 300, USUAL)
    assert bound.bytes == 9_500
    # The next is predicted lower by a thousandth of the limit at least.
    assert bound.highest_bytes == 9_789
    bound.fitted(9_500, 600, USUAL)
    assert bound.bytes == 9_789


def test_plans_that_missed_with_other_barriers_bound_nothing() -> None:
    bound = PeakBound(LIMIT, 9_900, 20_000)
    missed(bound, 9_800, 300, USUAL)
    bound.fitted(9_500, 550, FEW)
    assert bound.bytes == 10_050
    assert bound.highest_bytes == LIMIT
    missed(bound, 10_040, 100, FEW)
    assert bound.bytes == 9_940
    bound.fitted(9_900, 500, FEW)
    assert bound.bytes == 10_029


def test_while_none_fits_the_next_may_be_lower_by_more_and_more() -> None:
    bound = PeakBound(LIMIT, 9_900, 20_000)
    margins = []
    for predicted_bytes in (9_800, 9_700):
        bound.missed(predicted_bytes, -50, USUAL, any_fits=False)
        margins.append(bound.margin_bytes)
    assert margins[1] == 2 * margins[0] > 0
    bound.fitted(9_600, 50, USUAL)
    assert bound.margin_bytes == 0
