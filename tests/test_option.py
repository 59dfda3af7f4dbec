"""The Pareto law of options."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hremat._cost.option import Option, pareto
from jax_hremat._cost.option_cost import LiveRange, OptionCost, Phase
from jax_hremat._plan.region import Region

# Few values, so that options are often comparable and often equal in part.
SMALL = st.integers(0, 2)
POSITIONS = st.sampled_from([(), (0,), (1,), (0, 1)])
OPTIONS = st.builds(
    lambda cost, kind: Option(Region(0, 3, checkpointed=kind == "checkpointed"), cost, kind),
    st.builds(OptionCost, SMALL, SMALL, SMALL, POSITIONS, POSITIONS, SMALL, SMALL),
    st.sampled_from(["plain", "checkpointed"]),
)
PLAIN = Option(Region(0, 3), OptionCost(1.0, 2.0, 10, (0,), (0,), 20, 30), "plain")


@given(st.lists(OPTIONS, max_size=12))
def test_the_result_is_the_pareto_set(options: list[Option]) -> None:
    kept = pareto(options)
    assert all(k in options for k in kept)
    # No member dominates another, and whatever is left out is dominated by a member.
    assert not any(a.dominates(b) for a in kept for b in kept if a is not b)
    assert all(any(k.dominates(o) for k in kept) for o in options)
    times = [k.cost.time_s for k in kept]
    assert times == sorted(times)


@given(st.lists(OPTIONS, max_size=8))
def test_pareto_again_changes_nothing(options: list[Option]) -> None:
    assert pareto(pareto(options)) == pareto(options)


@given(st.lists(OPTIONS, max_size=8), st.randoms(use_true_random=False))
def test_the_costs_kept_do_not_depend_on_the_order(options: list[Option], random) -> None:
    mixed = random.sample(options, len(options))

    def costs(options: list[Option]) -> set[tuple[object, ...]]:
        fields = "time_s kept_bytes kept_inputs kept_outputs forward_peak_bytes backward_peak_bytes"
        return {tuple(getattr(o.cost, f) for f in fields.split()) for o in pareto(options)}

    assert costs(mixed) == costs(options)


@given(OPTIONS, OPTIONS, OPTIONS)
def test_dominance_is_a_preorder(a: Option, b: Option, c: Option) -> None:
    assert a.dominates(a)
    if a.dominates(b) and b.dominates(c):
        assert a.dominates(c)


@pytest.mark.parametrize(
    "worse",
    [
        {"forward_s": 1.5},
        {"backward_s": 2.5},
        {"kept_bytes": 11},
        {"kept_inputs": (0, 1)},
        {"kept_outputs": (0, 1)},
        {"forward_peak_bytes": 21},
        {"backward_peak_bytes": 31},
    ],
)
def test_every_cost_counts(worse: dict[str, object]) -> None:
    other = replace(PLAIN, cost=replace(PLAIN.cost, **worse))
    assert PLAIN.dominates(other)
    assert not other.dominates(PLAIN)
    assert pareto([other, PLAIN]) == (PLAIN,)


def test_time_between_forward_and_backward_may_shift() -> None:
    shifted = replace(PLAIN, cost=replace(PLAIN.cost, forward_s=2.0, backward_s=1.0))
    assert PLAIN.dominates(shifted) and shifted.dominates(PLAIN)
    assert pareto([PLAIN, shifted]) == (PLAIN,)
    assert pareto([shifted, PLAIN]) == (shifted,)


def test_of_equal_ones_that_is_kept_which_xla_makes_nothing_of_ahead() -> None:
    zeros = LiveRange(100, of_constants=True)
    early = replace(PLAIN, cost=replace(PLAIN.cost, backward=Phase((zeros,), (100,))))
    # The recompute of an index, fused into the gather that reads it.
    late = replace(PLAIN, cost=replace(PLAIN.cost, backward_s=2.0 + 5e-16), origin="checkpointed")
    assert early.cost.unbound_bytes == 100 and late.cost.unbound_bytes == 0
    assert pareto([early, late]) == pareto([late, early]) == (late,)
    slower = replace(late, cost=replace(late.cost, backward_s=2.0 + 1e-8))
    assert pareto([early, slower]) == (early,)


def test_inputs_kept_are_compared_as_sets() -> None:
    first, second = (replace(PLAIN, cost=replace(PLAIN.cost, kept_inputs=k)) for k in ((0,), (1,)))
    assert set(pareto([first, second])) == {first, second}
    assert pareto([]) == ()
