"""Tables as plain text."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.table import Table

_WIDTH = 118


def plain_table(*, show_header: bool = True) -> Table:
    """An empty table without lines."""
    return Table(box=None, padding=(0, 2, 0, 0), header_style="", show_header=show_header)


def plain_text(*parts: RenderableType) -> str:
    """What rich would print, without colours and trailing spaces."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(Group(*parts))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())
