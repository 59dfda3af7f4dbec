"""Names by which a user knows blocks, operations and values: scopes, parameters, source lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from jax_hremat._plan.region import Region
from jax_hremat._shared.format import format_bytes
from jax_hremat._trace.graph import Graph

_MAX_PARTS = 3
_NOWHERE = "(no scope)"
# `args[0]`, then `.name` or `[key]` as often as there are any.
_KEY = re.compile(r"^\w+(?:\[[^\]]*\])?|\.[^.\[]+|\[[^\]]*\]")
# The array in an NNX variable.
_HELD = ".value"
_LINE = re.compile(r"[^:]+:\d+")


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a program's blocks.

    Attributes:
        graph: The program.
        input_names: A path for each of its arguments, as in `Program.input_names`.
    """

    graph: Graph
    input_names: Sequence[str]

    def block(self, start: int, stop: int) -> str:
        """The innermost common scope and the parts of it that the block spans; where its operations
        have no scope, the same of the paths of the parameters that it reads, or of their modules;
        where it reads none, its source line."""
        scopes = [op.scope.split("/") for op in self.graph.operations[start:stop] if op.active]
        found = _spanned([s for s in scopes if s != [""]], "/")
        found = found or _spanned(self._parameters(start, stop), "")
        return found or self.source(start, stop) or _NOWHERE

    def source(self, start: int, stop: int) -> str:
        """File, line and function of the first operation whose source is not an installed package.
        The folder is left out: it says where the code is stored, not what it is."""
        lines = [op.source for op in self.graph.operations[start:stop] if op.active]
        own = [line for line in lines if _is_own(line)]
        return PurePath(own[0]).name if own else ""

    def _parameters(self, start: int, stop: int) -> list[list[str]]:
        names = dict(zip(self.graph.arguments, self.input_names, strict=True))
        read = (v for op in self.graph.operations[start:stop] if op.active for v in op.reads)
        parameters = [v for v in map(self._origin, read) if v in self.graph.differentiated]
        return [_path_of(names[v]) for v in dict.fromkeys(parameters)]

    def _origin(self, value: int) -> int:
        """The value of which this one is a copy in another type or shape."""
        producer = self.graph.values[value].producer
        if producer is None:
            return value
        operation = self.graph.operations[producer]
        inputs = operation.reads
        return self._origin(inputs[0]) if operation.fusible and len(inputs) == 1 else value


@dataclass(frozen=True, slots=True)
class OperationNames:
    """The names of the operations and values of one block, the same for blocks that do the same.

    Attributes:
        graph: The program, or the body of a scan.
        scope: The scope that the block's operations have in common.
    """

    graph: Graph
    scope: str

    @staticmethod
    def of(graph: Graph, start: int, stop: int) -> OperationNames:
        """The names of the operations `start … stop − 1`."""
        scopes = [op.scope.split("/") for op in graph.operations[start:stop] if op.scope]
        return OperationNames(graph, "/".join(_common(scopes)))

    def run(self, run: Region) -> str:
        """The first and last operation of a run that are not fused, with their source lines."""
        operations = self.graph.operations[run.start : run.stop]
        operations = [op for op in operations if not op.fusible] or operations
        first, last = (self._operation(op.id) for op in (operations[0], operations[-1]))
        named = first if first == last else f"{first} … {last}"
        lines = [line for line in (_line(op.source) for op in operations) if line]
        where = "" if not lines else lines[0] if lines[0] == lines[-1] else f"{lines[0]} …"
        return f"{named} ({where})" if where else named

    def value(self, value: int, size_bytes: int, each: str = "") -> str:
        """Its operation, shape, bytes (for `each`, such as a step) and source line."""
        held = self.graph.values[value]
        assert held.producer is not None, "arguments have names of their own"
        line = _line(self.graph.operations[held.producer].source)
        words = f"{self._operation(held.producer)} {held.text} ({format_bytes(size_bytes)}{each}"
        return f"{words}, {line})" if line else f"{words})"

    def _operation(self, index: int) -> str:
        operation = self.graph.operations[index]
        tail = "" if operation.scope == self.scope else operation.scope.split("/")[-1]
        return f"{tail}:{operation.primitive}" if tail else operation.primitive


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """What all paths start with."""
    if not paths:
        return []
    shared = 0
    while all(len(p) > shared and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return list(paths[0][:shared])


def _spanned(paths: Sequence[Sequence[str]], separator: str) -> str:
    """What all paths start with, and the different parts that follow; empty if there are none."""
    common = _common(paths)
    parts = list(dict.fromkeys(p[len(common)].strip(".[]'") for p in paths if len(p) > len(common)))
    if len(parts) > _MAX_PARTS:
        parts = [parts[0], "…", parts[-1]]
    prefix = separator.join(common)
    if not parts:
        return prefix
    return f"{prefix}: {', '.join(parts)}" if prefix else ", ".join(parts)


def _path_of(parameter: str) -> list[str]:
    """Its path as keys: `args[0]`, `['w']`; of an object's parameter those of its module: `blocks`,
    `[3]`, `.mlp` for `args[0].blocks[3].mlp.kernel`."""
    root, *keys = _KEY.findall(parameter)
    if keys and keys[0].startswith("."):
        keys = [key for key in keys if key != _HELD][:-1]
        return [key.lstrip(".") if i == 0 else key for i, key in enumerate(keys)]
    return [root, *keys]


def _is_own(source: str) -> bool:
    return bool(source) and "site-packages" not in PurePath(source).parts


def _line(source: str) -> str:
    """File and line alone, such as `model.py:12`; empty for an installed package."""
    found = _LINE.match(PurePath(source).name) if _is_own(source) else None
    return found.group() if found else ""
