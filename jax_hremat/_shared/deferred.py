"""Packages that are imported when they are first used, since they take long to import."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Deferred:
    """Stands for a module: the first attribute that is read imports it.

    Attributes:
        module_name: The module's full name.
    """

    module_name: str

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.module_name), name)
