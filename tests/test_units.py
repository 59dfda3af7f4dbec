import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hremat._plan.infeasible import InfeasibleBudgetError
from jax_hremat._shared.errors import BudgetFormatError
from jax_hremat._shared.format import format_bytes, format_seconds
from jax_hremat._shared.units import Budget, Slowdown, parse_budget, parse_goal, parse_headroom


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [
        ("70GiB", 70 * 2**30),
        ("70 GB", 70 * 10**9),
        (" 512mib ", 512 * 2**20),
        ("1.5 TiB", 3 * 2**39),
        ("0.1kB", 100),
        (".5KiB", 512),
        ("1.5e9", 1_500_000_000),
        ("1e3 MB", 10**9),
        ("12345", 12345),
        ("9007199254740993", 2**53 + 1),
        ("9007199254740993 B", 2**53 + 1),
    ],
)
def test_texts_are_read_exactly(text: str, expected_bytes: int) -> None:
    assert parse_budget(text) == Budget(bytes=expected_bytes)


@pytest.mark.parametrize("fraction", [1e-6, 0.5, 1.0])
def test_a_float_up_to_one_is_a_fraction(fraction: float) -> None:
    assert parse_budget(fraction) == Budget(fraction=fraction)
    assert parse_budget(fraction).resolve_bytes(10**6) == int(fraction * 10**6)


@pytest.mark.parametrize(("text", "fraction"), [("50%", 0.5), (" 12.5 % ", 0.125), ("100%", 1.0)])
def test_a_text_in_per_cent_is_a_fraction(text: str, fraction: float) -> None:
    assert parse_budget(text) == Budget(fraction=fraction)


@pytest.mark.parametrize("text", ["%", "0%", "-5%", "101%", "1e2%", "nan%", "5%%", "5GiB%"])
def test_other_texts_in_per_cent_are_refused(text: str) -> None:
    with pytest.raises(BudgetFormatError, match="at most 100 %"):
        parse_budget(text)


def test_a_budget_and_an_int_pass_through() -> None:
    budget = parse_budget(7)
    assert budget == Budget(bytes=7)
    assert parse_budget(budget) is budget
    assert budget.resolve_bytes(3) == 7


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint64])
def test_numpy_integers_are_bytes(kind: type) -> None:
    budget = parse_budget(kind(70_000_000))
    assert budget == Budget(bytes=70_000_000)
    assert type(budget.bytes) is int


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numpy_floats_are_fractions(kind: type) -> None:
    budget = parse_budget(kind(0.75))
    assert budget == Budget(fraction=0.75)
    assert type(budget.fraction) is float
    assert parse_goal(None, kind(1.25)) == Slowdown(1.25)  # pyright: ignore[reportArgumentType]


def test_numpy_numbers_that_are_no_budget_are_refused() -> None:
    for value in (np.bool_(True), np.int64(0), np.float32(2), np.float32("nan")):
        with pytest.raises(BudgetFormatError):
            parse_budget(value)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "value",
    [None, True, False, 0, -1, 0.0, -0.5, 1.5, 2.0, float("nan"), float("inf"), b"1GiB", [1]],
)
def test_values_that_are_no_budget_are_refused(value: object) -> None:
    with pytest.raises(BudgetFormatError) as caught:
        parse_budget(value)  # pyright: ignore[reportArgumentType]
    assert repr(value) in str(caught.value)
    assert "70GiB" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "70G",
        "-1GiB",
        "1.5",
        "1 GiB GiB",
        "nan",
        "inf",
        "0",
        "0GiB",
        "1e-3B",
        "0.1B",
        "1,000",
        "1_000",
        "٣GiB",
    ],
)
def test_texts_that_are_no_budget_are_refused(text: str) -> None:
    with pytest.raises(BudgetFormatError, match="cannot be read"):
        parse_budget(text)


def test_the_refusal_says_what_was_meant() -> None:
    with pytest.raises(BudgetFormatError, match=r'\(did you mean "70GiB"\?\)\. Give an integer'):
        parse_budget("70G")
    with pytest.raises(BudgetFormatError, match=r"write int\(70000000000.0\)"):
        parse_budget(7e10)


@pytest.mark.parametrize(
    ("count_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (1320702444, "1.23 GiB"),
        (-3 * 2**29, "-1.50 GiB"),
        (2**60, "1024.00 PiB"),
    ],
)
def test_format_bytes(count_bytes: int, text: str) -> None:
    assert format_bytes(count_bytes) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0.0, "0 s"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (1.5e-6, "1.50 us"),
        (2.5e-9, "2.50 ns"),
        (99.96, "100 s"),
        (12345.6, "12346 s"),
        (-0.25, "-250 ms"),
    ],
)
def test_format_seconds(duration_s: float, text: str) -> None:
    assert format_seconds(duration_s) == text


@given(st.integers(1, 2**50 - 1))
def test_what_is_formatted_reads_back_to_three_digits(count_bytes: int) -> None:
    read_bytes = parse_budget(format_bytes(count_bytes)).bytes
    assert read_bytes is not None
    assert abs(read_bytes - count_bytes) <= 0.005 * count_bytes + 1


@given(st.integers(1, 2**80), st.sampled_from(["", "B", " B", "b"]))
def test_bytes_read_back_exactly(count_bytes: int, unit: str) -> None:
    assert parse_budget(f"{count_bytes}{unit}") == parse_budget(count_bytes)


@given(st.floats(1e-9, 1e6))
def test_seconds_keep_three_digits(duration_s: float) -> None:
    number, unit = format_seconds(duration_s).split()
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]
    assert float(number) * scale == pytest.approx(duration_s, rel=0.00501)
    assert unit == "s" or float(number) < 1000


# What budgets are written with, and digits, a space and a sign that are not ASCII.
_LIKE_A_BUDGET = st.text("0123456789.,+-_eE%kKMGTiBbytesnaf \n\u00a0\u0663\u221e")


@given(st.one_of(_LIKE_A_BUDGET, st.text(), st.floats(), st.integers()))
def test_anything_is_read_or_refused(value: object) -> None:
    try:
        budget = parse_budget(value)  # pyright: ignore[reportArgumentType]
    except BudgetFormatError:
        return
    assert budget.resolve_bytes(10**12) >= 0


def test_a_budget_is_one_thing() -> None:
    with pytest.raises(BudgetFormatError):
        Budget()
    with pytest.raises(BudgetFormatError):
        Budget(bytes=1, fraction=0.5)


def test_an_infeasible_budget_survives_pickling() -> None:
    error = InfeasibleBudgetError(min_budget_bytes=3, budget_bytes=2, bottleneck="arguments")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.min_budget_bytes, copy.budget_bytes, copy.bottleneck) == (3, 2, "arguments")
    assert str(copy) == str(error) and copy.plan is None
    assert "at least 3 bytes" in str(error)
    assert "set by arguments" in str(error)


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), ("0", 0), (5, 5), ("1MiB", 2**20), ("70 kB", 70_000)]
)
def test_headroom_is_read(value: int | str, expected: int) -> None:
    assert parse_headroom(value) == expected


@pytest.mark.parametrize("value", [1e5, True, None, "", "5%", "1.5", "many", -1, "-1MiB"])
def test_other_headrooms_are_refused_by_name(value: Any) -> None:
    with pytest.raises(BudgetFormatError, match="headroom_bytes="):
        parse_headroom(value)
