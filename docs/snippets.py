"""Runs the code of a page as a reader would, from top to bottom, and shows what it prints.

    python docs/snippets.py docs/tutorials/gpt.md

runs every ```python block of the page in one namespace, and replaces each ```text block that
directly follows one by what it printed. Blocks that are not to be run stand under a line
`<!-- not run: why -->`. The tests run all pages with `run`.
"""

import contextlib
import io
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent

_BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]*-->\n\n?)?"
    r"(?P<source>^```python\n(?P<code>.*?)^```\n)"
    r"(?P<output>\n```text\n(?P<shown>.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)


def pages() -> list[Path]:
    """The pages that have code to run, and the README."""
    found = [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]
    return [page for page in found if any(not m["skip"] for m in _blocks(page))]


def run(page: Path, scope: dict[str, Any] | None = None) -> dict[str, Any]:
    """Runs a page's blocks in order; the names that they define."""
    scope = {} if scope is None else scope
    for match in _blocks(page):
        if not match["skip"]:
            _execute(page, match, scope)
    return scope


def fill(page: Path) -> None:
    """Runs a page in an empty folder and writes what its blocks print below them."""
    text = page.read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    parts, end = [], 0
    for match in _BLOCK.finditer(text):
        if match["skip"]:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            _execute(page, match, scope)
        if match["output"]:
            lines = [line.rstrip() for line in printed.getvalue().strip("\n").split("\n")]
            parts += [text[end : match.start("shown")], "\n".join(lines) + "\n"]
            end = match.end("shown")
    page.write_text("".join(parts) + text[end:], encoding="utf-8")


def _blocks(page: Path) -> list[re.Match[str]]:
    return list(_BLOCK.finditer(page.read_text(encoding="utf-8")))


def _execute(page: Path, match: re.Match[str], scope: dict[str, Any]) -> None:
    # As many lines before the code as on the page, so that a traceback names the page's line.
    before = match.string.count("\n", 0, match.start("code"))
    exec(compile("\n" * before + match["code"], str(page), "exec"), scope)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        path = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            # As wide as a page of the site.
            os.environ["COLUMNS"] = "100"
            fill(path)
