"""What an operation costs by its shapes alone; good enough to choose what to compile."""

from __future__ import annotations

from jax_hremat._cost.roofline import Rates
from jax_hremat._program.graph import Graph, Operation

# An operation fused into a neighbour's kernel reads and writes little of its own.
_FUSED_TRAFFIC = 0.25


def operation_times_s(graph: Graph, rates: Rates) -> tuple[float, ...]:
    """Seconds to run each operation once in a recompute, by a roofline on shapes.

    Unchecked: what XLA really fuses; `_cost.compiled` measures that.
    """
    return tuple(_time_s(graph, op, rates) for op in graph.operations)


def _time_s(graph: Graph, op: Operation, rates: Rates) -> float:
    if op.fusible:
        written = sum(graph.values[v].size_bytes for v in op.outputs)
        return _FUSED_TRAFFIC * written / rates.bytes_per_s
    dtype = graph.values[op.outputs[0]].text.split("[")[0] if op.outputs else "f32"
    matrix = op.primitive in ("dot_general", "conv_general_dilated")
    rate = (
        rates.flops_per_s.get(dtype, rates.vector_flops_per_s)
        if matrix
        else (rates.vector_flops_per_s)
    )
    return max(op.flops / rate, op.moved_bytes / rates.bytes_per_s) + rates.launch_s
