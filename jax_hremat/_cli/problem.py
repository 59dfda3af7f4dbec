"""`package.module:function` or `path/to/file.py:function` -> what is to be planned."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import click

_RETURNS = "return (loss_fn, args), or for a whole training step (make_step, loss_fn, args)"


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    Attributes:
        loss_fn: The loss.
        args: The arguments of the loss, or of the step.
        make_step: For a whole training step: makes it from a loss, as for `fit_step`.
    """

    loss_fn: Callable[..., Any]
    args: Sequence[Any]
    make_step: Callable[..., Any] | None = None


def load_problem(problem: str) -> Problem:
    """Import the named function and return what it returns.

    Raises:
        click.BadParameter: There is no such module or function, or it does not have this form.
        Whatever the module and the function raise themselves.
    """
    where, colon, name = problem.rpartition(":")
    if not (where and colon and name):
        raise click.BadParameter(
            f"{problem!r} is not package.module:function nor path/to/file.py:function"
        )
    module = _from_file(where) if where.endswith(".py") or os.sep in where else _named(where)
    function = getattr(module, name, None)
    if not callable(function):
        public = ", ".join(n for n, v in vars(module).items() if callable(v) and n[0] != "_")
        raise click.BadParameter(f"{where} has no function {name!r}; it has: {public}")
    try:
        made = function()
    except TypeError as error:
        # A `TypeError` from inside the function is the user's; one from the call itself is not.
        if traceback.extract_tb(error.__traceback__)[-1].name != load_problem.__name__:
            raise
        raise click.BadParameter(
            f"{problem} must take no arguments and {_RETURNS}: {error}"
        ) from error
    if isinstance(made, tuple) and len(made) in (2, 3) and all(map(callable, made[:-1])):
        *make_step, loss_fn, args = made
        return Problem(loss_fn, args, *make_step)
    raise click.BadParameter(f"{problem} must {_RETURNS}, and returned {type(made).__name__}")


def _named(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise click.BadParameter(
            f"there is no module {error.name!r} here or among the installed packages"
        ) from error


def _from_file(text: str) -> ModuleType:
    """Import a file as a module; files beside it can be imported, as in `python file.py`."""
    path = Path(text).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise click.BadParameter(f"there is no Python file {text!r}")
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
