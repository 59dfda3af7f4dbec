"""What a Python function does, as a text that is the same in every process.

This is for functions that JAX calls back and never traces. The text consists of their code and that
of the functions of the same module that they name. Values they close over are left out, except
functions: such a value may differ at each call, as a step's number does, and does not change the
program around the function.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator
from typing import Any

_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    functools.partial,
)


def is_function(value: Any) -> bool:
    """Whether a value is a function, a method or a `functools.partial`."""
    return isinstance(value, _FUNCTIONS)


def describe_function(function: Any) -> str:
    """The text for a function. Unchecked: that `is_function` is true of it."""
    return _text(function, {})


def _text(value: Any, known: dict[int, int]) -> str:
    if not is_function(value):
        return f"<{type(value).__name__}>"
    if id(value) in known:
        return f"<again {known[id(value)]}>"
    known[id(value)] = len(known)
    if isinstance(value, functools.partial):
        given = (_text(v, known) for v in (*value.args, *value.keywords.values()))
        return f"{_text(value.func, known)}({','.join(given)} {','.join(value.keywords)})"
    if isinstance(value, types.MethodType):
        return f"{_text(value.__self__, known)}.{_text(value.__func__, known)}"
    name = f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, types.BuiltinFunctionType):
        return f"<{name}>"
    inside = " ".join(_text(f, known) for f in _functions_of(value))
    return f"<{name} {_code_text(value.__code__)} {inside}>"


def _functions_of(function: types.FunctionType) -> Iterator[Any]:
    """Functions that it closes over or has as defaults, and those of its module that it names."""
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield from filter(is_function, (*given, *_closed_over(function)))
    space = function.__globals__
    for code in _codes(function.__code__):
        for name in code.co_names:
            named = space.get(name)
            if isinstance(named, types.FunctionType) and named.__globals__ is space:
                yield named


def _closed_over(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # The cell is still empty.
            continue


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _codes(const)


def _code_text(code: types.CodeType) -> str:
    return f"{code.co_code.hex()}:{','.join(code.co_names)}:{','.join(map(_const, code.co_consts))}"


def _const(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _code_text(value)
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_const, value))) + "}"
    return "(" + ",".join(map(_const, value)) + ")" if isinstance(value, tuple) else repr(value)
