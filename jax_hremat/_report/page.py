"""`RematPlan` -> one self-contained HTML page that explains it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.frontier import Frontier
from jax_hremat._plan.peak import Moment
from jax_hremat._plan.plan import RematPlan
from jax_hremat._plan.text import devices_words, opened_words, own_words, unpriced_words
from jax_hremat._plan.tree import tree_lines
from jax_hremat._shared.files import write_whole
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_seconds

# Size of the charts, in SVG units.
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720.0, 240.0, 64.0, 24.0
_FIXED, _GROUPED, _PASSED, _WORKING = "var(--a0)", "var(--a1)", "var(--a2)", "var(--a3)"
# Colours for what blocks keep, from the first scope to the last: one band for one or more scopes.
_BANDS = ("#0a3069", "#0550ae", "#1f6feb", "#2f81f7", "#54aeff", "#80ccff")
# What can be done about a buffer that is alive at the peak, by its kind.
_ADVICE = {
    "parameter": "an argument: donate it, give it a narrower dtype, or spread it over devices",
    "output": "a result: gradients are as large as parameters; donate what they may replace",
}


def report(plan: RematPlan, path: str | os.PathLike[str], frontier: Frontier | None = None) -> None:
    """Write one HTML page that explains a plan; it needs no other file, no script and no network.

    It shows the certificate; the predicted memory over the step, with and without the plan, with
    kept values stacked by scope; the tree of regions, and for each block what it does, keeps and
    adds; the largest buffers at the peak, and what can be done about those that no plan can change;
    and the frontier, if given, with this plan marked.

    Args:
        plan: The plan.
        path: Where to write; the file appears whole or not at all.
        frontier: The program's frontier.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(Path(path), page(plan, frontier).encode())


def page(plan: RematPlan, frontier: Frontier | None = None) -> str:
    """The page's HTML."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= dict(
        bytes=format_bytes, seconds=format_seconds, signed=format_signed_seconds
    )
    text = (resources.files("jax_hremat") / "templates" / "plan.html").read_text(encoding="utf-8")
    return environment.from_string(text).render(
        plan=plan,
        certificate=plan.certificate,
        devices=devices_words(plan.certificate),
        memory=_memory_charts(plan) if plan.moments else None,
        trade=_trade_chart(plan, frontier) if frontier is not None else None,
        frame=dict(width=_WIDTH, height=_HEIGHT, left=_LEFT, bottom=_BOTTOM),
        lines=tree_lines(plan.root, plan.blocks),
        advice=_ADVICE,
        unpriced=unpriced_words(plan),
        own_checkpoints=own_words(plan),
        opened=opened_words(plan),
        fixed=[b for b in plan.buffers if b.kind != "temp"],
    )


@dataclass(frozen=True)
class Area:
    """One layer of a stacked chart: its name, colour, outline and maximum of bytes."""

    name: str
    fill: str
    points: str
    most_bytes: int


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class MemoryChart:
    """Predicted memory over the step.

    Attributes:
        name: Which step.
        areas: What the step holds, stacked from the bottom.
        outline: The total of the other step, drawn as a line.
    """

    name: str
    areas: Sequence[Area]
    outline: str


@dataclass(frozen=True)
class MemoryCharts:
    """The step with the plan and the one without, drawn alike.

    Attributes:
        charts: One for each.
        budget_y: Where the budget is.
        middle: Where the forward ends.
        ticks: Of the vertical axis.
    """

    charts: Sequence[MemoryChart]
    budget_y: float
    middle: float
    ticks: Sequence[Tick]


@dataclass(frozen=True)
class Layer:
    """Bytes of one kind at every moment."""

    name: str
    fill: str
    sizes_bytes: Sequence[int]


@dataclass(frozen=True)
class Dot:
    """A plan of a frontier."""

    x: float
    y: float
    text: str
    is_this: bool


@dataclass(frozen=True)
class TradeChart:
    """Added time over peak."""

    dots: Sequence[Dot]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]


def _memory_charts(plan: RematPlan) -> MemoryCharts:
    fixed_bytes = plan.predicted_peak_bytes - max(m.live_bytes for m in plan.moments)
    bands = _bands(plan.blocks)
    kept = [(_scope(block), block.kept_bytes) for block in plan.blocks]
    plain = [(_scope(block), block.plain_bytes) for block in plan.blocks]
    stacks = [
        _layers(plan.moments, fixed_bytes, bands, kept),
        _layers(plan.baseline_moments, fixed_bytes, bands, plain),
    ]
    whole = [[sum(at) for at in zip(*(x.sizes_bytes for x in s), strict=True)] for s in stacks]
    top = 1.05 * max(*whole[0], *whole[1], plan.certificate.budget_bytes)
    count = len(plan.moments)

    def x(index: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * index / count

    def y(size: float) -> float:
        return (_HEIGHT - _BOTTOM) * (1 - size / top)

    def stairs(sizes: Sequence[int]) -> list[str]:
        return [
            f"{x(i + side):.1f},{y(size):.1f}" for i, size in enumerate(sizes) for side in (0, 1)
        ]

    def areas(layers: Sequence[Layer]) -> Iterator[Area]:
        below = [0] * count
        for layer in layers:
            above = [a + b for a, b in zip(below, layer.sizes_bytes, strict=True)]
            outline = [*stairs(above), *reversed(stairs(below))]
            yield Area(layer.name, layer.fill, " ".join(outline), max(layer.sizes_bytes))
            below = above

    return MemoryCharts(
        charts=[
            MemoryChart("with the plan", list(areas(stacks[0])), " ".join(stairs(whole[1]))),
            MemoryChart("without the plan", list(areas(stacks[1])), " ".join(stairs(whole[0]))),
        ],
        budget_y=y(plan.certificate.budget_bytes),
        middle=x(count / 2),
        ticks=[Tick(y(top * k / 4), format_bytes(int(top * k / 4))) for k in range(4)],
    )


def _bands(blocks: Sequence[BlockReport]) -> dict[str, int]:
    """The band of each scope that may keep something; consecutive scopes share a band if there are
    more scopes than bands."""
    scopes = list(dict.fromkeys(_scope(block) for block in blocks if block.plain_bytes))
    return {s: i * min(len(_BANDS), len(scopes)) // len(scopes) for i, s in enumerate(scopes)}


def _scope(block: BlockReport) -> str:
    # Cut off the list of parts that the block spans, after ": "; `file:line` has no such space.
    return block.scope.split(": ")[0]


def _layers(
    moments: Sequence[Moment],
    fixed_bytes: int,
    bands: Mapping[str, int],
    kept: Sequence[tuple[str, int]],
) -> list[Layer]:
    """The layers of live memory at every moment. What a block keeps only inside its group is alive
    between the group's recompute and the block's backward."""
    layers = [
        Layer("arguments and results", _FIXED, [fixed_bytes - m.reused_bytes for m in moments])
    ]
    rest = [m.kept_bytes for m in moments]
    for band, fill in enumerate(_BANDS):
        scopes = [scope for scope, own in bands.items() if own == band]
        if not scopes:
            continue
        own = [size if scope in scopes else 0 for scope, size in kept]
        before = list(accumulate(own, initial=0))
        sizes = [before[m.block] for m in moments]
        rest = [a - b for a, b in zip(rest, sizes, strict=True)]
        name = scopes[0] if len(scopes) == 1 else f"{scopes[0]} … {scopes[-1]}"
        layers.append(Layer(f"kept by {name}", fill, sizes))
    if any(rest):
        layers.append(Layer("kept inside a group", _GROUPED, rest))
    return [
        *layers,
        Layer("passed between blocks", _PASSED, [m.passed_bytes for m in moments]),
        Layer("at work", _WORKING, [m.working_bytes for m in moments]),
    ]


def _trade_chart(plan: RematPlan, frontier: Frontier) -> TradeChart:
    plans = list(frontier)
    if all(p.root != plan.root for p in plans):
        plans.append(plan)
    right = 1.05 * plan.baseline_peak_bytes
    slowest = max(max(p.slowdown for p in plans) - 1, 0.01) * 1.1
    fastest = min(min(p.slowdown for p in plans) - 1, 0.0) * 1.1

    def x(size: float) -> float:
        return _LEFT + (_WIDTH - _LEFT) * size / right

    def y(added: float) -> float:
        return (_HEIGHT - _BOTTOM) * (slowest - added) / (slowest - fastest)

    return TradeChart(
        dots=[
            Dot(
                x(p.certificate.peak_bytes),
                y(p.slowdown - 1),
                f"{format_bytes(p.certificate.peak_bytes)}, {p.slowdown - 1:+.1%}",
                p.root == plan.root,
            )
            for p in plans
        ],
        x_ticks=[Tick(x(right * k / 5), format_bytes(int(right * k / 5))) for k in range(1, 5)],
        y_ticks=[
            Tick(y(added), f"{added:+.0%}" if slowest > 0.05 else f"{added:+.1%}")
            for added in (slowest * k / 4 for k in range(4))
        ],
    )
