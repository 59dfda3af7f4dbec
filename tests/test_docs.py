"""The pages of the documentation: their code runs, and their links lead somewhere."""

import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS))

import snippets  # noqa: E402

# `test_examples.py` runs these two, and looks at what they make. Of the others the default run has
# the first page that a reader sees.
ELSEWHERE = ("README.md", "guide.md")
PAGES = [
    pytest.param(
        page,
        id=str(page.relative_to(DOCS.parent)),
        marks=[] if page.name == "index.md" else [pytest.mark.slow],
    )
    for page in snippets.pages()
    if page.name not in ELSEWHERE
]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if 'target="h200"' in page.read_text(encoding="utf-8"):
        request.getfixturevalue("h200")
    monkeypatch.chdir(tmp_path)
    snippets.run(page)


def test_links_between_files_lead_somewhere() -> None:
    dead = []
    for page in [DOCS.parent / "README.md", *DOCS.rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http") and not (page.parent / link).exists():
                dead.append(f"{page.relative_to(DOCS.parent)}: {link}")
    assert not dead
