"""`RematPlan` -> the pictures of memory over the step, with the plan and without."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.memory import MemoryOverStep
from jax_hremat._plan.peak import Moment
from jax_hremat._plan.plan import RematPlan
from jax_hremat._shared.format import format_bytes, format_seconds
from jax_hremat._shared.frame import Frame
from jax_hremat._shared.ticks import Tick, byte_ticks

_FIXED, _GROUPED, _PASSED, _WORKING = "var(--a0)", "var(--a1)", "var(--a2)", "var(--a3)"
# Colours for what blocks keep, from the first scope to the last: one band for one or more scopes.
_BANDS = ("#0a3069", "#0550ae", "#1f6feb", "#2f81f7", "#54aeff", "#80ccff")
_MOST_TICKS = 6
# How many of the blocks that keep most are named where the pointer is.
_MOST_NAMED = 3


@dataclass(frozen=True)
class Area:
    """One layer of a stacked chart: its name, colour, outline and maximum of bytes."""

    name: str
    fill: str
    points: str
    most_bytes: int


@dataclass(frozen=True)
class Column:
    """One moment: its left end and width, and what it is, in words."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class MemoryChart:
    """Predicted memory over one step.

    Attributes:
        name: Which step.
        compared: Which step the outline is.
        peak_bytes: Its predicted peak.
        peak_at: The moment of its peak, in words.
        areas: What the step holds, stacked from the bottom.
        columns: Its moments.
        outline: The total of the step it is compared with, drawn as a line.
    """

    name: str
    compared: str
    peak_bytes: int
    peak_at: str
    areas: Sequence[Area]
    columns: Sequence[Column]
    outline: str


@dataclass(frozen=True)
class MemoryCharts:
    """The step with the plan and the one without, drawn alike.

    Attributes:
        frame: Where everything is.
        charts: One for each.
        budget_y: Where the budget is; None if it is far above both steps.
        middle: Where the forward ends.
        ticks: Of the vertical axis.
    """

    frame: Frame
    charts: Sequence[MemoryChart]
    budget_y: float | None
    middle: float
    ticks: Sequence[Tick]


@dataclass(frozen=True)
class _Layer:
    """Bytes of one kind at every moment."""

    name: str
    fill: str
    sizes_bytes: Sequence[int]


@dataclass(frozen=True)
class _Step:
    """One of the two steps: its moments, and what each block keeps in it."""

    name: str
    moments: Sequence[Moment]
    total_bytes: Sequence[int]
    kept_bytes: Sequence[int]


def memory_charts(plan: RematPlan, memory: MemoryOverStep) -> MemoryCharts:
    """Both pictures, with the same axes."""
    budget_bytes = plan.certificate.budget_bytes
    shown_bytes = memory.shown_bytes(budget_bytes)
    shows_budget, top_bytes = budget_bytes <= shown_bytes, 1.05 * shown_bytes
    count = len(plan.moments)
    frame = Frame(0, count, 0, top_bytes)
    bands = _bands(plan.blocks)
    planned = _Step(
        "with the plan",
        plan.moments,
        memory.with_plan_bytes,
        [block.kept_bytes for block in plan.blocks],
    )
    plain = _Step(
        "without rematerialization",
        plan.baseline_moments,
        memory.without_bytes,
        [block.plain_bytes for block in plan.blocks],
    )

    def chart(step: _Step, other: _Step) -> MemoryChart:
        layers = _layers(plan.blocks, step, memory.fixed_bytes, bands)
        peak = max(range(count), key=lambda i: step.total_bytes[i])
        return MemoryChart(
            name=step.name,
            compared=other.name,
            peak_bytes=step.total_bytes[peak],
            peak_at=_moment_words(plan.blocks, step.moments[peak]),
            areas=list(_areas(frame, layers)),
            columns=list(_columns(frame, plan.blocks, step, memory.fixed_bytes)),
            outline=" ".join(frame.stairs(other.total_bytes)),
        )

    return MemoryCharts(
        frame=frame,
        charts=[chart(planned, plain), chart(plain, planned)],
        budget_y=frame.y(budget_bytes) if shows_budget else None,
        middle=frame.x(count / 2),
        ticks=frame.y_ticks(byte_ticks(top_bytes, _MOST_TICKS)),
    )


def _areas(frame: Frame, layers: Sequence[_Layer]) -> Iterator[Area]:
    below = [0] * len(layers[0].sizes_bytes)
    for layer in layers:
        above = [a + b for a, b in zip(below, layer.sizes_bytes, strict=True)]
        outline = [*frame.stairs(above), *reversed(frame.stairs(below))]
        yield Area(layer.name, layer.fill, " ".join(outline), max(layer.sizes_bytes))
        below = above


def _columns(
    frame: Frame, blocks: Sequence[BlockReport], step: _Step, fixed_bytes: int
) -> Iterator[Column]:
    for i, (moment, total_bytes) in enumerate(zip(step.moments, step.total_bytes, strict=True)):
        parts = [
            (fixed_bytes - moment.reused_bytes, "arguments, results, constants"),
            (moment.kept_bytes, "residuals kept"),
            (moment.passed_bytes, "boundary values"),
            (moment.working_bytes, "temporary memory of the running operations"),
        ]
        before = sorted(range(moment.block), key=lambda b: -step.kept_bytes[b])[:_MOST_NAMED]
        most = [
            f"\u2003{format_bytes(step.kept_bytes[b])} by {blocks[b].place.with_line}"
            for b in before
            if step.kept_bytes[b]
        ]
        lines = [f"{format_bytes(size)} {name}" for size, name in parts]
        lines[2:2] = most
        took = f", predicted {format_seconds(moment.duration_s)}" if moment.duration_s else ""
        yield Column(
            x=frame.x(i),
            width=round(frame.x(i + 1) - frame.x(i), 1),
            text="\n".join(
                [
                    f"{_moment_words(blocks, moment)}{took}",
                    f"{format_bytes(total_bytes)} in all",
                    *lines,
                ]
            ),
        )


def _moment_words(blocks: Sequence[BlockReport], moment: Moment) -> str:
    way = "backward" if moment.in_backward else "forward"
    return f"{way} of {blocks[moment.block].place.with_line}"


def _bands(blocks: Sequence[BlockReport]) -> dict[str, int]:
    """The band of each scope that may keep something; consecutive scopes share a band if there are
    more scopes than bands."""
    scopes = list(dict.fromkeys(_scope(block) for block in blocks if block.plain_bytes))
    return {s: i * min(len(_BANDS), len(scopes)) // len(scopes) for i, s in enumerate(scopes)}


def _scope(block: BlockReport) -> str:
    return str(block.place.around)


def _layers(
    blocks: Sequence[BlockReport], step: _Step, fixed_bytes: int, bands: Mapping[str, int]
) -> list[_Layer]:
    """The layers of live memory at every moment. What a block keeps only inside its group is alive
    between the group's recompute and the block's backward."""
    moments = step.moments
    layers = [
        _Layer(
            "arguments, results, constants", _FIXED, [fixed_bytes - m.reused_bytes for m in moments]
        )
    ]
    rest = [m.kept_bytes for m in moments]
    for band, fill in enumerate(_BANDS):
        scopes = [scope for scope, own in bands.items() if own == band]
        if not scopes:
            continue
        kept = zip(blocks, step.kept_bytes, strict=True)
        own = [size if _scope(block) in scopes else 0 for block, size in kept]
        before = list(accumulate(own, initial=0))
        sizes = [before[m.block] for m in moments]
        rest = [a - b for a, b in zip(rest, sizes, strict=True)]
        name = scopes[0] if len(scopes) == 1 else f"{scopes[0]} … {scopes[-1]}"
        layers.append(_Layer(f"residuals kept by {name}", fill, sizes))
    if any(rest):
        layers.append(_Layer("residuals kept inside a group", _GROUPED, rest))
    return [
        *layers,
        _Layer("boundary values", _PASSED, [m.passed_bytes for m in moments]),
        _Layer(
            "temporary memory of the running operations",
            _WORKING,
            [m.working_bytes for m in moments],
        ),
    ]
