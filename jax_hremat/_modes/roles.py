"""What each matrix product of a block is for in a Transformer's layer, and the policies by it.

MaxText's remat presets save products by the names that its models give them (`decoders.py`). Here
the products are told apart by what they read, so any model has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from jax_hremat._program.graph import Operation


class Role(Enum):
    """The role of a matrix product.

    Attributes:
        SCORES: Of queries and keys.
        CONTEXT: Of attention weights and values.
        QKV: Makes queries, keys or values.
        OUT: Reads a context.
        MLP_IN: Any other product.
        MLP_OUT: One that reads only what `MLP_IN` and others like itself make.
    """

    SCORES = "scores"
    CONTEXT = "context"
    QKV = "qkv"
    OUT = "out"
    MLP_IN = "mlp in"
    MLP_OUT = "mlp out"


_ATTENTION = {Role.QKV, Role.OUT}

# `minimal` is `dots_with_no_batch_dims_saveable`, `full` is a plain `jax.checkpoint`.
PRESETS: dict[str, set[Role]] = {
    "save_qkv_proj": {Role.QKV},
    "save_out_proj": {Role.OUT},
    "save_dot_except_mlp": _ATTENTION,
    "save_dot_with_context_except_mlp": _ATTENTION | {Role.CONTEXT},
    "save_dot_except_mlpwi": _ATTENTION | {Role.MLP_OUT},
    "minimal_with_context": _ATTENTION | {Role.CONTEXT, Role.MLP_IN, Role.MLP_OUT},
}


def product_roles(operations: Sequence[Operation]) -> dict[int, Role]:
    """The role of each matrix product among some operations, by the operation.

    A product of attention has batch dimensions, and each of its operands comes from a product.

    Unchecked: that the operations are one layer of a Transformer, or one half of it.
    """
    # For each value the products it comes from, with no other product in between.
    sources: dict[int, frozenset[int]] = {}
    reads: dict[int, frozenset[int]] = {}
    attention: set[int] = set()
    for op in operations:
        operands = [sources.get(v, frozenset()) for v in op.inputs if v is not None]
        read = frozenset().union(*operands)
        if op.primitive == "dot_general":
            reads[op.id] = read
            if op.has_batch_dims and all(operands):
                attention.add(op.id)
            read = frozenset((op.id,))
        sources |= dict.fromkeys(op.outputs, read)

    in_attention = frozenset().union(*(reads[op] for op in attention))
    roles: dict[int, Role] = {}
    for op, read in reads.items():
        if op in attention:
            roles[op] = Role.SCORES if op in in_attention else Role.CONTEXT
        elif op in in_attention:
            roles[op] = Role.QKV
        elif read & attention:
            roles[op] = Role.OUT
        elif read and all(roles[r] in (Role.MLP_IN, Role.MLP_OUT) for r in read):
            roles[op] = Role.MLP_OUT
        else:
            roles[op] = Role.MLP_IN
    return roles
