"""`Graph`, `Shardings` -> the graph of what one device of a mesh holds and does."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jax_hremat._plan.device_mesh import DeviceMesh, Spec
from jax_hremat._trace.graph import Graph, Operation
from jax_hremat._trace.trace import Program


@dataclass(frozen=True, slots=True)
class Shardings:
    """How the values of a graph are sharded.

    Attributes:
        mesh: The devices.
        specs: The spec of each value, in the order of `Graph.values`.
    """

    mesh: DeviceMesh
    specs: tuple[Spec, ...]


def on_one_device(program: Program, graph: Graph, shardings: Shardings) -> Graph:
    """The graph with bytes and flops of one device, and the sharding of each value.

    An operation is split as finely as the most finely split value it reads or makes: the two
    operands and the result of a matrix product are each split over some of the axes that the
    product is split over.

    Args:
        program: The program.
        graph: Its graph.
        shardings: How its values are sharded.
    """
    shares = [
        shardings.mesh.share(value.aval.shape, spec)
        for value, spec in zip(program.values, shardings.specs, strict=True)
    ]
    values = [
        replace(value, size_bytes=math.ceil(value.size_bytes * share), spec=spec)
        for value, share, spec in zip(graph.values, shares, shardings.specs, strict=True)
    ]
    operations = []
    for op in graph.operations:
        touched = [v for v in (*op.inputs, *op.outputs) if v is not None]
        share = min((shares[v] for v in touched), default=1.0)
        operations.append(
            replace(
                op,
                work=replace(
                    op.work.repeated(share),
                    bytes=float(sum(values[v].size_bytes for v in touched)),
                ),
                opaque_bytes=math.ceil(op.opaque_bytes * share),
                fusible=op.fusible or _stays(op, shardings),
            )
        )
    return replace(graph, operations=tuple(operations), values=tuple(values), mesh=shardings.mesh)


def _stays(op: Operation, shardings: Shardings) -> bool:
    """Whether it is a sharding constraint that the value satisfies already."""
    said = op.primitive == "sharding_constraint"
    return (
        said and len({shardings.specs[v] for v in (*op.inputs, *op.outputs) if v is not None}) == 1
    )
