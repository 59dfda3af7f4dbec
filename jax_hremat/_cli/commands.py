"""The command `jax-hremat`."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import click
import jax
from rich.console import Console

import jax_hremat
from jax_hremat._cli import solve as solving
from jax_hremat._cli.doctor import check_all
from jax_hremat._cli.problem import Problem, load_problem
from jax_hremat._cli.users_errors import users_traceback
from jax_hremat._plan.comparison import StrategyPlan
from jax_hremat._planner.config import Effort
from jax_hremat._schedules.graph_files import load_graph
from jax_hremat._schedules.schedule_files import save_schedule
from jax_hremat._schedules.simulate import simulate, without_recompute
from jax_hremat._schedules.strategies import STRATEGIES as OF_GRAPHS
from jax_hremat._shared.errors import HRematError
from jax_hremat._shared.format import format_bytes
from jax_hremat._shared.text import plain_table, plain_text
from jax_hremat._shared.units import parse_budget
from jax_hremat._strategies.registry import ALL_STRATEGIES, STRATEGIES, TREE, TREE_SUMMARY

_PROBLEM_HELP = """PROBLEM is `package.module:function` or `path/to/file.py:function`: a function
without parameters that returns `(loss_fn, args)`, the loss and the tuple of its arguments (arrays
or jax.ShapeDtypeStruct). For a module, the current folder is searched first."""
_STEP_HELP = """It may also return `(make_step, loss_fn, args)`: a function that makes the whole
training step from a loss, the loss, and the step's arguments. The budget then bounds the step."""


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
        jax-hremat explain plan.json --html plan.html

    The exit status is 0 if all went well, 1 if there is an error (for a budget that no plan fits,
    the message has the smallest that one was found for), and 2 for a wrong command line.
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
    click.option(
        "--effort", type=click.Choice(get_args(Effort)), default="normal", show_default=True
    ),
    click.option(
        "--cache-dir",
        type=click.Path(file_okay=False),
        help="Where to keep what was compiled, in place of the user's cache folder.",
    ),
    click.option("--quiet", "-q", is_flag=True, help="Show no progress."),
)
_json_option = click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
_plan_outputs = _with_options(
    click.option("--output", "-o", type=_OUTPUT, help="Save the plan here (JSON)."),
    click.option("--html", type=_OUTPUT, help="Write one page with pictures here."),
    _json_option,
)
_donate_option = click.option(
    "--donate-argnums", help="Arguments that a whole training step donates, as in 0,1."
)


@main.command(help=f"Plan a loss function's training step.\n\n{_PROBLEM_HELP}\n\n{_STEP_HELP}")
@_problem_options
@_planning_options
@_donate_option
@click.option("--budget", help="Bytes, 40GiB, or a share of the peak without remat: 0.5, 50%.")
@click.option("--max-slowdown", type=float, help="In place of a budget: least memory at 1.1 x.")
@_plan_outputs
def plan(
    problem: str,
    budget: str | None,
    max_slowdown: float | None,
    donate_argnums: str | None,
    quiet: bool,
    output: str | None,
    html: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    if (budget is None) == (max_slowdown is None):
        raise click.UsageError("give exactly one of --budget and --max-slowdown")
    found = _load(problem, options["target"])
    how: dict[str, Any] = dict(
        budget=None if budget is None else _budget(budget),
        max_slowdown=max_slowdown,
        **_planning(quiet, **options),
    )
    if found.make_step is None:
        _refuse_donation(donate_argnums, problem)
        made = jax_hremat.plan_remat(found.loss_fn, **how)(*found.args)
    else:
        how["donate_argnums"] = _positions(donate_argnums, "--donate-argnums")
        made = jax_hremat.fit_step(found.make_step, found.loss_fn, **how)(*found.args).plan
    _show(made, output, html, as_json)


@main.command(help=f"Show the whole trade between memory and time.\n\n{_PROBLEM_HELP}")
@_problem_options
@_planning_options
@click.option("--points", default=8, show_default=True, type=click.IntRange(min=2))
@click.option("--output", "-o", type=_OUTPUT, help="Save the table (CSV).")
@click.option("--plot", type=_OUTPUT, help="Save a picture (PNG, SVG, PDF).")
@_json_option
def pareto(
    problem: str,
    points: int,
    quiet: bool,
    output: str | None,
    plot: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    _refuse_without_matplotlib(plot)
    loss = _load_loss(problem, options["target"], "the trade-off is")
    planning = jax_hremat.pareto(loss.loss_fn, num_points=points, **_planning(quiet, **options))
    found = planning(*loss.args)
    click.echo(json.dumps([_figures(p) for p in found], indent=1) if as_json else str(found))
    if output is not None:
        _write(found.to_csv, output)
    if plot is not None:
        _write(found.plot().figure.savefig, plot)


@main.command(help=f"Compare published methods at the same budgets.\n\n{_PROBLEM_HELP}")
@_problem_options
@_planning_options
@click.option("--budgets", required=True, help="As for `jax-hremat plan`, with commas: 0.8,40GiB.")
@click.option(
    "--strategies",
    default=",".join(ALL_STRATEGIES),
    show_default=True,
    help="Names with commas, of `jax-hremat strategies`.",
)
@click.option("--output", "-o", type=_OUTPUT, help="Save the table (CSV).")
@click.option("--plot", type=_OUTPUT, help="Save a picture (PNG, SVG, PDF).")
@_json_option
def compare(
    problem: str,
    budgets: str,
    strategies: str,
    quiet: bool,
    output: str | None,
    plot: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    _refuse_without_matplotlib(plot)
    names = strategies.split(",")
    unknown = [name for name in names if name not in ALL_STRATEGIES]
    if unknown:
        raise click.UsageError(
            f"--strategies: {', '.join(map(repr, unknown))} is none of {', '.join(ALL_STRATEGIES)}"
        )
    loss = _load_loss(problem, options["target"], "strategies are")
    found = jax_hremat.compare(
        loss.loss_fn,
        budgets=[_budget(text) for text in budgets.split(",")],
        strategies=names,
        **_planning(quiet, **options),
    )(*loss.args)
    if as_json:
        rows = [
            {"strategy": one.strategy, "asked_bytes": one.budget_bytes, "fits": one.fits}
            | _figures(one.plan)
            | {"planning_s": found.planning_s[one.strategy]}
            | {"free_schedule": _free_figures(one)}
            for one in found.found
        ]
        click.echo(json.dumps(rows, indent=1))
    else:
        click.echo(str(found))
    if output is not None:
        _write(found.to_csv, output)
    if plot is not None:
        _write(found.plot().figure.savefig, plot)


@main.command(
    help=f"Certify a saved plan for other shapes or another device.\n\n{_PROBLEM_HELP}"
    f"\n\n{_STEP_HELP}"
)
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@_problem_options
@_donate_option
@click.option("--budget", required=True, help="As for `jax-hremat plan`.")
@_plan_outputs
def certify(
    path: str,
    problem: str,
    target: str | None,
    headroom: str,
    donate_argnums: str | None,
    budget: str,
    output: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    found = _load(problem, target)
    saved = jax_hremat.RematPlan.load(path)
    how: dict[str, Any] = dict(budget=_budget(budget), target=target, headroom_bytes=headroom)
    if found.make_step is None:
        _refuse_donation(donate_argnums, problem)
        made = jax_hremat.certify(found.loss_fn, saved, **how)(*found.args)
    else:
        how |= dict(
            plan=saved,
            argnums=saved.argnums,
            has_aux=saved.has_aux,
            donate_argnums=_positions(donate_argnums, "--donate-argnums"),
        )
        made = jax_hremat.fit_step(found.make_step, found.loss_fn, **how)(*found.args).plan
    _show(made, output, html, as_json)


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--html", type=_OUTPUT, help="Write one page with pictures here.")
@_json_option
def explain(path: str, html: str | None, as_json: bool) -> None:
    """Show what a saved plan does: certificate, every block, the largest buffers."""
    _show(jax_hremat.RematPlan.load(path), None, html, as_json)


@main.command()
def strategies() -> None:
    """List the published methods, those of `compare` and those of `solve`."""
    summaries = {TREE: TREE_SUMMARY} | {name: s.summary for name, s in STRATEGIES.items()}
    for title, lines in (
        ("compare: plans of a loss, compiled", summaries),
        ("solve: schedules of a graph, simulated", {s.name: s.summary for s in OF_GRAPHS.values()}),
    ):
        table = plain_table(show_header=False)
        for name, summary in lines.items():
            table.add_row(f"  {name}", summary)
        click.echo(plain_text(title, table))


@main.command()
@click.argument("path", type=click.Path(exists=True, dir_okay=False))
@click.option("--budget", required=True, help="Bytes, 40GiB, or a share of the peak: 0.5, 50%.")
@click.option(
    "--strategy",
    "names",
    multiple=True,
    type=click.Choice(tuple(OF_GRAPHS)),
    help="May be given several times; all by default.",
)
@click.option("--output", "-o", type=_OUTPUT, help="Save the fastest schedule found (JSON).")
@_json_option
def solve(
    path: str, budget: str, names: tuple[str, ...], output: str | None, as_json: bool
) -> None:
    """Schedule a graph of operations by the strategies of the literature.

    PATH is a JSON file of operations with times and sizes. A share of the peak is that of the peak
    without recomputation. Schedules are simulated, not compiled.
    """
    graph = load_graph(path)
    whole_bytes = simulate(graph, without_recompute(graph)).peak_bytes
    budget_bytes = parse_budget(_budget(budget)).resolve_bytes(whole_bytes)
    asked = [OF_GRAPHS[name] for name in names or OF_GRAPHS]
    found = [solving.find(graph, strategy, budget_bytes) for strategy in asked]
    solving.check_some(graph, found, budget_bytes)
    if as_json:
        click.echo(json.dumps(solving.figures(graph, found, budget_bytes), indent=1))
    else:
        click.echo(solving.table(graph, found, budget_bytes))
    if output is not None:
        fastest = solving.fastest(found)
        _write(functools.partial(save_schedule, graph, fastest), output)


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
    target = jax_hremat.calibrate()
    _write(target.save, output)
    flops = ", ".join(f"{k} {v / 1e12:.3g}" for k, v in target.matrix_flops_per_s.items())
    click.echo(f"products {flops} TFLOP/s, memory {target.bandwidth_bytes_per_s / 1e9:.3g} GB/s")


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
        raise click.ClickException(f"required checks that failed, marked FAIL: {failed}")


def _planning(
    quiet: bool,
    target: str | None,
    argnums: str,
    has_aux: bool,
    headroom: str,
    effort: Effort,
    cache_dir: str | None,
) -> dict[str, Any]:
    """The options of `plan_remat` that the planning commands share."""
    config = jax_hremat.PlannerConfig.of_effort(effort)
    return dict(
        target=target,
        argnums=_positions(argnums, "--argnums"),
        has_aux=has_aux,
        headroom_bytes=headroom,
        config=dataclasses.replace(config, cache_dir=cache_dir),
        progress=(lambda stage, done, total: None) if quiet else None,
    )


def _positions(text: str | None, option: str) -> tuple[int, ...]:
    """Positions of arguments; none if nothing was given."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise click.BadParameter(
            f"{text!r} is not a list of positions, such as 0 or 0,1", param_hint=option
        ) from error


def _refuse_donation(donate_argnums: str | None, problem: str) -> None:
    if donate_argnums is not None:
        raise click.UsageError(
            f"--donate-argnums is for a whole training step, and {problem} returns a loss; return "
            f"(make_step, loss_fn, args) to plan the step"
        )


def _refuse_without_matplotlib(plot: str | None) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError('--plot takes matplotlib: pip install "jax_hremat[plot]"')


def _budget(text: str) -> int | float | str:
    """A budget for `plan_remat`; a number with a point in (0, 1] becomes a fraction."""
    try:
        value = float(text)
    except ValueError:
        return text
    return value if 0 < value <= 1 and "." in text else text


def _load(problem: str, target: str | None) -> Problem:
    """What is to be planned, loaded without initialising a GPU unless one is needed."""
    if target is not None or not _has_gpu():
        _without_gpu()
    return load_problem(problem)


def _load_loss(problem: str, target: str | None, what: str) -> Problem:
    """The same, for what a whole training step cannot be given to."""
    loss = _load(problem, target)
    if loss.make_step is not None:
        raise click.UsageError(
            f"{problem} is a whole training step; {what} for a loss: return (loss_fn, args) from it"
        )
    return loss


def _has_gpu() -> bool:
    """Whether a driver has put a GPU's device file in place."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()


def _without_gpu() -> None:
    """Select the CPU backend: nothing is run, and without a GPU JAX's CUDA plugin would fail."""
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _show(plan: jax_hremat.RematPlan, output: str | None, html: str | None, as_json: bool) -> None:
    """Print a plan, and write what was asked for."""
    click.echo(json.dumps(_figures(plan), indent=1) if as_json else str(plan))
    if output is not None:
        _write(plan.save, output)
    if html is not None:
        _write(functools.partial(jax_hremat.report, plan), html)


def _free_figures(one: StrategyPlan) -> dict[str, Any] | None:
    """The free schedule of a plan, as simulated; None if it has none."""
    free = one.plan.free_schedule
    if free is None:
        return None
    return {
        "simulated_peak_bytes": free.peak_bytes,
        "simulated_step_s": free.step_s,
        "simulated_slowdown": one.free_slowdown,
        "found_by": free.found_by,
    }


def _figures(plan: jax_hremat.RematPlan) -> dict[str, Any]:
    """What a script may want to know of a plan; all else is in its file."""
    c = plan.certificate
    return {
        "program": plan.fingerprint.digest,
        "target": c.target,
        "devices": 1 if c.mesh is None else c.mesh.num_devices,
        "versions": dict(c.versions),
        "holds": c.holds,
        "peak_bytes": c.peak_bytes,
        "budget_bytes": c.budget_bytes,
        "headroom_bytes": c.headroom_bytes,
        "argument_bytes": c.argument_bytes,
        "output_bytes": c.output_bytes,
        "temp_bytes": c.temp_bytes,
        "constant_bytes": c.constant_bytes,
        "no_remat_peak_bytes": plan.baseline_peak_bytes,
        "estimated_step_s": plan.estimated_step_s,
        "no_remat_step_s": plan.baseline_step_s,
        "num_checkpoints": plan.root.num_checkpointed,
        "num_compiles": dict(plan.num_compiles),
        "planning_s": sum(plan.timings_s.values()),
    }


def _write(save: Callable[[str], Any], path: str) -> None:
    """Write a file and say so, beside the results."""
    try:
        save(path)
    except OSError as error:
        raise click.FileError(path, hint=error.strerror or str(error)) from error
    click.echo(f"wrote {path}", err=True)
