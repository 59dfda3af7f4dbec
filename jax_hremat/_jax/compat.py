"""Every `jax._src` import and JAX-version branch lives here.

Supported: JAX 0.10.2 and newer. Each function says what differs between versions and why it is
needed.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from types import FunctionType
from typing import Any

import jax
import jaxlib.version
from jax._src import (
    ad_checkpoint,
    checkify,
    config,
    core,
    custom_derivatives,
    debugging,
    linear_util,
    sharding_impls,
    source_info_util,
    tree_util,
)
from jax._src import effects as effects_lib
from jax._src.interpreters import partial_eval as partial_eval_internals
from jax._src.lax.control_flow import conditionals
from jax._src.lib import (
    cuda_versions,
    xla_client,  # pyright: ignore[reportPrivateImportUsage]
)
from jax._src.state import discharge
from jax._src.state.types import AbstractRef, RefEffect
from jax.extend import core as jex_core
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func as func_dialect
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, Sharding

from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._shared.functions import describe_function, is_function

Jaxpr = jex_core.Jaxpr
JaxprEqn = jex_core.JaxprEqn
Literal = jex_core.Literal
Var = jex_core.Var
DropVar = jex_core.DropVar


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants (JAX < 0.11 has `ClosedJaxpr`, later versions do not)."""
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


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all bodies inside it."""
    for eqn in open_jaxpr(jaxpr).eqns:
        yield eqn
        for body in inner_jaxprs(eqn):
            yield from all_equations(body)


def remat3_enabled() -> bool:
    """Whether the experimental `jax_remat3` is on, under which nested regions differ in meaning."""
    return bool(getattr(jax.config, "jax_remat3", False))


@contextmanager
def context_of(eqn: Any) -> Iterator[None]:
    """Operations evaluated inside get the equation's scope name, source line and context."""
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
    """How many constants and how many carried values a scan has; JAX 0.11 changed the parameters
    that hold them."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def switch(
    eqn: Any, index: Any, branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Any:
    """`jax.lax.switch` with replacements for the branches of a cond's equation.

    Each branch of a `jax.lax.platform_dependent` stays bound to its platforms; only these lower it.
    """
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    return conditionals._switch_internal(index, branches, operands, branches_platforms=platforms)


def evaluate_inlined(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a jaxpr with every plain inner `jit` inlined, so that tracing it gives a flat one.

    An inner `jit` that carries shardings or layouts is kept: inlining it would drop them.
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


@dataclass(frozen=True, slots=True)
class ForwardRule:
    """The forward rule of a `custom_vjp` call, for a given set of differentiated inputs.

    Attributes:
        eqn: The call.
        moving: Which of its inputs are differentiated.
        num_consts: The first `num_consts` inputs are values that the function closes over.
        jaxpr: Maps the other inputs to the residuals that are not inputs themselves, followed by
            the outputs.
        consts: The jaxpr's constants.
        sources: For each residual, the position of the input that it equals, or None.
    """

    eqn: Any
    moving: tuple[bool, ...]
    num_consts: int
    jaxpr: Any
    consts: Sequence[Any]
    sources: tuple[int | None, ...]


def is_custom_vjp(eqn: Any) -> bool:
    """Whether the equation is a `jax.custom_vjp` call."""
    return eqn.primitive is jex_core.primitives.custom_vjp_call_p


def num_closed_over(eqn: Any) -> int:
    """How many of the first inputs of a `custom_vjp` call are values the function closes over."""
    return eqn.params["num_consts"] if is_custom_vjp(eqn) else 0


def asks_what_moves(eqn: Any) -> bool:
    """Whether the equation is a custom rule that is told which of its inputs are differentiated
    (`symbolic_zeros`), and may fail if told anything but what JAX itself would tell it."""
    return bool(eqn.params.get("symbolic_zeros", False))


def forward_rule(eqn: Any, moving: Sequence[bool]) -> ForwardRule | None:
    """The forward rule of a `custom_vjp` call; None for anything else.

    Args:
        eqn: An equation.
        moving: Which of its inputs are differentiated.
    """
    if not is_custom_vjp(eqn):
        return None
    num_consts = num_closed_over(eqn)
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*moving[num_consts:])
    _, _, sources = eqn.params["out_trees"]()
    return ForwardRule(eqn, tuple(moving), num_consts, jaxpr, consts, tuple(sources))


def bind_attached(
    rule: ForwardRule, inputs: Sequence[Any], outputs: Sequence[Any], residuals: Sequence[Any]
) -> list[Any]:
    """A `custom_vjp` call whose forward rule has been evaluated already.

    Where it is differentiated, it returns `outputs`, and the backward rule computes the cotangents
    of `inputs` from `residuals`. It behaves like the original call if values that the function
    closes over are differentiated, or if the rule asks which inputs are (`symbolic_zeros`) and they
    differ from those the rule was evaluated for. Where it is not differentiated, it is the function
    applied to `inputs`.
    """
    params = rule.eqn.primitive.get_bind_params(rule.eqn.params)
    function, forward, backward = params.pop("subfuns")
    trees = params.pop("out_trees")
    made = [*outputs, *residuals]
    # `functions_key` tells these functions apart by what they close over, so that has no values.
    num_outputs, num_made = len(outputs), len(made)
    evaluated_for, num_consts = rule.moving, rule.num_consts
    asks_which = asks_what_moves(rule.eqn)

    def attached(*args: Any) -> list[Any]:
        return function.call_wrapped(*args[num_made:])

    def attached_forward(*pairs: Any) -> list[Any]:
        values, moving = pairs[::2], pairs[2 * num_made + 1 :: 2]
        as_evaluated = moving == evaluated_for or not asks_which
        if as_evaluated and not any(moving[:num_consts]):
            return [*values[num_outputs:num_made], *values[:num_outputs]]
        results = iter(forward.call_wrapped(*pairs[2 * num_made :]))
        sources = trees()[2]
        given = values[num_made:]
        return [*(next(results) if i is None else given[i] for i in sources), *results]

    def attached_trees() -> tuple[Any, Any, list[None]]:
        out_tree, residual_tree, sources = trees()
        return out_tree, residual_tree, [None] * len(sources)

    def wrapped(fun: Callable[..., Any], like: Any) -> Any:
        return linear_util.wrap_init(fun, debug_info=like.debug_info.with_unknown_names())

    subfuns = (
        wrapped(attached, function),
        wrapped(attached_forward, forward),
        # `made` gets no cotangents.
        custom_derivatives._handle_consts_in_bwd(backward, [jax.typeof(x) for x in made]),
    )
    with context_of(rule.eqn):
        return rule.eqn.primitive.bind(
            *made, *inputs, subfuns=subfuns, out_trees=attached_trees, **params
        )


DETACH = "hremat_detach"
_detach_p = jex_core.Primitive(DETACH)
_detach_p.multiple_results = True
_detach_p.def_impl(lambda *values: list(values))
_detach_p.def_abstract_eval(lambda *avals: list(avals))


def detach(*values: Any) -> list[Any]:
    """The values, without the tangents of the innermost differentiation around them.

    `jax.lax.stop_gradient`, in contrast, removes those of every differentiation around it. All
    values form one operation: where one of them is differentiated, all of them are detached.
    """
    return _detach_p.bind(*values)


def _detach_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return list(primals), [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals]


ad.primitive_jvps[_detach_p] = _detach_jvp
batching.primitive_batchers[_detach_p] = lambda values, dims: (detach(*values), dims)
mlir.register_lowering(_detach_p, lambda _, *values: values)


def scope_name(eqn: Any) -> str:
    """The `jax.named_scope` path the equation was traced under (Flax: the module path)."""
    return str(eqn.source_info.name_stack)


def source_line(eqn: Any) -> str:
    """The line of the user's code that made the equation, as `file.py:12 (function)`."""
    return source_info_util.summarize(eqn.source_info)


def ordered_effects(jaxpr: Any) -> tuple[str, ...]:
    """The ordered effects (of an ordered `io_callback` or `debug.print`)."""
    effects = open_jaxpr(jaxpr).effects
    return tuple(sorted(str(e) for e in effects if effects_lib.ordered_effects.contains(e)))


def is_symbolic(size: Any) -> bool:
    """Whether the size of a dimension is an expression (`jax.export`), not a number."""
    return core.is_symbolic_dim(size)


def named_axes(jaxpr: Any) -> frozenset[Any]:
    """Axes of a surrounding `vmap` or `shard_map` that the program communicates over."""
    effects = open_jaxpr(jaxpr).effects
    return frozenset(e.name for e in effects if isinstance(e, core.NamedAxisEffect))


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What must hold where the operations of a program are traced, in whichever thread.

    Attributes:
        mesh: The mesh in force, empty if there is none; manual axes are those of a surrounding
            `shard_map`.
        check_vma: Whether types record along which manual axes a value varies.
        lock: Held by the thread that traces. JAX evaluates the rules in an equation's parameters
            (of a `custom_vjp`, say) at their first use, and fails if two threads use them at once.
    """

    mesh: AbstractMesh
    check_vma: bool
    lock: RLock = field(default_factory=RLock, compare=False, repr=False)

    @staticmethod
    def current() -> TraceContext:
        """The context at the call, of operations that no other context is for."""
        return TraceContext(jax.sharding.get_abstract_mesh(), config._check_vma.value)

    def here(self) -> TraceContext:
        """The context at the call, of the same operations."""
        return replace(TraceContext.current(), lock=self.lock)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Code inside is traced in this context, in whichever thread."""
        with self.lock, self._mesh_in_force():
            yield

    @contextmanager
    def _mesh_in_force(self) -> Iterator[None]:
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
        """The function, traced in this context."""

        @functools.wraps(fun)
        def run(*args: Any) -> Any:
            with self.entered():
                return fun(*args)

        return run


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


def named_sharding(sharding: Sharding, mesh: AbstractMesh) -> NamedSharding | None:
    """The compiler's sharding in terms of a mesh's axes; None if they cannot express it."""
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
    """`fun`, run in another thread, where nothing is being traced and no mesh is in force."""

    def run(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(in_settings_of_this_thread(fun), *args).result()

    return run


def in_settings_of_this_thread(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, for another thread, with all settings that JAX's context managers made in this one.

    Such settings apply to one thread only.
    """
    local = [(state, state.get_local()) for state in config.config_states.values()]
    settings = [(state, value) for state, value in local if value is not config.config_ext.unset]

    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            for state, value in settings:
                stack.enter_context(state(value))
            return fun(*args)

    return run


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compilations inside bypass JAX's cache, so that they can be observed."""
    with config.enable_compilation_cache(False):
        yield


# Effects allowing a recompute: unordered debugging callbacks, as under `jax.checkpoint`; and those
# that only name the axes, or the internal mutable arrays, that an operation works on.
_MAY_RUN_AGAIN = (
    debugging.DebugEffect,
    core.NamedAxisEffect,
    core.InternalMutableArrayEffect,
    RefEffect,
)
# Primitives that declare no effect but read state that is not among their arguments.
_HIDDEN_STATE = frozenset({"rng_uniform"})


def run_once_equation(eqn: Any) -> Any | None:
    """The equation, or the first one inside it at any depth, that must run exactly once because it
    has an effect not in `_MAY_RUN_AGAIN` or reads hidden state. None if it may be recomputed."""
    if not _must_run_once(eqn):
        return None
    inside = next(filter(_must_run_once, _inner_equations(eqn)), None)
    return eqn if inside is None else run_once_equation(inside)


def _must_run_once(eqn: Any) -> bool:
    # An effect confined to the inside, as in a kernel, is not an effect of the equation.
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
    """The flat closed jaxpr with the mutable arrays it makes replaced by values.

    Arrays that are mutable only inside one equation stay mutable.

    Raises:
        UnsupportedProgramError: A mutable array is passed to an equation that JAX cannot rewrite,
            or cannot rewrite without losing a derivative rule.
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
        # With `lower=True`, all custom derivative rules would be lost.
        return discharge.discharge_state(closed, lower=False)
    except NotImplementedError as error:
        raise _lasting_ref(str(error)) from error


def _has_derivative_rule(eqn: Any) -> bool:
    """Whether an equation, or one inside it, has a custom derivative rule."""
    is_rule = eqn.primitive.name.startswith(("custom_jvp", "custom_vjp"))
    return is_rule or any(map(_has_derivative_rule, _inner_equations(eqn)))


def _lasting_ref(what: str) -> UnsupportedProgramError:
    return UnsupportedProgramError(
        f"the function makes a mutable array (`jax.new_ref`) and hands it to an operation that is "
        f"or holds a function with a derivative rule of its own, or that JAX cannot rewrite to "
        f"work on values: {what}. Carry the array's value through it instead"
    )


def unchecked_errors(jaxpr: Any) -> tuple[str, ...]:
    """Kinds of errors that are left to a surrounding `checkify`."""
    effects = open_jaxpr(jaxpr).effects
    errors = (e.error_type.__name__ for e in effects if isinstance(e, checkify.ErrorEffect))
    return tuple(sorted(set(errors)))


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# A set in the `str` of another object.
_SET = re.compile(r"\{([^{}:]*)\}")


def _sorted_set(found: re.Match[str]) -> str:
    return "{" + ", ".join(sorted(found[1].split(", "))) + "}"


# Derivative rules and their data. JAX makes new functions of them at every use, so equations are
# described by the result of differentiating them instead.
_RULES = frozenset({"fwd_jaxpr_thunk", "bwd", "out_trees", "jvp_jaxpr_fun"})


def describe_param(value: Any) -> str:
    """A text for an equation's parameter that is the same in every process."""
    if is_jaxpr(value):
        return describe_jaxpr(value)
    if isinstance(value, (core.DebugInfo, source_info_util.SourceInfo)):
        return ""
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(describe_param(v) for v in value) + ")"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(sorted(map(describe_param, value))) + "}"
    if isinstance(value, Mapping):
        items = sorted(f"{describe_param(k)}:{describe_param(v)}" for k, v in value.items())
        return "{" + ",".join(items) + "}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, jax.Array):
        return f"{value.dtype}{list(value.shape)}"
    if is_function(value):
        return describe_function(value)
    if dataclasses.is_dataclass(value):
        fields = (getattr(value, f.name) for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({','.join(map(describe_param, fields))})"
    if callable(value):
        return f"<{type(value).__name__}>"
    return _SET.sub(_sorted_set, _ADDRESS.sub("", str(value)))


def functions_key(eqn: Any) -> tuple[Any, ...]:
    """A key for the functions that, besides its jaxprs, decide what the equation does; empty if
    there are none. Equal keys mean equal behaviour as long as the equations exist."""
    own = tuple(_identity(v) for k, v in eqn.params.items() if k != "out_trees" and _is_code(v))
    if own:
        return own
    inside = any(functions_key(inner) for inner in _inner_equations(eqn))
    return (id(eqn),) if inside else ()


def _is_code(value: Any) -> bool:
    return isinstance(value, linear_util.WrappedFun) or (
        callable(value) and not isinstance(value, (type, Mesh, AbstractMesh))
    )


_MEMOIZED = partial_eval_internals._memoize(lambda: None).__code__
_BY_VALUE = (int, float, str, bytes, type(None), type, tree_util.PyTreeDef, core.AbstractValue)


def _identity(value: Any, outer: tuple[int, ...] = ()) -> Any:
    """A key that is equal for functions with the same code and closed-over values. JAX wraps a rule
    in new functions at each use, all with the same code."""

    def inner(part: Any) -> Any:
        return _identity(part, (*outer, id(value)))

    if isinstance(value, _BY_VALUE):
        return value
    if id(value) in outer:
        return ("again", outer.index(id(value)))
    if isinstance(value, (tuple, list)):
        return tuple(map(inner, value))
    if isinstance(value, (linear_util.Store, linear_util.EqualStore, linear_util.DebugInfo)):
        return type(value)  # State left by an earlier run.
    if isinstance(value, linear_util.WrappedFun):
        return ("wrapped", inner(value.f), inner(value.transforms))
    if isinstance(value, FunctionType) and value.__closure__:
        cells = zip(value.__code__.co_freevars, value.__closure__, strict=True)
        if value.__code__ is _MEMOIZED:
            cells = ((name, cell) for name, cell in cells if name == "fn")
        closed_over = (inner(content) for _, cell in cells for content in _contents(cell))
        defaults = inner((value.__defaults__, tuple((value.__kwdefaults__ or {}).items())))
        return (id(value.__code__), id(value.__globals__), defaults, *closed_over)
    return ("id", id(value))


def _contents(cell: Any) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # The cell is still empty.
        return ()


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
    """An equation's parameters, except derivative rules, as one stable text in the order of their
    names."""
    named = sorted(set(params) - _RULES)
    return ",".join(f"{k}={describe_param(params[k])}" for k in named)


def cudnn_version() -> int | None:
    """The version of the cuDNN library that JAX finds, such as 92800; None if it finds none."""
    if cuda_versions is None:
        return None
    try:
        return cuda_versions.cudnn_get_version()
    except RuntimeError as error:
        if says_that_cudnn_is_missing(error):
            return None
        raise


def says_that_cudnn_is_missing(error: RuntimeError) -> bool:
    """Whether JAX's error is that cuDNN is missing; the error has no class of its own."""
    return str(error).startswith(("cuDNN not found", "cuDNN is not detected"))


def attached_gpu_target_config() -> str:
    """Returns XLA's target configuration of the attached GPUs, as a text proto.

    Not checked: that the default backend is a GPU; it must be.
    """
    topology = xla_client.get_topology_for_devices(jax.local_devices())
    return str(topology.target_config)


def with_scopes(jaxpr: Any, scopes: Sequence[str]) -> Any:
    """The same jaxpr, with one more scope name on each equation, outside the existing ones."""
    inner = open_jaxpr(jaxpr)
    eqns = []
    for eqn, scope in zip(inner.eqns, scopes, strict=True):
        name_stack = source_info_util.new_name_stack(scope) + eqn.source_info.name_stack
        source_info = eqn.source_info.replace(name_stack=name_stack)
        eqns.append(eqn.replace(source_info=source_info))
    inner = inner.replace(eqns=eqns)
    # JAX >= 0.11: a closed jaxpr is its own open one, constants included.
    return inner if open_jaxpr(jaxpr) is jaxpr else jaxpr.replace(jaxpr=inner)


def is_checkpoint(eqn: Any) -> bool:
    """Whether the equation is a `jax.checkpoint` that is not part of a derivative already."""
    return eqn.primitive.name in ("remat2", "checkpoint") and not eqn.params["differentiated"]


def with_barriers(eqn: Any) -> Any:
    """The equation of a `jax.checkpoint`, with `prevent_cse` on: without a loop around it, nothing
    else keeps the compiler from merging the recompute with the first run."""
    return eqn.replace(params={**eqn.params, "prevent_cse": True})


def policy_name(policy: Any) -> str:
    """The name of a checkpoint's policy: that of the function, or of JAX's own class."""
    return getattr(policy, "__name__", type(policy).__name__)


def without_checkpoints(jaxpr: Any) -> Any:
    """The jaxpr with every `jax.checkpoint` replaced by its body, in bodies of loops too.

    Custom rules are left unchanged: it is not their primal function that is differentiated.
    """
    inner = open_jaxpr(jaxpr)
    eqns: list[Any] = []
    outvars = _spliced(inner, {}, None, eqns)
    opened = inner.replace(eqns=eqns, outvars=outvars)
    return opened if inner is jaxpr else jaxpr.replace(jaxpr=opened)


def _spliced(jaxpr: Any, env: dict[Any, Any], scope: Any, eqns: list[Any]) -> list[Any]:
    """Append a jaxpr's equations, its variables renamed by `env`, and return its results.

    `scope` is the scope of the checkpoint that the equations come from, whose variables get fresh
    copies so that none is bound twice; None for equations of the jaxpr itself.
    """

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [v if isinstance(v, Literal) else env.get(v, v) for v in atoms]

    for eqn in jaxpr.eqns:
        if is_checkpoint(eqn) and not _reads_refs(eqn.params["jaxpr"]):
            body = open_jaxpr(eqn.params["jaxpr"])
            of_body = dict(zip(body.invars, renamed(eqn.invars), strict=True))
            own_scope = eqn.source_info.name_stack
            inside = own_scope if scope is None else scope + own_scope
            env.update(zip(eqn.outvars, _spliced(body, of_body, inside, eqns), strict=True))
            continue
        eqn = eqn.replace(invars=renamed(eqn.invars))
        if eqn.primitive.name not in _CUSTOM_RULES:
            eqn = eqn.replace(params={k: _opened_param(v) for k, v in eqn.params.items()})
        if scope is not None:
            fresh = [type(v)(v.aval) for v in eqn.outvars]
            env.update(zip(eqn.outvars, fresh, strict=True))
            name_stack = scope + eqn.source_info.name_stack
            source_info = eqn.source_info.replace(name_stack=name_stack)
            eqn = eqn.replace(outvars=fresh, source_info=source_info)
        eqns.append(eqn)
    return renamed(jaxpr.outvars)


_CUSTOM_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


def _opened_param(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_opened_param, value))
    if not is_jaxpr(value) or not any(map(is_checkpoint, all_equations(value))):
        return value
    return without_checkpoints(value)


def _reads_refs(jaxpr: Any) -> bool:
    """Whether effects refer to inputs of the jaxpr by position, which splicing changes, or the
    jaxpr has constants."""
    effects = open_jaxpr(jaxpr).effects
    return any(hasattr(e, "input_index") for e in effects) or bool(open_jaxpr(jaxpr).constvars)


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


def without_dead_code(jaxpr: Any) -> Any:
    """The jaxpr without dead code, loop bodies included; all inputs stay."""
    inner = open_jaxpr(jaxpr)
    live, _ = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars), instantiate=True)
    return live


def inputs_read(jaxpr: Any, num_outputs: int) -> Sequence[bool]:
    """Which inputs of a jaxpr its first `num_outputs` outputs depend on."""
    outputs = range(len(jaxpr.outvars))
    return partial_eval.dce_jaxpr(jaxpr, [i < num_outputs for i in outputs])[1]


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
    if eqn.primitive.name in ("optimization_barrier", "hremat_barrier"):
        return True
    prevent_cse = eqn.params.get("prevent_cse", False)
    some = any(prevent_cse) if isinstance(prevent_cse, tuple) else bool(prevent_cse)
    return some and bool(eqn.params.get("differentiated", False))


# From jaxlib 0.11.1 on, XLA:CPU keeps optimization barriers until equal operations are merged.
_CPU_DROPS_BARRIERS = jaxlib.version.__version_info__ < (0, 11, 1)


def drops_barriers(ctx: Any) -> bool:
    """Whether a lowering rule produces code for a platform whose XLA drops barriers; False if it
    produces code for several platforms at once."""
    return _CPU_DROPS_BARRIERS and platforms_of(ctx) == ("cpu",)


def platforms_of(ctx: Any) -> tuple[str, ...]:
    """The platforms a lowering rule produces code for: "cpu", "cuda"; several in an export."""
    return tuple(ctx.platforms or ctx.module_context.platforms)


def lower_to_kept_call(ctx: Any, values: Sequence[Any]) -> list[Any]:
    """A call, not to be inlined, of a function that returns its arguments.

    Args:
        ctx: The context of a lowering rule.
        values: The arguments of the lowering rule, as values of the module.
    """
    types = [value.type for value in values]
    function = func_dialect.FuncOp(
        "hremat_barrier", (types, types), ip=ctx.module_context.ip, visibility="private"
    )
    with ir.InsertionPoint(function.add_entry_block()):
        func_dialect.ReturnOp(function.arguments)
    name = ctx.module_context.symbol_table.insert(function)
    call = func_dialect.CallOp(types, ir.FlatSymbolRefAttr.get(name.value), list(values))
    kept = ir.DictAttr.get({"inlineable": ir.StringAttr.get("false")})
    call.operation.attributes["mhlo.frontend_attributes"] = kept
    return list(call.results)


def lower_checkpoints_apart(kind: type) -> None:
    """Where XLA drops barriers, `jax.checkpoint` with a policy of this kind lowers to a call.

    JAX has no hook for this, so its lowering rule is replaced by one that changes the arguments and
    calls the original. For all other checkpoints, and elsewhere, JAX's own rule is unchanged.
    """
    if not _CPU_DROPS_BARRIERS:
        return
    plain = ad_checkpoint._remat_lowering

    def lower(
        ctx: Any,
        *values: Any,
        prevent_cse: Any,
        differentiated: bool,
        policy: Any,
        **params: Any,
    ) -> Any:
        if (
            isinstance(policy, kind)
            and differentiated
            and prevent_cse is True
            and drops_barriers(ctx)
        ):
            values = tuple(lower_to_kept_call(ctx, values))
            prevent_cse = False
        how = {"prevent_cse": prevent_cse, "differentiated": differentiated, "policy": policy}
        return plain(ctx, *values, **how, **params)

    mlir.register_lowering(ad_checkpoint.remat_p, lower)


def is_transposed(scope: str) -> bool:
    """Whether a scope path belongs to the transposed (backward) half of a `jax.vjp`."""
    return "transpose(" in scope


def is_rematted(scope: str) -> bool:
    """Whether a scope path belongs to the forward that a differentiated region recomputes."""
    return "rematted_computation" in scope
