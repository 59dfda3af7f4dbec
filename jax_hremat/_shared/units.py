"""Budgets as users write them: sizes, fractions and bounds on the slowdown."""

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from jax_hremat._shared.errors import BudgetFormatError

_UNITS_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "pb": 10**15,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "pib": 2**50,
}
_AMOUNT = re.compile(r"([0-9]*\.?[0-9]+|[0-9]+\.)(e\+?[0-9]{1,3})?\s*([a-z]*)", re.ASCII)
_PERCENT = re.compile(r"[0-9]+(\.[0-9]*)?|\.[0-9]+", re.ASCII)
_ACCEPTED = (
    'an integer number of bytes (75161927680), a text with a unit ("70GiB", "70 GB", "512MiB"), '
    "or a share of the step's peak without rematerialization, as a float in (0, 1] (0.9) or a "
    'text ("90%")'
)


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory budget: either a size or a fraction of the peak without rematerialization.

    Attributes:
        bytes: The size in bytes, positive; None when a fraction was given.
        fraction: The share of the compiled peak of the step without rematerialization, in
            (0, 1]; None when a size was given.
    """

    bytes: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.fraction is None):
            raise BudgetFormatError("a Budget takes exactly one of bytes and fraction")
        if self.bytes is not None and self.bytes <= 0:
            raise BudgetFormatError(f"a budget must be positive, not {self.bytes} bytes")
        if self.fraction is not None and not 0.0 < self.fraction <= 1.0:
            raise BudgetFormatError(f"a fraction must be in (0, 1], not {self.fraction!r}")

    def resolve_bytes(self, whole_bytes: int) -> int:
        """Returns the budget in bytes; a fraction is taken of ``whole_bytes`` and rounded down."""
        if self.bytes is not None:
            return self.bytes
        assert self.fraction is not None
        return int(self.fraction * whole_bytes)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The longest a step may take, as a multiple of its estimated time without rematerialization.

    Attributes:
        ratio: At least 1.
        of_s: That time, if it is not the planned step's own.
    """

    ratio: float
    of_s: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ratio, bool) or not isinstance(self.ratio, int | float):
            raise BudgetFormatError(f"max_slowdown={self.ratio!r} is not a number")
        if not (math.isfinite(self.ratio) and self.ratio >= 1.0):
            raise BudgetFormatError(
                f"max_slowdown={self.ratio!r} is not a ratio of 1 or more; for ten per cent more "
                "time than without rematerialization, give 1.10"
            )

    def resolve_s(self, baseline_s: float) -> float:
        """The longest step, given the planned step's time without rematerialization."""
        return self.ratio * (baseline_s if self.of_s is None else self.of_s)


def parse_goal(
    budget: int | float | str | Budget | None, max_slowdown: float | None
) -> Budget | Slowdown:
    """Reads the goal of a plan: a budget, or a bound on the slowdown.

    Raises:
        BudgetFormatError: Not exactly one of the two was given, or it cannot be read.
    """
    if max_slowdown is None and budget is None:
        raise BudgetFormatError(
            f"no budget was given: give budget=…, {_ACCEPTED}; or max_slowdown=1.1 for the least "
            "memory within 1.1 times the time without rematerialization"
        )
    if max_slowdown is None:
        return parse_budget(budget)
    if budget is not None:
        raise BudgetFormatError(
            f"budget={budget!r} and max_slowdown={max_slowdown!r} were both given; give a budget "
            "for the fastest step within it, or a slowdown for the least memory within that"
        )
    return Slowdown(_plain(max_slowdown))


def parse_headroom(headroom_bytes: int | str) -> int:
    """Reads what is set aside of a budget: a whole number of bytes, or a text with a unit.

    Raises:
        BudgetFormatError: It is neither, or negative.
    """
    given, cause = _plain(headroom_bytes), None
    if isinstance(given, int) and not isinstance(given, bool):
        if given < 0:
            raise BudgetFormatError(
                f"headroom_bytes={given} is negative: give the number of bytes to set aside of the "
                "budget, 0 or more"
            )
        return given
    if isinstance(given, str):
        try:
            return 0 if given.strip() == "0" else _text_bytes(given)
        except BudgetFormatError as error:
            cause = error
    raise BudgetFormatError(
        f"headroom_bytes={headroom_bytes!r} is not a number of bytes: give an int, or a text with "
        'a unit ("512MiB")'
    ) from cause


def parse_budget(budget: int | float | str | Budget | None) -> Budget:
    """Reads a memory budget.

    Args:
        budget: An integer number of bytes above 0; a string, which is a number of bytes or a
            number with one of the units B, kB, MB, GB, TB, PB (powers of 1000) and KiB, MiB,
            GiB, TiB, PiB (powers of 1024), case and spaces ignored, rounded down to whole
            bytes; a float in (0, 1] or a string such as "90%", a share of the step's peak without
            rematerialization; or a `Budget`, returned unchanged. NumPy numbers are read like
            Python's.
            A unit without its B ("70G") is refused, since both readings are in common use.

    Returns:
        The budget, in bytes or as a fraction.

    Raises:
        BudgetFormatError: The value is none of these, is not positive, or is not finite.
    """
    if isinstance(budget, Budget):
        return budget
    budget = _plain(budget)
    # A bool is an int in Python, but never meant as a budget.
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise _refuse(budget, f"it is {_type_words(budget)}")
    if isinstance(budget, str) and budget.rstrip().endswith("%"):
        return Budget(fraction=_share(budget))
    if isinstance(budget, str):
        return Budget(bytes=_text_bytes(budget))
    if isinstance(budget, float):
        return Budget(fraction=_fraction(budget))
    if budget <= 0:
        raise _refuse(budget, "it is not positive")
    return Budget(bytes=budget)


def _plain(value: Any) -> Any:
    """A NumPy scalar as a Python one; other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def _share(text: str) -> float:
    number = text.rstrip().removesuffix("%").strip()
    if not _PERCENT.fullmatch(number) or not 0 < float(number) <= 100:
        raise _refuse(text, "a share of memory is above 0 % and at most 100 %")
    return float(number) / 100


def _text_bytes(text: str) -> int:
    if text == "device":
        raise _refuse(
            text, "only `fit_step` and `max_batch`, which bound a whole training step, take it"
        )
    match = _AMOUNT.fullmatch(text.strip().lower())
    if match is None:
        raise _refuse(text, "it is not a positive number with an optional unit")
    mantissa, exponent, unit = match.groups()
    if unit and unit not in _UNITS_BYTES:
        hint = f' (did you mean "{text.strip()}iB"?)' if f"{unit}ib" in _UNITS_BYTES else ""
        raise _refuse(
            text, f"its unit is not one of B, kB, KiB, MB, MiB, GB, GiB, TB, TiB, PB, PiB{hint}"
        )
    if "." in mantissa and not unit and not exponent:
        raise _refuse(text, "it has a decimal point and no unit")
    count_bytes = _exact_bytes(mantissa, exponent, _UNITS_BYTES[unit or "b"])
    if count_bytes < 1:
        raise _refuse(text, "it is less than one byte")
    return count_bytes


def _exact_bytes(mantissa: str, exponent: str | None, unit_bytes: int) -> int:
    # Integers throughout: a float would lose bytes above 2**53 and for decimals such as 0.1.
    whole, _, decimals = mantissa.partition(".")
    power = int(exponent[1:]) if exponent else 0
    return int(whole + decimals) * unit_bytes * 10**power // 10 ** len(decimals)


def _fraction(value: float) -> float:
    if not math.isfinite(value):
        raise _refuse(value, "it is not finite")
    if value <= 0:
        raise _refuse(value, "it is not positive")
    if value > 1:
        hint = f"; for bytes, write int({value!r})" if value.is_integer() else ""
        raise _refuse(value, f"a float is a fraction of memory and must be at most 1{hint}")
    return value


def _refuse(budget: object, reason: str) -> BudgetFormatError:
    return BudgetFormatError(f"budget={budget!r} cannot be read: {reason}. Give {_ACCEPTED}.")


def _type_words(value: object) -> str:
    return "None" if value is None else f"of type {type(value).__name__}"
