"""How the compiler shards each value of a step that runs on a mesh of devices."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import jax
from jax.sharding import Sharding

from jax_hremat._emit.emit import FlatFunction, emit_range
from jax_hremat._emit.step import Step
from jax_hremat._jax.compiling import no_compilation_cache
from jax_hremat._jax.jaxprs import jaxpr_consts, open_jaxpr
from jax_hremat._jax.keys import is_key
from jax_hremat._jax.meshes import named_sharding
from jax_hremat._plan.device_mesh import DeviceMesh
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
    whole on each device, with a warning. Typed random keys are taken to be whole too.

    Args:
        step: The step; its arguments carry their shardings.
        mesh: The devices.
        target: What each device is.
    """
    found: dict[int, Sharding] = {}
    with no_compilation_cache():
        compile_flat(
            step.around(_watched(step.program, found)),
            step.avals,
            never_run(target),
            mesh=abstract_mesh(mesh),
        )
    atoms = step.program.values
    specs = []
    unknown = 0
    for i, atom in enumerate(atoms):
        sharding, num_dims = found.get(i), atom.aval.ndim
        named = None if sharding is None else named_sharding(sharding, abstract_mesh(mesh))
        if named is not None:
            specs.append(spec_of(named, num_dims))
        else:
            specs.append(((),) * num_dims)
            unknown += not is_key(atom.aval)
    if unknown:
        _logger.warning(
            "%d of %d values lie across the mesh in a way that its axes do not tell; they are "
            "taken to be whole on each device, so that estimates are too high",
            unknown,
            len(atoms),
        )
    return Shardings(mesh, tuple(specs))


def _watched(program: Program, found: dict[int, Sharding]) -> FlatFunction:
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
                jax.debug.inspect_array_sharding(value, callback=partial(found.__setitem__, i))
        return results[len(program.values) :]

    return body
