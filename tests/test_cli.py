"""The command line: what each command prints, and what it says to wrong input."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from click.testing import CliRunner, Result

import jax_hremat
from jax_hremat._cli import doctor
from jax_hremat._cli.commands import main
from jax_hremat._shared.errors import TargetUnavailableError
from jax_hremat._strategies.registry import ALL_STRATEGIES

MODULE = """
import jax
import jax.numpy as jnp


def loss_fn(params, x):
    for w_in, w_out in params:
        x = x + jax.nn.gelu(x @ w_in) @ w_out
    return jnp.mean(x**2)


def problem():
    params = [(jnp.ones((8, 32)), jnp.ones((32, 8)))] * 3
    return loss_fn, (params, jax.ShapeDtypeStruct((1024, 8), jnp.float32))


def larger():
    params = [(jnp.ones((8, 32)), jnp.ones((32, 8)))] * 3
    return loss_fn, (params, jax.ShapeDtypeStruct((2048, 8), jnp.float32))


def deeper():
    params = [(jnp.ones((8, 32)), jnp.ones((32, 8)))] * 4
    return loss_fn, (params, jax.ShapeDtypeStruct((1024, 8), jnp.float32))


def step():
    def make_step(loss_fn):
        def train_step(params, x):
            grads = jax.grad(loss_fn)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        return train_step

    return (make_step, *problem())


def takes_one(a):
    return loss_fn, a


def returns_three():
    return 3


def fails_inside():
    return len(None)


def fails_when_traced():
    return (lambda params, x: x.nothing), (jnp.ones(3), jnp.ones(3))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands have compiled, for those after them."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: Path) -> Callable[..., Result]:
    """Runs a command in a folder with a module `cli_problem`."""
    monkeypatch.setenv("JAX_HREMAT_CACHE_DIR", str(compiled))
    (tmp_path / "cli_problem.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))

    def run(*args: str) -> Result:
        return CliRunner().invoke(main, args, catch_exceptions=False)

    return run


def test_plan_saves_what_explain_shows(run: Callable[..., Result], tmp_path: Path) -> None:
    made = run("plan", "cli_problem:problem", "--budget", "0.6", "--target", "cpu", "-o", "p.json")
    assert made.exit_code == 0
    plan = jax_hremat.RematPlan.load(tmp_path / "p.json")
    assert plan.certificate.holds and plan.root.num_checkpointed > 0
    assert "certified peak" in made.output and "wrote p.json" in made.output
    shown = run("explain", "p.json")
    assert shown.exit_code == 0
    assert str(plan) in shown.output
    assert run("explain", "p.json", "--html", "p.html").exit_code == 0
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_certify_for_another_batch(run: Callable[..., Result], tmp_path: Path) -> None:
    cpu = ("--target", "cpu")
    run("plan", "cli_problem:problem", "--budget", "0.6", *cpu, "-o", "p.json")
    again = run("certify", "p.json", "cli_problem:larger", "--budget", "0.7", *cpu, "-o", "q.json")
    assert again.exit_code == 0
    small = jax_hremat.RematPlan.load(tmp_path / "p.json")
    large = jax_hremat.RematPlan.load(tmp_path / "q.json")
    assert large.root == small.root
    assert large.certificate.holds
    assert large.certificate.peak_bytes > small.certificate.peak_bytes
    # It is a plan for the other program, like one that was made for it.
    namespace: dict[str, Any] = {}
    exec(MODULE, namespace)
    loss_fn, args = namespace["larger"]()
    jax.eval_shape(jax_hremat.apply_plan(loss_fn, large), *args)
    with pytest.raises(jax_hremat.StalePlanError):
        jax.eval_shape(jax_hremat.apply_plan(loss_fn, small), *args)
    refused = run("certify", "p.json", "cli_problem:larger", "--budget", "100kB", *cpu)
    assert refused.exit_code == 1 and "set by this plan" in " ".join(refused.output.split())
    stale = run("certify", "p.json", "cli_problem:deeper", "--budget", "1GB", *cpu)
    assert stale.exit_code == 1 and "StalePlanError" in stale.output


def test_pareto(run: Callable[..., Result], tmp_path: Path) -> None:
    options = ("--points", "3", "-o", "f.csv", "--plot", "f.png", "--target", "cpu", "-q")
    made = run("pareto", "cli_problem:problem", *options)
    assert made.exit_code == 0
    rows = list(csv.DictReader((tmp_path / "f.csv").read_text().splitlines()))
    assert len(rows) >= 2 and all(int(row["peak_bytes"]) > 0 for row in rows)
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_slowdown_in_place_of_a_budget(run: Callable[..., Result]) -> None:
    made = run("plan", "cli_problem:problem", "--max-slowdown", "1.05", "--target", "cpu")
    assert made.exit_code == 0


def test_a_whole_step_is_planned_and_certified_again(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    asked = ("cli_problem:step", "--budget", "0.6", "--target", "cpu", "--donate-argnums", "0")
    made = run(
        "plan", *asked, "--effort", "low", "-o", "p.json", "--html", "p.html", "--json", "-q"
    )
    assert made.exit_code == 0
    plan = jax_hremat.RematPlan.load(tmp_path / "p.json")
    # The parameters are donated, and what is returned takes their place.
    certificate = plan.certificate
    assert certificate.peak_bytes < (
        certificate.argument_bytes + certificate.output_bytes + certificate.temp_bytes
    )
    figures = json.loads(made.stdout)
    assert figures["peak_bytes"] == certificate.peak_bytes <= figures["budget_bytes"]
    assert figures["holds"] is True and figures["num_compiles"]["blocks"] > 0
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")
    again = run("certify", "p.json", *asked, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["peak_bytes"] == certificate.peak_bytes
    assert json.loads(run("explain", "p.json", "--json").stdout)["program"] == figures["program"]


def test_json_of_a_frontier(run: Callable[..., Result]) -> None:
    options = ("--points", "2", "--target", "cpu", "--effort", "low", "--json", "-q")
    figures = json.loads(run("pareto", "cli_problem:problem", *options).stdout)
    peaks = [one["peak_bytes"] for one in figures]
    assert len(peaks) >= 2 and peaks == sorted(peaks)
    assert peaks[-1] == figures[0]["no_remat_peak_bytes"]


def test_targets_lists_all(run: Callable[..., Result]) -> None:
    lines = run("targets").output.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(jax_hremat.list_targets())


def test_strategies_lists_all(run: Callable[..., Result]) -> None:
    shown = run("strategies").output
    compared, _, solved = shown.partition("solve:")
    for text, known in (
        (compared, ALL_STRATEGIES),
        (solved, jax_hremat.schedules.STRATEGIES),
    ):
        assert re.findall(r"^  (\S+)", text, re.MULTILINE) == list(known)


@pytest.fixture
def graph() -> jax_hremat.schedules.Graph:
    """Four layers of one MiB and a loss."""
    forward = [
        jax_hremat.schedules.Forward(
            name=name,
            time_s=1e-3,
            output_bytes=0 if name == "loss" else 2**20,
            backward_time_s=2e-3,
            reads=(before,) if before else (),
        )
        for before, name in itertools.pairwise(("", "a", "b", "c", "d", "loss"))
    ]
    return jax_hremat.schedules.training_graph(forward, constant_bytes=2**20)


def test_solve(
    run: Callable[..., Result], graph: jax_hremat.schedules.Graph, tmp_path: Path
) -> None:
    jax_hremat.schedules.save_graph(graph, tmp_path / "graph.json")
    solved = run("solve", "graph.json", "--budget", "5MiB", "-o", "schedule.json")
    assert solved.exit_code == 0
    assert "10 operations within 5.00 MiB" in solved.output
    assert "wrote schedule.json" in solved.output
    lines = [line.split() for line in solved.output.splitlines()]
    assert next(line for line in lines if line[0] == "checkmate")[-2:] == ["+0.0", "%"]
    assert "keep-all found no schedule within the budget; least peak 6.00 MiB." in solved.output
    schedule = jax_hremat.schedules.load_schedule(graph, tmp_path / "schedule.json")
    best = jax_hremat.schedules.simulate(graph, schedule)
    assert best.peak_bytes <= 5 * 2**20

    one = ("--strategy", "rotor", "--strategy", "keep-all", "--json")
    figures = json.loads(run("solve", "graph.json", "--budget", "85%", *one).stdout)
    assert figures["budget_bytes"] == int(0.85 * 6 * 2**20)
    rotor, keep_all = figures["strategies"]
    assert (rotor["strategy"], rotor["time_s"]) == ("rotor", best.time_s)
    assert keep_all["time_s"] is None
    assert keep_all["least_peak_bytes"] == figures["no_remat_peak_bytes"] == 6 * 2**20


def test_solve_refuses(
    run: Callable[..., Result], graph: jax_hremat.schedules.Graph, tmp_path: Path
) -> None:
    jax_hremat.schedules.save_graph(graph, tmp_path / "graph.json")
    refused = run("solve", "graph.json", "--budget", "0.5", "--strategy", "keep-all")
    assert refused.exit_code == 1
    said = " ".join(refused.output.split())
    assert "InfeasibleBudgetError" in said and "is 6.00 MiB" in said and "'keep-all'" in said
    assert run("solve", "graph.json", "--budget", "1", "--strategy", "best").exit_code == 2
    (tmp_path / "other.json").write_text("{}")
    wrong = run("solve", "other.json", "--budget", "0.5")
    assert wrong.exit_code == 1
    assert "GraphFormatError: other.json: the key 'format' is missing" in wrong.output


def test_solve_says_why_a_strategy_found_nothing(
    run: Callable[..., Result], tmp_path: Path
) -> None:
    operations = tuple(
        jax_hremat.schedules.Operation(
            name=str(i), time_s=1.0, output_bytes=1, reads=(i - 1,) if i else ()
        )
        for i in range(101)
    )
    jax_hremat.schedules.save_graph(jax_hremat.schedules.Graph(operations), tmp_path / "graph.json")
    shown = run("solve", "graph.json", "--budget", "1.0", "--strategy", "checkmate")
    assert shown.exit_code == 1 and "SolverError: checkmate: the graph has 101" in shown.output
    both = ("--strategy", "checkmate", "--strategy", "keep-all")
    shown = run("solve", "graph.json", "--budget", "1.0", *both)
    assert shown.exit_code == 0
    assert "checkmate found nothing: the graph has 101 operations" in shown.output


def test_doctor(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = run("doctor", "--target", "cpu")
    assert healthy.exit_code == 0
    assert "HiGHS" in healthy.output and "FAIL" not in healthy.output


def test_doctor_without_the_plugin(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_plugin(fun: Any, avals: Any, target: Any) -> Any:
        if target.platform == "cpu":
            return real(fun, avals, target)
        raise TargetUnavailableError("JAX's CUDA plugin is not installed")

    real = doctor.compile_flat
    monkeypatch.setattr(doctor, "compile_flat", no_plugin)
    shown = run("doctor", "--target", "h200")
    # A GPU's compiler is wanted, not needed.
    assert shown.exit_code == 0
    assert "no    compile for h200" in shown.output
    assert "plugin is not installed" in shown.output


def test_doctor_with_an_unwritable_cache(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAX_HREMAT_CACHE_DIR", str(tmp_path / "file"))
    shown = run("doctor", "--target", "cpu")
    assert shown.exit_code == 1
    assert "FAIL  cache" in shown.output and "marked FAIL: 1" in shown.output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("plan", "cli_problem", "--budget", "0.5"), 2, "is not package.module:function nor"),
        (("plan", "cli_nowhere:problem", "--budget", "0.5"), 2, "no module 'cli_nowhere'"),
        (("plan", "cli_problem:nothing", "--budget", "0.5"), 2, "it has: loss_fn, problem"),
        (("plan", "cli_problem:takes_one", "--budget", "0.5"), 2, "must take no arguments"),
        (("plan", "cli_problem:returns_three", "--budget", "0.5"), 2, "and returned int"),
        (("plan", "cli_problem:problem"), 2, "exactly one of --budget and --max-slowdown"),
        (("plan", "cli_problem:problem", "--budget", "7G"), 1, "cannot be read"),
        (
            ("plan", "cli_problem:problem", "--budget", "9B"),
            1,
            "smallest budget that a plan was found for is",
        ),
        (("plan", "cli_problem:problem", "--budget", "1GB", "--argnums", "a"), 2, "such as 0 or"),
        (
            ("plan", "cli_problem:problem", "--budget", "1GB", "--effort", "all"),
            2,
            "'low', 'normal'",
        ),
        (
            ("plan", "cli_problem:problem", "--budget", "1GB", "--donate-argnums", "0"),
            2,
            "is for a whole training step",
        ),
        (("pareto", "cli_problem:step", "--target", "cpu"), 2, "the trade-off is for a loss"),
        (("plan", "cli_problem:problem", "--budget", "1GB", "--target", "h20"), 1, "'h200'?"),
        (("plan", "cli_problem:problem", "--budget", "1GB", "-o", "no/p.json"), 1, "no/p.json"),
        (("plan", "cli_problem:problem", "--budget", "140%"), 1, "at most 100 %"),
        (("plan", "./cli_nowhere.py:problem", "--budget", "1GB"), 2, "no Python file"),
        (("plan", "./cli_problem.py", "--budget", "1GB"), 2, "is not package.module:function"),
        (("explain", "nowhere.json"), 2, "does not exist"),
        (("explain", "cli_problem.py"), 1, "is not a saved plan"),
        (("doctor", "--target", "h20"), 1, "'h200'?"),
    ],
)
def test_wrong_input(
    run: Callable[..., Result], args: tuple[str, ...], code: int, message: str
) -> None:
    if args[0] == "plan" and "--target" not in args:
        args = (*args, "--target", "cpu")
    result = run(*args)
    assert result.exit_code == code
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("name", ["fails_inside", "fails_when_traced"])
def test_errors_of_the_users_own_code_are_shown_from_there_on(
    run: Callable[..., Result], name: str
) -> None:
    result = run("plan", f"cli_problem:{name}", "--budget", "0.5", "--target", "cpu")
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if line.startswith("  File ")]
    assert "cli_problem.py" in lines[0]
    assert not any("jax_hremat" in line or "click" in line for line in lines)
    assert "\nTypeError: " in result.output or "\nAttributeError: " in result.output


def test_an_error_of_the_command_is_not_taken_for_the_users(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_hremat.plan_remat", None)
    with pytest.raises(TypeError, match="NoneType"):
        run("plan", "cli_problem:problem", "--budget", "0.5", "--target", "cpu")


@pytest.mark.parametrize("absolute", [False, True])
def test_a_problem_in_a_file(run: Callable[..., Result], tmp_path: Path, absolute: bool) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "cli_beside.py").write_text("from cli_problem import loss_fn")
    text = MODULE.replace("def problem", "from cli_beside import loss_fn\n\n\ndef problem")
    (tmp_path / "sub" / "cli_file.py").write_text(text)
    path = tmp_path / "sub" / "cli_file.py" if absolute else "./sub/cli_file.py"
    found = run("plan", f"{path}:problem", "--budget", "90%", "--target", "cpu", "-q")
    assert found.exit_code == 0, found.output


def test_an_output_that_cannot_be_written_is_found_before_planning(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax_hremat.plan_remat", None)
    target = ("--budget", "0.5", "--target", "cpu", "-o")
    for output in ("no/p.json", "/proc/p.json", "."):
        result = run("plan", "cli_problem:problem", *target, output)
        assert result.exit_code != 0 and output in result.output


def test_without_a_gpu_none_is_started(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(jax.config, "update", lambda *args: asked.append(args))
    for found, expected in ((False, [("jax_platforms", "cpu")]), (True, [])):
        asked.clear()
        monkeypatch.setattr("jax_hremat._cli.commands._has_gpu", lambda found=found: found)
        run("plan", "cli_problem:returns_three", "--budget", "0.5")
        assert asked == expected
