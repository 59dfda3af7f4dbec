"""How the compiler shards each value of a step that runs on a mesh of devices."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from jax_hremat._emit.emit import FlatFunction, emit_range
from jax_hremat._emit.step import Step
from jax_hremat._jax.compiling import no_compilation_cache
from jax_hremat._jax.inspect_sharding import inspect_sharding
from jax_hremat._jax.jaxprs import jaxpr_consts, open_jaxpr
from jax_hremat._jax.keys import is_key
from jax_hremat._jax.meshes import named_sharding
from jax_hremat._plan.device_mesh import DeviceMesh, Spec
from jax_hremat._plan.region import Region
from jax_hremat._trace.mesh import abstract_mesh, spec_of
from jax_hremat._trace.sharding import Shardings
from jax_hremat._trace.trace import Program
from jax_hremat._xla.compile import compile_flat, never_run
from jax_hremat._xla.target import Target

_logger = logging.getLogger("jax_hremat")


def inferred_shardings(step: Step, mesh: DeviceMesh, target: Target) -> Shardings:
    """Compile the step without rematerialization and read the shardings of its program's values.

    The arguments' shardings are given; the compiler chooses all others, and may choose differently
    under another plan. A value whose sharding cannot be expressed by the mesh's axes is taken to be
    split into as many parts along whole axes, or fewer, with a warning. Typed random keys are taken
    to be whole on each device.

    Args:
        step: The step; its arguments carry their shardings.
        mesh: The devices.
        target: What each device is.
    """
    if mesh.num_devices == 1:
        # Nothing is partitioned, so nothing is told.
        return Shardings(mesh, tuple(((),) * atom.aval.ndim for atom in step.program.values))
    found: dict[int, Any] = {}
    with no_compilation_cache():
        compile_flat(
            step.around(_watched(step.program, found)),
            step.avals,
            never_run(target),
            mesh=abstract_mesh(mesh),
        )
    specs: list[Spec] = []
    num_unknown = 0
    for i, atom in enumerate(step.program.values):
        shape, sharding = atom.aval.shape, found.get(i)
        named = None if sharding is None else named_sharding(sharding, abstract_mesh(mesh))
        if named is not None:
            specs.append(spec_of(named, len(shape)))
        else:
            specs.append(_in_as_many_parts(sharding, shape, mesh))
            num_unknown += not is_key(atom.aval)
    if num_unknown:
        _logger.warning(
            "%d of %d values are split over parts of the mesh's axes, or over none; estimates are "
            "made as if they were split along whole axes, or not split, and may be too high",
            num_unknown,
            len(specs),
        )
    return Shardings(mesh, tuple(specs))


def _in_as_many_parts(sharding: Any, shape: Sequence[int], mesh: DeviceMesh) -> Spec:
    """A spec that splits a value into as many equal parts as the compiler's `HloSharding`, if that
    is known, or into fewer, along axes of the mesh that are left to the compiler."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    if sharding is None or not sharding.is_tiled():
        return tuple(spec)
    tiles = sharding.tile_assignment_dimensions()[: len(shape)]
    left = list(shape)
    num_parts = math.prod(tiles)
    for axis, size in mesh.axes:
        if axis in (*mesh.explicit, *mesh.manual) or num_parts < size:
            continue
        divisible = [d for d, extent in enumerate(left) if extent and extent % size == 0]
        if divisible:
            chosen = max(divisible, key=lambda d: tiles[d])
            spec[chosen] += (axis,)
            left[chosen] //= size
            num_parts //= size
    return tuple(spec)


def _watched(program: Program, found: dict[int, Any]) -> FlatFunction:
    """The program as a function of its flat inputs; compiling it stores the sharding of each value
    in `found`."""
    jaxpr = open_jaxpr(program.jaxpr)
    consts = jaxpr_consts(program.jaxpr)
    run = emit_range(
        program,
        Region(0, program.num_operations),
        (*jaxpr.constvars, *jaxpr.invars),
        (*program.values, *jaxpr.outvars),
    )

    def body(*inputs: Any) -> list[Any]:
        results = run(*consts, *inputs)
        for i, value in enumerate(results[: len(program.values)]):
            if not is_key(value):
                inspect_sharding(value, partial(found.__setitem__, i))
        return results[len(program.values) :]

    return body
