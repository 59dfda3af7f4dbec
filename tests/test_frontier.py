"""The trade between memory and time: every point certified, none beaten, both ends there."""

from __future__ import annotations

import csv
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_hremat
from jax_hremat import (
    BudgetFormatError,
    Frontier,
    InfeasibleBudgetError,
    PlannerConfig,
    SearchConfig,
)

CONFIG = PlannerConfig(search=SearchConfig(max_packings=1, max_saved_sets=1), max_rounds=2)
OPTIONS: dict[str, Any] = dict(target="cpu", config=CONFIG)


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for w_in, w_out in params:
        x = x + jax.nn.gelu(x @ w_in) @ w_out
    return jnp.mean(x**2)


ARGS = (
    [(jnp.ones((16, 64)), jnp.ones((64, 16)))] * 5,
    jax.ShapeDtypeStruct((1024, 16), jnp.float32),
)


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return jax_hremat.pareto(loss_fn, num_points=6, headroom_bytes=100, **OPTIONS)(*ARGS)


def test_every_point_is_certified_and_none_is_beaten(frontier: Frontier) -> None:
    assert len(frontier) >= 4
    for plan in frontier:
        assert plan.certificate.holds
        assert plan.certificate.budget_bytes == plan.certificate.peak_bytes + 100
    for low, high in itertools.pairwise(frontier):
        assert low.certificate.peak_bytes < high.certificate.peak_bytes
        assert low.estimated_step_s > high.estimated_step_s


def test_its_ends_are_the_floor_and_no_slowdown(frontier: Frontier) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        jax_hremat.plan_remat(loss_fn, budget=1, **OPTIONS)(*ARGS)
    # The floor is found up to a hundredth.
    lowest = frontier[0].certificate.peak_bytes
    assert lowest == pytest.approx(caught.value.min_budget_bytes, rel=0.01)
    assert frontier[-1].slowdown <= 1.0


def test_within_takes_the_fastest_that_fits(frontier: Frontier) -> None:
    for plan in frontier:
        assert frontier.within(plan.certificate.budget_bytes) is plan
    assert frontier.within(1.0) is frontier[-1]
    with pytest.raises(InfeasibleBudgetError) as caught:
        frontier.within(frontier[0].certificate.budget_bytes - 1)
    assert caught.value.min_budget_bytes == frontier[0].certificate.budget_bytes


def test_table_and_csv(frontier: Frontier, tmp_path: Any) -> None:
    title, table, legend = str(frontier).split("\n\n")
    assert title.startswith("Without rematerialization: ")
    assert len(table.splitlines()) == len(frontier) + 1
    assert all(word in table for word in ("peak", "share", "added time", "time per GiB"))
    assert "certified" in legend
    assert max(map(len, str(frontier).splitlines())) <= 80
    path = tmp_path / "frontier.csv"
    frontier.to_csv(path)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [int(r["peak_bytes"]) for r in rows] == [p.certificate.peak_bytes for p in frontier]
    price = float(rows[0]["s_per_gib"])
    assert price == pytest.approx(frontier.s_per_byte(0) * 2**30) and price > 0
    assert rows[-1]["s_per_gib"] == ""
    assert repr(frontier).startswith(f"Frontier({len(frontier)} plans")


def test_plot(frontier: Frontier, tmp_path: Any) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    ax = frontier.plot()
    drawn = ax.lines[1].get_xydata()
    assert drawn[:, 0] * 2**30 == pytest.approx([p.certificate.peak_bytes for p in frontier])
    path = tmp_path / "frontier.png"
    ax.figure.savefig(path)
    assert path.stat().st_size > 0


def test_a_curve_has_two_ends() -> None:
    with pytest.raises(ValueError, match="two ends"):
        jax_hremat.pareto(loss_fn, num_points=1)


@pytest.mark.parametrize(
    "ratio",
    [1.1, *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in (1.0, 1.2))],
)
def test_least_memory_within_a_slowdown(frontier: Frontier, ratio: float) -> None:
    plan = jax_hremat.plan_remat(loss_fn, max_slowdown=ratio, **OPTIONS)(*ARGS)
    assert plan.slowdown <= ratio
    assert plan.certificate.holds
    known = [p.certificate.peak_bytes for p in frontier if p.slowdown <= ratio]
    assert plan.certificate.peak_bytes <= 1.02 * min(known)


@pytest.mark.parametrize(
    ("goal", "message"),
    [
        (dict(), "no budget was given: give budget="),
        (dict(budget="device"), "only `fit_step` and `max_batch`"),
        (dict(budget=0.5, max_slowdown=1.1), "both given"),
        (dict(max_slowdown=0.9), "not a ratio of 1 or more"),
        (dict(max_slowdown="10%"), "not a number"),
        (dict(max_slowdown=float("nan")), "not a ratio"),
    ],
)
def test_goals_that_are_none(goal: dict[str, Any], message: str) -> None:
    for entry in (jax_hremat.plan_remat, jax_hremat.hremat):
        with pytest.raises(BudgetFormatError, match=message):
            entry(loss_fn, **goal)
