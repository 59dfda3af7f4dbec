"""The role of each matrix product in a Transformer, and policies that save products by role.

MaxText's remat presets save products by the names that its models give them (`decoders.py`). Here a
product's role is inferred from what the product reads, so the presets apply to any model. A fused
attention kernel stands for the products inside it: it returns the context and other values that its
backward reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from jax_hremat._jax.custom_rules import DETACH
from jax_hremat._trace.graph import Graph, Operation

# Queries, keys and values.
_FUSED_OPERANDS = 3


class Role(Enum):
    """The role of a matrix product or a fused attention kernel.

    Attributes:
        SCORES: Product of queries and keys.
        CONTEXT: Product of attention weights and values, or an attention kernel.
        QKV: Product that makes queries, keys or values.
        OUT: Product that reads a context.
        MLP_IN: Any other product.
        MLP_OUT: Product that reads only results of `MLP_IN` and `MLP_OUT` products.
    """

    SCORES = "scores"
    CONTEXT = "context"
    QKV = "qkv"
    OUT = "out"
    MLP_IN = "mlp in"
    MLP_OUT = "mlp out"


_PROJECTIONS = frozenset((Role.QKV, Role.OUT))


@dataclass(frozen=True, slots=True)
class Preset:
    """A remat policy of MaxText.

    Attributes:
        roles: The roles whose results the policy keeps.
        by_name: Whether the policy keeps named values instead of the results of matrix products.
    """

    roles: frozenset[Role]
    by_name: bool = True


# MaxText's `minimal` is `dots_with_no_batch_dims_saveable`, and `full` is `jax.checkpoint` without
# a policy. The first preset here is not MaxText's; it is most useful if attention is a kernel.
PRESETS: Mapping[str, Preset] = {
    "save_context": Preset(frozenset((Role.CONTEXT,))),
    "save_qkv_proj": Preset(frozenset((Role.QKV,))),
    "save_out_proj": Preset(frozenset((Role.OUT,))),
    "save_dot_except_mlp": Preset(_PROJECTIONS),
    "save_dot_with_context_except_mlp": Preset(_PROJECTIONS | {Role.CONTEXT}),
    "save_dot_except_mlpwi": Preset(_PROJECTIONS | {Role.MLP_OUT}),
    "minimal_with_context": Preset(
        _PROJECTIONS | {Role.CONTEXT, Role.MLP_IN, Role.MLP_OUT}, by_name=False
    ),
}


def product_roles(operations: Sequence[Operation]) -> dict[int, Role]:
    """The role of each matrix product and attention kernel of a program, by operation; empty if the
    program has no attention.

    A context is a product with batch dimensions whose operands both come from products, one of them
    from another product of this kind, the scores. An attention kernel is an operation inside a
    custom rule that does not fuse and has three or more operands that come from products: queries,
    keys and values.

    Unchecked: that the program is a Transformer; what looks like attention may be something else.
    """
    # For each value: the products it comes from with no other product in between.
    sources: dict[int, frozenset[int]] = {}
    reads: dict[int, frozenset[int]] = {}
    inner: set[int] = set()
    kernels: set[int] = set()
    for op in operations:
        if op.primitive == DETACH:
            pairs = zip(op.outputs, op.inputs, strict=True)
            sources |= {out: sources[v] for out, v in pairs if v in sources}
            continue
        operands = [sources[v] for v in op.reads if v in sources]
        different = set(operands)
        # In a deep stack of layers these sets are large; most operations take theirs from a single
        # operand.
        read = different.pop() if len(different) == 1 else frozenset().union(*different)
        if op.primitive == "dot_general":
            reads[op.id] = read
            if op.has_batch_dims and len(operands) == len(op.inputs):
                inner.add(op.id)
            read = frozenset((op.id,))
        elif op.of_rule and not op.fusible and len(operands) >= _FUSED_OPERANDS:
            reads[op.id] = read
            kernels.add(op.id)
            read = frozenset((op.id,))
        if read:
            sources |= dict.fromkeys(op.outputs, read)
    contexts = kernels | {op for op in inner if reads[op] & inner}
    if not contexts:
        return {}
    scores = {read for op in contexts - kernels for read in reads[op] & inner}
    attention = contexts | scores
    in_attention = {read for op in attention for read in reads[op]}
    roles: dict[int, Role] = {}
    for op, read in reads.items():
        if op in attention:
            roles[op] = Role.SCORES if op in scores else Role.CONTEXT
        elif op in in_attention:
            roles[op] = Role.QKV
        elif read & attention:
            roles[op] = Role.OUT
        elif read and all(roles[r] in (Role.MLP_IN, Role.MLP_OUT) for r in read):
            roles[op] = Role.MLP_OUT
        else:
            roles[op] = Role.MLP_IN
    return roles


def named_results(graph: Graph, start: int, stop: int) -> dict[int, int]:
    """For each product of a range of operations, the value derived from its result that the author
    named (`checkpoint_name`), if any.

    A policy by name keeps the named value, which may come later than the product: queries are named
    after their rotation. Keeping the value avoids recomputing the product if the value is as large
    as the product's result and no operation in between reads that result in its backward.
    """
    product: dict[int, int] = {}
    named: dict[int, int] = {}
    for op in graph.operations[start:stop]:
        if op.primitive == "dot_general":
            product |= dict.fromkeys(op.outputs, op.id)
            continue
        sources = {product.get(v) for v in op.reads if v in product or graph.values[v].active}
        at = sources.pop() if len(sources) == 1 else None
        if at is None or any(v in product for v in op.needs):
            continue
        product |= dict.fromkeys(op.outputs, at)
        (made,) = graph.operations[at].outputs
        if (
            op.primitive == "name"
            and graph.values[op.outputs[0]].size_bytes == graph.values[made].size_bytes
        ):
            named[at] = op.outputs[0]
    return named
