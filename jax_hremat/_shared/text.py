"""Tables as plain text."""

from __future__ import annotations

import io
from collections.abc import Sequence
from textwrap import fill

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_WIDTH = 80
_GAP = 2


def plain_table(*, show_header: bool = True) -> Table:
    """An empty table without lines."""
    return Table(box=None, padding=(0, _GAP, 0, 0), header_style="", show_header=show_header)


def plain_text(*parts: RenderableType) -> str:
    """What rich would print, without colours and trailing spaces, at most 80 columns wide."""
    console = Console(file=io.StringIO(), width=_WIDTH, color_system=None)
    console.print(Group(*parts))
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def wide_row(
    name: str, figures: Sequence[str], widths: Sequence[int], *, indent: int = 0
) -> RenderableType:
    """A name and figures in columns of these widths, which end at the right margin; for tables
    whose rows have lines of full width between them. A long name is folded."""
    figures_width = sum(widths) + _GAP * len(widths)
    row = Table.grid(padding=(0, 0, 0, 0))
    row.add_column(width=_WIDTH - figures_width, overflow="fold", vertical="bottom")
    cells: list[RenderableType] = [Padding(Text(name), (0, 0, 0, indent))]
    for figure, width in zip(figures, widths, strict=True):
        row.add_column(width=width + _GAP, justify="right", vertical="bottom")
        cells.append(Text(figure))
    row.add_row(*cells)
    return row


def indented(text: str, indent: int) -> RenderableType:
    """Text of full width; lines that are folded go on four columns further in."""
    first, further = " " * indent, " " * (indent + 4)
    return Text(fill(text, _WIDTH, initial_indent=first, subsequent_indent=further))


def shortened(text: str, width: int) -> str:
    """The text, its middle left out where it is longer than the width."""
    if len(text) <= width:
        return text
    ahead = (width - 1) // 2
    return f"{text[:ahead]}…{text[len(text) - (width - 1 - ahead) :]}"
