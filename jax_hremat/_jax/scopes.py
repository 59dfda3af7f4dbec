"""Where an equation comes from: the scope that it was traced under and the user's source line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from jax._src import source_info_util

from jax_hremat._jax.jaxprs import open_jaxpr, with_equations

_PACKAGE = PurePath(__file__).parents[1]


def scope_name(eqn: Any) -> str:
    """The `jax.named_scope` path the equation was traced under (Flax: the module path)."""
    return str(eqn.source_info.name_stack)


def module_path(eqn: Any) -> str:
    """The same path, without transformations at its end, such as the `vmap()` of a function that
    has no scopes: they are around whatever is there."""
    stack = eqn.source_info.name_stack
    while len(stack) and isinstance(stack.stack[-1], source_info_util.Transform):
        stack = stack[:-1]
    return str(stack)


def source_line(eqn: Any) -> str:
    """The line of the user's code that made the equation, as `file.py:12 (function)`; empty if
    there is none. To JAX, the lines of this package are a user's too."""
    frames = source_info_util.user_frames(eqn.source_info.traceback)
    own = (f for f in frames if _PACKAGE not in PurePath(f.file_name).parents)
    return next((f"{f.file_name}:{f.start_line} ({f.function_name})" for f in own), "")


def with_scopes(jaxpr: Any, scopes: Sequence[str]) -> Any:
    """The same jaxpr, with one more scope name on each equation, outside the existing ones."""
    eqns = [in_scope(*pair) for pair in zip(open_jaxpr(jaxpr).eqns, scopes, strict=True)]
    return with_equations(jaxpr, eqns)


def in_scope(eqn: Any, scope: str) -> Any:
    """An equation with one more scope name, outside the existing ones."""
    name_stack = source_info_util.new_name_stack(scope) + eqn.source_info.name_stack
    return eqn.replace(source_info=eqn.source_info.replace(name_stack=name_stack))


def is_transposed(scope: str) -> bool:
    """Whether a scope path belongs to the transposed (backward) half of a `jax.vjp`."""
    return "transpose(" in scope


def is_rematted(scope: str) -> bool:
    """Whether a scope path belongs to the forward that a differentiated region recomputes."""
    return "rematted_computation" in scope
