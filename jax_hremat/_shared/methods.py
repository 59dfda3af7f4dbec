"""The methods of a module class that are planned."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jax_hremat._shared.errors import UnsupportedProgramError

CALL = ("__call__",)


def methods_of(module_class: type, names: str | Sequence[str]) -> dict[str, Callable[..., Any]]:
    """The methods with these names, as defined in the class or one of its bases.

    Raises:
        UnsupportedProgramError: A name is not that of a method, or no name is given.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    if not names:
        raise UnsupportedProgramError(
            f"no method of `{module_class.__name__}` is named, so nothing would be planned; leave "
            f"`methods` out to plan `__call__`"
        )
    methods: dict[str, Callable[..., Any]] = {}
    for name in names:
        # `getattr` would find the metaclass's `__call__`, which makes instances.
        defined = (vars(base)[name] for base in module_class.__mro__ if name in vars(base))
        method = next(defined, None)
        if not inspect.isfunction(method):
            what = "no" if method is None else "no method"
            raise UnsupportedProgramError(
                f"`{module_class.__name__}` has {what} `{name}`. Name in `methods` those that it "
                f"has, or plan the loss function that uses it"
            )
        methods[name] = method
    return methods
