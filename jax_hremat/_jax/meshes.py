"""Meshes of devices in the types, constraints and contexts of a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import Any

import jax
from jax._src import core, sharding_impls
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jax_hremat._jax.jaxprs import Literal, is_jaxpr, open_jaxpr
from jax_hremat._shared.errors import UnsupportedProgramError


def typed_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """The struct for a value when a function is traced: everything that is part of its type.

    This includes its sharding along explicit axes of a mesh, and the axes of a `shard_map` along
    which it varies, but not its sharding along axes that are left to the compiler.
    """
    sharding = getattr(aval, "sharding", None)
    typed = isinstance(sharding, NamedSharding) and is_typed(sharding.mesh)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=getattr(aval, "weak_type", False),
        sharding=sharding if typed else None,
        manual_axis_type=getattr(aval, "manual_axis_type", None) if typed else None,
    )


def is_typed(mesh: Mesh | AbstractMesh) -> bool:
    """Whether the mesh is part of the types of arrays: some axes are not left to the compiler."""
    return any(kind != AxisType.Auto for kind in mesh.axis_types)


def varying_axes(aval: Any) -> Set[Any]:
    """The axes of surrounding `shard_map`s along which a value varies, according to its type."""
    return aval.manual_axis_type.varying


def named_mesh(jaxpr: Any) -> AbstractMesh | None:
    """The first mesh that a program names: in a constraint, a `shard_map` or the type of an array,
    or as the mesh in force where it was traced."""

    def meshes(value: Any) -> Iterator[Mesh | AbstractMesh]:
        if isinstance(value, NamedSharding):
            yield value.mesh
        elif isinstance(value, (Mesh, AbstractMesh)):
            yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from meshes(item)
        elif is_jaxpr(value):
            inner = open_jaxpr(value)
            for var in (*inner.constvars, *inner.invars):
                yield from meshes(getattr(var.aval, "sharding", None))
            for eqn in inner.eqns:
                yield from meshes(list(eqn.params.values()))
                yield eqn.ctx.cur_abstract_mesh

    found = (mesh for mesh in meshes(jaxpr) if not mesh.empty)
    return next((mesh.abstract_mesh for mesh in found if mesh.size > 1 or is_typed(mesh)), None)


def named_sharding(sharding: Any, mesh: AbstractMesh) -> NamedSharding | None:
    """The compiler's `HloSharding` in terms of a mesh's axes; None if they cannot express it."""
    if sharding.is_manual():
        return NamedSharding(mesh, PartitionSpec())
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding, mesh)
    except (ValueError, NotImplementedError, AssertionError):
        return None
    return NamedSharding(mesh, spec)


def on_mesh(jaxpr: Any, devices: Mesh) -> Any:
    """The closed jaxpr with `devices` in place of every mesh that it names or was traced under.

    Raises:
        UnsupportedProgramError: It names a mesh of another shape.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, NamedSharding):
            return NamedSharding(moved(value.mesh), value.spec, memory_kind=value.memory_kind)
        if isinstance(value, (Mesh, AbstractMesh)) and not value.empty:
            if value.shape != devices.shape:
                raise UnsupportedProgramError(
                    f"the function names a mesh of devices {dict(value.shape)}, and it, or its "
                    f"arguments, another of {dict(devices.shape)}; use one mesh"
                )
            if isinstance(value, Mesh):
                return devices
            # In the body of a `shard_map`, some axes are of another type than outside.
            types = dict(zip(value.axis_names, value.axis_types, strict=True))
            return devices.abstract_mesh.update_axis_types(types)
        if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
            return type(value)(map(moved, value))
        return moved_jaxpr(value) if is_jaxpr(value) else value

    def moved_context(context: Any) -> Any:
        if context.cur_abstract_mesh.empty:
            return context
        with context.manager, jax.sharding.use_abstract_mesh(moved(context.cur_abstract_mesh)):
            return core.JaxprEqnContext()

    def moved_jaxpr(nested: Any) -> Any:
        inner = open_jaxpr(nested)
        variables: dict[Any, Any] = {}

        def moved_atom(atom: Any) -> Any:
            sharding = getattr(atom.aval, "sharding", None)
            if sharding is None or sharding.mesh.empty:
                return atom
            aval = atom.aval.update(sharding=moved(sharding))
            if isinstance(atom, Literal):
                return Literal(atom.val, aval)
            return variables.setdefault(atom, type(atom)(aval))

        def moved_atoms(atoms: Sequence[Any]) -> list[Any]:
            return [moved_atom(a) for a in atoms]

        moved_parts = {part: moved_atoms(getattr(inner, part)) for part in ("constvars", "invars")}
        eqns = [
            eqn.replace(
                invars=moved_atoms(eqn.invars),
                outvars=moved_atoms(eqn.outvars),
                params={k: moved(v) for k, v in eqn.params.items()},
                ctx=moved_context(eqn.ctx),
            )
            for eqn in inner.eqns
        ]
        inner = inner.replace(**moved_parts, eqns=eqns, outvars=moved_atoms(inner.outvars))
        return inner if open_jaxpr(nested) is nested else nested.replace(jaxpr=inner)

    return moved_jaxpr(jaxpr)
