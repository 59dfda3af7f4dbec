"""`Program`, `Graph` -> `Fingerprint`."""

from __future__ import annotations

import hashlib

from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._trace.graph import Graph
from jax_hremat._trace.trace import Program


def fingerprint(program: Program, graph: Graph) -> Fingerprint:
    """The fingerprint of a traced program; the same in every process."""
    differentiated = set(program.differentiated)
    inputs = tuple(
        f"{name}: {graph.values[v].text}{'*' if i in differentiated else ''}"
        for i, (name, v) in enumerate(zip(program.input_names, graph.arguments, strict=True))
    )
    table: dict[str, int] = {}
    order = tuple(table.setdefault(op.signature, len(table)) for op in graph.operations)
    digests = tuple(
        hashlib.sha256(f"{op.inputs}|{op.literals}".encode()).hexdigest()[:8]
        for op in graph.operations
    )
    outputs = ",".join("literal" if v is None else str(v) for v in graph.outputs)
    return Fingerprint(inputs, tuple(table), order, digests, outputs)
