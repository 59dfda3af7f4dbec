"""What compiled plans tell about the peaks of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from compiled_plans import FEW, MANY, PREDICTED_BYTES, compiled, plain_candidate

from jax_hremat._cost.option_cost import LiveRange
from jax_hremat._plan.region import Region
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.corrections import Corrections
from jax_hremat._solve.regions import Barriers

# Four buffers, each alive with the next, of which the last is placed above the others.
GAP_BYTES = 4000
WITH_GAP = [LiveRange(GAP_BYTES, *at) for at in ((0, 1), (1, 2), (2, 3), (3, 5))]


@pytest.fixture(scope="module")
def plain() -> Candidate:
    return plain_candidate()


def test_a_peak_is_corrected_by_the_plans_most_like_it(plain: Candidate) -> None:
    known = [
        compiled(plain, plan=0, excess_bytes=10),
        compiled(plain, plan=1, excess_bytes=20, more_bytes=3000),
        compiled(plain, plan=2, excess_bytes=-30, groups=True),
        compiled(plain, plan=3, excess_bytes=-40, groups=True, block=1),
        compiled(plain, plan=4, excess_bytes=50, groups=True, block=1, barriers=MANY),
        # Part of its backward was delayed: this says nothing about others.
        compiled(plain, plan=5, excess_bytes=PREDICTED_BYTES, block=1),
    ]

    def expected_excess(candidate: Candidate) -> int:
        expected_bytes = Corrections(known, 0).expected_bytes(
            candidate.selection, candidate.prediction, candidate.barriers
        )
        return expected_bytes - candidate.prediction.peak_bytes

    assert expected_excess(compiled(plain, plan=9, more_bytes=-10_000)) == 9
    assert expected_excess(compiled(plain, plan=9, more_bytes=1500)) == 15
    assert expected_excess(compiled(plain, plan=9, more_bytes=9000)) == 20
    assert expected_excess(compiled(plain, plan=9, more_bytes=1500, groups=True)) == -30
    assert expected_excess(compiled(plain, plan=9, groups=True, block=1)) == -40
    assert expected_excess(compiled(plain, plan=9, groups=True, block=1, barriers=MANY)) == 50
    assert Corrections(known, 0).excess_near(PREDICTED_BYTES - 29, plain.selection, FEW) == -30
    assert Corrections(known, 0).excess_near(2 * PREDICTED_BYTES, plain.selection, FEW) == 20
    assert Corrections(known, 0).excess_near(2 * PREDICTED_BYTES, plain.selection, MANY) == 50
    assert (
        Corrections(known, 0).excess_near(2 * PREDICTED_BYTES, plain.selection, Barriers.NONE) == 20
    )


def test_a_smaller_plan_is_expected_to_err_less(plain: Candidate) -> None:
    fixed_bytes = PREDICTED_BYTES // 5
    known = [compiled(plain, plan=0, excess_bytes=-2000)]
    # Halfway between what no plan changes and the plan known.
    peak_bytes = (fixed_bytes + known[0].peak_bytes) // 2
    assert Corrections(known, fixed_bytes).excess_near(peak_bytes, plain.selection, FEW) == -1000
    assert Corrections(known, fixed_bytes).excess_near(fixed_bytes, plain.selection, FEW) == 0
    assert (
        Corrections(known, fixed_bytes).excess_near(2 * PREDICTED_BYTES, plain.selection, FEW)
        == -2000
    )
    half = compiled(plain, plan=1, more_bytes=(fixed_bytes - PREDICTED_BYTES) // 2)
    expected_bytes = Corrections(known, fixed_bytes).expected_bytes(
        half.selection, half.prediction, FEW
    )
    assert expected_bytes == half.prediction.peak_bytes - 1000


def test_a_plan_that_uses_more_than_one_predicted_higher_is_taken_for_delayed(
    plain: Candidate,
) -> None:
    known = [
        compiled(plain, plan=0, excess_bytes=10),
        compiled(plain, plan=1, more_bytes=-2000, excess_bytes=2010),
        compiled(plain, plan=2, more_bytes=-5000, excess_bytes=5100),
    ]
    corrections = Corrections(known, 0)
    other = compiled(plain, plan=9, more_bytes=-5000)
    asked = other.selection, other.prediction, FEW
    # As a whole such plans are expected to use as much again, …
    assert corrections.expected_bytes(*asked) == known[2].peak_bytes
    # … but that is no error of the prediction.
    assert corrections.undelayed_bytes(*asked) == PREDICTED_BYTES - 5000 + 9
    for delayed in known[1:]:
        assert corrections.excess_near(delayed.peak_bytes, plain.selection, FEW) == 10
    # A plan alone may be delayed or badly predicted.
    assert (
        corrections.but_for(known[0]).excess_near(known[1].peak_bytes, plain.selection, FEW) == 2010
    )


def test_without_the_barriers_that_would_help_a_plan_is_expected_to_be_like_those_without(
    plain: Candidate,
) -> None:
    known = [
        compiled(plain, plan=0, excess_bytes=300, barriers=FEW),
        compiled(plain, plan=0, excess_bytes=-100, barriers=MANY),
    ]
    for barriers, excess_bytes in ((FEW, 300), (MANY, -100), (Barriers.NONE, -100)):
        other = compiled(plain, plan=1, barriers=barriers)
        expected_bytes = Corrections(known, 0).expected_bytes(
            other.selection, other.prediction, barriers
        )
        assert expected_bytes == PREDICTED_BYTES + excess_bytes
        assert (
            Corrections(known, 0).excess_near(2 * PREDICTED_BYTES, plain.selection, barriers)
            == excess_bytes
        )


def test_what_barriers_do_is_not_expected_of_plans_of_another_family(plain: Candidate) -> None:
    known = [
        compiled(plain, plan=0, excess_bytes=3000, barriers=FEW),
        compiled(plain, plan=0, excess_bytes=-100, barriers=Barriers.ALL),
    ]
    corrections = Corrections(known, 0)
    for groups, excess_bytes in ((False, 3000), (True, -100)):
        other = compiled(plain, plan=1, groups=groups, barriers=FEW)
        figures = other.selection, other.prediction, FEW
        assert corrections.expected_bytes(*figures) == PREDICTED_BYTES + excess_bytes
        assert corrections.undelayed_bytes(*figures) == PREDICTED_BYTES + excess_bytes
        at = 2 * PREDICTED_BYTES
        assert corrections.excess_near(at, other.selection, FEW) == excess_bytes
        assert corrections.excess_near(at, other.selection, Barriers.ALL) == -100


def test_a_plan_without_some_barriers_is_expected_to_be_like_others_without_them(
    plain: Candidate,
) -> None:
    known = [
        compiled(plain, plan=0, excess_bytes=PREDICTED_BYTES, barriers=FEW),
        compiled(plain, plan=0, excess_bytes=-100, barriers=MANY),
        compiled(plain, plan=1, more_bytes=10_000, barriers=FEW),
    ]
    corrections = Corrections(known, 0)

    def expected_excess(more_bytes: int) -> int:
        other = compiled(plain, plan=9, more_bytes=more_bytes)
        expected_bytes = corrections.peak_without_bytes(
            Barriers.PLAIN, other.selection, other.prediction, MANY
        )
        return expected_bytes - other.prediction.peak_bytes

    # Part of the first was delayed: so may be part of others, the less the higher they are.
    assert expected_excess(0) == PREDICTED_BYTES
    assert expected_excess(5000) == PREDICTED_BYTES // 2
    assert expected_excess(10_000) == 0


def test_what_checkpoints_nothing_is_never_taken_for_delayed(plain: Candidate) -> None:
    behind = Region(0, 1, barrier=True)
    for root in (Region(0, 99), Region(0, 99, children=(behind,))):
        excess_bytes = PREDICTED_BYTES // 2
        alone = replace(compiled(plain, plan=0, excess_bytes=excess_bytes), root=root)
        assert (
            Corrections([alone], 0).excess_near(alone.peak_bytes, plain.selection, FEW)
            == excess_bytes
        )
        other = compiled(plain, plan=1)
        expected_bytes = Corrections([alone], 0).expected_bytes(
            other.selection, other.prediction, FEW
        )
        assert expected_bytes == PREDICTED_BYTES + excess_bytes
        # So it is compared with itself where there is no other.
        itself = alone.selection, alone.prediction, FEW
        found = Corrections([alone], 0).but_for(alone).undelayed_bytes(*itself)
        assert found == PREDICTED_BYTES + excess_bytes


def test_the_optimistic_peak_lies_between_those_of_the_plans_next_to_it(plain: Candidate) -> None:
    fixed_bytes = PREDICTED_BYTES // 2
    known = [compiled(plain, plan=0)]

    def estimate(more_bytes: int) -> float:
        prediction = compiled(plain, plan=9, more_bytes=more_bytes).prediction
        return Corrections(known, fixed_bytes).optimistic_peak_bytes(prediction)

    assert estimate(-fixed_bytes) == fixed_bytes
    assert estimate(-1000) == PREDICTED_BYTES - 1000
    by_hand = compiled(plain, plan=1, more_bytes=-2000, excess_bytes=-900, barriers=Barriers.NONE)
    assert Corrections(known, fixed_bytes).worst_overestimate(by_hand.selection) is None
    known.append(by_hand)
    wanted = (PREDICTED_BYTES - 2000 - fixed_bytes) / (PREDICTED_BYTES - 2900 - fixed_bytes)
    assert Corrections(known, fixed_bytes).worst_overestimate(by_hand.selection) == pytest.approx(
        wanted
    )
    in_groups = replace(by_hand.selection, groups=((0, 1),))
    assert Corrections(known, fixed_bytes).worst_overestimate(in_groups) is None
    assert estimate(-1000) == pytest.approx(PREDICTED_BYTES - 2900 / 2)
    # One part of whose backward the compiler delayed counts as high as the next.
    known.append(compiled(plain, plan=2, more_bytes=-1000, excess_bytes=9 * PREDICTED_BYTES))
    assert estimate(-1000) == PREDICTED_BYTES


def test_predicted_gaps_are_part_of_what_a_plan_is_expected_to_take(plain: Candidate) -> None:
    def with_gaps(candidate: Candidate) -> Candidate:
        return replace(candidate, prediction=replace(candidate.prediction, buffers=WITH_GAP))

    known = [with_gaps(compiled(plain, plan=0, excess_bytes=GAP_BYTES + 10))]
    assert known[0].excess_bytes == 10
    for other, gaps_bytes in (
        (with_gaps(compiled(plain, plan=1)), GAP_BYTES),
        (compiled(plain, plan=1), 0),
    ):
        asked = other.selection, other.prediction, FEW
        assert Corrections(known, 0).expected_bytes(*asked) == PREDICTED_BYTES + gaps_bytes + 10
        assert Corrections(known, 0).undelayed_bytes(*asked) == PREDICTED_BYTES + gaps_bytes + 10


def test_a_plan_of_which_less_is_in_results_than_predicted_is_not_taken_for_delayed(
    plain: Candidate,
) -> None:
    candidate = compiled(plain, plan=0, excess_bytes=5000)
    assert candidate.is_delayed(PREDICTED_BYTES)
    assert not candidate.is_delayed(PREDICTED_BYTES + 4000)
    peak = replace(candidate.prediction.peak, reused_bytes=9000)
    candidate = replace(candidate, prediction=replace(candidate.prediction, peak=peak))
    # As much is alive as predicted.
    less = replace(candidate, step=replace(candidate.step, reused_bytes=4000))
    assert not less.is_delayed(PREDICTED_BYTES)
    # Other values are: at another moment, …
    assert candidate.is_delayed(PREDICTED_BYTES)
    # … or more than predicted.
    more = replace(candidate, step=replace(candidate.step, reused_bytes=9000))
    assert more.is_delayed(PREDICTED_BYTES)
