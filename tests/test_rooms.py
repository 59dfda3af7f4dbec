"""The architecture, as the imports tell it: each room knows only those before it."""

from __future__ import annotations

import ast
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
    "_options",
    "_planner",
    "_report",
    "_calls",
)
# Modules at the top know all rooms.
TOP = ("__init__", "__main__", "_api", "_batch", "_cli", "_fit", "linen", "nnx")

# The only rooms that import a package, of those that not every room needs.
ONLY_IN = {
    "jax._src": {"_jax"},
    "flax": {"_flax", "linen", "nnx"},
    "jinja2": {"_report"},
    "click": {"_cli"},
    "rich": {"_shared", "_plan", "_cli", "_batch"},
}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[str]:
    """What a module imports, by full name; what only a type checker sees is left out."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
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
    loaders = {path.name for path in modules() if 'import_module("cvxpy")' in path.read_text()}
    assert loaders == {"modelling.py"}
    users = {
        room_of(path)
        for path in modules()
        if any(name.startswith("jax_hremat._solve.modelling") for name in imported(path))
    }
    assert users == {"_solve", "_cli"}
