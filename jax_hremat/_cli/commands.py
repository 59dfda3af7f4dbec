"""The command `jax-hremat`."""

from __future__ import annotations

import functools
import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import jax_hremat
from jax_hremat._cli.doctor import check_all
from jax_hremat._cli.problem import load_problem
from jax_hremat._cli.users_errors import users_traceback
from jax_hremat._shared.errors import HRematError
from jax_hremat._shared.format import format_bytes
from jax_hremat._shared.text import plain_table
from jax_hremat._shared.units import parse_budget

_PROBLEM_HELP = """PROBLEM is `package.module:function` or `path/to/file.py:function`: a function
without parameters that returns `(loss_fn, args)`, the loss and the tuple of its arguments (arrays
or jax.ShapeDtypeStruct). For a module, the current folder is searched first."""


class _Output(click.Path):
    """A path for output, checked to be writable before anything is planned."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = os.fsdecode(super().convert(value, param, ctx))
        try:
            with tempfile.TemporaryFile(dir=Path(path).parent):
                return path
        except OSError as error:
            raise click.FileError(path, hint=error.strerror or str(error)) from error


_OUTPUT = _Output(dir_okay=False, writable=True)


class _Group(click.Group):
    """Shows the library's errors as messages, and other errors from the user's first frame on."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except HRematError as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            text = users_traceback(error, around=(jax_hremat, click, jax))
            if text is None:
                raise
            click.echo(text, err=True)
            ctx.exit(1)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(jax_hremat.__version__, prog_name="jax-hremat")
def main() -> None:
    """Plan rematerialization under a byte budget, for JAX training steps.

    \b
    Example, with a file `train.py` that has
        def problem():
            return loss_fn, (params, batch)
    plan it for an H200 within 40 GiB, and read what was decided:
        jax-hremat plan train:problem --budget 40GiB --target h200 -o plan.json
        jax-hremat explain plan.json
    """


def _with_options(*options: Callable[..., Any]) -> Callable[..., Any]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_problem_options = _with_options(
    click.argument("problem"),
    click.option("--target", help="Device to compile for, of `jax-hremat targets`."),
    click.option("--headroom", default="0", help="Bytes set aside for library workspaces."),
)
_planning_options = _with_options(
    click.option(
        "--argnums", default="0", show_default=True, help="Arguments differentiated, as in 0,1."
    ),
    click.option("--has-aux", is_flag=True, help="The loss returns (loss, aux)."),
    click.option("--cache-dir", type=click.Path(file_okay=False), help="Keep what was compiled."),
    click.option("--quiet", "-q", is_flag=True, help="Show no progress."),
)


@main.command(help=f"Plan a loss function's training step.\n\n{_PROBLEM_HELP}")
@_problem_options
@_planning_options
@click.option("--budget", help='Bytes, "40GiB", or a share of the peak as it is: 0.5, 50%.')
@click.option("--max-slowdown", type=float, help="In place of a budget: least memory at 1.1 x.")
@click.option("--output", "-o", type=_OUTPUT, help="Save the plan here (JSON).")
def plan(
    problem: str,
    budget: str | None,
    max_slowdown: float | None,
    output: str | None,
    quiet: bool,
    **options: Any,
) -> None:
    if (budget is None) == (max_slowdown is None):
        raise click.UsageError("give exactly one of --budget and --max-slowdown")
    loss_fn, args = _load(problem, options["target"])
    with _progress(quiet) as progress:
        found = jax_hremat.plan_remat(
            loss_fn,
            budget=None if budget is None else _budget(budget),
            max_slowdown=max_slowdown,
            progress=progress,
            **_planning(**options),
        )(*args)
    click.echo(str(found))
    if output is not None:
        _write(found.save, output)
        click.echo(f"\nwrote {output}")


@main.command(help=f"Show the whole trade between memory and time.\n\n{_PROBLEM_HELP}")
@_problem_options
@_planning_options
@click.option("--points", default=8, show_default=True, type=click.IntRange(min=2))
@click.option("--output", "-o", type=_OUTPUT, help="Save the table (CSV).")
@click.option("--plot", type=_OUTPUT, help="Save a picture (PNG, SVG, PDF).")
def pareto(
    problem: str, points: int, output: str | None, plot: str | None, quiet: bool, **options: Any
) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError('--plot takes matplotlib: pip install "jax_hremat[plot]"')
    loss_fn, args = _load(problem, options["target"])
    with _progress(quiet) as progress:
        found = jax_hremat.pareto(
            loss_fn, num_points=points, progress=progress, **_planning(**options)
        )(*args)
    click.echo(str(found))
    if output is not None:
        _write(found.to_csv, output)
        click.echo(f"\nwrote {output}")
    if plot is not None:
        _write(found.plot().figure.savefig, plot)
        click.echo(f"wrote {plot}")


@main.command(help=f"Certify a saved plan for other shapes or another device.\n\n{_PROBLEM_HELP}")
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@_problem_options
@click.option("--budget", required=True, help="As for `jax-hremat plan`.")
@click.option("--output", "-o", type=_OUTPUT, help="Save the plan here (JSON).")
def certify(
    path: str,
    problem: str,
    target: str | None,
    headroom: str,
    budget: str,
    output: str | None,
) -> None:
    loss_fn, args = _load(problem, target)
    found = jax_hremat.certify(
        loss_fn,
        jax_hremat.RematPlan.load(path),
        budget=_budget(budget),
        target=target,
        headroom_bytes=_headroom_bytes(headroom),
    )(*args)
    click.echo(str(found))
    if output is not None:
        _write(found.save, output)
        click.echo(f"\nwrote {output}")


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--html", type=_OUTPUT, help="Write one page with pictures here.")
def explain(path: str, html: str | None) -> None:
    """Show what a saved plan does: certificate, every block, the largest buffers."""
    plan = jax_hremat.RematPlan.load(path)
    if html is None:
        click.echo(str(plan))
        return
    _write(functools.partial(jax_hremat.report, plan), html)
    click.echo(f"wrote {html}")


@main.command()
def targets() -> None:
    """List the devices that plans can be made for; none of them has to be attached."""
    table = plain_table()
    for column in ("name", "memory", "TB/s", "bf16 TFLOP/s"):
        table.add_column(column, justify="left" if column == "name" else "right")
    for name in jax_hremat.list_targets():
        target = jax_hremat.get_target(name)
        flops = target.matrix_flops_per_s.get("bf16", 0.0)
        table.add_row(
            name,
            format_bytes(target.memory_bytes) if target.memory_bytes else "",
            f"{target.bandwidth_bytes_per_s / 1e12:.2f}",
            f"{flops / 1e12:.0f}" if flops else "",
        )
    Console().print(table)


@main.command()
@click.option("--output", "-o", required=True, type=_OUTPUT, help="TOML file.")
def calibrate(output: str) -> None:
    """Measure the attached device, to plan for it elsewhere with --target FILE."""
    with _progress(quiet=False) as progress:
        target = jax_hremat.calibrate(progress)
    _write(target.save, output)
    flops = ", ".join(f"{k} {v / 1e12:.3g}" for k, v in target.matrix_flops_per_s.items())
    click.echo(f"products {flops} TFLOP/s, memory {target.bandwidth_bytes_per_s / 1e9:.3g} GB/s")
    click.echo(f"wrote {output}")


@main.command()
@click.option("--target", default="h200", show_default=True, help="What to try to compile for.")
def doctor(target: str) -> None:
    """Check what planning needs: versions, solver, compilers, cache."""
    _without_gpu()
    failed = 0
    for check in check_all(target):
        mark = "ok  " if check.passed else "FAIL" if check.needed else "no  "
        click.echo(f"{mark}  {check.name}: {check.found}")
        if check.advice:
            click.echo(f"      {check.advice}")
        failed += check.needed and not check.passed
    if failed:
        raise click.ClickException(f"{failed} of the things that planning takes are missing")


def _planning(
    target: str | None, argnums: str, has_aux: bool, headroom: str, cache_dir: str | None
) -> dict[str, Any]:
    """The options of `plan_remat` that both planning commands share."""
    try:
        positions = tuple(int(part) for part in argnums.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{argnums!r} is not 0 or 0,1", param_hint="--argnums") from error
    return dict(
        target=target,
        argnums=positions,
        has_aux=has_aux,
        headroom_bytes=_headroom_bytes(headroom),
        config=jax_hremat.PlannerConfig(cache_dir=cache_dir),
    )


def _headroom_bytes(text: str) -> int:
    return 0 if text == "0" else parse_budget(text).resolve_bytes(0)


def _budget(text: str) -> int | float | str:
    """A budget for `plan_remat`; a number with a point in (0, 1] becomes a fraction."""
    try:
        value = float(text)
    except ValueError:
        return text
    return value if 0 < value <= 1 and "." in text else text


def _load(problem: str, target: str | None) -> tuple[Callable[..., Any], Sequence[Any]]:
    """The loss and its arguments, loaded without initialising a GPU unless one is needed."""
    if target is not None or not _has_gpu():
        _without_gpu()
    return load_problem(problem)


def _has_gpu() -> bool:
    """Whether a driver has put a GPU's device file in place."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _without_gpu() -> None:
    """Select the CPU backend: nothing is run, and without a GPU JAX's CUDA plugin would fail."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _write(save: Callable[[str], Any], path: str) -> None:
    try:
        save(path)
    except OSError as error:
        raise click.FileError(path, hint=error.strerror or str(error)) from error


@contextmanager
def _progress(quiet: bool) -> Any:
    """Show a progress line for each stage on standard error, if that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as bars:
        tasks: dict[str, Any] = {}

        def progress(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield progress
