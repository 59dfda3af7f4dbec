"""Where things are in a chart, in SVG units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jax_hremat._shared.ticks import Tick


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart with margins that hold its labels whole, in the larger letters for a phone too.

    Attributes:
        x_low, x_high: Values at the left and the right end of the horizontal axis.
        y_low, y_high: Values at the bottom and the top of the vertical axis.
    """

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    width: float = 720.0
    height: float = 300.0
    left: float = 112.0
    right: float = 668.0
    top: float = 14.0
    bottom: float = 264.0

    def x(self, value: float) -> float:
        """The horizontal place of a value."""
        share = (value - self.x_low) / (self.x_high - self.x_low)
        return round(self.left + (self.right - self.left) * share, 1)

    def y(self, value: float) -> float:
        """The vertical place of a value."""
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return round(self.bottom - (self.bottom - self.top) * share, 1)

    def x_ticks(self, ticks: Sequence[Tick]) -> list[Tick]:
        """The ticks at their places on the horizontal axis."""
        return [Tick(self.x(tick.value), tick.text) for tick in ticks]

    def y_ticks(self, ticks: Sequence[Tick]) -> list[Tick]:
        """The ticks at their places on the vertical axis."""
        return [Tick(self.y(tick.value), tick.text) for tick in ticks]

    def stairs(self, sizes: Sequence[float]) -> list[str]:
        """Points of a line that has each size for one unit of the horizontal axis."""
        return [f"{self.x(i + k)},{self.y(size)}" for i, size in enumerate(sizes) for k in (0, 1)]
