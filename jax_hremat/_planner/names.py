"""Names by which a user knows blocks, operations and values: scopes, parameters, source lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from jax_hremat._plan.place import Place
from jax_hremat._plan.region import Region
from jax_hremat._shared.format import format_bytes
from jax_hremat._trace.graph import Graph, Operation

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

    def block(self, start: int, stop: int) -> Place:
        """The innermost common path of its operations and the parts that follow it in the block;
        and file, line and function of the first operation whose source is no package's. The folder
        is left out: it says where the code is stored, not what it is."""
        operations = self._named(start, stop)
        paths = self.paths_of(operations)
        common = _common(paths)
        parts = (_part(path[len(common)]) for path in paths if len(path) > len(common))
        scoped = any(op.scope for op in operations)
        return Place(
            modules=tuple(common if scoped else filter(None, ["".join(common)])),
            parts=tuple(dict.fromkeys(parts)),
            source=next((PurePath(o.source).name for o in operations if _is_own(o.source)), ""),
        )

    def _named(self, start: int, stop: int) -> Sequence[Operation]:
        """The operations that a block is named after: the differentiated ones, if there are any."""
        operations = self.graph.operations[start:stop]
        return [op for op in operations if op.active] or operations

    def paths(self, operation: int) -> list[list[str]]:
        """The keys of an operation's scope; where it has none, those of each parameter that it
        reads, or of the parameter's module."""
        op = self.graph.operations[operation]
        if op.scope:
            return [op.scope.split("/")]
        return [_path_of(name) for name in map(self.parameter, op.reads) if name]

    def paths_of(self, operations: Sequence[Operation]) -> list[list[str]]:
        """The paths of several operations; only scopes, if any of them has one."""
        scoped = [op for op in operations if op.scope]
        return [path for op in scoped or operations for path in self.paths(op.id)]

    def parameter(self, value: int) -> str:
        """The name of the parameter that a value is, or is a copy of in another type or shape;
        empty if it is none."""
        producer = self.graph.values[value].producer
        if producer is not None:
            operation = self.graph.operations[producer]
            inputs = operation.reads
            return self.parameter(inputs[0]) if operation.fusible and len(inputs) == 1 else ""
        if value not in self.graph.differentiated:
            return ""
        return self.input_names[self.graph.arguments.index(value)]

    def inside(self, operation: int, body: Graph) -> Names:
        """The names in the body of a scan: a step's slice of a parameter has the parameter's."""
        inputs = self.graph.operations[operation].inputs
        return Names(body, ["" if v is None else self.parameter(v) for v in inputs])


@dataclass(frozen=True, slots=True)
class OperationNames:
    """The names of the operations and values of one block, the same for blocks that do the same.

    Attributes:
        names: The names of the program, or of the body of a scan.
        common: The keys that the paths of all the block's operations start with.
    """

    names: Names
    common: Sequence[str]

    @staticmethod
    def of(names: Names, start: int, stop: int) -> OperationNames:
        """The names of the operations `start … stop − 1`."""
        return OperationNames(names, _common(names.paths_of(names.graph.operations[start:stop])))

    @property
    def graph(self) -> Graph:
        """The program."""
        return self.names.graph

    def run(self, run: Region) -> str:
        """The first and last operation of a run that are not fused, with their source lines."""
        operations = self.graph.operations[run.start : run.stop]
        operations = [op for op in operations if not op.fusible] or operations
        first, last = (self._operation(op.id) for op in (operations[0], operations[-1]))
        named = first if first == last else f"{first} … {last}"
        lines = [line for line in (_line(op.source) for op in operations) if line]
        where = (
            "" if not lines else lines[0] if lines[0] == lines[-1] else f"{lines[0]} … {lines[-1]}"
        )
        return f"{named} ({where})" if where else named

    def value(self, value: int, size_bytes: int, each: str = "") -> str:
        """Its operation, shape, bytes (for `each`, such as a step) and source line."""
        held = self.graph.values[value]
        assert held.producer is not None, "arguments have names of their own"
        line = _line(self.graph.operations[held.producer].source)
        words = f"{self._operation(held.producer)} {held.text} ({format_bytes(size_bytes)}{each}"
        return f"{words}, {line})" if line else f"{words})"

    def _operation(self, index: int) -> str:
        path = _common(self.names.paths(index))
        primitive = self.graph.operations[index].primitive
        return f"{_part(path[-1])}:{primitive}" if len(path) > len(self.common) else primitive


def _common(paths: Sequence[Sequence[str]]) -> list[str]:
    """What all paths start with."""
    if not paths:
        return []
    shared = 0
    while all(len(p) > shared and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    return list(paths[0][:shared])


def _part(key: str) -> str:
    """A key as it is shown alone."""
    return key.strip("[]'") if key.startswith("[") else key.removeprefix(".")


def _path_of(parameter: str) -> list[str]:
    """Its path as keys: `args[0]`, `['w']`; of an object's parameter those of its module: `blocks`,
    `[3]`, `.mlp` for `args[0].blocks[3].mlp.kernel`."""
    root, *keys = _KEY.findall(parameter)
    if keys and keys[0].startswith("."):
        keys = keys[:-2] if keys[-1] == _HELD else keys[:-1]
        return [key.lstrip(".") if i == 0 else key for i, key in enumerate(keys)]
    return [root, *keys]


def _is_own(source: str) -> bool:
    return bool(source) and "site-packages" not in PurePath(source).parts


def _line(source: str) -> str:
    """File and line alone, such as `model.py:12`; empty for a package."""
    found = _LINE.match(PurePath(source).name) if _is_own(source) else None
    return found.group() if found else ""
