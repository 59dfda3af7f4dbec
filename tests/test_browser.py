"""The report in a real browser, at the width of a desk and of a phone."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jax_hremat

pytestmark = pytest.mark.browser

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# The smallest letters that are read without effort, in CSS pixels.
READABLE = 9

# Elements with text of their own, and how high it is drawn, what pictures shrink counted.
TEXTS = """
return [...document.querySelectorAll('svg text, td, th, p, li, code')]
    .filter(e => e.textContent.trim() && e.getClientRects().length)
    .map(e => {
        const svg = e.ownerSVGElement;
        const scale = svg ? svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : 1;
        return [parseFloat(getComputedStyle(e).fontSize) * scale, e.textContent.trim()];
    });
"""
# Words of the same picture that lie over each other.
OVERLAPS = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
    const boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
    boxes.forEach(([t, a], i) => boxes.slice(i + 1).forEach(([u, b]) => {
        if (a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom)
            found.push(t.textContent + ' over ' + u.textContent);
    }));
}
return found;
"""
# Labels and marks that leave their picture, and pictures that leave the window.
CUT = """
const found = [];
for (const svg of document.querySelectorAll('svg')) {
    const box = svg.getBoundingClientRect();
    if (box.left < 0 || box.right > innerWidth) found.push('picture');
    for (const e of svg.querySelectorAll('text, circle, path, polygon, polyline, rect')) {
        const b = e.getBoundingClientRect();
        if (b.left < box.left || b.right > box.right || b.top < box.top || b.bottom > box.bottom)
            found.push(e.tagName + ' ' + e.textContent);
    }
}
return found;
"""


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for i, (w_in, w_out) in enumerate(params):
        with jax.named_scope(f"a_layer_with_quite_a_long_name_{i}"):
            x = x + jax.nn.gelu(x @ w_in) @ w_out
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def chromium() -> tuple[Any, str, str]:
    """Selenium, and the paths of Chromium and its driver."""
    webdriver = pytest.importorskip("selenium.webdriver")
    paths = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in paths:
        pytest.skip("there is no Chromium with its driver here")
    return webdriver, *paths


@pytest.fixture(scope="module")
def report(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the plan that takes the least memory, which is the longest."""
    args = (
        [(jnp.ones((16, 64)), jnp.ones((64, 16)))] * 12,
        jax.ShapeDtypeStruct((1024, 16), jnp.float32),
    )
    search = jax_hremat.SearchConfig(max_packings=1, max_saved_sets=1)
    config = jax_hremat.PlannerConfig(search=search, max_rounds=1)
    frontier = jax_hremat.pareto(loss_fn, num_points=4, target="cpu", config=config)(*args)
    path = tmp_path_factory.mktemp("report") / "report.html"
    peak_bytes, step_s = frontier.no_remat
    hand = {"a policy by hand": (peak_bytes // 2, 1.2 * step_s)}
    jax_hremat.report(frontier[0], path, frontier, hand=hand)
    return path


@pytest.fixture(params=SIZES)
def browser(request: pytest.FixtureRequest, chromium: Any, report: Path) -> Iterator[Any]:
    webdriver, binary, driver = chromium
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    width, height = SIZES[request.param]
    metrics = dict(width=width, height=height, pixelRatio=1.0)
    options.add_experimental_option("mobileEmulation", dict(deviceMetrics=metrics))
    options.set_capability("goog:loggingPrefs", dict(browser="ALL"))
    chrome = webdriver.Chrome(options, webdriver.ChromeService(driver))
    try:
        chrome.get(report.as_uri())
        assert chrome.execute_script("return [innerWidth, innerHeight]") == [width, height]
        yield chrome
    finally:
        chrome.quit()


def test_it_loads_nothing_and_says_nothing_to_the_console(browser: Any) -> None:
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_it_is_as_wide_as_the_window(browser: Any) -> None:
    """Only a table or a picture that is too wide scrolls, in its own box."""
    wide, window = browser.execute_script(
        "return [document.documentElement.scrollWidth, innerWidth]"
    )
    assert wide <= window


def test_all_text_is_large_enough_to_read(browser: Any) -> None:
    texts = browser.execute_script(TEXTS)
    assert len(texts) > 50
    assert [text for size, text in texts if size < READABLE] == []


def test_nothing_of_a_picture_is_cut_off(browser: Any) -> None:
    """Every label and mark is inside its picture, and every picture inside the window."""
    assert browser.execute_script(CUT) == []


def test_a_click_on_a_heading_sorts_and_the_third_restores(browser: Any) -> None:
    sizes = """
    const rows = [...document.querySelectorAll('.blocks tbody tr')];
    return rows.map(row => +row.cells[2].dataset.value);
    """
    click = "document.querySelectorAll('.blocks thead th')[2].click()"
    written = browser.execute_script(sizes)
    browser.execute_script(click)
    assert browser.execute_script(sizes) == sorted(written, reverse=True)
    browser.execute_script(click)
    assert browser.execute_script(sizes) == sorted(written)
    browser.execute_script(click)
    assert browser.execute_script(sizes) == written
    assert sorted(written) != written


def test_what_is_under_the_pointer_is_said_below_its_picture(browser: Any) -> None:
    before, title, after, others = browser.execute_script("""
    const sections = [...document.querySelectorAll('section')];
    const readout = sections[1].querySelector('.readout');
    const hit = sections[1].querySelectorAll('.hit')[3];
    const before = readout.textContent;
    hit.dispatchEvent(new PointerEvent('pointerenter'));
    return [before, hit.querySelector('title').textContent, readout.textContent,
            sections[0].querySelector('.readout').textContent];
    """)
    assert (before, others) == ("", "")
    assert title == after
    assert "in all" in after


def test_no_words_of_a_picture_lie_over_each_other(browser: Any) -> None:
    assert browser.execute_script(OVERLAPS) == []


def test_a_picture_is_kept_to_be_looked_at(browser: Any, tmp_path: Path) -> None:
    """The whole page, in pytest's folder of temporary files."""
    path = tmp_path / "report.png"
    height = browser.execute_script("return document.documentElement.scrollHeight")
    width = browser.execute_script("return innerWidth")
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        dict(width=width, height=height, deviceScaleFactor=1, mobile=False),
    )
    assert browser.save_screenshot(str(path))
    assert path.stat().st_size > 10_000
