"""A `jax.shard_map` whose body calls custom rules, as several that can be taken apart.

What a rule's forward keeps for its backward would be a residual of the one `shard_map`, and no name
given outside reaches it. So the body is cut before and after each rule, and each part becomes a
`shard_map` of its own. From one part to the next, a value is the concatenation, along its first
dimension, of what the devices hold: no device sends anything.

Rules inside a scan or a branch in the body stay whole, and so do those of a body that leaves axes
of the mesh to the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_hremat._jax.custom_rules import DETACH, detach, is_custom_vjp
from jax_hremat._jax.equations import bind_equation, context_of
from jax_hremat._jax.jaxprs import Literal, jaxpr_consts, open_jaxpr, read, variables
from jax_hremat._jax.keys import is_inexact
from jax_hremat._jax.meshes import typed_struct, varying_axes
from jax_hremat._jax.refs import is_ref


def is_whole_map(eqn: Any) -> bool:
    """Whether the equation is a `shard_map` over all axes of its mesh."""
    if eqn.primitive.name != "shard_map":
        return False
    return set(eqn.params["newly_manual_axes"]) == set(eqn.params["mesh"].axis_names)


def in_parts(eqn: Any, body: Callable[..., list[Any]], inputs: Sequence[Any]) -> list[Any] | None:
    """The outputs of a `shard_map` in parts, or None if no rule in its body was taken apart.

    Args:
        eqn: The equation (`is_whole_map`).
        body: Evaluates its body, taking rules apart.
        inputs: The equation's inputs.
    """
    whole = _mapped(eqn, body, eqn.params["in_specs"], eqn.params["out_specs"])
    with context_of(eqn):
        closed = jax.make_jaxpr(whole)(*(typed_struct(v.aval) for v in eqn.invars))
    jaxpr = open_jaxpr(closed)
    if not any(map(_can_be_cut, jaxpr.eqns)):
        return None
    env = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*jaxpr_consts(closed), *inputs), strict=True)
    )
    for part in jaxpr.eqns:
        given = read(env, part.invars)
        outputs = _Map(part, given).outputs() if _can_be_cut(part) else bind_equation(part, given)
        env.update(zip(part.outvars, outputs, strict=True))
    return read(env, jaxpr.outvars)


def handed_on(eqn: Any) -> Iterator[tuple[Any, Any]]:
    """The outputs of a `shard_map` that are inputs of it as they are, each with the input."""
    if eqn.primitive.name != "shard_map":
        return
    body = open_jaxpr(eqn.params["jaxpr"])
    given = {
        v: (x, s) for v, x, s in zip(body.invars, eqn.invars, eqn.params["in_specs"], strict=True)
    }
    for outer, inner, spec in zip(eqn.outvars, body.outvars, eqn.params["out_specs"], strict=True):
        if not isinstance(inner, Literal) and inner in given and given[inner][1] == spec:
            yield outer, given[inner][0]


def _can_be_cut(eqn: Any) -> bool:
    if eqn.primitive.name != "shard_map":
        return False
    inner = open_jaxpr(eqn.params["jaxpr"]).eqns
    refs = any(is_ref(v.aval) for e in inner for v in (*e.invars, *e.outvars))
    return not refs and any(e.primitive.name == DETACH for e in inner)


def _mapped(eqn: Any, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
    return jax.shard_map(
        body,
        mesh=eqn.params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=list(out_specs),
        check_vma=eqn.params["check_vma"],
        axis_names=set(eqn.params["newly_manual_axes"]),
    )


@dataclass(frozen=True, slots=True)
class _Global:
    """A value of the body, as it is outside.

    Attributes:
        value: The global array.
        spec: How it is sharded.
        is_scalar: Whether a device holds a scalar, which gets a dimension outside.
    """

    value: Any
    spec: PartitionSpec
    is_scalar: bool = False


class _Map:
    """A `shard_map` that is evaluated in parts."""

    def __init__(self, eqn: Any, inputs: Sequence[Any]) -> None:
        self._eqn = eqn
        self._body = open_jaxpr(eqn.params["jaxpr"])
        consts = zip(self._body.constvars, jaxpr_consts(eqn.params["jaxpr"]), strict=True)
        self._env = {v: _Global(x, PartitionSpec()) for v, x in consts}
        given = zip(self._body.invars, inputs, eqn.params["in_specs"], strict=True)
        self._env |= {v: _Global(x, spec) for v, x, spec in given}

    def outputs(self) -> list[Any]:
        parts = _cut(self._body.eqns)
        reads = [_read(part) for part in parts]
        if not self._eqn.params["check_vma"]:
            # The cotangents of an input are summed over the devices that share it: once, as in the
            # whole map, and not once for each part that reads it.
            inputs = [v for v in self._body.invars if sum(v in read for read in reads) > 1]
            self._run([], [v for v in inputs if is_inexact(v.aval.dtype)], [])
        found: dict[int, Any] = {}
        for k, part in enumerate(parts):
            later = set().union(*reads[k + 1 :])
            made = [v for eqn in part for v in eqn.outvars]
            if part[0].primitive.name == DETACH:
                self._detach(part[0])
                continue
            results = [i for i, v in enumerate(self._body.outvars) if v in made]
            outputs = self._run(part, [v for v in made if v in later], results)
            found.update(zip(results, outputs, strict=True))
        passed = [i for i in range(len(self._body.outvars)) if i not in found]
        found.update(zip(passed, self._run([], [], passed) if passed else (), strict=True))
        return [found[i] for i in range(len(found))]

    def _detach(self, eqn: Any) -> None:
        given = [self._env[v] for v in eqn.invars]
        with context_of(self._eqn):
            values = detach(*(g.value for g in given))
        for var, g, value in zip(eqn.outvars, given, values, strict=True):
            self._env[var] = _Global(value, g.spec, g.is_scalar)

    def _run(self, eqns: Sequence[Any], kept: Sequence[Any], results: Sequence[int]) -> list[Any]:
        """Evaluate one part: add the variables `kept` to those known, and return `results`, given
        as positions among the body's."""
        atoms = [self._body.outvars[i] for i in results]
        made = {v for eqn in eqns for v in eqn.outvars}
        wanted = (v for v in variables((*kept, *atoms)) if v not in made)
        taken = list(dict.fromkeys((*_read(eqns), *wanted)))
        given = [self._env[v] for v in taken]
        specs = [self._spec(v) for v in kept]
        scalars = [not v.aval.shape for v in kept]

        def part(*values: Any) -> list[Any]:
            env = {
                v: x.reshape(()) if g.is_scalar else x
                for v, g, x in zip(taken, given, values, strict=True)
            }
            for eqn in eqns:
                outputs = bind_equation(eqn, read(env, eqn.invars))
                env.update(zip(eqn.outvars, outputs, strict=True))
            passed = [x[None] if s else x for x, s in zip(read(env, kept), scalars, strict=True)]
            pairs = zip(read(env, atoms), atoms, strict=True)
            return [*passed, *(jnp.asarray(x, a.aval.dtype) for x, a in pairs)]

        out_specs = [*specs, *(self._eqn.params["out_specs"][i] for i in results)]
        with context_of(self._eqn):
            mapped = _mapped(self._eqn, part, (g.spec for g in given), out_specs)
            outputs = mapped(*(g.value for g in given))
        for var, value, spec, scalar in zip(kept, outputs, specs, scalars, strict=False):
            self._env[var] = _Global(value, spec, scalar)
        return list(outputs[len(kept) :])

    def _spec(self, var: Any) -> PartitionSpec:
        params = self._eqn.params
        varies = varying_axes(var.aval) if params["check_vma"] else params["newly_manual_axes"]
        axes = tuple(name for name in params["mesh"].axis_names if name in varies)
        return PartitionSpec(axes or None)


def _cut(eqns: Iterable[Any]) -> list[list[Any]]:
    """The equations in runs, cut before and after each `detach` and each rule."""
    parts: list[list[Any]] = [[]]
    for eqn in eqns:
        alone = eqn.primitive.name == DETACH or is_custom_vjp(eqn)
        parts += [[eqn], []] if alone else []
        if not alone:
            parts[-1].append(eqn)
    return [part for part in parts if part]


def _read(eqns: Sequence[Any]) -> list[Any]:
    """The variables that equations read and do not make, in order."""
    made = {v for eqn in eqns for v in eqn.outvars}
    atoms = variables(v for eqn in eqns for v in eqn.invars)
    return list(dict.fromkeys(v for v in atoms if v not in made))
