"""Schedules as JSON files.

A file is one object, which names the operations of its graph:

    {
     "format": "jax_hremat.schedule",
     "format_version": 1,
     "bound_s": null,
     "steps": [{"compute": "a"}, {"compute": "b"}, {"drop": "a"}]
    }

`bound_s` is null by default: see `Schedule.bound_s`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jax_hremat._schedules.graph import Graph
from jax_hremat._schedules.json_fields import read_file, read_list, read_object, read_text
from jax_hremat._schedules.schedule import Compute, Drop, Schedule, Step
from jax_hremat._shared.errors import GraphFormatError
from jax_hremat._shared.files import write_whole

FORMAT = "jax_hremat.schedule"
FORMAT_VERSION = 1


def save_schedule(graph: Graph, schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Write a schedule of a graph to a file; one that is there is replaced.

    Raises:
        OSError: The file cannot be written.
    """
    steps = []
    for step in schedule.steps:
        kind = "compute" if isinstance(step, Compute) else "drop"
        steps.append({kind: graph.operations[step.operation].name})
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "bound_s": schedule.bound_s,
        "steps": steps,
    }
    write_whole(Path(path), (json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode())


def load_schedule(graph: Graph, path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule of a graph from a file. Whether it can be carried out is not checked.

    Raises:
        GraphFormatError: The file holds no schedule, or one of another graph; the message names the
            file and the place in it.
        OSError: The file cannot be read.
    """
    where = str(path)
    known = ("bound_s", "steps")
    fields = read_file(read_text(path), where, FORMAT, FORMAT_VERSION, known, needed=("steps",))
    bound_s = fields.get("bound_s")
    if isinstance(bound_s, bool) or not isinstance(bound_s, int | float | None):
        raise GraphFormatError(f"{where}: bound_s: it is {bound_s!r}, not a number of seconds")
    positions = {operation.name: i for i, operation in enumerate(graph.operations)}
    entries = read_list(fields["steps"], f"{where}: steps")
    steps = (_step(entry, f"{where}: steps[{i}]", positions) for i, entry in enumerate(entries))
    return Schedule(tuple(steps), None if bound_s is None else float(bound_s))


def _step(entry: Any, place: str, positions: dict[str, int]) -> Step:
    fields = read_object(entry, place, ("compute", "drop"), ())
    if len(fields) != 1:
        raise GraphFormatError(f'{place}: it has both of "compute" and "drop", or neither')
    ((kind, name),) = fields.items()
    if not isinstance(name, str) or name not in positions:
        raise GraphFormatError(f"{place}: {name!r} is no operation of the graph")
    return Compute(positions[name]) if kind == "compute" else Drop(positions[name])
