"""The bound on the predicted peak of a search's next plan."""

from __future__ import annotations

from jax_hremat._planner.peak_bound import PeakBound

LIMIT = 10_000


def test_the_bound_goes_below_a_plan_that_misses_by_what_it_misses() -> None:
    bound = PeakBound(LIMIT, 9_900)
    assert bound.bytes == 9_900
    bound.missed(9_800, -300, any_fits=True)
    assert bound.bytes == 9_500
    # The next is predicted lower by a thousandth of the limit at least.
    bound.missed(9_500, -1, any_fits=True)
    assert bound.bytes == 9_490
    bound.missed(9_490, 200, any_fits=True)
    assert bound.bytes == 9_480
    assert bound.margin_bytes == 0


def test_the_bound_goes_above_a_plan_that_fits_and_above_others_that_missed() -> None:
    bound = PeakBound(LIMIT, 9_900)
    bound.missed(9_800, -300, any_fits=True)
    bound.fitted(9_500, 600)
    assert bound.bytes == 10_100


def test_while_none_fits_the_next_may_be_lower_by_more_and_more() -> None:
    bound = PeakBound(LIMIT, 9_900)
    margins = []
    for predicted_bytes in (9_800, 9_700):
        bound.missed(predicted_bytes, -50, any_fits=False)
        margins.append(bound.margin_bytes)
    assert margins[1] == 2 * margins[0] > 0
    bound.fitted(9_600, 50)
    assert bound.margin_bytes == 0
