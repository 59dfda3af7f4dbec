"""What a group needs to make a block's outputs again, of whose values it keeps some by name.

The block alone, under a checkpoint that keeps these values, is compiled; its own backward does not
read its outputs, so that cost does not include them. The blocks after it in a group do read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jax_hremat._cost.option import Option
from jax_hremat._options.recomputed import run_again
from jax_hremat._partition.blocks import Block
from jax_hremat._trace.graph import Graph


def with_outputs(graph: Graph, block: Block, option: Option, times_s: Sequence[float]) -> Option:
    """The option with what its outputs take in a group that keeps what it saves.

    Args:
        graph: The program's graph.
        block: The block.
        option: One of its options.
        times_s: Seconds of each operation, by the analytic model.

    Unchecked: that a later block of the group reads every output.
    """
    if option.origin != "names":
        return option
    operations = graph.operations[block.start : block.stop]
    saved = {
        graph.operations[block.start + op].outputs[position] for op, position in option.region.saved
    }
    read = {v for op in operations for v in op.needs}
    again = {op.id for op in operations if op.opaque_bytes or op.compares_results}
    read.update(v for op in again for v in graph.operations[op].reads)
    own_operations, own_values = run_again(graph, block.start, block.stop, read, saved)
    again_for_outputs, values = run_again(
        graph, block.start, block.stop, read.union(block.outputs), saved
    )
    return replace(
        option,
        outputs_s=sum(times_s[e] for e in sorted(again_for_outputs - own_operations - again)),
        outputs_bytes=sum(graph.values[v].size_bytes for v in (values - own_values) & saved),
    )
