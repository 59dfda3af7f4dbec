"""The picture of memory for a terminal, and the round numbers on axes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_plans import MIB, certificate, moments, written_plan

from jax_hremat._plan.memory import memory_over_step
from jax_hremat._shared.ticks import byte_ticks, percent_ticks, round_ticks


def picture(**changes: object) -> list[str]:
    return written_plan(**changes).memory_chart(width=68, height=8).splitlines()


def test_the_picture() -> None:
    """Six moments of ten columns, lines of 10 MiB."""
    assert picture() == [
        "memory over the step (heights predicted, peaks below as compiled)",
        "80 MiB ┤                              ░░░░░░░░░░",
        "       │                    ░░░░░░░░░░░░░░░░░░░░",
        "60 MiB ┤                    ░░░░░░░░░░░░░░░░░░░░",
        "       │┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄",
        "40 MiB ┤          ░░░░░░░░░░░░░░░░░░░░██████████░░░░░░░░░░",
        "       │          ████████████████████████████████████████",
        "20 MiB ┤████████████████████████████████████████████████████████████",
        "       │████████████████████████████████████████████████████████████",
        "     0 └─────────────────────────────┴──────────────────────────────",
        "        forward                       backward",
        "█ with the plan 41.00 MiB   ░ without 81.00 MiB   ┄ budget 50.00 MiB",
    ]


def test_it_is_as_wide_as_asked_with_more_moments_than_columns() -> None:
    many = moments(*[10] * 333, 90, *[10] * 66, *[10] * 400)
    plan = written_plan(moments=many, baseline_moments=many, predicted_peak_bytes=100 * MIB)
    lines = plan.memory_chart(width=80, height=12).splitlines()
    assert max(map(len, lines)) in (79, 80)  # Halves are equally wide.
    # One moment of 800 is seen, though it shares its column with eleven others.
    assert lines[1].count("█") == 1


def test_a_budget_far_above_is_said_and_not_drawn() -> None:
    lines = picture(certificate=certificate(budget_bytes=500 * MIB))
    assert not any("┄┄" in line for line in lines)
    assert lines[-1].endswith("┄ budget 500.00 MiB, above the picture")


def test_a_budget_somewhat_above_is_drawn_at_the_top() -> None:
    lines = picture(certificate=certificate(budget_bytes=120 * MIB))
    assert lines[1].endswith("│" + 58 * "┄")
    assert [line[:9] for line in lines if "┤" in line] == ["100 MiB ┤", " 50 MiB ┤"]


def test_a_plan_without_predictions_says_so() -> None:
    plan = written_plan(moments=(), baseline_moments=())
    assert "not known" in plan.memory_chart()
    assert memory_over_step(plan) is None


def test_arguments_and_results_are_in_both_curves() -> None:
    memory = memory_over_step(written_plan())
    assert memory is not None
    assert memory.fixed_bytes == 10 * MIB
    assert [size // MIB for size in memory.with_plan_bytes] == [20, 30, 30, 40, 30, 20]
    assert [size // MIB for size in memory.without_bytes] == [20, 40, 70, 80, 50, 20]
    assert memory.most_bytes == 80 * MIB


@given(
    low=st.floats(-1e6, 1e6),
    span=st.floats(1e-3, 1e15),
    most=st.integers(2, 10),
)
def test_ticks_are_few_round_and_on_the_axis(low: float, span: float, most: int) -> None:
    ticks = round_ticks(low, low + span, most)
    assert len(ticks) <= most
    assert all(low - 1e-9 * span <= t <= low + span * (1 + 1e-9) for t in ticks)
    # A step of 1, 2 or 5 is at most two and a half times the one below it.
    assert len(ticks) >= most // 2.5 - 1


@pytest.mark.parametrize(
    ("high_bytes", "texts"),
    [
        (80 * MIB, ["0", "20 MiB", "40 MiB", "60 MiB", "80 MiB"]),
        (1.2 * 2**30, ["0", "0.5 GiB", "1 GiB"]),
        (1023 * MIB, ["0", "500 MiB", "1000 MiB"]),
        (900, ["0", "200 B", "400 B", "600 B", "800 B"]),
        (141 * 2**30, ["0", "50 GiB", "100 GiB"]),
    ],
)
def test_ticks_of_bytes(high_bytes: float, texts: list[str]) -> None:
    assert [tick.text for tick in byte_ticks(high_bytes, 5)] == texts


def test_ticks_of_percentages() -> None:
    found = [tick.text for tick in percent_ticks(-0.013, 0.031, 6)]
    assert found == ["−1 %", "0 %", "+1 %", "+2 %", "+3 %"]
