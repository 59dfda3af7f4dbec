"""Which barriers plans are compiled with."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from compiled_plans import FEW, MANY, PREDICTED_BYTES, compiled, plain_candidate

from jax_hremat._planner.barriers import Pair, may_do_without, nearest_pair, needed_barriers
from jax_hremat._planner.candidate import Candidate
from jax_hremat._solve.regions import Barriers


def cheap(_: int, __: int) -> float:
    """The price of bytes where options lower any peak in no time."""
    return 0.0


def dear(_: int, __: int) -> float:
    """The same where no options lower any peak."""
    return math.inf


@pytest.fixture(scope="module")
def plain() -> Candidate:
    return plain_candidate()


def both(
    plain: Candidate,
    plan: int,
    few: Barriers,
    few_bytes: int,
    many: Barriers,
    many_bytes: int,
    longer: float = 0.01,
) -> list[Candidate]:
    """A plan compiled with few barriers and with more, and its peaks; with more of them the step is
    longer by a part."""
    candidates = [
        compiled(plain, plan=plan, excess_bytes=peak_bytes - PREDICTED_BYTES, barriers=barriers)
        for barriers, peak_bytes in ((few, few_bytes), (many, many_bytes))
    ]
    slower = replace(candidates[1].step, step_s=(1 + longer) * candidates[1].step_s)
    return [candidates[0], replace(candidates[1], step=slower)]


def test_barriers_are_worth_the_time_that_options_would_take(plain: Candidate) -> None:
    def per_byte(peak_bytes: int, lower_bytes: int) -> float:
        return 1e-7 * peak_bytes * plain.step_s * lower_bytes

    for few_bytes, longer, worth in (
        (1099, 0.01, False),
        (1101, 0.01, True),
        (1001, 0.0, True),
        (1001, -0.01, True),
        (1000, -0.01, False),
        (999, 0.0, False),
    ):
        few, many = both(plain, 0, FEW, few_bytes, MANY, 1000, longer)
        assert Pair(many, few).are_worth_it(1000, per_byte) == worth
        assert not Pair(few, many).are_worth_it(1000, per_byte) or few_bytes < 1000


def test_barriers_are_tried_first_where_the_nearest_plan_needed_them(plain: Candidate) -> None:
    assert needed_barriers([plain], plain.selection, 0, dear) == FEW
    known = [
        plain,
        *both(plain, 0, FEW, 1000, MANY, 900),
        *both(plain, 1, FEW, 2000, MANY, 2000),
        compiled(plain, plan=2, excess_bytes=100 - PREDICTED_BYTES),
    ]
    assert needed_barriers(known, plain.selection, 800, dear) == MANY
    assert needed_barriers(known, plain.selection, 1800, dear) == FEW
    assert needed_barriers(known, plain.selection, 800, cheap) == FEW
    # What they did is judged by the price here, not there.
    assert (
        needed_barriers(known, plain.selection, 1400, lambda peak, _: math.inf if peak < 900 else 0)
        == FEW
    )


def test_barriers_that_were_only_tried_together_are_judged_together(plain: Candidate) -> None:
    known = [plain, *both(plain, 0, FEW, 1000, Barriers.ALL, 900)]
    assert needed_barriers(known, plain.selection, 800, dear) == Barriers.ALL
    assert needed_barriers(known, plain.selection, 800, cheap) == FEW
    # Once it is known what one of them does alone, that counts.
    known.append(compiled(plain, plan=0, excess_bytes=950 - PREDICTED_BYTES, barriers=MANY))
    assert needed_barriers(known, plain.selection, 800, dear) == Barriers.ALL
    known[-1] = compiled(plain, plan=0, excess_bytes=1000 - PREDICTED_BYTES, barriers=MANY)
    only_gradients = FEW | Barriers.GRADIENTS
    assert needed_barriers(known, plain.selection, 800, dear) == only_gradients


def test_late_arguments_are_left_out_where_the_nearest_plan_did_not_need_them(
    plain: Candidate,
) -> None:
    fewest = Barriers.CHECKPOINTED
    known = [
        plain,
        *both(plain, 0, fewest, 1000, FEW, 900),
        *both(plain, 1, fewest, 2000, FEW, 2000),
    ]
    assert needed_barriers(known, plain.selection, 800, dear) == FEW
    assert needed_barriers(known, plain.selection, 1800, dear) == fewest
    # With barriers at plain blocks or without: what is compared is alike but for late arguments.
    known += both(plain, 2, fewest | Barriers.PLAIN, 3000, MANY, 2900)
    # Those of checkpointed regions are no exception.
    few = both(plain, 3, Barriers.NONE, 5000, fewest, 5000)
    assert needed_barriers([plain, *few], plain.selection, 5000, dear) == Barriers.LATE_ARGUMENTS
    assert needed_barriers(known, plain.selection, 2900, dear) == FEW
    # Where they took no time, nothing is gained, but where they raised the peak.
    idle = both(plain, 4, fewest, 5000, FEW, 5000, longer=0.0001)
    assert needed_barriers([plain, *idle], plain.selection, 5000, cheap) == FEW
    slightly = both(plain, 5, fewest, 5000, FEW, 5005, longer=0.0001)
    assert needed_barriers([plain, *slightly], plain.selection, 5000, dear) == FEW
    higher = both(plain, 5, fewest, 5000, FEW, 5006, longer=0.0)
    assert needed_barriers([plain, *higher], plain.selection, 5000, dear) == fewest


def test_a_plan_whose_peak_other_barriers_lower_tells_nothing(plain: Candidate) -> None:
    fewest, with_plain = Barriers.CHECKPOINTED, Barriers.CHECKPOINTED | Barriers.PLAIN
    # By themselves late arguments do nothing here; but barriers at plain blocks lower the peak.
    delayed = both(plain, 0, fewest, 2000, FEW, 2000)
    assert needed_barriers([plain, *delayed], plain.selection, 2000, dear) == fewest
    held_back = compiled(plain, plan=0, excess_bytes=1800 - PREDICTED_BYTES, barriers=with_plain)
    assert needed_barriers([plain, *delayed, held_back], plain.selection, 2000, dear) == MANY
    # Late arguments that lower it by more than the others do tell something.
    lower = [plain, *both(plain, 1, fewest, 2000, FEW, 1700), held_back]
    pair = nearest_pair(lower, plain.selection, 2000, Barriers.LATE_ARGUMENTS)
    assert pair is not None
    assert pair.lower_bytes == 300


def test_plans_without_groups_tell_nothing_about_those_with_groups(plain: Candidate) -> None:
    fewest = Barriers.CHECKPOINTED
    without = both(plain, 0, fewest, 1000, FEW, 1000)
    grouped = replace(plain.selection, groups=((0, 1),))
    assert needed_barriers(without, plain.selection, 500, dear) == fewest
    assert needed_barriers(without, grouped, 500, dear) == FEW
    with_groups = [replace(c, selection=grouped) for c in both(plain, 1, fewest, 2000, FEW, 2000)]
    assert needed_barriers([*without, *with_groups], grouped, 500, dear) == fewest


def test_a_plan_may_do_without_barriers_that_take_time_if_it_is_expected_to_fit(
    plain: Candidate,
) -> None:
    def allowed(known: list[Candidate], some: Barriers, without_bytes: int) -> bool:
        pair = nearest_pair(known, plain.selection, without_bytes, some)
        return may_do_without(pair, without_bytes, 1040)

    known = [plain, *both(plain, 0, FEW, 1000, MANY, 800), *both(plain, 1, FEW, 3000, MANY, 2000)]
    assert allowed(known, Barriers.PLAIN, 1040)
    assert not allowed(known, Barriers.PLAIN, 1041)
    # What others take is not known.
    assert allowed(known, Barriers.LATE_ARGUMENTS, 1040)
    assert not allowed(known, Barriers.LATE_ARGUMENTS, 1041)
    # Where they took no time, nothing is gained.
    idle = [plain, *both(plain, 0, FEW, 1000, MANY, 800, longer=0.0001)]
    assert not allowed(idle, Barriers.PLAIN, 1040)
