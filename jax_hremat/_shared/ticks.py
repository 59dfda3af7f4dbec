"""Round numbers for the axes of charts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jax_hremat._shared.format import IEC_NAMES


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: where it is, in the axis' own measure, and what stands there."""

    value: float
    text: str


def round_ticks(low: float, high: float, most: int, *, per_unit: float = 1.0) -> list[float]:
    """The multiples of a round step from `low` to `high`, at most `most` of them, in order.

    The step is 1, 2 or 5 times a power of ten of a unit, and as small as it can be.

    Args:
        low, high: Ends of the axis; `low` < `high`.
        most: The largest number of ticks, at least 2.
        per_unit: The unit, in the axis' own measure.
    """
    power = 10.0 ** math.floor(math.log10((high - low) / per_unit / most))
    steps = (digit * times * power * per_unit for times in (1, 10, 100) for digit in (1, 2, 5))
    step = next(s for s in steps if math.floor(high / s) - math.ceil(low / s) < most)
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def byte_ticks(high_bytes: float, most: int) -> list[Tick]:
    """Round ticks from 0 to a number of bytes, in the largest unit (B, KiB, MiB, …) below it."""
    power = max(0, min(int(math.log2(max(high_bytes, 1)) // 10), len(IEC_NAMES) - 1))
    unit, name = float(1 << 10 * power), IEC_NAMES[power]
    found = round_ticks(0, high_bytes, most, per_unit=unit)
    return [Tick(v, f"{v / unit:.10g} {name}" if v else "0") for v in found]


def percent_ticks(low: float, high: float, most: int) -> list[Tick]:
    """Round ticks between two ratios, as signed percentages: 0.05 is `+5 %`."""
    found = round_ticks(low, high, most, per_unit=0.01)
    return [Tick(v, f"{100 * v:+.10g} %".replace("-", "−") if v else "0 %") for v in found]
