"""The field's systems as strategies: their laws, their optima, and certified plans by each."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choices_laws import check_laws
from drawing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import jit_peak_bytes, normal
from tracing import trace_loss

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._emit.step import own_step
from jax_hremat._partition.blocks import Partitioner
from jax_hremat._plan.region import Region
from jax_hremat._planner.forms import forms_of
from jax_hremat._shared.format import format_bytes
from jax_hremat._solve.schedule import Schedules
from jax_hremat.strategies import (
    STRATEGIES,
    BoundaryValue,
    Chain,
    Choices,
    Curve,
    Selection,
    SolverConfig,
    Strategy,
    predict,
)

MIB = 2**20
Shape = tuple[tuple[int, int], ...]


def chain_of(
    times_ms: list[int], kept: list[int], made: list[int], skips: Shape = (), effects: bool = False
) -> Chain:
    """A chain of blocks, each plain or checkpointed, whose values pass to the next block and, by
    `skips`, from one block to another.

    Args:
        times_ms: Time of each block's forward; its backward takes twice as long.
        kept: MiB of each block's residuals.
        made: MiB that each block hands on.
        skips: Pairs of a block that makes a value of 1 MiB and a later one that reads it.
        effects: Whether the second block has an effect.
    """
    options = []
    for ms, k, m in zip(times_ms, kept, made, strict=True):
        plain = OptionCost(ms / 1e3, 2 * ms / 1e3, k * MIB, (), (), (k + m) * MIB, (k + m) * MIB)
        again = replace(
            plain, kept_bytes=0, backward_s=3 * ms / 1e3, forward_peak_bytes=(m + 1) * MIB
        )
        options.append(
            (Option(Region(0, 2), plain, "plain"), Option(Region(0, 2), again, "checkpointed"))
        )
    ends = [(a, a + 1, made[a]) for a in range(len(made) - 1)] + [(*skip, 1) for skip in skips]
    values = tuple(
        BoundaryValue(m * MIB, a, (z,), True, frozenset({(z, 0), (z, 1)})) for a, z, m in ends
    )
    return Chain(
        starts=tuple(range(0, 2 * len(made), 2)),
        options=tuple(options),
        recompute_s=tuple(ms / 1e3 for ms in times_ms),
        handing_on_bytes=tuple(opts[-1].cost.forward_peak_bytes for opts in options),
        handing_on=tuple(opts[-1].cost.forward for opts in options),
        last_recompute_s=tuple((ms / 1e3, 0.0) for ms in times_ms),
        shared_bytes=(0,) * len(made),
        boundary_values=values,
        fixed_bytes=3 * MIB,
        effectful=frozenset({1} if effects else ()),
    )


@st.composite
def chains(draw: st.DrawFn, most: int = 9, skipping: bool = True) -> Chain:
    """Two blocks or more, with a few values that skip blocks."""
    n = draw(st.integers(2, most))

    def sizes(low: int, high: int) -> list[int]:
        return draw(st.lists(st.integers(low, high), min_size=n, max_size=n))

    skips = [
        (a, draw(st.integers(a + 1, n - 1)))
        for a in draw(st.lists(st.integers(0, n - 2), max_size=3 if skipping else 0, unique=True))
    ]
    effects = skipping and draw(st.booleans())
    return chain_of(sizes(1, 9), sizes(0, 12), sizes(1, 9), tuple(skips), effects)


# Those that solve integer programs for each budget, or for several peaks.
PROGRAMS = ("hrockmate", "checkmate")


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name not in PROGRAMS])
@settings(max_examples=examples(15), derandomize=True)
@given(chains())
def test_the_laws(name: str, chain: Chain) -> None:
    check_laws(STRATEGIES[name], chain)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n == "checkmate" else []) for n in PROGRAMS],
)
@settings(max_examples=examples(6), derandomize=True)
@given(chains(most=6))
def test_the_laws_of_integer_programs(name: str, chain: Chain) -> None:
    check_laws(STRATEGIES[name], chain)


class EveryThird(Strategy):
    """A strategy of a user's own, as in the guide."""

    name = "every third"
    summary = "every third block is checkpointed, or every block"
    source = "nobody"
    leaves_out = "everything else"

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        def every(count: int) -> Selection:
            checkpointed = (b % count == 0 for b in range(len(chain)))
            return Selection(
                tuple(
                    len(o) - 1 if c else 0 for o, c in zip(chain.options, checkpointed, strict=True)
                )
            )

        return Curve(chain, (every(1), every(3), Selection((0,) * len(chain))))


@settings(max_examples=examples(20), derandomize=True)
@given(chains())
def test_the_laws_hold_of_a_users_own(chain: Chain) -> None:
    check_laws(EveryThird(), chain)


def nests(first: int, last: int, *, proper: bool = False) -> Iterator[Shape]:
    """All sets of groups of blocks from first to last, nested in every way; if `proper`, without
    the group of all of them."""
    if first >= last:
        yield ()
        return
    yield from nests(first + 1, last)
    for end in range(first + 1, last if proper else last + 1):
        for inside, rest in product(nests(first, end, proper=True), nests(end + 1, last)):
            yield ((first, end), *inside, *rest)


def best_s(chain: Chain, limit_bytes: float) -> float:
    """The least predicted time of all nested selections within a limit, by enumeration."""
    return min(
        (
            found.time_s
            for groups in nests(0, len(chain) - 1)
            for options in product(*(range(len(o)) for o in chain.options))
            if (found := predict(chain, Selection(options, groups))).peak_bytes <= limit_bytes
        ),
        default=float("inf"),
    )


@settings(max_examples=examples(12), derandomize=True)
@given(chains(most=4, skipping=False), st.floats(0, 1))
def test_rotor_is_what_enumeration_finds(chain: Chain, part: float) -> None:
    """Up to its rounding: a slot for each size that a schedule adds up, each at most the chain's
    whole size over the number of slots."""
    choices = STRATEGIES["rotor"].choices(chain, SolverConfig())
    plain_bytes = predict(chain, Selection((0,) * len(chain))).peak_bytes
    low = predict(chain, choices.lowest()).peak_bytes
    limit = low + part * (plain_bytes - low)
    selection = choices.fastest(int(limit))
    assert selection is not None
    found_s = predict(chain, selection).time_s
    rounding_bytes = 3 * len(chain) * plain_bytes / 100
    assert best_s(chain, limit) <= found_s + 1e-9
    assert found_s <= best_s(chain, limit - rounding_bytes) + 1e-9


@pytest.mark.parametrize(("blocks", "sets"), [(1, 1), (2, 2), (3, 6), (4, 22)])
def test_the_enumeration_lists_every_nest(blocks: int, sets: int) -> None:
    """The large Schröder numbers, of the ways to put brackets around two or more."""
    found = list(nests(0, blocks - 1))
    assert len(found) == len(set(found)) == sets


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)
    return jnp.mean(x**2)


PARAMS = [normal(i, 8, 32) / 8 for i in range(5)]
X = normal(5, 64, 8)


def config_of(strategy: str | Strategy) -> PlannerConfig:
    search = SearchConfig(max_packings=1, max_saved_sets=1)
    return PlannerConfig(
        search=search, cost="analytic", strategy=strategy, max_rounds=1, floor_rounds=1
    )


@pytest.mark.parametrize(
    "strategy",
    [
        EveryThird(),
        *(pytest.param(name, marks=pytest.mark.slow) for name in STRATEGIES),
    ],
)
def test_a_plan_of_each_is_certified_and_computes_the_same(strategy: str | Strategy) -> None:
    plan = jax_hremat.plan_remat(loss_fn, budget=0.75, target="cpu", config=config_of(strategy))(
        PARAMS, X
    )
    assert plan.certificate.holds
    assert plan.root.num_checkpointed
    assert 0 < plan.bound_step_s <= plan.predicted_step_s
    planned = jax.jit(jax.value_and_grad(jax_hremat.apply_plan(loss_fn, plan)))
    assert jit_peak_bytes(planned, PARAMS, X) <= plan.certificate.budget_bytes
    expected = jax.jit(jax.value_and_grad(loss_fn))(PARAMS, X)
    for got, wanted in zip(*map(jax.tree.leaves, (planned(PARAMS, X), expected)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def test_a_refusal_names_the_least_budget_of_the_strategy() -> None:
    planned = jax_hremat.plan_remat(loss_fn, budget=2_000, target="cpu", config=config_of("chen"))
    with pytest.raises(jax_hremat.InfeasibleBudgetError) as refused:
        planned(PARAMS, X)
    least = refused.value.min_budget_bytes
    plan = jax_hremat.plan_remat(loss_fn, budget=least, target="cpu", config=config_of("chen"))
    assert plan(PARAMS, X).certificate.holds


@pytest.mark.slow
def test_a_slowdown_and_a_frontier_of_a_strategy() -> None:
    how = dict(target="cpu", config=config_of("rotor"))
    plan = jax_hremat.plan_remat(loss_fn, max_slowdown=1.3, **how)(PARAMS, X)
    assert plan.slowdown <= 1.3
    assert plan.certificate.peak_bytes < plan.baseline_peak_bytes
    frontier = jax_hremat.pareto(loss_fn, num_points=3, **how)(PARAMS, X)
    assert len(frontier) >= 2


def test_an_unknown_strategy_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="strategy='cehn': the strategies are 'tree', 'chen'"):
        PlannerConfig(strategy="cehn")


def test_an_answer_of_one_strategy_is_no_answer_of_another(tmp_path) -> None:
    def planned(strategy: str | Strategy) -> jax_hremat.RematPlan:
        config = replace(config_of(strategy), cache_dir=tmp_path)
        return jax_hremat.plan_remat(loss_fn, budget=0.75, target="cpu", config=config)(PARAMS, X)

    chen = planned("chen")
    assert planned("tw-remat").root != chen.root
    assert planned(EveryThird()).root != chen.root
    assert planned("chen").root == chen.root


def test_rockmate_is_no_slower_than_rotor_and_the_tree_no_slower_than_either() -> None:
    """Of the same chain: every choice of one is a choice of the next, but for nests."""
    chain = chain_of([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3], [1] * 8)
    plain_bytes = predict(chain, Selection((0,) * 8)).peak_bytes
    for part in (0.9, 0.75, 0.6):
        limit = int(part * plain_bytes)
        tree = Schedules(chain).fastest_within(limit, SolverConfig(relative_gap=0.0)).selection
        rotor = STRATEGIES["rotor"].choices(chain, SolverConfig()).fastest(limit)
        assert tree is not None
        assert rotor is not None
        assert predict(chain, tree).time_s <= predict(chain, rotor).time_s + 1e-9


@pytest.fixture(scope="module")
def comparison() -> jax_hremat.Comparison:
    config = replace(config_of("tree"), floor_rounds=0)
    compared = jax_hremat.compare(
        loss_fn,
        budgets=[0.75, 2_000],
        strategies=["chen", EveryThird()],
        target="cpu",
        config=config,
    )
    return compared(PARAMS, X)


def test_a_comparison_lists_every_strategy_at_every_budget(
    comparison: jax_hremat.Comparison,
) -> None:
    assert comparison.strategies == ("chen", "every third")
    assert {(one.strategy, one.fits) for one in comparison.found} == {
        (name, fits) for name in comparison.strategies for fits in (True, False)
    }
    large, small = comparison.budgets_bytes
    assert small == 2_000
    assert all(one.plan.certificate.peak_bytes <= large for one in comparison.at(large))
    steps = [one.plan.estimated_step_s for one in comparison.at(large)]
    assert steps == sorted(steps)


def test_what_a_comparison_shows(comparison: jax_hremat.Comparison, tmp_path) -> None:
    text = str(comparison)
    assert max(map(len, text.splitlines())) <= 80
    assert "*: above the budget" in text
    for one in comparison.found:
        assert one.strategy in text
        assert format_bytes(one.plan.certificate.peak_bytes) in text
        assert format_bytes(one.plan.certificate.peak_bytes) in comparison._repr_html_()
    comparison.to_csv(tmp_path / "found.csv")
    with open(tmp_path / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["peak_bytes"]) for row in rows] == [
        one.plan.certificate.peak_bytes for one in comparison.found
    ]
    (axes,) = comparison.plot().figure.axes
    assert {label.get_text() for label in axes.get_legend().get_texts()} == {
        *comparison.strategies,
        "no rematerialization",
    }


@pytest.mark.parametrize(
    ("budgets", "strategies"), [([], ["chen"]), ([0.5], []), ([0.5], ["chen", "chen"])]
)
def test_what_cannot_be_compared(budgets: list[float], strategies: list[str]) -> None:
    with pytest.raises(ValueError, match="one (budget|strategy) or more"):
        jax_hremat.compare(loss_fn, budgets=budgets, strategies=strategies)


@pytest.mark.slow
def test_the_best_plan_of_several_partitioners_is_returned() -> None:
    def planned(*partitioners: Partitioner) -> jax_hremat.RematPlan:
        config = PlannerConfig(cost="analytic", cache_dir="", partitioner=partitioners)
        return jax_hremat.plan_remat(loss_fn, budget=0.6, target="cpu", config=config)(PARAMS, X)

    width, score = jax_hremat.partition_by_width, jax_hremat.partition_by_score
    alone = [planned(width), planned(score)]
    steps_s = [plan.estimated_step_s for plan in alone]
    assert steps_s[0] != steps_s[1]
    for order in ((width, score), (score, width)):
        best = planned(*order)
        assert best.estimated_step_s == min(steps_s)
        assert best.certificate.holds
        assert best.bound_step_s == min(plan.bound_step_s for plan in alone)


def test_a_program_is_planned_with_each_partitioner_once() -> None:
    width, score = jax_hremat.partition_by_width, jax_hremat.partition_by_score
    step = own_step(trace_loss(loss_fn, (PARAMS, X)))
    forms = forms_of(step, PlannerConfig(partitioner=(score, width, score)))
    assert [form.config.partitioner for form in forms] == [score, width]
    with pytest.raises(ValueError, match="at least one partitioner"):
        PlannerConfig(partitioner=())
