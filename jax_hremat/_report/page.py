"""`RematPlan` -> one self-contained HTML page that explains it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from importlib import resources
from pathlib import Path, PurePath

from jax_hremat._plan.frontier import Frontier
from jax_hremat._plan.memory import memory_over_step
from jax_hremat._plan.plan import RematPlan
from jax_hremat._plan.text import devices_words, opened_words, own_words, unpriced_words
from jax_hremat._plan.tree import tree_lines
from jax_hremat._report.advice import advised, rest_bytes
from jax_hremat._report.memory import memory_charts
from jax_hremat._report.modules import Totals, modules
from jax_hremat._report.trade import trade_chart
from jax_hremat._shared.files import write_whole
from jax_hremat._shared.format import format_bytes, format_seconds, format_signed_seconds


def report(
    plan: RematPlan,
    path: str | os.PathLike[str],
    frontier: Frontier | None = None,
    *,
    name: str | None = None,
    hand: Mapping[str, tuple[int, float]] | None = None,
) -> None:
    """Write one HTML page that explains a plan; it needs no other file and no network.

    It shows the certificate; the predicted memory over the step, with and without the plan, with
    residuals stacked by scope; what is done with each module, down to its operations, and with each
    checkpoint; the largest buffers at the peak, and what can be done about each; and the plan
    beside the frontier and policies written by hand, if they are given. It is complete without its
    script too, which sorts tables and shows what is under the pointer.

    Args:
        plan: The plan.
        path: Where to write; the file appears whole or not at all.
        frontier: The program's frontier.
        name: What the program is called, for the title; by default its outermost scope or file.
        hand: For each policy written by hand, the compiled peak in bytes and the estimated step in
            seconds. For a loss `by_hand` that has its own `jax.checkpoint`s they are
            `baseline_peak_bytes` and `baseline_step_s` of `plan_remat(by_hand, budget=1.0)(*args)`.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(Path(path), page(plan, frontier, name=name, hand=hand).encode())


def page(
    plan: RematPlan,
    frontier: Frontier | None = None,
    *,
    name: str | None = None,
    hand: Mapping[str, tuple[int, float]] | None = None,
) -> str:
    """The page's HTML."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= dict(
        bytes=format_bytes, seconds=format_seconds, signed=format_signed_seconds
    )
    text = (resources.files("jax_hremat") / "templates" / "plan.html").read_text(encoding="utf-8")
    memory = memory_over_step(plan)
    return environment.from_string(text).render(
        plan=plan,
        name=program_name(plan) if name is None else name,
        certificate=plan.certificate,
        devices=devices_words(plan.certificate),
        memory=memory_charts(plan, memory) if memory is not None else None,
        trade=trade_chart(plan, frontier, hand or {}) if frontier or hand else None,
        modules=modules(plan),
        lines=tree_lines(plan.root, plan.blocks),
        totals=Totals.of(plan.blocks),
        buffers=advised(plan),
        rest_bytes=rest_bytes(plan),
        unpriced=unpriced_words(plan),
        own_checkpoints=own_words(plan),
        opened=opened_words(plan),
    )


def program_name(plan: RematPlan) -> str:
    """The outermost scope that most blocks share, or the file they come from; empty if neither is
    known."""
    modules = (b.place.modules or b.place.parts for b in plan.blocks)
    outermost = Counter(names[0] for names in modules if names)
    files = Counter(PurePath(b.source.partition(":")[0]).name for b in plan.blocks if b.source)
    for found in (outermost, files):
        for name, count in found.most_common(1):
            if 2 * count > len(plan.blocks):
                return name
    return ""
