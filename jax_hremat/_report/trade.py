"""`RematPlan` among other ways to run the step -> the picture of added time over peak."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax_hremat._plan.frontier import Frontier
from jax_hremat._plan.plan import RematPlan
from jax_hremat._shared.format import format_bytes, format_seconds
from jax_hremat._shared.frame import Frame
from jax_hremat._shared.ticks import Tick, byte_ticks, percent_ticks

_MOST_TICKS = 6
# At least this range of added time is shown, so that noise is not drawn large.
_LEAST_RANGE = 0.01


@dataclass(frozen=True)
class Dot:
    """One way to run the step.

    Attributes:
        x, y: Its place.
        kind: "plan" of the frontier, "this" plan, "none" (no rematerialization), or "hand".
        name: What it is.
        peak_bytes: Its compiled peak.
        step_s: Its estimated step.
        added: Of the step without rematerialization, the added fraction.
    """

    x: float
    y: float
    kind: str
    name: str
    peak_bytes: int
    step_s: float
    added: float

    @property
    def text(self) -> str:
        """What stands where the pointer is."""
        figures = f"{format_bytes(self.peak_bytes)}, {format_seconds(self.step_s)}"
        return f"{self.name}: {figures} ({100 * self.added:+.1f} %)"


@dataclass(frozen=True)
class TradeChart:
    """Added time over peak; `line` connects the plans of the frontier."""

    frame: Frame
    dots: Sequence[Dot]
    line: str
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]


def trade_chart(
    plan: RematPlan, frontier: Frontier | None, hand: Mapping[str, tuple[int, float]]
) -> TradeChart:
    """The picture.

    Args:
        plan: The plan, which is marked.
        frontier: The frontier.
        hand: Peak in bytes and step in seconds of each policy written by hand.
    """
    ways = list(_ways(plan, frontier, hand))
    added = [step_s / plan.baseline_step_s - 1 for _, _, _, step_s in ways]
    low, high = min(added), max(added)
    margin = 0.08 * max(high - low, _LEAST_RANGE)
    frame = Frame(
        0,
        1.05 * max(peak_bytes for _, _, peak_bytes, _ in ways),
        low - margin,
        max(high, low + _LEAST_RANGE) + margin,
    )
    dots = [
        Dot(frame.x(peak_bytes), frame.y(a), kind, name, peak_bytes, step_s, a)
        for (kind, name, peak_bytes, step_s), a in zip(ways, added, strict=True)
    ]
    of_frontier = sorted((d.peak_bytes, d.x, d.y) for d in dots if d.kind in ("plan", "this"))
    return TradeChart(
        frame=frame,
        dots=dots,
        line=" ".join(_between(of_frontier)) if frontier is not None else "",
        x_ticks=frame.x_ticks(byte_ticks(frame.x_high, _MOST_TICKS)),
        y_ticks=frame.y_ticks(percent_ticks(frame.y_low, frame.y_high, _MOST_TICKS)),
    )


def _ways(
    plan: RematPlan, frontier: Frontier | None, hand: Mapping[str, tuple[int, float]]
) -> Iterator[tuple[str, str, int, float]]:
    """Kind, name, peak and step of each way."""
    yield "none", "no rematerialization", plan.baseline_peak_bytes, plan.baseline_step_s
    for name, (peak_bytes, step_s) in hand.items():
        yield "hand", name, peak_bytes, step_s
    for other in frontier or ():
        if other.root != plan.root:
            yield "plan", "plan", other.certificate.peak_bytes, other.estimated_step_s
    # Drawn last, over the others.
    yield "this", "this plan", plan.certificate.peak_bytes, plan.estimated_step_s


def _between(points: Sequence[tuple[int, float, float]]) -> Iterator[str]:
    """Between the peaks of two plans, the plan with the lower peak is the one that fits."""
    previous_y: float | None = None
    for _, x, y in points:
        if previous_y is not None:
            yield f"{x},{previous_y}"
        yield f"{x},{y}"
        previous_y = y
