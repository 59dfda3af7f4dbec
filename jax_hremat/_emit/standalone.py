"""The emitter as code that needs JAX only, which `RematPlan.to_code` writes under the regions.

It is what `emit.py`, `naming.py` and `_trace/sinking.py` do for ranges of operations under
`jax.checkpoint`; the code of a plan that needs more is refused.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, Literal

# What takes more than a `jax.checkpoint` around it.
UNSAID = {"cond", "reduce_window_max", "reduce_window_min", "jit", "pjit"}


class Region(NamedTuple):
    """Equations `start … stop − 1` of the program; `keeps` are results, as (equation, position).
    With `late`, nothing is made of the arguments it reads before the other values it reads are
    there. One with a `body` is a scan, and the body is what is done with the equations of each
    step."""

    start: int
    stop: int
    keeps: Sequence[tuple[int, int]] = ()
    inside: Sequence[Region] = ()
    checkpointed: bool = True
    barrier: bool = False
    late: bool = False
    body: Region | None = None


def applied(fun: Callable[..., Any], regions: Region, argnums: Sequence[int], digest: str) -> Any:
    """The function with the regions applied: the same arguments, results and gradients."""

    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        moving = [path[0].idx == 0 and path[1].idx in argnums for path in paths((args, kwargs))]

        def flat(*values: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, values)
            return fun(*args, **kwargs)

        nested, out = jax.make_jaxpr(flat, return_shape=True)(*leaves)
        closed = jax.make_jaxpr(lambda *values: inlined(nested, values))(*leaves)
        jaxpr, consts = parts(closed)
        jaxpr = sunk(jaxpr)
        names = " ".join(eqn.primitive.name for eqn in jaxpr.eqns)
        if hashlib.sha256(names.encode()).hexdigest()[:16] != digest:
            raise ValueError("the function does not trace to the program that the plan is for")
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        body = Emitter(jaxpr, moving).function(regions, inputs, jaxpr.outvars, frozenset())
        made = body(*consts, *leaves)
        # A constant result is a literal.
        results = [value if isinstance(value, jax.Array) else jnp.asarray(value) for value in made]
        return jax.tree.unflatten(jax.tree.structure(out), results)

    return run


def paths(tree: Any) -> list[Any]:
    return [path for path, _ in jax.tree.leaves_with_path(tree)]


def parts(closed: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """A jaxpr and its constants; from JAX 0.11 on, both are one object."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation, under the scope it was traced in."""
    with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
        made = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(eqn.params))
    return made if eqn.primitive.multiple_results else [made]


def inlined(closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, with its inner `jit`s inlined."""
    jaxpr, consts = parts(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))
    for eqn in jaxpr.eqns:
        given = read(env, eqn.invars)
        if eqn.primitive.name in ("jit", "pjit", "closed_call"):
            body = eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"]
            with jax.named_scope(str(eqn.source_info.name_stack)), eqn.ctx.manager:
                made = inlined(body, given)
        else:
            made = bind(eqn, given)
        env.update(zip(eqn.outvars, made, strict=True))
    return read(env, jaxpr.outvars)


def sunk(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, with each operation on one argument alone that only one other operation reads
    (such as a cast of parameters) moved to just before that one."""
    readers: dict[Any, set[int]] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        for var in variables(eqn.invars):
            readers.setdefault(var, set()).add(index)
    at_hand, returned = {*jaxpr.constvars, *jaxpr.invars}, set(variables(jaxpr.outvars))
    before = list(range(len(jaxpr.eqns)))
    for index, eqn in enumerate(jaxpr.eqns):
        given = variables(eqn.invars)
        read_by = set().union(*(readers.get(v, ()) for v in eqn.outvars))
        movable = len(given) == 1 and not eqn.effects and returned.isdisjoint(eqn.outvars)
        if movable and given[0] in at_hand and len(read_by) == 1:
            at_hand.update(eqn.outvars)
            (before[index],) = read_by
    for index in reversed(range(len(before))):
        before[index] = before[before[index]]
    order = sorted(range(len(before)), key=lambda index: (before[index], index))
    return jaxpr.replace(eqns=[jaxpr.eqns[index] for index in order])


def read(env: dict[Any, Any], atoms: Sequence[Any]) -> list[Any]:
    return [v.val if isinstance(v, Literal) else env[v] for v in atoms]


def variables(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if not isinstance(v, Literal)]


class Emitter:
    """Turns regions of a jaxpr into functions; `scan` names the scan that it is a step of, and
    `in_loop` says whether the steps run one at a time."""

    def __init__(
        self, jaxpr: Jaxpr, moving: Sequence[bool], scan: str = "", in_loop: bool = False
    ) -> None:
        self.scan = scan
        self.in_loop = in_loop
        self.eqns = jaxpr.eqns
        self.last_use = {v: i for i, eqn in enumerate(self.eqns) for v in variables(eqn.invars)}
        self.last_use |= dict.fromkeys(variables(jaxpr.outvars), len(self.eqns))
        self.given = set(jaxpr.invars)
        self.made_at = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.arguments = {v for v, on in zip(jaxpr.invars, moving, strict=True) if on}
        # What depends on a differentiated argument, and what is made of literals alone.
        self.moving = set(filter(has_gradient, self.arguments))
        self.of_literals: dict[Any, int] = {}
        for i, eqn in enumerate(self.eqns):
            given = variables(eqn.invars)
            if eqn.primitive.name != "stop_gradient" and not self.moving.isdisjoint(given):
                self.moving.update(filter(has_gradient, eqn.outvars))
            if not eqn.effects and all(v in self.of_literals for v in given):
                self.of_literals.update(dict.fromkeys(eqn.outvars, i))

    def function(
        self,
        region: Region,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        names: frozenset[Any],
        is_nested: bool = False,
    ) -> Callable[..., list[Any]]:
        """The region as a function; the values among `names` are named."""
        # Values made of literals alone are made again by each region that reads them.
        again = [self.equation(i, names) for i in self.makers(region, inputs)]
        steps = [*again, *self.steps(region, names, is_nested or region.checkpointed)]

        def run(*values: Any) -> list[Any]:
            env = dict(zip(inputs, values, strict=True))
            for step in steps:
                step(env)
            return read(env, outputs)

        return run

    def steps(
        self, region: Region, names: frozenset[Any], is_nested: bool
    ) -> list[Callable[[Any], None]]:
        steps, position = [], region.start
        for inner in region.inside:
            steps += [self.equation(i, names) for i in range(position, inner.start)]
            if inner.body is not None:
                steps.append(self.equation(inner.start, names, self.steps_of(inner)))
            else:
                steps.append(self.region(inner, names, is_nested))
            position = inner.stop
        return [*steps, *(self.equation(i, names) for i in range(position, region.stop))]

    def region(
        self, region: Region, names: frozenset[Any], is_nested: bool
    ) -> Callable[[Any], None]:
        keeps = [k for k in region.keeps if self.eqns[k[0]].outvars[k[1]] not in self.of_literals]
        inputs, outputs = self.boundary(region)
        run = self.function(region, inputs, outputs, names.union(keeps), is_nested)
        joined = [v for v in inputs if region.barrier and v in self.moving]
        if region.checkpointed:
            policy = jax.checkpoint_policies.save_only_these_names(*map(self.name_of, keeps))
            # XLA cannot merge what a step of a loop recomputes with its first run.
            run = jax.checkpoint(run, policy=policy, prevent_cse=is_nested or not self.in_loop)
            joined = [v for v in joined if v not in self.arguments]

        made = [v for v in inputs if v in self.made_at]
        first = max(made, key=self.made_at.__getitem__) if region.late and made else None
        held = [v for v in inputs if v in self.given]

        def step(env: dict[Any, Any]) -> None:
            if len(joined) > 1:
                env.update(zip(joined, tied(*(env[v] for v in joined)), strict=True))
            given = {v: env[v] for v in inputs}
            if first is not None:
                after = held_back(env[first], [env[v] for v in held])
                given.update(zip(held, after, strict=True))
            env.update(zip(outputs, run(*given.values()), strict=True))

        return step

    def equation(
        self, index: int, names: frozenset[Any], evaluate: Callable[..., Any] | None = None
    ) -> Callable[[Any], None]:
        """One equation, or what is evaluated in its place."""
        eqn = self.eqns[index]
        kept = [k for k in range(len(eqn.outvars)) if (index, k) in names]
        named = {k: self.name_of((index, k)) for k in kept}
        differentiated = not self.moving.isdisjoint(variables(eqn.outvars))

        def step(env: dict[Any, Any]) -> None:
            given = read(env, eqn.invars)
            if evaluate is None and named and differentiated:
                made = bind_named(eqn, given, named)
            else:
                made = bind(eqn, given) if evaluate is None else evaluate(given)
                made = [with_name(x, named.get(k)) for k, x in enumerate(made)]
            env.update(zip(eqn.outvars, made, strict=True))

        return step

    def steps_of(self, region: Region) -> Callable[[Sequence[Any]], list[Any]]:
        """The scan of a region, each of its steps run as its body says."""
        eqn, body = self.eqns[region.start], region.body
        num_consts, num_carry = scan_counts(eqn)
        nested, avals = eqn.params["jaxpr"], parts(eqn.params["jaxpr"])[0].in_avals
        jaxpr, closed = parts(jax.make_jaxpr(lambda *xs: inlined(nested, xs))(*avals))
        jaxpr = sunk(jaxpr)
        if (
            body is None
            or body.stop != len(jaxpr.eqns)
            or not UNSAID.isdisjoint(inner.primitive.name for inner in jaxpr.eqns)
        ):
            raise ValueError(
                f"the steps of the scan at equation {region.start} are others than when the plan "
                f"was made, or have a cond, a pool or the rule of a custom_vjp"
            )
        # A carried value is differentiated if it is so after any step.
        moving = [not isinstance(v, Literal) and v in self.moving for v in eqn.invars]
        carried = slice(num_consts, num_consts + num_carry)
        for _ in range(num_carry):
            emitter = Emitter(jaxpr, moving)
            after = [v in emitter.moving for v in jaxpr.outvars[:num_carry]]
            moving[carried] = [a or b for a, b in zip(moving[carried], after, strict=True)]
        emitter = Emitter(
            jaxpr, moving, f"{self.scan}{region.start}/", in_loop=eqn.params["unroll"] == 1
        )
        inputs = (*jaxpr.constvars, *jaxpr.invars)
        run = emitter.function(body, inputs, jaxpr.outvars, frozenset())

        def evaluate(given: Sequence[Any]) -> list[Any]:
            consts, carry = given[:num_consts], list(given[carried])

            def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
                made = run(*closed, *consts, *carry, *x)
                return made[:num_carry], made[num_carry:]

            how = {k: eqn.params[k] for k in ("length", "reverse", "unroll")}
            carry, ys = jax.lax.scan(step, carry, list(given[carried.stop :]), **how)
            return [*carry, *ys]

        return evaluate

    def name_of(self, kept: tuple[int, int]) -> str:
        return "plan/{}{}.{}".format(self.scan, *kept)

    def boundary(self, region: Region) -> tuple[list[Any], list[Any]]:
        """What a region reads and does not make, and what it makes that is read after it."""
        own = range(region.start, region.stop)
        inputs: dict[Any, None] = {}
        made: set[Any] = set()
        for i in (*self.makers(region), *own):
            inputs |= dict.fromkeys(v for v in variables(self.eqns[i].invars) if v not in made)
            made.update(self.eqns[i].outvars)
        results = (v for i in own for v in self.eqns[i].outvars)
        return list(inputs), [v for v in results if self.last_use.get(v, -1) >= region.stop]

    def makers(self, region: Region, given: Sequence[Any] = ()) -> list[int]:
        """The equations before a region that make what it reads of literals alone."""
        found: set[int] = set()
        own = self.eqns[region.start : region.stop]
        stack = [v for eqn in own for v in variables(eqn.invars)]
        while stack:
            var = stack.pop()
            maker = self.of_literals.get(var, region.start)
            if var not in given and maker < region.start and maker not in found:
                found.add(maker)
                stack += variables(self.eqns[maker].invars)
        return sorted(found)


def has_gradient(variable: Any) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def is_inexact(value: Any) -> bool:
    return jnp.issubdtype(jax.typeof(value).dtype, jnp.inexact)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many constants and how many carried values a scan has."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()  # From JAX 0.11 on.
    return len(consts), len(carry)


def with_name(value: Any, name: str | None) -> Any:
    if name is None:
        return value
    return of_key_data(checkpoint_name(key_data(value), name), like=value)


def bind_named(eqn: Any, inputs: Sequence[Any], names: dict[int, str]) -> Sequence[Any]:
    """The results of a differentiated equation, some of them named. What its derivative reads are
    the named values: those of exp, tanh and others read their own result, and would otherwise be
    computed again although it is kept."""
    given = [k for k, v in enumerate(eqn.invars) if not isinstance(v, Literal)]
    count = len(eqn.outvars)

    def evaluate(*values: Any) -> list[Any]:
        known = dict(zip(given, values, strict=True))
        return list(bind(eqn, [known.get(k, x) for k, x in enumerate(inputs)]))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        moving = [k for k, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def pushed(*values: Any) -> list[Any]:
            primals, tangents = values[: len(given)], values[len(given) :]

            def of_moving(*moved: Any) -> list[Any]:
                now = dict(zip(moving, moved, strict=True))
                return evaluate(*(now.get(k, x) for k, x in enumerate(primals)))

            made, changes = jax.jvp(of_moving, [primals[k] for k in moving], list(tangents))
            return [*made, *(t for x, t in zip(made, changes, strict=True) if is_inexact(x))]

        values = (*primals, *(tangents[k] for k in moving))
        nested = jax.make_jaxpr(pushed)(*values)
        jaxpr, consts = parts(jax.make_jaxpr(lambda *values: inlined(nested, values))(*values))
        named = {v: names[k] for k, v in enumerate(jaxpr.outvars) if k in names}
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))
        for inner in jaxpr.eqns:
            made = bind(inner, read(env, inner.invars))
            for v, value in zip(inner.outvars, made, strict=True):
                env[v] = with_name(value, named.get(v))
        results = read(env, jaxpr.outvars)
        changes = iter(results[count:])
        return results[:count], [
            next(changes) if is_inexact(x) else SymbolicZero(jax.typeof(x).to_tangent_aval())
            for x in results[:count]
        ]

    run = jax.custom_jvp(evaluate)
    run.defjvp(rule, symbolic_zeros=True)
    return run(*(inputs[k] for k in given))


def held_back(first: Any, values: Sequence[Any]) -> list[Any]:
    """The values, none of them available before the first. Typed keys go through the barrier as
    the integers that they are made of, so that no check takes them as used."""
    after = available_after(*map(key_data, (first, *values)))
    return [of_key_data(new, like=old) for new, old in zip(after, values, strict=True)]


def is_key(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def key_data(value: Any) -> Any:
    return jax.random.key_data(value) if is_key(value) else value


def of_key_data(data: Any, *, like: Any) -> Any:
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like)) if is_key(like) else data


@jax.custom_jvp
def available_after(first: Any, *values: Any) -> Any:
    """The values, none of them available before the first, so that XLA's scheduler cannot make
    anything of arguments alone, such as a cast of weights, at the start of the step."""
    return jax.lax.optimization_barrier((first, *values))[1:]


@functools.partial(available_after.defjvp, symbolic_zeros=True)
def available_after_jvp(primals: Any, tangents: Any) -> Any:
    return available_after(*primals), tuple(tangents[1:])


@jax.custom_jvp
def tied(*values: Any) -> Any:
    """Identity; the cotangents of all values become available together, so that XLA's scheduler
    cannot put off a part of a region's backward and keep alive what it recomputed."""
    return values


@functools.partial(tied.defjvp, symbolic_zeros=True)
def tied_jvp(primals: Any, tangents: Any) -> Any:
    moving = tuple(t for t in tangents if not isinstance(t, SymbolicZero))
    held = iter(jax.lax.optimization_barrier(moving))
    return tied(*primals), tuple(t if isinstance(t, SymbolicZero) else next(held) for t in tangents)
