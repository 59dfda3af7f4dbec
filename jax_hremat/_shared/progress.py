"""Progress of long work: the callbacks that report it, and what is shown if there is none."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

# Called as `progress(stage, done, total)`; `total` is 0 while it is unknown, and does not grow.
Progress = Callable[[str, int, int], None]

_LOGGER = "jax_hremat.progress"
# Where there is no terminal: no line before this time, then one for each stage, and one after this
# time within a stage.
_QUIET_S = 1.0
_LINE_S = 30.0


def progress(shown: bool = True) -> None:
    """Show the progress of planning, as by default, or do not, in the whole process.

    Progress is shown on standard error by every function that plans and is not given a `progress`
    callback: a bar on a terminal and in a notebook (there it needs `ipywidgets`), otherwise a line
    for each stage that begins after the first second. Setting the level of the logger
    `"jax_hremat"` above `logging.INFO` hides it too.

    Args:
        shown: Whether to show it.
    """
    logging.getLogger(_LOGGER).setLevel(logging.INFO if shown else logging.WARNING)


@contextmanager
def reporting(given: Progress | None, what: str) -> Iterator[Progress]:
    """The callback to report to: the caller's, or the default display.

    Args:
        given: The caller's callback.
        what: What the work is, for the display: "planning", for example.
    """
    if given is not None:
        yield given
    elif not _is_shown():
        yield lambda stage, done, total: None
    else:
        console = Console(stderr=True)
        is_live = console.is_terminal or (console.is_jupyter and bool(find_spec("ipywidgets")))
        with (_bar if is_live else _lines)(console, what) as show:
            yield show


def _is_shown() -> bool:
    """Whether the nearest level that was set, of our loggers, lets information through."""
    levels = (logging.getLogger(name).level for name in (_LOGGER, "jax_hremat"))
    return next(filter(None, levels), logging.INFO) <= logging.INFO


@contextmanager
def _bar(console: Console, what: str) -> Iterator[Progress]:
    """One bar, which shows the stage that runs and disappears at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[count]}"),
        TimeElapsedColumn(),
    )
    bars = Bars(*columns, console=console, transient=True)
    task = bars.add_task(what, total=None, count="")

    def show(stage: str, done: int, total: int) -> None:
        bars.start()
        bars.update(
            task,
            description=f"{what}: {stage}",
            completed=done,
            total=total or None,
            count=_count(done, total),
        )

    try:
        yield show
    finally:
        bars.stop()


@contextmanager
def _lines(console: Console, what: str) -> Iterator[Progress]:
    """A line for each stage, and for each half minute of a stage."""
    start_s = last_s = time.monotonic()
    shown = ""

    def say(text: str) -> None:
        text = f"{what}: {text} ({time.monotonic() - start_s:.0f} s)"
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(stage: str, done: int, total: int) -> None:
        nonlocal shown, last_s
        now_s = time.monotonic()
        is_due = stage != shown or now_s - last_s >= _LINE_S
        if is_due and now_s - start_s >= _QUIET_S:
            shown, last_s = stage, now_s
            say(f"{stage}, {_count(done, total)}" if done else stage)

    yield show
    if shown:
        say("done")


def _count(done: int, total: int) -> str:
    if total:
        return f"{done} of {total}"
    return str(done) if done else ""
