"""Costs of kernels that XLA only calls: given by the user, or found while tracing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._primitives.work import Array, Call, Work, one_product

# A function from the shapes of a kernel's operands and results to its flops and bytes.
KernelPrice = Callable[
    [Sequence[jax.ShapeDtypeStruct], Sequence[jax.ShapeDtypeStruct]], tuple[float, float]
]

# HLO's names of types, or their letters, to JAX's names.
_TYPES = MappingProxyType(
    {
        "pred": "bool",
        "s": "int",
        "u": "uint",
        "f": "float",
        "bf16": "bfloat16",
        "c64": "complex64",
        "c128": "complex128",
        "f8e4m3fn": "float8_e4m3fn",
        "f8e4m3b11fnuz": "float8_e4m3b11fnuz",
        "f8e4m3fnuz": "float8_e4m3fnuz",
        "f8e4m3": "float8_e4m3",
        "f8e3m4": "float8_e3m4",
        "f8e5m2": "float8_e5m2",
        "f8e5m2fnuz": "float8_e5m2fnuz",
        "f8e8m0fnu": "float8_e8m0fnu",
        "f4e2m1fn": "float4_e2m1fn",
    }
)
_HLO_NAMES = MappingProxyType({name: hlo for hlo, name in _TYPES.items()})


def array_of(dtype: Any, dims: Sequence[int]) -> Array:
    """An array of a JAX type, named as in HLO; a type unknown to HLO keeps its name."""
    name = getattr(dtype, "name", None) or jnp.dtype(dtype).name
    letters = name.rstrip("0123456789")
    short = _HLO_NAMES.get(letters, letters)
    return Array(_HLO_NAMES.get(name, f"{short}{name[len(letters) :]}"), tuple(dims))


def _struct(array: Array) -> jax.ShapeDtypeStruct:
    name = _TYPES.get(array.dtype) or f"{_TYPES[array.dtype[0]]}{array.dtype[1:]}"
    return jax.ShapeDtypeStruct(array.dims, jnp.dtype(name))


@dataclass(frozen=True, slots=True)
class KernelBook:
    """What is known about the kernels of one program.

    Attributes:
        traced: Kernels of the program's step, as they were traced.
        priced: The user's prices, by a kernel's target, its own name or its primitive; they take
            precedence over everything else that is known.
    """

    traced: tuple[Call, ...] = ()
    priced: Mapping[str, KernelPrice] = field(default_factory=dict, hash=False)

    def work_of(self, call: Call) -> Work | None:
        """The work of one execution of a kernel; None if nothing is known about it.

        Raises:
            ValueError: A price given by the user is not two numbers.
        """
        for name in call.names:
            if name in self.priced:
                return _priced(name, self.priced[name], call)
        return call.work or self._traced_work(call)

    def _traced_work(self, call: Call) -> Work | None:
        """The work of the matching traced kernel that shares the most names with the call."""
        found = [t for t in self.traced if t.work is not None and _may_be(call, t)]
        if not found:
            return None
        return max(found, key=lambda t: len({*t.names} & {*call.names})).work


def _may_be(call: Call, traced: Call) -> bool:
    """Whether names and shapes match; a compiled call may have additional scratch arrays."""
    return (
        not {*traced.names}.isdisjoint(call.names)
        and Counter(traced.operands) <= Counter(call.operands)
        and Counter(traced.results) <= Counter(call.results)
    )


def _priced(name: str, cost: KernelPrice, call: Call) -> Work:
    said = cost([_struct(a) for a in call.operands], [_struct(a) for a in call.results])
    try:
        flops, moved_bytes = (float(number) for number in said)
    except (TypeError, ValueError) as error:
        raise ValueError(_why_bad(name, said)) from error
    if not (flops >= 0 and moved_bytes >= 0 and math.isfinite(flops + moved_bytes)):
        raise ValueError(_why_bad(name, said))
    factors = [a for a in call.operands[:2] if jnp.issubdtype(_struct(a).dtype, jnp.floating)]
    if not factors:
        return Work(vector_flops=flops, bytes=moved_bytes)
    return Work(flops=one_product(widest(factors), flops).flops, bytes=moved_bytes)


def widest(arrays: Sequence[Array]) -> str:
    """The widest type of the arrays, which decides the unit that multiplies them."""
    return max(arrays, key=lambda a: _struct(a).dtype.itemsize).dtype


def _why_bad(name: str, said: object) -> str:
    return (
        f"PlannerConfig(kernel_costs=...): the cost of {name!r} returned {said!r}, which is not a "
        f"pair (flops, bytes) of finite numbers that are not negative"
    )
