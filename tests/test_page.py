"""The page that explains a plan: whole, self-contained, and true to the plan."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_hremat
from jax_hremat import Frontier, PlannerConfig, SearchConfig
from jax_hremat._report.page import page
from jax_hremat._shared.format import format_bytes

OPTIONS: dict[str, Any] = dict(
    target="cpu",
    config=PlannerConfig(
        search=SearchConfig(max_runs=1, max_packings=1, max_saved_sets=1), max_rounds=1
    ),
)
_VOID = {"meta", "line", "polyline", "br"}


class Outline(HTMLParser):
    """Checks that tags are closed in order, and gathers tags, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        # Rows and cells are closed too.
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for i, (w_in, w_out) in enumerate(params):
        with jax.named_scope(f"layer<{i}>"):
            x = x + jax.nn.gelu(x @ w_in) @ w_out
    return jnp.mean(x**2)


ARGS = (
    [(jnp.ones((16, 64)), jnp.ones((64, 16)))] * 4,
    jax.ShapeDtypeStruct((1024, 16), jnp.float32),
)


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return jax_hremat.pareto(loss_fn, num_points=3, **OPTIONS)(*ARGS)


def test_the_page_is_whole_and_loads_nothing(frontier: Frontier, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    jax_hremat.report(frontier[0], path, frontier)
    html = path.read_text(encoding="utf-8")
    outline = Outline(html)
    assert {"script", "img", "link", "iframe"}.isdisjoint(tag for tag, _ in outline.tags)
    assert not re.search(r"https?:|url[(]|@import", html)
    assert len([tag for tag, _ in outline.tags if tag == "svg"]) == 3
    # Names of the user's are text, whatever is in them.
    assert "layer<0>" in outline.text
    assert format_bytes(frontier[0].certificate.peak_bytes) in outline.text
    assert "test_page.py" in outline.text


def test_the_picture_of_memory_is_that_of_the_plan(frontier: Frontier) -> None:
    plan = frontier[0]
    outline = Outline(page(plan))
    svg = next(attrs for tag, attrs in outline.tags if tag == "svg")
    height = float(str(svg["viewbox"]).split()[3])
    outlines = [attrs["points"] for tag, attrs in outline.tags if tag == "polygon"]
    # With the plan and without: fixed, passed, at work, and a band for each layer that keeps.
    assert len(outlines) == 2 * (3 + 4)
    without, outlines = outlines[7:], outlines[:7]
    assert all(f"kept by layer<{i}>" in outline.text for i in range(4))
    highest = min(float(y) for points in outlines for _, y in _points(points))
    baseline = next(attrs["points"] for tag, attrs in outline.tags if tag == "polyline")
    bare_highest = min(float(y) for _, y in _points(baseline))
    bottom = max(float(y) for points in outlines for _, y in _points(points))
    assert 0 < bare_highest < highest < bottom < height
    fixed = plan.predicted_peak_bytes - max(m.live_bytes for m in plan.moments)
    plain = fixed + max(m.live_bytes for m in plan.baseline_moments)
    assert min(float(y) for points in without for _, y in _points(points)) == bare_highest
    ratio = (bottom - highest) / (bottom - bare_highest)
    assert ratio == pytest.approx(plan.predicted_peak_bytes / plain, rel=0.01)


def _points(text: str | None) -> list[list[str]]:
    assert text is not None
    return [point.split(",") for point in text.split()]


def test_the_frontier_marks_the_plan(frontier: Frontier) -> None:
    radii = [
        attrs["r"] for tag, attrs in Outline(page(frontier[1], frontier)).tags if tag == "circle"
    ]
    assert len(radii) == len(frontier)
    assert radii.count("7") == 1 and radii[1] == "7"


def test_a_plan_without_costs_says_so(frontier: Frontier) -> None:
    params, batch = ARGS
    other = jax.ShapeDtypeStruct((512, 16), batch.dtype)
    plan = jax_hremat.certify(loss_fn, frontier[0], budget=1.0, target="cpu")(params, other)
    text = " ".join(Outline(page(plan)).text.split())
    assert text.count("certified again from another, without costs") == 2


def test_arguments_at_the_peak_get_advice(frontier: Frontier) -> None:
    buffer = dataclasses.replace(frontier[0].buffers[0], kind="parameter", made_by="args[0]")
    plan = dataclasses.replace(frontier[0], buffers=(buffer,))
    assert "args[0] (" in Outline(page(plan)).text
    assert "narrower dtype" in Outline(page(plan)).text
