"""The shardings that XLA's partitioner chooses, told value by value while a program is compiled.

`jax.debug.inspect_array_sharding` tells them too, but compiling fails where the mesh's axes do not
express one (JAX 0.10 to 0.12): where a batch that is split over four devices is reshaped to two
microbatches, both dimensions are split over half of an axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src import debugging
from jax._src.interpreters import mlir as mlir_internals
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def inspect_sharding(value: Any, tell: Callable[[Any], None]) -> None:
    """Call `tell` with the `HloSharding` of a value when the program that it is in is partitioned.

    Args:
        value: An array of a program for several devices.
        tell: Called once for each time that the value is lowered.
    """
    _inspect_p.bind(value, tell=tell)


_inspect_p = Primitive("hremat_inspect_sharding")
_inspect_p.multiple_results = True
# The effect keeps what is not read.
_inspect_p.def_effectful_abstract_eval(lambda aval, **_: ([], {debugging.debug_effect}))


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return _inspect_p.bind(*primals, **params), []


def _batch(values: Any, axes: Any, **params: Any) -> Any:
    return _inspect_p.bind(*values, **params), []


def _lower(ctx: Any, value: Any, *, tell: Callable[[Any], None]) -> Any:
    ctx.module_context.add_keepalive(tell)
    mlir_internals.custom_call(
        "InspectSharding",
        result_types=[value.type],
        operands=[value],
        backend_config=xla_client.encode_inspect_sharding_callback(tell),
        has_side_effect=True,
        api_version=1,
    )
    return []


ad.primitive_jvps[_inspect_p] = _jvp
batching.primitive_batchers[_inspect_p] = _batch
mlir.register_lowering(_inspect_p, _lower)
