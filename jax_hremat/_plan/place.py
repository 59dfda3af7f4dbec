"""Where in the user's model a block is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_MAX_PARTS = 3
_NOWHERE = "(no scope)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the user's model some operations are.

    Attributes:
        modules: The names of the modules around all of them, the outermost first: `net`, `layer_0`.
            Where operations have no scopes, the path of a parameter takes the place of a module.
        parts: The names of what they are in inside the innermost module, in order, if they are in
            several things or in one alone.
        source: The line of the user's code that they come from; empty if that is not known.
    """

    modules: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    source: str = ""

    def __str__(self) -> str:
        """As text, `net/layer_0: attention, mlp`; where there is neither, the line."""
        return ": ".join(filter(None, ("/".join(self.modules), self.listed))) or (
            self.source or _NOWHERE
        )

    @property
    def listed(self) -> str:
        """The parts as text; of many the first and the last."""
        some = self.parts
        return ", ".join(some if len(some) <= _MAX_PARTS else (some[0], "…", some[-1]))

    @property
    def line(self) -> str:
        """The line, where the text does not say it already; empty otherwise."""
        return self.source if self.modules or self.parts else ""

    @property
    def with_line(self) -> str:
        """As text, followed by the line."""
        return ", ".join(filter(None, (str(self), self.line)))

    @property
    def around(self) -> Place:
        """Without the parts and the line, as far as there is anything else."""
        if self.modules:
            return Place(self.modules)
        return Place(parts=self.parts) if self.parts else self

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Place:
        """A place from what `dataclasses.asdict` makes of it."""
        return Place(tuple(data["modules"]), tuple(data["parts"]), data["source"])
