"""A mesh of devices, and how an array lies on it, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jax_hremat._shared.errors import UnsupportedProgramError

# For each dimension of an array, the axes of the mesh that it is split over.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A mesh of devices of one kind.

    Attributes:
        axes: Name and size of each axis.
    """

    axes: tuple[tuple[str, int], ...]

    @staticmethod
    def of(sharding: NamedSharding) -> DeviceMesh:
        """The mesh of a sharding, whatever its devices and the types of its axes."""
        return DeviceMesh(tuple(sharding.mesh.shape.items()))

    @property
    def num_devices(self) -> int:
        """All devices of the mesh."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.axes)

    @property
    def abstract(self) -> AbstractMesh:
        """The mesh of no devices in particular, its axes left to the compiler."""
        names, sizes = zip(*self.axes, strict=True)
        return AbstractMesh(sizes, names, (AxisType.Auto,) * len(sizes))

    def sharding(self, spec: Spec) -> NamedSharding:
        """A sharding on the abstract mesh."""
        return NamedSharding(self.abstract, PartitionSpec(*(axes or None for axes in spec)))

    def share(self, shape: Sequence[int], spec: Spec) -> float:
        """The part of an array that the fullest device holds; dimensions are padded up."""
        sizes = dict(self.axes)
        share = 1.0
        for extent, axes in zip(shape, spec, strict=True):
            parts = math.prod(sizes[axis] for axis in axes)
            share *= math.ceil(extent / parts) / extent if extent else 1.0
        return share


def spec_of(sharding: NamedSharding, num_dims: int) -> Spec:
    """The axes of each dimension, written out for all of them."""
    entries = [*sharding.spec, *[None] * (num_dims - len(sharding.spec))]
    return tuple(
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in entries
    )


def sharding_on_mesh(leaf: Any) -> NamedSharding | None:
    """How an argument lies on a mesh of several devices, without naming the devices; None if it
    does not. Of one that is being traced JAX does not know yet: its sharding is unconstrained.

    Raises:
        UnsupportedProgramError: It lies on several devices that are no mesh, or on a mesh with
            explicit axes.
    """
    traced = isinstance(leaf, Tracer)
    sharding = jax.typeof(leaf).sharding if traced else getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        if sharding is not None and sharding.num_devices > 1:
            raise UnsupportedProgramError(
                f"an argument lies on {sharding.num_devices} devices as {sharding}. Only meshes "
                f"of devices can be planned for: use `jax.sharding.NamedSharding`"
            )
        return None
    mesh = sharding.mesh
    if mesh.empty or mesh.size == 1:
        return None
    if traced:
        spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * leaf.ndim)
    elif any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise UnsupportedProgramError(
            f"an argument lies on {mesh}, whose shardings are part of the types of arrays. Only "
            f"meshes whose shardings the compiler infers can be planned for: make it with "
            f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}"
        )
    else:
        spec = sharding.spec
    return NamedSharding(DeviceMesh.of(sharding).abstract, spec)


def shardings_on_one_mesh(
    names: Sequence[str], structs: Sequence[jax.ShapeDtypeStruct]
) -> tuple[NamedSharding | None, ...]:
    """The shardings of a step's arguments, empty if none of them has one.

    Raises:
        UnsupportedProgramError: They are on different meshes.
    """
    placed = {n: s.sharding for n, s in zip(names, structs, strict=True) if s.sharding is not None}
    first, *others = placed or ("",)
    for name in others:
        if placed[name].mesh != placed[first].mesh:
            raise UnsupportedProgramError(
                f"`{first}` lies on {placed[first].mesh} and `{name}` on {placed[name].mesh}; the "
                f"arguments of one step must lie on one mesh"
            )
    return tuple(s.sharding for s in structs) if placed else ()


def is_known(sharding: NamedSharding | None) -> bool:
    """Whether it is said how the array lies."""
    return sharding is None or PartitionSpec.UNCONSTRAINED not in sharding.spec


def put(x: Any, sharding: NamedSharding | None) -> Any:
    """The array, which the compiler must lay so; as it is if nothing is said."""
    return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
