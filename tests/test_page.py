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
from written_plans import MIB, block, written_plan

import jax_hremat
from jax_hremat import Frontier, PlannerConfig, RematPlan, SearchConfig
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.peak import BufferReport
from jax_hremat._plan.region import Region
from jax_hremat._report.advice import advised, rest_bytes
from jax_hremat._report.modules import Module, modules
from jax_hremat._report.page import page, program_name
from jax_hremat._shared.format import format_bytes

OPTIONS: dict[str, Any] = dict(
    target="cpu",
    config=PlannerConfig(search=SearchConfig(max_packings=1, max_saved_sets=1), max_rounds=1),
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


def texts(html: str) -> str:
    return " ".join(Outline(html).text.split())


def attributes(html: str, tag: str) -> list[dict[str, str | None]]:
    return [attrs for found, attrs in Outline(html).tags if found == tag]


def test_the_page_is_whole_and_loads_nothing(frontier: Frontier, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    jax_hremat.report(frontier[0], path, frontier)
    html = path.read_text(encoding="utf-8")
    outline = Outline(html)
    assert {"img", "link", "iframe", "object", "embed"}.isdisjoint(tag for tag, _ in outline.tags)
    assert not re.search(r"https?:|url[(]|@import|\bsrc=|href=", html)
    assert len(attributes(html, "svg")) == 3
    # Names of the user's are text, whatever is in them.
    assert "layer<0>" in outline.text
    assert format_bytes(frontier[0].certificate.peak_bytes) in outline.text
    assert "test_page.py" in outline.text


def test_the_script_reaches_for_nothing(frontier: Frontier) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page(frontier[0]), re.DOTALL)
    assert len(scripts) == 1
    assert not re.search(r"fetch|XMLHttp|import|innerHTML|eval|storage|cookie", scripts[0], re.I)


def test_the_picture_of_memory_is_that_of_the_plan() -> None:
    html = page(written_plan())
    svg = attributes(html, "svg")[0]
    width, height = map(float, str(svg["viewbox"]).split()[2:])
    # Each tick's line is where its text says; every other place follows.
    places = {
        text: float(y)
        for y, text in re.findall(
            r'<text x="[^"]+" y="([^"]+)" text-anchor="end"[^>]*>([^<←]+)</text>', html
        )
    }
    assert list(places) == ["0", "20 MiB", "40 MiB", "60 MiB", "80 MiB"]
    mib = (places["0"] - places["80 MiB"]) / 80
    plan_outline, without_outline = (
        [float(y) for _, y in _points(attrs["points"])][::2]
        for attrs in reversed(attributes(html, "polyline"))
    )

    def mib_at(ys: list[float]) -> list[int]:
        return [round((places["0"] - y) / mib) for y in ys]

    assert mib_at(plan_outline) == [20, 30, 30, 40, 30, 20]
    assert mib_at(without_outline) == [20, 40, 70, 80, 50, 20]
    points = [_points(attrs["points"]) for attrs in attributes(html, "polygon")]
    tops = [
        min(float(y) for outline in half for _, y in outline) for half in (points[:7], points[7:])
    ]
    assert mib_at(tops) == [40, 80]
    assert all(
        0 < float(x) < width and 0 < float(y) < height for outline in points for x, y in outline
    )


def _points(text: str | None) -> list[list[str]]:
    assert text is not None
    return [point.split(",") for point in text.split()]


def test_each_layer_of_a_real_plan_has_its_band(frontier: Frontier) -> None:
    html = page(frontier[0])
    assert all(f"residuals kept by layer<{i}>" in texts(html) for i in range(4))
    plan = frontier[0]
    fixed = plan.predicted_peak_bytes - max(m.live_bytes for m in plan.moments)
    plain = fixed + max(m.live_bytes for m in plan.baseline_moments)
    assert f"At most {format_bytes(plan.predicted_peak_bytes)}, in the" in texts(html)
    assert f"At most {format_bytes(plain)}, in the" in texts(html)


def test_under_the_pointer_are_name_line_and_bytes() -> None:
    columns = re.findall(r'class="hit".*?<title>(.*?)</title>', page(written_plan()), re.DOTALL)
    assert len(columns) == 12
    assert columns[2].splitlines() == [
        "forward of net/layer_1, net.py:2 (call)",
        "30.00 MiB in all",
        "10.00 MiB arguments, results, constants",
        "0 B residuals kept",
        "\u20038.00 MiB by net/layer_0, net.py:1 (call)",
        "\u20035.00 MiB by net: embed, net.py:0 (call)",
        "1.00 MiB boundary values",
        "19.00 MiB temporary memory of the running operations",
    ]


def test_the_frontier_marks_the_plan(frontier: Frontier) -> None:
    radii = [attrs["r"] for attrs in attributes(page(frontier[1], frontier), "circle")]
    assert len(radii) == len(frontier)
    assert radii.count("7") == 1


def test_policies_by_hand_stand_beside_the_plans(frontier: Frontier) -> None:
    plan = frontier[0]
    hand = {"dots <saveable>": (2 * plan.baseline_peak_bytes, 3 * plan.baseline_step_s)}
    html = page(plan, frontier, hand=hand)
    assert len(attributes(html, "path")) == 1
    assert "dots <saveable>" in texts(html)
    assert "+200.0 %" in texts(html)
    # Without a frontier too, and every mark is inside the picture.
    alone = page(plan, hand=hand)
    assert len(attributes(alone, "circle")) == 1
    assert "plans of the frontier" not in texts(alone)
    right = float(str(attributes(alone, "svg")[2]["viewbox"]).split()[2])
    start = str(attributes(alone, "path")[0]["d"])
    assert float(start[1:].split()[0]) < right


def test_a_plan_without_costs_says_so(frontier: Frontier) -> None:
    params, batch = ARGS
    other = jax.ShapeDtypeStruct((512, 16), batch.dtype)
    plan = jax_hremat.certify(loss_fn, frontier[0], budget=1.0, target="cpu")(params, other)
    assert texts(page(plan)).count("certified again from another, without costs") == 2


def test_the_program_s_name_is_on_top() -> None:
    plan = written_plan()
    assert program_name(plan) == "net"
    assert re.search("<h1>net</h1>", page(plan))
    assert re.search("<h1>My GPT</h1>", page(plan, name="My GPT"))
    without_scopes = tuple(block(i, f"net.py:{i} (call)") for i in range(3))
    assert program_name(written_plan(blocks=without_scopes)) == "net.py"
    assert program_name(written_plan(blocks=())) == ""
    assert "<h1>Rematerialization plan</h1>" in page(written_plan(blocks=(), moments=()))


def test_a_module_opens_to_its_operations() -> None:
    html = page(written_plan())
    items = re.findall(r'<li value="(\d+)"( class="kept")?>(.*?)</li>', html)
    assert [int(index) for index, _, _ in items] == list(range(30))
    assert [index for index, kept, _ in items if kept] == ["12"]
    assert items[12][2] == "sin <code>f32[8]</code> kept"


def shape(found: list[Module]) -> list[Any]:
    return [
        (m.name, m.last_name, m.count, [op.index for op in m.operations] or shape([*m.inside]))
        for m in found
    ]


def test_modules_are_those_of_the_scopes() -> None:
    first, second, third = (list(range(10 * i, 10 * (i + 1))) for i in range(3))
    (net,) = modules(written_plan())
    assert shape([net]) == [
        (
            "net",
            "net",
            1,
            [
                ("embed", "embed", 1, first),
                ("layer_0", "layer_0", 1, second),
                ("layer_1", "layer_1", 1, third),
            ],
        )
    ]
    assert (net.totals.kept_bytes, net.totals.plain_bytes) == (33 * MIB, 55 * MIB)
    assert (net.totals.num_blocks, net.totals.recomputed) == (3, 7)


def test_equal_modules_are_one_that_opens_to_the_first() -> None:
    scopes = ["net: embed", *(f"net/layer_{i}: {part}" for i in range(3) for part in ("a", "b"))]
    blocks = tuple(block(i, scope, kept_bytes=MIB * (i % 2)) for i, scope in enumerate(scopes))
    plan = written_plan(blocks=blocks, fingerprint=of_length(70), root=Region(0, 70))
    first, second, third = (list(range(10 * i, 10 * (i + 1))) for i in range(3))
    assert shape(modules(plan)) == [
        (
            "net",
            "net",
            1,
            [
                ("embed", "embed", 1, first),
                ("layer_0", "layer_2", 3, [("a", "a", 1, second), ("b", "b", 1, third)]),
            ],
        )
    ]
    assert "<b>3 ×</b> <code>layer_0</code> … <code>layer_2</code>" in page(plan)


def test_blocks_without_scopes_are_modules_of_their_own() -> None:
    blocks = tuple(block(i, f"net.py:{i} (call)", kept_bytes=i) for i in range(3))
    found = modules(written_plan(blocks=blocks))
    assert [m.name for m in found] == [f"net.py:{i} (call)" for i in range(3)]


def of_length(count: int) -> Fingerprint:
    return Fingerprint(("args[0]: f32[8]*",), ("sin[](f32[8])->f32[8]",), (0,) * count, (), "0")


def test_tables_end_with_what_is_left() -> None:
    plan = written_plan()
    text = texts(page(plan))
    assert "all 3 blocks33.00 MiB55.00 MiB+2.00 ms7" in text
    assert rest_bytes(plan) == (41 - 6 - 4) * MIB
    assert "31.00 MiBall other buffers at the peak; with those above, the certified" in text


def advice_on(plan: RematPlan, kind: str, made_by: str) -> tuple[str, bool]:
    changed = dataclasses.replace(plan, buffers=(BufferReport(MIB, "f32[8]", kind, made_by),) * 2)
    ((advice, (alike,)),) = advised(changed)
    assert alike.count == 2
    assert f"{made_by} (2.00 MiB): {advice.words}" in texts(page(changed))
    return advice.what, advice.is_fixed


def test_advice_is_by_what_a_buffer_is() -> None:
    plan = written_plan()
    assert advice_on(plan, "parameter", "args[0]") == ("differentiated argument", True)
    assert advice_on(plan, "parameter", "args[1]") == ("argument", True)
    assert advice_on(plan, "output", "mul") == ("result", True)
    # The last block is the loss.
    assert advice_on(plan, "temp", "net/layer_1/dot_general") == ("made at the loss", True)
    assert advice_on(plan, "temp", "net/layer_0/tanh") == ("residual kept", False)
    assert advice_on(plan, "temp", "net/embed/gather") == ("residual kept", False)
    assert advice_on(plan, "temp", "(recomputed)/net/layer_0/tanh") == ("recomputed", False)
    assert advice_on(plan, "temp", "elsewhere/tanh") == ("temporary", False)
    # Without a scope it is the loss's if the predicted peak is there, and not a checkpoint's own.
    assert advice_on(plan, "temp", "exp") == ("made at the loss", True)
    assert advice_on(plan, "temp", "reduce_precision") == ("temporary", False)
    early = dataclasses.replace(plan, moments=plan.moments[:1])
    assert advice_on(early, "temp", "exp") == ("temporary", False)


def test_a_buffer_is_of_the_block_that_its_scope_is_in() -> None:
    many = block(0, "net: a, b, c, d", kept_bytes=1)
    deep = block(2, "net/e", kept_bytes=0)
    plan = written_plan(blocks=(many, deep, block(1, "net: loss")))
    assert many.scope == "net: a, …, d"
    assert advice_on(plan, "temp", "net/c/tanh") == ("residual kept", False)
    assert advice_on(plan, "temp", "net/e/tanh") == ("temporary", False)
    # In none of them.
    assert advice_on(plan, "temp", "net/f/tanh") == ("temporary", False)
    assert advice_on(plan, "temp", "net/loss/tanh") == ("made at the loss", True)
