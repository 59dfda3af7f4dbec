"""JAX meshes and shardings, to and from plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_hremat._jax.meshes import is_typed
from jax_hremat._plan.device_mesh import DeviceMesh, Spec
from jax_hremat._shared.errors import UnsupportedProgramError


def device_mesh(mesh: Mesh | AbstractMesh) -> DeviceMesh:
    """The mesh as data, without its devices."""
    return DeviceMesh(tuple(mesh.shape.items()), tuple(mesh.explicit_axes), tuple(mesh.manual_axes))


def abstract_mesh(mesh: DeviceMesh) -> AbstractMesh:
    """The mesh as an abstract one, without particular devices."""
    names, sizes = zip(*mesh.axes, strict=True)
    kinds = dict.fromkeys(names, AxisType.Auto)
    kinds |= dict.fromkeys(mesh.explicit, AxisType.Explicit)
    kinds |= dict.fromkeys(mesh.manual, AxisType.Manual)
    return AbstractMesh(sizes, names, tuple(kinds.values()))


def abstract_sharding(mesh: DeviceMesh, spec: Spec) -> NamedSharding:
    """A sharding on the abstract mesh, without particular devices."""
    return NamedSharding(abstract_mesh(mesh), PartitionSpec(*(axes or None for axes in spec)))


def spec_of(sharding: NamedSharding, num_dims: int) -> Spec:
    """The mesh axes of each dimension, written out for all dimensions."""
    entries = [*sharding.spec, *[None] * (num_dims - len(sharding.spec))]
    return tuple(
        () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
        for axes in entries
    )


def sharding_on_mesh(leaf: Any) -> NamedSharding | None:
    """How an argument is sharded over a mesh, without naming the devices; None if it is not.

    For an argument that is being traced, JAX knows only the sharding along explicit axes; where the
    mesh has automatic ones, dimensions without an explicit axis are unconstrained.

    Raises:
        UnsupportedProgramError: The argument is on several devices that do not form a mesh.
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
    mesh, spec = sharding.mesh, sharding.spec
    kinds = set(mesh.axis_types)
    if mesh.empty or kinds == {AxisType.Manual} or (mesh.size == 1 and kinds == {AxisType.Auto}):
        return None
    if traced and AxisType.Auto in kinds:
        spec = PartitionSpec(*(axes or PartitionSpec.UNCONSTRAINED for axes in spec))
    # A mesh that is part of the types of arrays must be the same in the function.
    typed = is_typed(mesh)
    return NamedSharding(mesh.abstract_mesh if typed else abstract_mesh(device_mesh(mesh)), spec)


def shardings_on_one_mesh(
    names: Sequence[str], leaves: Sequence[Any]
) -> tuple[NamedSharding | None, ...]:
    """The shardings of a step's arguments, empty if none of them has one.

    Raises:
        UnsupportedProgramError: The arguments are on different meshes.
    """
    shardings = tuple(map(sharding_on_mesh, leaves))
    placed = {n: s.mesh for n, s in zip(names, shardings, strict=True) if s is not None}
    first, *others = placed or ("",)
    for name in others:
        if device_mesh(placed[name]) != device_mesh(placed[first]):
            raise UnsupportedProgramError(
                f"`{first}` lies on {placed[first]} and `{name}` on {placed[name]}; the "
                f"arguments of one step must lie on one mesh"
            )
    return shardings if placed else ()


def is_known(sharding: NamedSharding | None) -> bool:
    """Whether the sharding of the array is fully specified."""
    return sharding is None or PartitionSpec.UNCONSTRAINED not in sharding.spec


def laid(struct: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """The struct of an array with this sharding; a mesh that is part of its type stays.

    Args:
        struct: The struct of the array.
        sharding: The array's sharding, on any mesh with the same axes; None if not specified.
    """
    if sharding is None or not is_known(sharding):
        return struct
    own = struct.sharding
    mesh = own.mesh if isinstance(own, NamedSharding) else sharding.mesh
    return struct.update(sharding=NamedSharding(mesh, sharding.spec))


def put(x: Any, sharding: NamedSharding | None) -> Any:
    """The array, constrained to this sharding; unchanged if no sharding is specified, or if the
    sharding is part of its type."""
    if sharding is None or not is_known(sharding) or is_typed(sharding.mesh):
        return x
    return jax.lax.with_sharding_constraint(x, sharding)
