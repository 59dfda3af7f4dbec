"""The documentation site: `nox -s docs`."""

import re
from typing import Any

from jax_hremat import __version__

project = "jax_hremat"
author = "The jax_hremat developers"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
exclude_patterns = ["_build", "data"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
# What is printed is not copied.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
html_theme = "furo"
html_show_copyright = False
html_title = f"jax_hremat {version}"
# Headings are the targets of links within and between pages.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True

_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)(?=(\w?))")


def setup(app: Any) -> None:
    """Docstrings are written as Markdown is: one backtick is code."""

    def to_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
        for i, line in enumerate(lines):
            escaped = "`".join(
                part if k % 2 else part.replace("|", r"\|")
                for k, part in enumerate(line.split("`"))
            )
            lines[i] = _CODE.sub(lambda m: f"``{m[1]}``" + ("\\ " if m[2] else ""), escaped)

    # Before napoleon, which makes backticks of its own.
    app.connect("autodoc-process-docstring", to_rst, priority=400)
