"""Every `jax._src` import and JAX-version branch lives here.

Supported: JAX 0.10.2 and newer. What moves between versions and why it is needed is said at
each function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import jax
from jax._src import config, core, sharding_impls, source_info_util
from jax._src import effects as effects_lib
from jax._src.lax.control_flow import conditionals
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.extend import core as jex_core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from jax_hremat._shared.errors import UnsupportedProgramError

Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Var = jex_core.Var
DropVar = jex_core.DropVar


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants (JAX < 0.11 has `ClosedJaxpr`, later ones do not)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxpr_consts(jaxpr: Any) -> Sequence[Any]:
    """The constants a closed jaxpr carries."""
    return getattr(jaxpr, "consts", ())


def is_jaxpr(value: Any) -> bool:
    """Whether an equation's parameter is a jaxpr, open or closed."""
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters: bodies of loops, branches, custom rules."""
    for param in eqn.params.values():
        items = param if isinstance(param, (tuple, list)) else (param,)
        yield from (item for item in items if is_jaxpr(item))


def remat3_enabled() -> bool:
    """Whether the experimental `jax_remat3` is on; its nested regions mean something else."""
    return bool(getattr(jax.config, "jax_remat3", False))


@contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """What is evaluated inside gets the equation's scope name, source line and context."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
    ):
        yield


# JAX runs the rules in an equation's parameters (of a `custom_vjp` under `vmap`, say) the first
# time that they are asked for, and fails if two threads ask at once.
_RULES = RLock()


def bind_equation(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, keeping its scope name, source line and context."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with _RULES, context_of(eqn):
        outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has; JAX 0.11 changed where it
    says so."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def switch(
    eqn: Any, index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Any:
    """`jax.lax.switch` with other branches that compute the same as those of a cond's equation.

    Those of a `jax.lax.platform_dependent` stay each for its platforms, which alone lower it.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    return conditionals._switch_internal(index, branches, operands, branches_platforms=platforms)


def evaluate_inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with every plain inner `jit` opened, so that tracing it gives a flat one.

    An inner `jit` that carries shardings or layouts stays closed: opening it would drop them.
    """
    jaxpr = open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        inputs = [read(v) for v in eqn.invars]
        inner = inlinable_jaxpr(eqn)
        if inner is None:
            outputs = bind_equation(eqn, inputs)
        else:
            with context_of(eqn):
                outputs = evaluate_inlined(inner, jaxpr_consts(inner), inputs)
        env.update(zip(eqn.outvars, outputs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def inlinable_jaxpr(eqn: Any) -> Any | None:
    """The body of a plain inner `jit` (or closed call), or None."""
    name = eqn.primitive.name
    if name in ("jit", "pjit"):
        unspecified = all(
            type(s).__name__ == "UnspecifiedValue"
            for s in (*eqn.params["in_shardings"], *eqn.params["out_shardings"])
        )
        automatic = all(
            layout is None for layout in (*eqn.params["in_layouts"], *eqn.params["out_layouts"])
        )
        return eqn.params["jaxpr"] if unspecified and automatic else None
    if name in ("closed_call", "core_call", "eval_jaxpr"):  # The last: JAX 0.12.
        return eqn.params["call_jaxpr"]
    return None


def scope_name(eqn: Any) -> str:
    """The `jax.named_scope` path the equation was traced under (Flax: the module path)."""
    return str(eqn.source_info.name_stack)


def source_line(eqn: Any) -> str:
    """`file.py:12 (function)` of the user's code that made the equation."""
    return source_info_util.summarize(eqn.source_info)


def ordered_effects(jaxpr: Any) -> tuple[str, ...]:
    """The effects that fix an order (ordered `io_callback`, ordered `debug.print`)."""
    effects = open_jaxpr(jaxpr).effects
    return tuple(sorted(str(e) for e in effects if effects_lib.ordered_effects.contains(e)))


def named_axes(jaxpr: Any) -> frozenset[Any]:
    """Axes of a surrounding map that the program communicates over."""
    effects = open_jaxpr(jaxpr).effects
    return frozenset(e.name for e in effects if isinstance(e, core.NamedAxisEffect))


@dataclass(frozen=True, slots=True)
class MeshContext:
    """The mesh in force where a function is traced.

    Attributes:
        mesh: It, empty if there is none; the manual axes are those of a `shard_map` around.
        check_vma: Whether types say along which of these a value varies.
    """

    mesh: AbstractMesh
    check_vma: bool

    @staticmethod
    def current() -> MeshContext:
        """What is in force here."""
        return MeshContext(jax.sharding.get_abstract_mesh(), config._check_vma.value)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is traced inside is traced as there, whatever thread this is."""
        if self.mesh.empty:
            yield
            return
        mapped = [(name, self.mesh.shape[name]) for name in self.mesh.manual_axes]
        with (
            core.extend_axis_env_nd(mapped),
            jax.sharding.use_abstract_mesh(self.mesh),
            config._check_vma(self.check_vma),
        ):
            yield

    def inside(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function, traced as there."""

        def run(*args: Any) -> Any:
            with self.entered():
                return fun(*args)

        return run


def typed_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """What stands for a value when a function is traced: all that is part of its type.

    That is its sharding along explicit axes of a mesh, and the axes of a `shard_map` along which
    it varies; not its sharding along axes that are left to the compiler.
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
    """Whether types of arrays tell of the mesh: some axes are not left to the compiler."""
    return any(kind != AxisType.Auto for kind in mesh.axis_types)


def varying_axes(aval: Any) -> Set[Any]:
    """The axes of surrounding `shard_map`s along which a value is said to vary."""
    return aval.manual_axis_type.varying


def named_mesh(jaxpr: Any) -> AbstractMesh | None:
    """The first mesh that a program names: in a constraint, a `shard_map`, a type of an array, or
    as in force where it was traced."""

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


def named_sharding(sharding: Sharding, mesh: AbstractMesh) -> NamedSharding | None:
    """A sharding that the compiler tells of, along the axes of a mesh; None if they do not tell."""
    if isinstance(sharding, NamedSharding):
        return sharding
    if not isinstance(sharding, sharding_impls.GSPMDSharding):
        return None
    try:
        (spec,) = sharding_impls.parse_flatten_op_sharding(sharding._hlo_sharding, mesh)
    except (ValueError, NotImplementedError, AssertionError):
        return None
    return NamedSharding(mesh, spec)


def apart(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` where nothing is being traced and no mesh is in force: in another thread."""

    def run(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(in_settings_of_this_thread(fun), *args).result()

    return run


def in_settings_of_this_thread(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, to be run in another thread with this one's 64-bit mode and matmul precision.

    JAX's context managers act on one thread only.
    """
    settings: Any = jax.config
    x64, precision = settings.jax_enable_x64, settings.jax_default_matmul_precision

    def run(*args: Any) -> Any:
        with jax.enable_x64(x64), jax.default_matmul_precision(precision):
            return fun(*args)

    return run


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """What is compiled inside is compiled anew, so that its compilation can be watched."""
    with config.enable_compilation_cache(False):
        yield


def has_effects(eqn: Any) -> bool:
    """Whether running the equation twice would be seen from outside."""
    return bool(eqn.effects)


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# A set in the text of some other object.
_SET = re.compile(r"\{([^{}:]*)\}")


def _sorted_set(found: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(found[1].split(", "))) + "}"


def describe_param(value: Any) -> str:
    """A text for an equation's parameter that is the same in every process."""
    if is_jaxpr(value):
        return describe_jaxpr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(describe_param(v) for v in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(describe_param, value))) + "}"
    if isinstance(value, Mapping):
        items = sorted(f"{describe_param(k)}:{describe_param(v)}" for k, v in value.items())
        return "{" + ",".join(items) + "}"
    if callable(value) and not isinstance(value, type) and hasattr(value, "__name__"):
        return f"<{getattr(value, '__module__', '')}.{value.__name__}>"
    if type(value).__name__ in ("WrappedFun", "PartialVal") or callable(value):
        return f"<{type(value).__name__}>"
    return _SET.sub(_sorted_set, _ADDRESS.sub("", str(value)))


def describe_jaxpr(jaxpr: Any) -> str:
    """A text for a nested jaxpr that does not depend on the names JAX gave its variables."""
    jaxpr = open_jaxpr(jaxpr)
    ids: dict[Any, int] = {}

    def name(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"{atom.val}:{atom.aval.str_short()}"
        return f"%{ids.setdefault(atom, len(ids))}:{atom.aval.str_short()}"

    head = ",".join(name(v) for v in (*jaxpr.constvars, *jaxpr.invars))
    body = ";".join(
        f"{','.join(name(v) for v in eqn.outvars)}={eqn.primitive.name}"
        f"[{describe_params(eqn.params)}]({','.join(name(v) for v in eqn.invars)})"
        for eqn in jaxpr.eqns
    )
    return f"({head}){{{body}}}->({','.join(name(v) for v in jaxpr.outvars)})"


def describe_params(params: Mapping[str, Any]) -> str:
    """All of an equation's parameters as one stable text, in the order of their names."""
    return ",".join(f"{k}={describe_param(params[k])}" for k in sorted(params))


def attached_gpu_target_config() -> str:
    """Returns XLA's target configuration of the attached GPUs, as a text proto.

    Not checked: that the default backend is a GPU; it must be.
    """
    topology = xla_client.get_topology_for_devices(jax.local_devices())
    return str(topology.target_config)


def with_scopes(jaxpr: Any, scopes: Sequence[str]) -> Any:
    """The same jaxpr, with one more scope name on each equation, outside those it has."""
    inner = open_jaxpr(jaxpr)
    eqns = []
    for eqn, scope in zip(inner.eqns, scopes, strict=True):
        name_stack = source_info_util.new_name_stack(scope) + eqn.source_info.name_stack
        source_info = eqn.source_info.replace(name_stack=name_stack)
        eqns.append(eqn.replace(source_info=source_info))
    inner = inner.replace(eqns=eqns)
    # JAX >= 0.11: a closed jaxpr is its own open one, constants included.
    return inner if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=inner)


def on_mesh(jaxpr: Any, devices: Mesh) -> Any:
    """The closed jaxpr with `devices` in place of every mesh that it names or was traced under.

    Raises:
        UnsupportedProgramError: It names one of another shape.
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


def without_dead_code(jaxpr: Any) -> Any:
    """The jaxpr less what its outputs do not need, loop bodies included; all inputs stay."""
    inner = open_jaxpr(jaxpr)
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return live


# Primitives that lowering replaces by their body; `remat2` is `jax.checkpoint`.
_WRAPPERS = frozenset(
    """jit pjit closed_call core_call eval_jaxpr remat2 checkpoint custom_jvp_call
    custom_vjp_call custom_vjp_call_jaxpr""".split()
)


def wrapped_body(eqn: Any) -> Any | None:
    """The body of an equation that lowering inlines, whatever its shardings, or None."""
    if eqn.primitive.name not in _WRAPPERS:
        return None
    return eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]


def lowers_to_barrier(eqn: Any) -> bool:
    """Whether lowering puts an optimization barrier over the equation's inputs."""
    if eqn.primitive.name == "optimization_barrier":
        return True
    prevent_cse = eqn.params.get("prevent_cse", False)
    some = any(prevent_cse) if isinstance(prevent_cse, tuple) else bool(prevent_cse)
    return some and bool(eqn.params.get("differentiated", False))


def is_transposed(scope: str) -> bool:
    """Whether a scope path belongs to the transposed (backward) half of a `jax.vjp`."""
    return "transpose(" in scope


def is_rematted(scope: str) -> bool:
    """Whether a scope path belongs to the forward that a differentiated region recomputes."""
    return "rematted_computation" in scope
