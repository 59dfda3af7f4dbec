"""Every `jax._src` import and JAX-version branch lives here.

Supported: JAX 0.10.2 and newer. What moves between versions and why it is needed is said at
each function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax._src import checkify, config, core, debugging, source_info_util
from jax._src import effects as effects_lib
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax._src.state import discharge
from jax._src.state.types import AbstractRef, RefEffect
from jax.extend import core as jex_core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, Mesh, NamedSharding

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


def bind_equation(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Evaluate one equation, keeping its scope name, source line and context."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with context_of(eqn):
        outputs = eqn.primitive.bind(*inputs, **params)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has; JAX 0.11 changed where it
    says so."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


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


def is_symbolic(size: Any) -> bool:
    """Whether the size of a dimension is an expression (`jax.export`), not a number."""
    return core.is_symbolic_dim(size)


def named_axes(jaxpr: Any) -> tuple[str, ...]:
    """Axes of a surrounding map that the program communicates over."""
    effects = open_jaxpr(jaxpr).effects
    return tuple(sorted(str(e.name) for e in effects if isinstance(e, core.NamedAxisEffect)))


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


# Effects of what may run again: unordered debugging callbacks, as under `jax.checkpoint`; and those
# that only say which axes, or which mutable arrays of its own, an operation works on.
_MAY_RUN_AGAIN = (
    debugging.DebugEffect,
    core.NamedAxisEffect,
    core.InternalMutableArrayEffect,
    RefEffect,
)
# Primitives that declare no effect and draw on state that no argument shows.
_HIDDEN_STATE = frozenset({"rng_uniform"})


def run_once_equation(eqn: Any) -> Any | None:
    """The equation, or the first one inside it at any depth, that must run exactly once: one with
    another effect, or that draws on hidden state. None if it may run again."""
    if not _must_run_once(eqn):
        return None
    inside = next(filter(_must_run_once, _inner_equations(eqn)), None)
    return eqn if inside is None else run_once_equation(inside)


def _must_run_once(eqn: Any) -> bool:
    # What is only in effect inside, as in a kernel, is no effect of the equation.
    lasting = any(not isinstance(effect, _MAY_RUN_AGAIN) for effect in eqn.effects)
    return lasting or _draws_on_hidden_state(eqn)


def _draws_on_hidden_state(eqn: Any) -> bool:
    inside = _inner_equations(eqn)
    return eqn.primitive.name in _HIDDEN_STATE or any(map(_draws_on_hidden_state, inside))


def _inner_equations(eqn: Any) -> Iterator[Any]:
    return (e for body in inner_jaxprs(eqn) for e in open_jaxpr(body).eqns)


def is_ref(aval: Any) -> bool:
    """Whether it is the aval of a mutable array (`jax.new_ref`)."""
    return isinstance(aval, AbstractRef)


def without_refs(jaxpr: Any) -> Any:
    """The flat closed jaxpr with the mutable arrays it makes as values that are handed on.

    What is mutable only inside one equation stays so.

    Raises:
        UnsupportedProgramError: One is handed to an equation that JAX cannot rewrite so, or not
            without losing a derivative rule.
    """
    inner = open_jaxpr(jaxpr)
    on_refs = [any(is_ref(v.aval) for v in (*eqn.invars, *eqn.outvars)) for eqn in inner.eqns]
    if not any(on_refs):
        return jaxpr
    eqns = []
    for eqn, on_ref in zip(inner.eqns, on_refs, strict=True):
        if on_ref and _has_derivative_rule(eqn):
            raise _lasting_ref(f"`{eqn.primitive.name}` at {source_line(eqn)}")
        inside = {e for e in eqn.effects if not isinstance(e, core.InternalMutableArrayEffect)}
        eqns.append(eqn if on_ref else eqn.replace(effects=inside))
    inner = inner.replace(eqns=eqns)
    closed = inner if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=inner)
    try:
        # Lowered meanwhile, all custom derivative rules would be gone.
        return discharge.discharge_state(closed, lower=False)
    except NotImplementedError as error:
        raise _lasting_ref(str(error)) from error


def _has_derivative_rule(eqn: Any) -> bool:
    """Whether it, or anything in it, is a function with a derivative rule of its own."""
    is_rule = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    return is_rule or any(map(_has_derivative_rule, _inner_equations(eqn)))


def _lasting_ref(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"the function makes a mutable array (`jax.new_ref`) and hands it to an operation that is "
        f"or holds a function with a derivative rule of its own, or that JAX cannot rewrite to "
        f"work on values: {what}. Carry the array's value through it instead"
    )


def unchecked_errors(jaxpr: Any) -> tuple[str, ...]:
    """Kinds of errors that a surrounding `checkify` is to collect."""
    effects = open_jaxpr(jaxpr).effects
    errors = (e.error_type.__name__ for e in effects if isinstance(e, checkify.ErrorEffect))
    return tuple(sorted(set(errors)))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def describe_param(value: Any) -> str:
    """A text for an equation's parameter that is the same in every process."""
    if is_jaxpr(value):
        return describe_jaxpr(value)
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(describe_param(v) for v in value) + ")"
    if isinstance(value, Mapping):
        items = ",".join(f"{k}:{describe_param(v)}" for k, v in value.items())
        return "{" + items + "}"
    if callable(value) and not isinstance(value, type) and hasattr(value, "__name__"):
        return f"<{getattr(value, '__module__', '')}.{value.__name__}>"
    if type(value).__name__ in ("WrappedFun", "PartialVal") or callable(value):
        return f"<{type(value).__name__}>"
    return _ADDRESS.sub("", str(value))


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
                    f"the function names a mesh of devices {dict(value.shape)}, and its arguments "
                    f"lie on one of {dict(devices.shape)}; use one mesh"
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
