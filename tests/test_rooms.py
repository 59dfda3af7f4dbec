"""The architecture, as the imports tell it: each room knows only those before it."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jax_hremat"

# In the order of the pipeline: a module imports from its own room and from rooms before it.
ROOMS = (
    "_shared",
    "_plan",
    "_jax",
    "_flax",
    "_primitives",
    "_trace",
    "_partition",
    "_emit",
    "_verify",
    "_xla",
    "_cost",
    "_solve",
    "_schedules",
    "_options",
    "_strategies",
    "_planner",
    "_report",
    "_calls",
)
# Modules at the top know all rooms.
TOP = (
    "__init__",
    "__main__",
    "_api",
    "_batch",
    "_cli",
    "_fit",
    "linen",
    "nnx",
    "schedules",
    "strategies",
)

# The only rooms that import a package, of those that not every room needs.
ONLY_IN = {
    "jax._src": {"_jax"},
    "flax": {"_flax", "linen", "nnx"},
    "cvxpy": {"_solve"},
    "scipy": {"_solve"},
    "networkx": {"_schedules", "_strategies"},
    "matplotlib": {"_plan"},
    "jinja2": {"_report"},
    "click": {"_cli"},
    "rich": {"_shared", "_plan", "_cli", "_batch"},
}


@functools.cache
def modules() -> tuple[Path, ...]:
    return tuple(sorted(PACKAGE.rglob("*.py")))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def imported(path: Path) -> tuple[str, ...]:
    """What a module imports, at once or deferred, by full name. Of what only a type checker sees,
    the library's own modules count."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = list(_names(node))
            if id(node) not in typing_only:
                yield from names
            else:
                yield from (name for name in names if name.startswith("jax_hremat."))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Deferred":
            (name,) = node.args
            assert isinstance(name, ast.Constant), "the name of a deferred package is written out"
            yield name.value


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    else:
        assert node.level == 0, "imports are absolute"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_module_is_in_a_room() -> None:
    assert {room_of(path) for path in modules()} == {*ROOMS, *TOP}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_only_those_before_it(room: str) -> None:
    known = {*ROOMS[: ROOMS.index(room) + 1]}
    for path in modules():
        if room_of(path) == room:
            for name in imported(path):
                package, _, rest = name.partition(".")
                if package == "jax_hremat":
                    assert rest.split(".")[0] in known, f"{path.relative_to(PACKAGE)}: {name}"


@pytest.mark.parametrize("package", ONLY_IN)
def test_a_package_stays_in_its_rooms(package: str) -> None:
    users = {
        room_of(path)
        for path in modules()
        for name in imported(path)
        if f"{name}.".startswith(f"{package}.")
    }
    assert users <= ONLY_IN[package]
    assert users, f"nothing imports {package}"


def test_plans_are_data() -> None:
    for path in modules():
        if room_of(path) in ("_plan", "_shared"):
            used = {name.split(".")[0] for name in imported(path)}
            assert not used & {"jax", "jaxlib", "flax", "cvxpy", "scipy"}, path


def test_the_solver_s_modelling_language_stays_with_it() -> None:
    # It is imported when a program is first solved: plans are applied where there is none.
    loaders = {path.name for path in modules() if "cvxpy" in imported(path)}
    assert loaders == {"modelling.py"}
    users = {
        room_of(path)
        for path in modules()
        if any(name.startswith("jax_hremat._solve.modelling") for name in imported(path))
    }
    assert users == {"_solve", "_cli"}


# What takes long to import, and is not needed by all who import the library.
ON_USE = ("flax", "cvxpy", "scipy", "networkx", "matplotlib", "jinja2")

AFTER_IMPORT = """
import sys
import jax_hremat
"""

# Planning two blocks of a function that has nothing of Flax, and applying the plan.
AFTER_PLANNING = """
import sys
import jax, jax.numpy as jnp, jax_hremat
config = jax_hremat.PlannerConfig(cost="analytic", max_rounds=0, cache_dir=None)
loss = lambda w, x: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=config)(w, x)
jax.grad(jax_hremat.apply_plan(loss, plan))(w, x)
jax_hremat.hremat(loss, budget=1.0, target="cpu", config=config)(w, x)
"""

PRINT_IMPORTED = f"""
print(*(name for name in {ON_USE!r} if name in sys.modules))
"""


def imported_by(code: str) -> set[str]:
    """Which of the packages above a program has imported at its end."""
    run = [sys.executable, "-c", code + PRINT_IMPORTED]
    done = subprocess.run(run, cwd=PACKAGE.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_library_is_quick_to_import() -> None:
    # What needs no Flax imports none of the packages, and neither does the list of what there is.
    listed = "\nassert {'linen', 'nnx', 'schedules', 'strategies'} <= set(dir(jax_hremat))"
    strategies = "\nassert jax_hremat.schedules.STRATEGIES and jax_hremat.strategies.STRATEGIES"
    assert imported_by(AFTER_IMPORT + listed + strategies) == set()


def test_a_function_without_flax_is_planned_without_it() -> None:
    assert "flax" not in imported_by(AFTER_PLANNING)


def test_the_modules_for_flax_are_there_when_asked_for() -> None:
    asked = "\nassert jax_hremat.linen.remat and jax_hremat.nnx.remat"
    assert imported_by(AFTER_IMPORT + asked) == {"flax"}


def test_schedules_know_nothing_of_jax() -> None:
    for path in modules():
        if room_of(path) == "_schedules":
            used = {name.split(".")[0] for name in imported(path)}
            assert not used & {"jax", "jaxlib", "flax", "cvxpy", "scipy"}, path
            own = {name.split(".")[1] for name in imported(path) if name.startswith("jax_hremat.")}
            # Of these rooms, the data that the solver's room is about.
            assert own <= {"_shared", "_plan", "_cost", "_solve", "_schedules"}, path
