"""What is shown while the library works, and what turns it off."""

from __future__ import annotations

import io
import itertools
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

import jax_hremat
from jax_hremat._shared import progress as shown
from jax_hremat._shared.progress import reporting


@pytest.fixture
def progress_shown() -> Iterator[None]:
    jax_hremat.progress()
    yield
    jax_hremat.progress(False)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the clock is two seconds after the one before."""
    ticks = itertools.count(0, 2)
    monkeypatch.setattr(shown.time, "monotonic", lambda: float(next(ticks)))


def worked() -> None:
    """Work that reports its progress."""
    with reporting(None, "planning") as tell:
        for done in range(3):
            tell("costs of blocks", done, 2)
        tell("whole steps compiled", 0, 0)
        tell("whole steps compiled", 1, 0)


def test_where_there_is_no_terminal_each_stage_is_a_line(
    progress_shown: None, clock: None, capsys: pytest.CaptureFixture[str]
) -> None:
    worked()
    out, err = capsys.readouterr()
    assert out == ""
    stages = [line.partition(" (")[0] for line in err.splitlines()]
    assert stages == [
        "planning: costs of blocks",
        "planning: whole steps compiled",
        "planning: done",
    ]


def test_a_long_stage_is_reported_again(
    progress_shown: None, clock: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with reporting(None, "planning") as tell:
        for done in range(40):
            tell("costs of blocks", done, 40)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 6
    assert lines[1].startswith("planning: costs of blocks, ") and " of 40 " in lines[1]


def test_short_work_shows_nothing(progress_shown: None, capsys: pytest.CaptureFixture[str]) -> None:
    worked()
    assert capsys.readouterr().err == ""


def test_a_terminal_has_a_bar_that_disappears(
    progress_shown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()

    def console(**how: Any) -> Console:
        assert how == dict(stderr=True)
        return Console(file=written, force_terminal=True, width=80)

    monkeypatch.setattr(shown, "Console", console)
    worked()
    text = written.getvalue()
    assert "whole steps compiled" in text
    assert text.endswith("\x1b[2K"), "the line is erased"


@pytest.mark.parametrize("logger", ["jax_hremat", "jax_hremat.progress"])
def test_a_log_level_hides_it(logger: str, clock: None, capsys: pytest.CaptureFixture[str]) -> None:
    ours, progress = logging.getLogger("jax_hremat"), logging.getLogger("jax_hremat.progress")
    before = ours.level, progress.level
    try:
        ours.setLevel(logging.NOTSET)
        progress.setLevel(logging.NOTSET)
        worked()
        assert "planning" in capsys.readouterr().err, "it is shown by default"
        logging.getLogger(logger).setLevel(logging.WARNING)
        worked()
        assert capsys.readouterr().err == ""
    finally:
        ours.setLevel(before[0])
        progress.setLevel(before[1])


def test_a_callback_takes_the_place_of_the_display(
    progress_shown: None, clock: None, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[tuple[str, int, int]] = []
    with reporting(lambda *what: heard.append(what), "planning") as tell:
        tell("costs of blocks", 1, 2)
    assert heard == [("costs of blocks", 1, 2)]
    assert capsys.readouterr().err == ""


def test_an_error_is_not_done(
    progress_shown: None, clock: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError), reporting(None, "planning") as tell:
        tell("costs of blocks", 1, 2)
        raise KeyError
    assert "done" not in capsys.readouterr().err


SCRIPT = """
import sys
import jax.numpy as jnp, jax_hremat
from jax_hremat._shared import progress
progress._QUIET_S = 0.0  # However short the planning.
config = jax_hremat.PlannerConfig(cost="analytic", max_rounds=0)
loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
for change in (lambda: None, lambda: jax_hremat.progress(False), jax_hremat.progress):
    change()
    plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=config)
    plan(jnp.ones((64, 64)), jnp.ones((256, 64)))
    print("planned", file=sys.stderr)
"""


def test_a_script_shows_the_progress_of_planning_unless_it_is_turned_off() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == ""
    by_default, silent, again, _ = done.stderr.split("planned\n")
    for text in (by_default, again):
        ours = [line for line in text.splitlines() if line.startswith("planning: ")]
        assert ours[-1].startswith("planning: done (")
    assert "planning" not in silent


def test_totals_do_not_grow() -> None:
    import jax.numpy as jnp

    heard: list[tuple[str, int, int]] = []

    def loss(w: Any, x: Any) -> Any:
        for _ in range(3):
            x = jnp.tanh(x @ w) * x
        return x.sum()

    plan = jax_hremat.plan_remat(
        loss, budget=0.9, target="cpu", progress=lambda *what: heard.append(what)
    )
    plan(jnp.ones((16, 16)), jnp.ones((64, 16)))
    for stage in {stage for stage, _, _ in heard}:
        told = [(done, total) for s, done, total in heard if s == stage]
        assert len({total for _, total in told}) == 1
        assert [done for done, _ in told] == sorted(done for done, _ in told)
    costs = [(done, total) for stage, done, total in heard if stage == "costs of blocks"]
    assert costs[-1][0] == costs[-1][1] > 0
