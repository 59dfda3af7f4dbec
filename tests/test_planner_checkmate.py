"""Checkmate as a strategy of the planner: the graph of a chain, free schedules, nearest nests."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest
from choices_laws import EXACT, check_selection
from drawing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner_strategies import PARAMS, X, best_s, chain_of, chains, loss_fn
from written_plans import written_plan

import jax_hremat
from jax_hremat import PlannerConfig, RematPlan
from jax_hremat._schedules.simulate import simulate, without_recompute
from jax_hremat._strategies.checkmate import PROVEN, ROUNDED
from jax_hremat._strategies.nearest_nest import nearest_nest, parts
from jax_hremat._strategies.step_graph import step_graph
from jax_hremat.strategies import (
    STRATEGIES,
    Chain,
    FreeChoices,
    FreeSchedule,
    Selection,
    SolverConfig,
    Strategy,
    predict,
)

MIB = 2**20
CHECKMATE = STRATEGIES["checkmate"]


def as_the_graph_counts(chain: Chain) -> Chain:
    """The chain with peaks that count what the graph's operations hold.

    A backward starts when a block's residuals, the cotangent of its output and as much working
    memory again are there; a checkpointed block writes its residuals in its first forward too, and
    its second takes as long as the first.
    """

    def made_bytes(block: int) -> int:
        made = [v.size_bytes for v in chain.boundary_values if v.producer == block]
        read = [v.size_bytes for v in chain.boundary_values if v.readers[-1] == block]
        return 2 * max(sum(made), *read, 9 * MIB)

    options = []
    for block, of_block in enumerate(chain.options):
        kept = of_block[0].cost.kept_bytes
        peaks = dict(
            forward_peak_bytes=kept + made_bytes(block) // 2,
            backward_peak_bytes=kept + made_bytes(block),
        )
        options.append(tuple(replace(o, cost=replace(o.cost, **peaks)) for o in of_block))
    return replace(chain, options=tuple(options))


@settings(max_examples=examples(60), derandomize=True)
@given(chains())
def test_the_graph_is_the_chain_where_nothing_runs_again(chain: Chain) -> None:
    chain = as_the_graph_counts(chain)
    graph = step_graph(chain).graph
    run = simulate(graph, without_recompute(graph))
    plain = predict(chain, Selection((0,) * len(chain)))
    assert run.time_s == pytest.approx(plain.time_s)
    assert run.peak_bytes == plain.peak_bytes


@settings(max_examples=examples(60), derandomize=True)
@given(chains())
def test_the_graph_takes_no_less_than_the_chain_whatever_its_peaks(chain: Chain) -> None:
    graph = step_graph(chain).graph
    run = simulate(graph, without_recompute(graph))
    assert run.peak_bytes >= predict(chain, Selection((0,) * len(chain))).peak_bytes


def test_constants_that_a_checkpoint_keeps_are_held_until_the_backward() -> None:
    chain = replace(chain_of([1, 2, 3], [4, 5, 6], [7, 8, 9]), shared_bytes=(MIB, 0, 9 * MIB))
    step = step_graph(as_the_graph_counts(chain))
    assert [o.output_bytes for o in step.graph.operations if "constants" in o.name] == [
        MIB,
        6 * MIB,
    ]
    run = simulate(step.graph, without_recompute(step.graph))
    plain = Selection((0, 0, 0))
    assert run.peak_bytes == predict(as_the_graph_counts(chain), plain).peak_bytes


@settings(max_examples=examples(20), derandomize=True)
@given(chains(most=4, skipping=False), st.floats(0, 1))
def test_a_free_schedule_is_no_slower_than_any_nest(chain: Chain, part: float) -> None:
    """Of a chain without values that skip blocks, whose peaks are such that every nest, followed in
    the graph, takes at most what is predicted for it: every moment of a recompute is then below the
    predicted moment of the backward behind it."""
    chain = as_the_graph_counts(chain)
    choices = CHECKMATE.choices(chain, EXACT)
    assert isinstance(choices, FreeChoices)
    plain_bytes = predict(chain, Selection((0,) * len(chain))).peak_bytes
    low_bytes = predict(chain, choices.lowest()).peak_bytes
    limit = int(low_bytes + part * (plain_bytes - low_bytes))
    free = choices.free(limit)
    assert free is not None
    assert free.found_by == PROVEN
    assert free.peak_bytes <= limit
    assert free.step_s <= best_s(chain, limit) + 1e-9


@settings(max_examples=examples(20), derandomize=True)
@given(chains(most=6), st.floats(0.2, 1))
def test_free_schedules_are_within_the_peak_and_the_same_each_time(
    chain: Chain, part: float
) -> None:
    graph = step_graph(chain).graph
    plain = simulate(graph, without_recompute(graph))
    peak_bytes = int(part * plain.peak_bytes)
    asked = [CHECKMATE.choices(chain, SolverConfig()) for _ in range(2)]
    asked[1].lowest()  # What was asked before makes no difference.
    found = [choices.free(peak_bytes) for choices in asked if isinstance(choices, FreeChoices)]
    assert found[0] == found[1]
    if found[0] is not None:
        assert found[0].peak_bytes <= peak_bytes
        assert found[0].step_s >= plain.time_s - 1e-9


def test_nothing_is_free_below_what_one_operation_takes() -> None:
    choices = CHECKMATE.choices(chain_of([1, 2], [3, 4], [5, 6]), SolverConfig())
    assert isinstance(choices, FreeChoices)
    assert choices.free(4 * MIB) is None
    assert choices.free(2 * MIB) is None


@pytest.mark.slow
def test_a_large_chain_is_answered_by_the_relaxation() -> None:
    chain = chain_of([1] * 51, [4] * 51, [1] * 51)
    choices = CHECKMATE.choices(chain, SolverConfig())
    assert isinstance(choices, FreeChoices)
    plain_bytes = predict(chain, Selection((0,) * 51)).peak_bytes
    free = choices.free(int(0.6 * plain_bytes))
    assert free is not None
    assert free.found_by == ROUNDED


@pytest.mark.parametrize(
    ("again", "groups"),
    [
        ([[], []], []),
        ([[3, 4, 5], [], [1]], [(3, 5), (1, 1)]),
        ([[1, 2, 5, 6]], [(1, 2), (5, 6)]),
        ([[2, 3, 4, 5], [], [2, 3]], [(2, 5), (2, 3)]),
        ([[2, 3], [2, 3]], [(2, 3)]),
        # What would cross a group is cut.
        ([[3, 4, 5], [2, 3]], [(3, 5), (2, 2), (3, 3)]),
    ],
)
def test_the_nearest_nest(again: list[list[int]], groups: list[tuple[int, int]]) -> None:
    assert nearest_nest(again) == groups


@settings(max_examples=examples(100), derandomize=True)
@given(st.lists(st.sets(st.integers(0, 7)), max_size=8))
def test_nests_and_their_parts_are_selections(again: list[set[int]]) -> None:
    chain = chain_of([1] * 8, [1] * 8, [1] * 8, effects=True)
    for selection in parts(chain, nearest_nest(again)):
        check_selection(chain, selection)


@pytest.fixture(scope="module")
def comparison() -> jax_hremat.Comparison:
    strategies: list[str | Strategy] = ["checkmate", "chen"]
    config = PlannerConfig(cost="analytic", max_rounds=1, floor_rounds=0)
    compared = jax_hremat.compare(
        loss_fn, budgets=[0.75, 2_000], strategies=strategies, target="cpu", config=config
    )
    return compared(PARAMS, X)


def test_a_plan_is_certified_and_has_the_free_schedule_beside_it(
    comparison: jax_hremat.Comparison,
) -> None:
    large, small = comparison.budgets_bytes
    (one,) = [one for one in comparison.at(large) if one.strategy == "checkmate"]
    assert one.fits
    assert one.plan.certificate.holds
    assert one.plan.root.num_checkpointed
    free = one.plan.free_schedule
    assert free is not None
    assert free.peak_bytes <= large
    assert one.free_slowdown is not None
    assert one.free_slowdown >= 1 - 1e-9
    assert RematPlan.from_json(one.plan.to_json()) == one.plan
    (refused,) = [one for one in comparison.at(small) if one.strategy == "checkmate"]
    assert refused.plan.free_schedule is None
    assert refused.free_words == ""


def test_a_comparison_tells_both_figures_apart(comparison: jax_hremat.Comparison, tmp_path) -> None:
    text, html = str(comparison), comparison._repr_html_()
    assert max(map(len, text.splitlines())) <= 80
    assert "simulated" in text
    assert "free schedule, simulated" in html
    (words,) = {one.free_words for one in comparison.found} - {""}
    assert words in html
    comparison.to_csv(tmp_path / "found.csv")
    with open(tmp_path / "found.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, one in zip(rows, comparison.found, strict=True):
        free = one.plan.free_schedule
        assert row["free_simulated_peak_bytes"] == ("" if free is None else str(free.peak_bytes))
        assert row["free_found_by"] == ("" if free is None else free.found_by)


def test_plans_without_the_field_are_read() -> None:
    plan = written_plan()
    data = json.loads(plan.to_json())
    assert data.pop("free_schedule") is None
    assert RematPlan.from_json(json.dumps(data)) == plan
    free = replace(plan, free_schedule=FreeSchedule(3 * MIB, 0.5, PROVEN))
    assert RematPlan.from_json(free.to_json()) == free


def test_printing_a_plan_tells_its_free_schedule_apart() -> None:
    plan = written_plan()
    text = str(replace(plan, free_schedule=FreeSchedule(3 * MIB, 0.5, PROVEN)))
    assert max(map(len, text.splitlines())) <= 80
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("free schedule")]
    assert "500 ms" in line
    assert "not compiled" in " ".join(text.split())
    assert "free schedule" not in str(plan)
