"""Graphs as JSON files.

A file is one object:

    {
     "format": "jax_hremat.graph",
     "format_version": 1,
     "constant_bytes": 0,
     "operations": [
      {"name": "a", "time_s": 0.001, "output_bytes": 4096},
      {"name": "b", "time_s": 0.002, "output_bytes": 1024, "reads": ["a"], "workspace_bytes": 512},
      {"name": "b.backward", "time_s": 0.004, "output_bytes": 4096, "reads": ["a"],
       "backward_of": "b"}
     ],
     "results": ["b", "b.backward"]
    }

Operations stand in a topological order, and name those that they read and whose backward they are.
An operation needs `name`, `time_s` and `output_bytes`; by default `reads` is empty,
`workspace_bytes` 0 and `backward_of` null. A graph needs `operations`; by default `constant_bytes`
is 0, and all operations that no other reads are results.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax_hremat._schedules.graph import Graph, Operation
from jax_hremat._schedules.json_fields import (
    read_bytes,
    read_file,
    read_list,
    read_object,
    read_text,
)
from jax_hremat._shared.errors import GraphFormatError
from jax_hremat._shared.files import write_whole

FORMAT = "jax_hremat.graph"
FORMAT_VERSION = 1

_GRAPH_KEYS = ("constant_bytes", "operations", "results")
_OPERATION_KEYS = ("name", "time_s", "output_bytes", "reads", "workspace_bytes", "backward_of")


def save_graph(graph: Graph, path: str | os.PathLike[str]) -> None:
    """Write a graph to a file; one that is there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(Path(path), graph_to_json(graph).encode())


def load_graph(path: str | os.PathLike[str]) -> Graph:
    """Read a graph from a file.

    Raises:
        GraphFormatError: The file holds no graph; the message names the file and the place in it.
        OSError: The file cannot be read.
    """
    return graph_from_json(read_text(path), where=str(path))


def graph_to_json(graph: Graph) -> str:
    """The text of a graph's file; equal graphs have equal texts."""
    names = [operation.name for operation in graph.operations]
    operations = []
    for operation in graph.operations:
        of = operation.backward_of
        operations.append(
            {
                "name": operation.name,
                "time_s": operation.time_s,
                "output_bytes": operation.output_bytes,
                "reads": [names[j] for j in operation.reads],
                "workspace_bytes": operation.workspace_bytes,
                "backward_of": None if of is None else names[of],
            }
        )
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "constant_bytes": graph.constant_bytes,
        "operations": operations,
        "results": [names[i] for i in graph.results],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def graph_from_json(text: str, where: str = "the text") -> Graph:
    """The inverse of `graph_to_json`.

    Args:
        text: What a file holds.
        where: What errors call it.

    Raises:
        GraphFormatError: The text holds no graph; the message names the place in it.
    """
    fields = read_file(text, where, FORMAT, FORMAT_VERSION, _GRAPH_KEYS, needed=("operations",))
    positions: dict[str, int] = {}
    operations: list[Operation] = []
    for i, entry in enumerate(read_list(fields["operations"], f"{where}: operations")):
        place = f"{where}: operations[{i}]"
        operations.append(_operation(entry, place, positions))
        positions.setdefault(operations[-1].name, i)
    names = read_list(fields.get("results", []), f"{where}: results")
    results = tuple(_position(n, f"{where}: results[{i}]", positions) for i, n in enumerate(names))
    constant_bytes = read_bytes(fields.get("constant_bytes", 0), f"{where}: constant_bytes")
    try:
        return Graph(tuple(operations), results, constant_bytes)
    except GraphFormatError as error:
        raise GraphFormatError(f"{where}: {error}") from error


def _operation(entry: Any, place: str, positions: Mapping[str, int]) -> Operation:
    fields = read_object(entry, place, _OPERATION_KEYS, needed=("name", "time_s", "output_bytes"))
    if not isinstance(fields["name"], str):
        raise GraphFormatError(f"{place}.name: it is {fields['name']!r}, not a text")
    time_s = fields["time_s"]
    if isinstance(time_s, bool) or not isinstance(time_s, int | float):
        raise GraphFormatError(f"{place}.time_s: it is {time_s!r}, not a number of seconds")
    try:
        time_s = float(time_s)
    except OverflowError as error:
        raise GraphFormatError(f"{place}.time_s: it is too large") from error
    reads = read_list(fields.get("reads", []), f"{place}.reads")
    of = fields.get("backward_of")
    return Operation(
        name=fields["name"],
        time_s=time_s,
        output_bytes=read_bytes(fields["output_bytes"], f"{place}.output_bytes"),
        reads=tuple(_position(n, f"{place}.reads[{i}]", positions) for i, n in enumerate(reads)),
        workspace_bytes=read_bytes(fields.get("workspace_bytes", 0), f"{place}.workspace_bytes"),
        backward_of=None if of is None else _position(of, f"{place}.backward_of", positions),
    )


def _position(name: Any, place: str, positions: Mapping[str, int]) -> int:
    if not isinstance(name, str) or name not in positions:
        raise GraphFormatError(
            f"{place}: {name!r} is not the name of an operation before it; operations stand in a "
            f"topological order"
        )
    return positions[name]
