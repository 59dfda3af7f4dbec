"""What compiled plans tell about the peaks of others."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_hremat import PlannerConfig
from jax_hremat._emit.step import own_step
from jax_hremat._plan.region import Region
from jax_hremat._planner.barriers import Pair, may_do_without, needed_barriers
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.context import prepare
from jax_hremat._planner.corrections import (
    excess_near,
    expected_peak_bytes,
    optimistic_peak_bytes,
    worst_overestimate,
)
from jax_hremat._solve.regions import Barriers
from jax_hremat._trace.trace import trace_loss
from jax_hremat._xla.compile import MemoryStats
from jax_hremat._xla.target import get_target

FEW, MANY = Barriers.USUAL, Barriers.USUAL | Barriers.PLAIN
PREDICTED_BYTES = 100_000


def cheap(_: int, __: int) -> float:
    """The price of bytes where options lower any peak in no time."""
    return 0.0


def dear(_: int, __: int) -> float:
    """The same where no options lower any peak."""
    return math.inf


@pytest.fixture(scope="module")
def plain() -> Candidate:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.tanh(w).sum()

    program = trace_loss(loss, (jax.ShapeDtypeStruct((8,), np.float32),), {})
    config = PlannerConfig(cost="analytic")
    context = prepare(own_step(program), get_target("cpu"), config, 0.0, lambda *_: None)
    return Candidates(context, lambda *_: None).plain


def compiled(
    plain: Candidate,
    *,
    plan: int,
    more_bytes: int = 0,
    excess_bytes: int = 0,
    groups: bool = False,
    block: int = 0,
    barriers: Barriers = FEW,
) -> Candidate:
    """A compiled plan. Those of the same number differ in barriers alone.

    Args:
        plan: Its number.
        more_bytes: Its predicted peak, over that of the others.
        excess_bytes: Its compiled peak, over the predicted one.
        groups: Whether it has groups.
        block: The block whose backward sets the peak.
        barriers: Its barriers.
    """
    peak_bytes = PREDICTED_BYTES + more_bytes
    late = Barriers.LATE_ARGUMENTS in barriers
    child = Region(plan, plan + 1, True, barrier=Barriers.PLAIN in barriers, late_arguments=late)
    return replace(
        plain,
        root=Region(0, 99, children=(child,)),
        selection=replace(plain.selection, groups=((0, 1),) if groups else ()),
        prediction=replace(
            plain.prediction,
            peak_bytes=peak_bytes,
            peak=replace(plain.prediction.peak, block=block, in_backward=True),
        ),
        step=replace(plain.step, memory=MemoryStats(0, 0, peak_bytes + excess_bytes, 0)),
        barriers=barriers,
    )


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
        expected_bytes = expected_peak_bytes(
            known, candidate.selection, candidate.prediction, candidate.barriers, 0
        )
        return expected_bytes - candidate.prediction.peak_bytes

    assert expected_excess(compiled(plain, plan=9, more_bytes=-10_000)) == 9
    assert expected_excess(compiled(plain, plan=9, more_bytes=1500)) == 15
    assert expected_excess(compiled(plain, plan=9, more_bytes=9000)) == 20
    assert expected_excess(compiled(plain, plan=9, more_bytes=1500, groups=True)) == -30
    assert expected_excess(compiled(plain, plan=9, groups=True, block=1)) == -40
    assert expected_excess(compiled(plain, plan=9, groups=True, block=1, barriers=MANY)) == 50
    assert excess_near(known, PREDICTED_BYTES - 29, FEW, 0) == -30
    assert excess_near(known, 2 * PREDICTED_BYTES, FEW, 0) == 20
    assert excess_near(known, 2 * PREDICTED_BYTES, MANY, 0) == 50
    assert excess_near(known, 2 * PREDICTED_BYTES, Barriers.NONE, 0) == 20


def test_a_smaller_plan_is_expected_to_err_less(plain: Candidate) -> None:
    fixed_bytes = PREDICTED_BYTES // 5
    known = [compiled(plain, plan=0, excess_bytes=-2000)]
    # Halfway between what no plan changes and the plan known.
    peak_bytes = (fixed_bytes + known[0].peak_bytes) // 2
    assert excess_near(known, peak_bytes, FEW, fixed_bytes) == -1000
    assert excess_near(known, fixed_bytes, FEW, fixed_bytes) == 0
    assert excess_near(known, 2 * PREDICTED_BYTES, FEW, fixed_bytes) == -2000
    half = compiled(plain, plan=1, more_bytes=(fixed_bytes - PREDICTED_BYTES) // 2)
    expected_bytes = expected_peak_bytes(known, half.selection, half.prediction, FEW, fixed_bytes)
    assert expected_bytes == half.prediction.peak_bytes - 1000


def test_without_the_barriers_that_would_help_a_plan_is_expected_to_be_like_those_without(
    plain: Candidate,
) -> None:
    known = [
        compiled(plain, plan=0, excess_bytes=300, barriers=FEW),
        compiled(plain, plan=0, excess_bytes=-100, barriers=MANY),
    ]
    for barriers, excess_bytes in ((FEW, 300), (MANY, -100), (Barriers.NONE, -100)):
        other = compiled(plain, plan=1, barriers=barriers)
        expected_bytes = expected_peak_bytes(known, other.selection, other.prediction, barriers, 0)
        assert expected_bytes == PREDICTED_BYTES + excess_bytes
        assert excess_near(known, 2 * PREDICTED_BYTES, barriers, 0) == excess_bytes


def test_what_checkpoints_nothing_is_never_taken_for_delayed(plain: Candidate) -> None:
    behind = Region(0, 1, barrier=True)
    for root in (Region(0, 99), Region(0, 99, children=(behind,))):
        excess_bytes = PREDICTED_BYTES // 2
        alone = replace(compiled(plain, plan=0, excess_bytes=excess_bytes), root=root)
        assert excess_near([alone], alone.peak_bytes, FEW, 0) == excess_bytes
        other = compiled(plain, plan=1)
        expected_bytes = expected_peak_bytes([alone], other.selection, other.prediction, FEW, 0)
        assert expected_bytes == PREDICTED_BYTES + excess_bytes


def test_the_optimistic_peak_lies_between_those_of_the_plans_next_to_it(plain: Candidate) -> None:
    fixed_bytes = PREDICTED_BYTES // 2
    known = [compiled(plain, plan=0)]

    def estimate(more_bytes: int) -> float:
        prediction = compiled(plain, plan=9, more_bytes=more_bytes).prediction
        return optimistic_peak_bytes(known, prediction, fixed_bytes)

    assert estimate(-fixed_bytes) == fixed_bytes
    assert estimate(-1000) == PREDICTED_BYTES - 1000
    by_hand = compiled(plain, plan=1, more_bytes=-2000, excess_bytes=-900, barriers=Barriers.NONE)
    assert worst_overestimate(known, by_hand.selection, fixed_bytes) is None
    known.append(by_hand)
    wanted = (PREDICTED_BYTES - 2000) / (PREDICTED_BYTES - 2900)
    assert worst_overestimate(known, by_hand.selection, fixed_bytes) == pytest.approx(wanted)
    in_groups = replace(by_hand.selection, groups=((0, 1),))
    assert worst_overestimate(known, in_groups, fixed_bytes) is None
    assert estimate(-1000) == pytest.approx(PREDICTED_BYTES - 2900 / 2)
    # One part of whose backward the compiler delayed counts as high as the next.
    known.append(compiled(plain, plan=2, more_bytes=-1000, excess_bytes=9 * PREDICTED_BYTES))
    assert estimate(-1000) == PREDICTED_BYTES


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
    assert needed_barriers([plain], 0, dear) == FEW
    known = [
        plain,
        *both(plain, 0, FEW, 1000, MANY, 900),
        *both(plain, 1, FEW, 2000, MANY, 2000),
        compiled(plain, plan=2, excess_bytes=100 - PREDICTED_BYTES),
    ]
    assert needed_barriers(known, 800, dear) == MANY
    assert needed_barriers(known, 1800, dear) == FEW
    assert needed_barriers(known, 800, cheap) == FEW
    # What they did is judged by the price here, not there.
    assert needed_barriers(known, 1400, lambda peak, _: math.inf if peak < 900 else 0) == FEW


def test_late_arguments_are_left_out_where_the_nearest_plan_did_not_need_them(
    plain: Candidate,
) -> None:
    fewest = Barriers.CHECKPOINTED
    known = [
        plain,
        *both(plain, 0, fewest, 1000, FEW, 900),
        *both(plain, 1, fewest, 2000, FEW, 2000),
    ]
    assert needed_barriers(known, 800, dear) == FEW
    assert needed_barriers(known, 1800, dear) == fewest
    # With barriers at plain blocks or without: what is compared is alike but for late arguments.
    known += both(plain, 2, fewest | Barriers.PLAIN, 3000, MANY, 2900)
    # Those of checkpointed regions are no exception.
    few = both(plain, 3, Barriers.NONE, 5000, fewest, 5000)
    assert needed_barriers([plain, *few], 5000, dear) == Barriers.LATE_ARGUMENTS
    assert needed_barriers(known, 2900, dear) == FEW


def test_what_a_plan_needs_without_barriers_follows_from_the_nearest_pair(plain: Candidate) -> None:
    known = [plain, *both(plain, 0, FEW, 1000, MANY, 800), *both(plain, 1, FEW, 3000, MANY, 2000)]
    near = compiled(plain, plan=3, excess_bytes=840 - PREDICTED_BYTES, barriers=MANY)
    # What they save is the same number of bytes in a plan of another size.
    assert may_do_without(known, near, Barriers.PLAIN, 1040)
    assert not may_do_without(known, near, Barriers.PLAIN, 1039)
    assert may_do_without(known, near, Barriers.LATE_ARGUMENTS, 0)
    # Where they took no time, nothing is gained.
    idle = [plain, *both(plain, 0, FEW, 1000, MANY, 800, longer=0.0005)]
    assert not may_do_without(idle, near, Barriers.PLAIN, 1040)


def test_one_unlucky_plan_is_not_taken_for_the_fragmentation_of_the_next(plain: Candidate) -> None:
    def fragmented(plan: int, more_bytes: int, fragmentation_bytes: int) -> Candidate:
        candidate = compiled(
            plain, plan=plan, more_bytes=more_bytes, excess_bytes=10 + fragmentation_bytes
        )
        step = replace(candidate.step, fragmentation_bytes=fragmentation_bytes)
        return replace(candidate, step=step)

    known = [compiled(plain, plan=0, more_bytes=9000), fragmented(1, 0, 5000)]
    assert known[1].used_bytes == PREDICTED_BYTES + 10
    assert excess_near(known, known[1].peak_bytes, FEW, 0) == 10
    # Two that are alike are.
    known.append(fragmented(2, -100, 3000))
    assert excess_near(known, known[2].peak_bytes, FEW, 0) == 10 + 3000
    other = compiled(plain, plan=9)
    expected_bytes = expected_peak_bytes(known, other.selection, other.prediction, FEW, 0)
    assert expected_bytes == PREDICTED_BYTES + 10 + 3000
