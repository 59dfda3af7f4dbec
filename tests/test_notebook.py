"""What a notebook shows of a plan and of a frontier: whole, small, and true to them."""

from __future__ import annotations

import dataclasses
import re
from xml.etree import ElementTree

import pytest
from written_plans import MIB, certificate, written_plan

from jax_hremat import Frontier, RematPlan

POINTS = re.compile(r'points="([^"]+)"')


def frontier() -> Frontier:
    high = written_plan(
        certificate=certificate(peak_bytes=80 * MIB, budget_bytes=80 * MIB),
        estimated_step_s=0.0101,
    )
    return Frontier((written_plan(), high))


@pytest.mark.parametrize("shown", [written_plan(), frontier()], ids=["plan", "frontier"])
def test_it_is_whole_and_needs_nothing_else(shown: RematPlan | Frontier) -> None:
    html = shown._repr_html_()
    # Well formed as XML too, so every tag is closed.
    tags = {element.tag for element in ElementTree.fromstring(html).iter()}
    assert {"svg", "table"} <= tags
    # Nothing that is loaded, and nothing that acts on the rest of the notebook.
    assert tags.isdisjoint({"script", "style", "img", "link"})
    assert not re.search(r"https?:|url[(]|\bsrc=|\bhref=|\bid=|\bclass=", html)
    assert len(html) < 20_000


def test_a_plan_shows_its_figures_and_its_memory() -> None:
    html = written_plan()._repr_html_()
    for text in ("41.00 MiB", "50.00 MiB", "81.00 MiB", "+10.0 % over 10.0 ms", "80 MiB"):
        assert text in html
    planned, plain = (
        [float(point.split(",")[1]) for point in points.split()] for points in POINTS.findall(html)
    )
    floor = planned[-1]
    mib = (floor - min(plain)) / 80
    assert [round((floor - y) / mib) for y in planned[:-2:2]] == [20, 30, 30, 40, 30, 20]
    assert [round((floor - y) / mib) for y in plain[::2]] == [20, 40, 70, 80, 50, 20]


def test_a_plan_without_predictions_has_no_picture() -> None:
    html = written_plan(moments=(), baseline_moments=())._repr_html_()
    assert "<svg" not in html
    assert "41.00 MiB" in html


def test_a_frontier_shows_each_plan() -> None:
    html = frontier()._repr_html_()
    assert html.count("<circle") == 2
    assert html.count("<tr>") == 3
    assert "41.00 MiB, +10.0 %" in html
    assert "without rematerialization 81.00 MiB, 10.0 ms" in html


def test_names_are_text() -> None:
    c = dataclasses.replace(certificate(), target="<b>mine</b>")
    assert "<b>mine" not in written_plan(certificate=c)._repr_html_()
