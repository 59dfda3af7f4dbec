"""A block as a user would write it: under `jax.checkpoint`, with the policies that there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jax_hremat._options.roles import PRESETS, Role, named_results
from jax_hremat._plan.region import Region
from jax_hremat._solve.saved import value_refs
from jax_hremat._trace.graph import Graph, Operation


def regions_by_hand(
    graph: Graph, checkpointed: Region, roles: Mapping[int, Role], *, policies: bool
) -> dict[str, Region]:
    """A block under `jax.checkpoint`: without a policy, under each standard policy, and under
    MaxText's presets. Each region lists its saved values one by one. Of a product with a
    `checkpoint_name`, a preset keeps the named value.

    Args:
        graph: The program's graph.
        checkpointed: The block, checkpointed as a whole as far as it can be.
        roles: What each matrix product is for, by operation.
        policies: Whether to name policies and presets, too.
    """
    if not checkpointed.checkpointed:
        return {"block": checkpointed} if checkpointed.children else {}
    if not policies:
        return {"block": checkpointed}
    operations = graph.operations[checkpointed.start : checkpointed.stop]
    products = [op for op in operations if op.primitive == "dot_general"]
    saved = {
        "block": [],
        "dots_saveable": _results(products),
        "dots_with_no_batch_dims_saveable": _results(
            op for op in products if not op.has_batch_dims
        ),
    }
    named = named_results(graph, checkpointed.start, checkpointed.stop)
    for name, preset in PRESETS.items() if roles else ():
        by_role = [op for op in operations if roles.get(op.id) in preset.roles]
        instead = named if preset.by_name else {}
        saved[name] = [instead.get(op.id, v) for op in by_role for v in op.outputs]
    return {
        name: replace(checkpointed, saved=value_refs(graph, kept)) for name, kept in saved.items()
    }


def _results(operations: Iterable[Operation]) -> list[int]:
    return [v for op in operations for v in op.outputs]
