"""Lowering rules: barriers that XLA:CPU keeps, and what else passes through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jaxlib.version
from jax._src import ad_checkpoint
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func as func_dialect
from jax.interpreters import mlir

# From jaxlib 0.11.1 on, XLA:CPU keeps optimization barriers until equal operations are merged.
_CPU_DROPS_BARRIERS = jaxlib.version.__version_info__ < (0, 11, 1)


def drops_barriers(ctx: Any) -> bool:
    """Whether a lowering rule produces code for a platform whose XLA drops barriers; False if it
    produces code for several platforms at once."""
    return _CPU_DROPS_BARRIERS and platforms_of(ctx) == ("cpu",)


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms a lowering rule produces code for: "cpu", "cuda"; several in an export."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def lower_to_kept_call(ctx: Any, values: Sequence[Any]) -> list[Any]:
    """A call, not to be inlined, of a function that returns its arguments.

    Args:
        ctx: The context of a lowering rule.
        values: The arguments of the lowering rule, as values of the module.
    """
    types = [value.type for value in values]
    function = func_dialect.FuncOp(
        "hremat_barrier", (types, types), ip=ctx.module_context.ip, visibility="private"
    )
    with ir.InsertionPoint(function.add_entry_block()):
        func_dialect.ReturnOp(function.arguments)
    name = ctx.module_context.symbol_table.insert(function)
    call = func_dialect.CallOp(types, ir.FlatSymbolRefAttr.get(name.value), list(values))
    kept = ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")})
    call.operation.attributes["mhlo.frontend_attributes"] = kept
    return list(call.results)


def lower_checkpoints_apart(kind: type, prepared: Callable[..., tuple[Any, list[Any]]]) -> None:
    """Change how a `jax.checkpoint` with a policy of this kind lowers its recompute and backward.

    JAX has no hook for this, so its lowering rule is replaced by one that changes the arguments and
    calls the original. For all other checkpoints JAX's own rule is unchanged.

    Args:
        kind: The type of the policies.
        prepared: From the jaxpr of recompute and backward, and whether code for the CPU is made
            (`on_cpu`), to the jaxpr that is lowered in its place, and the values of the inputs that
            it has behind those of the first.
    """
    plain = ad_checkpoint._remat_lowering

    def lower(
        ctx: Any,
        *values: Any,
        jaxpr: Any,
        prevent_cse: Any,
        differentiated: bool,
        policy: Any,
        **params: Any,
    ) -> Any:
        if isinstance(policy, kind) and differentiated and prevent_cse is True:
            jaxpr, more = prepared(jaxpr, on_cpu="cpu" in platforms_of(ctx))
            values = (*values, *map(mlir.ir_constant, more))
            ctx = ctx.replace(avals_in=[v.aval for v in jaxpr.invars])
            if drops_barriers(ctx):
                values = tuple(lower_to_kept_call(ctx, values))
                prevent_cse = False
        how = {"prevent_cse": prevent_cse, "differentiated": differentiated, "policy": policy}
        return plain(ctx, *values, jaxpr=jaxpr, **how, **params)

    mlir.register_lowering(ad_checkpoint.remat_p, lower)
