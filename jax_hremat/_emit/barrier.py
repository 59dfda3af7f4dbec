"""An optimization barrier that XLA keeps on every platform.

XLA:CPU before jaxlib 0.11.1 drops optimization barriers before it merges equal operations, and so
merges every recompute with the first run. It does not look into a call that is marked "not to be
inlined". On these versions each barrier is therefore replaced by such a call, of a function that
returns its arguments: the call contains no code and copies nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jax_hremat._emit.destinations import with_filled_destinations
from jax_hremat._jax.lowering import drops_barriers, lower_checkpoints_apart, lower_to_kept_call


def barrier(values: Sequence[jax.Array]) -> list[jax.Array]:
    """The values, none of which is available before all of them are computed."""
    return list(barrier_p.bind(*values)) if values else []


@dataclass(frozen=True)  # Without slots: JAX keeps weak references to policies.
class KeptApart:
    """A policy of `jax.checkpoint` that saves values by name. On no platform is its recompute
    merged with the first run, and the arrays that the recompute and the backward write into are
    their own (`destinations.py`).

    JAX's own policies by name fail on primitives that have a parameter called `prim` (Lineax).

    Attributes:
        names: Names of the values that are saved.
    """

    names: frozenset[str]

    @property
    def __name__(self) -> str:
        """What it is called where a program that contains it is described."""
        return "a plan of jax_hremat"

    def __call__(self, primitive: Any, /, *_: Any, **params: Any) -> bool:
        return primitive.name == "name" and params["name"] in self.names


barrier_p = Primitive("hremat_barrier")
barrier_p.multiple_results = True
barrier_p.def_impl(lambda *values: list(values))
barrier_p.def_abstract_eval(lambda *avals: list(avals))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return barrier(primals), barrier([ad.instantiate_zeros(t) for t in tangents])


def _transpose(cotangents: Sequence[Any], *_: Any) -> Any:
    return barrier([ad.instantiate_zeros(c) for c in cotangents])


def _batch(values: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    return barrier(values), axes


def _lower(ctx: Any, *values: Any) -> Any:
    if drops_barriers(ctx):
        return lower_to_kept_call(ctx, values)
    return mlir.lower_fun(_xlas_own, multiple_results=True)(ctx, *values)


def _xlas_own(*values: jax.Array) -> Sequence[jax.Array]:
    return jax.lax.optimization_barrier(values)


ad.primitive_jvps[barrier_p] = _jvp
ad.primitive_transposes[barrier_p] = _transpose
batching.primitive_batchers[barrier_p] = _batch
mlir.register_lowering(barrier_p, _lower)
lower_checkpoints_apart(KeptApart, with_filled_destinations)
