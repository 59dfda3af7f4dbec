"""From a `Program` and a `Region` tree to the same function with nested `jax.checkpoint`s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero

from jax_hremat._emit.barrier import barrier
from jax_hremat._emit.check import check_region
from jax_hremat._emit.checkpoint import checkpoint, checkpoint_name
from jax_hremat._emit.loop import run_scan
from jax_hremat._emit.naming import Reading, reading_of_results, run_named
from jax_hremat._jax.describe import equation_key
from jax_hremat._jax.equations import bind_equation, chooser_of, context_of, switch
from jax_hremat._jax.jaxprs import jaxpr_consts, open_jaxpr, read, variables
from jax_hremat._jax.keys import data_of, from_data
from jax_hremat._jax.meshes import varying_axes
from jax_hremat._plan.region import Loop, Region, ValueRef
from jax_hremat._trace.bodies import after_any_step, branch_bodies, scan_body
from jax_hremat._trace.comparisons import Pair, compared_values, sources_of
from jax_hremat._trace.constants import constant_makers
from jax_hremat._trace.residuals import compared_by_derivative
from jax_hremat._trace.rules import active_variables, are_in
from jax_hremat._trace.trace import Program

FlatFunction = Callable[..., list[Any]]


def emit_flat(
    program: Program, root: Region, *, name: str = "", in_loop: bool = False
) -> FlatFunction:
    """The program as a function of its flat inputs, with the regions of `root` applied.

    Args:
        program: The program.
        root: The region tree.
        name: If the program is the body of a scan or a branch of a cond, a unique name for it.
        in_loop: Whether the program runs as a scan's body, one step at a time. The recompute is
            then in another loop than the first run, and XLA cannot merge the two.

    Raises:
        PlanFormatError: The regions do not fit this program (`check_region`).
    """
    jaxpr = open_jaxpr(program.jaxpr)
    check_region(jaxpr, root)
    consts = jaxpr_consts(program.jaxpr)
    if root.checkpointed:
        # A region is checkpointed by its parent.
        root = Region(root.start, root.stop, children=(root,))
    inputs = (*jaxpr.constvars, *jaxpr.invars)
    with program.context.entered():
        body = _Emitter(program, name, in_loop).function(root, inputs, tuple(jaxpr.outvars))

    def flat_function(*inputs: Any) -> list[Any]:
        return body(*consts, *inputs)

    return flat_function


def emit_range(
    program: Program,
    region: Region,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    scopes: Mapping[int, str] = MappingProxyType({}),
) -> FlatFunction:
    """The operations of one region as a function from `inputs` to `outputs`, both jaxpr atoms.

    The region itself is run plain, even if it is marked as checkpointed; the regions inside it are
    run as they are marked. An operation that `scopes` names a scope for is traced inside of it.
    """
    emitter = _Emitter(program, scopes=scopes)
    return emitter.function(region, tuple(inputs), tuple(outputs))


class _Emitter:
    """Turns regions into functions; the function of a region is built once and has no state."""

    def __init__(
        self,
        program: Program,
        name: str = "",
        in_loop: bool = False,
        scopes: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._scopes = scopes
        self._program_name = name
        self._in_loop = in_loop
        self._sources = program.sources
        self._jaxpr = open_jaxpr(program.jaxpr)
        eqns = self._jaxpr.eqns
        self._last_use = {v: i for i, eqn in enumerate(eqns) for v in variables(eqn.invars)}
        self._last_use |= dict.fromkeys(variables(self._jaxpr.outvars), len(eqns))
        self._arguments = frozenset(self._jaxpr.invars[i] for i in program.differentiated)
        self._given = frozenset(self._jaxpr.invars)
        self._made_at = {v: i for i, eqn in enumerate(eqns) for v in eqn.outvars}
        self._differentiated = active_variables(self._jaxpr, program.differentiated)
        self._moving = active_variables(self._jaxpr, program.moving)
        # What cotangents come from.
        self._results = self._jaxpr.outvars[:1] if program.is_loss else self._jaxpr.outvars
        self._readings: dict[tuple[Any, ...], Reading] = {}

    @functools.cached_property
    def _compared(self) -> frozenset[Any]:
        # Most of the functions that are priced keep nothing by name, and need not ask.
        wanted = {*variables(self._results)}
        for eqn in reversed(self._jaxpr.eqns):
            if not wanted.isdisjoint(eqn.outvars):
                wanted.update(variables(eqn.invars))
        wanted &= self._moving
        known: dict[tuple[Any, ...], frozenset[Pair]] = {}

        def by_derivative(index: int) -> frozenset[Pair]:
            eqn = self._jaxpr.eqns[index]
            moving = are_in(self._moving, eqn.invars)
            pulled = tuple(k for k, v in enumerate(eqn.outvars) if v in wanted)
            key = (*equation_key(eqn), *moving, pulled)
            if key not in known:
                known[key] = compared_by_derivative(eqn, moving, pulled)
            return known[key]

        return compared_values(self._jaxpr, by_derivative, self._sources)

    @functools.cached_property
    def _choosers(self) -> frozenset[Any]:
        return frozenset(map(chooser_of, self._jaxpr.eqns))

    @functools.cached_property
    def _constant_makers(self) -> Mapping[Any, int]:
        return constant_makers(self._jaxpr)

    def function(
        self,
        region: Region,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        saved: frozenset[tuple[int, int]] = frozenset(),
        *,
        is_nested: bool = False,
    ) -> FlatFunction:
        saved = saved.union(self._kept(region))
        inside = _Inside(loop=self._in_loop, checkpointed=is_nested or region.checkpointed)
        again = self._constants_of(region, frozenset(inputs))
        steps = [self._equation(i, saved) for i in again]
        steps += self._steps(region, saved, inside)

        def run(*values: Any) -> list[Any]:
            env = dict(zip(inputs, values, strict=True))
            for step in steps:
                step(env)
            return read(env, outputs)

        return run

    def _steps(
        self, region: Region, saved: frozenset[tuple[int, int]], inside: _Inside
    ) -> list[Callable[[dict[Any, Any]], None]]:
        steps = []
        position = region.start
        for child in region.children:
            steps += [self._equation(i, saved) for i in range(position, child.start)]
            if child.checkpointed:
                steps.append(self._checkpoint(child, saved, inside))
            elif child.loop is not None:
                steps.append(self._scan(child.start, child.loop, saved, inside))
            elif child.branches:
                steps.append(self._cond(child.start, child.branches, saved))
            elif child.barrier or child.late_arguments:
                steps.append(self._with_barriers(child, saved, inside))
            else:
                steps += self._steps(child, saved, inside)
            position = child.stop
        steps += [self._equation(i, saved) for i in range(position, region.stop)]
        return steps

    def _equation(
        self, index: int, saved: frozenset[tuple[int, int]]
    ) -> Callable[[dict[Any, Any]], None]:
        eqn = self._jaxpr.eqns[index]
        names = self._names(index, saved)
        moving = are_in(self._moving, eqn.invars)
        reading = self._reading(eqn, moving, tuple(names)) if names else Reading.NONE
        if reading is Reading.COMPARED:
            return self._assign(index, frozenset(), lambda inputs: bind_equation(eqn, inputs))
        if reading is Reading.NONE:
            return self._assign(index, saved, self._bound(index))
        return self._assign(index, frozenset(), lambda inputs: run_named(eqn, inputs, names))

    def _reading(self, eqn: Any, moving: Sequence[bool], positions: tuple[int, ...]) -> Reading:
        """`reading_of_results`, found once for equal equations: it differentiates them."""
        key = (*equation_key(eqn), *moving, positions)
        if key not in self._readings:
            self._readings[key] = reading_of_results(eqn, moving, positions)
        return self._readings[key]

    def _bound(self, index: int) -> Callable[[list[Any]], list[Any]]:
        eqn = self._jaxpr.eqns[index]
        if index not in self._scopes:
            return lambda inputs: bind_equation(eqn, inputs)

        def bound(inputs: list[Any]) -> list[Any]:
            with jax.named_scope(self._scopes[index]):
                return bind_equation(eqn, inputs)

        return bound

    def _scan(
        self, index: int, loop: Loop, saved: frozenset[tuple[int, int]], inside: _Inside
    ) -> Callable[[dict[Any, Any]], None]:
        eqn = self._jaxpr.eqns[index]
        name = f"{self._program_name}{index}/"
        # XLA can merge operations of several steps that are unrolled into one loop body, or into
        # no loop at all.
        in_loop = eqn.params["unroll"] == 1
        active = after_any_step(eqn, are_in(self._differentiated, eqn.invars))
        sources = sources_of(self._jaxpr, eqn, self._sources)
        program = scan_body(eqn, are_in(self._moving, eqn.invars), active, sources)
        body = emit_flat(program, loop.body, name=name, in_loop=in_loop)
        prevent_cse = inside.prevents_cse
        return self._assign(
            index,
            saved,
            lambda inputs: run_scan(eqn, body, loop.segments, inputs, prevent_cse=prevent_cse),
        )

    def _cond(
        self, index: int, branches: Sequence[Region], saved: frozenset[tuple[int, int]]
    ) -> Callable[[dict[Any, Any]], None]:
        eqn = self._jaxpr.eqns[index]
        active = are_in(self._differentiated, eqn.invars[1:])
        sources = sources_of(self._jaxpr, eqn, self._sources)
        bodies = branch_bodies(eqn, are_in(self._moving, eqn.invars), active, sources)
        functions = [
            emit_flat(body, branch, name=f"{self._program_name}{index}.{k}/", in_loop=self._in_loop)
            for k, (body, branch) in enumerate(zip(bodies, branches, strict=True))
        ]

        def run(inputs: list[Any]) -> list[Any]:
            with context_of(eqn):
                return switch(eqn, inputs[0], functions, inputs[1:])

        return self._assign(index, saved, run)

    def _assign(
        self,
        index: int,
        saved: frozenset[tuple[int, int]],
        evaluate: Callable[[list[Any]], list[Any]],
    ) -> Callable[[dict[Any, Any]], None]:
        eqn = self._jaxpr.eqns[index]
        names = self._names(index, saved)

        def step(env: dict[Any, Any]) -> None:
            results = evaluate(read(env, eqn.invars))
            for k, (var, value) in enumerate(zip(eqn.outvars, results, strict=True)):
                env[var] = checkpoint_name(value, names[k]) if k in names else value

        return step

    def _names(self, index: int, saved: frozenset[tuple[int, int]]) -> dict[int, str]:
        """Names of the results of an operation that are kept; those that must be recomputed
        together with what they are made of have none, but for what chooses branches."""
        results = enumerate(self._jaxpr.eqns[index].outvars)
        return {
            k: self._name(index, k)
            for k, var in results
            if (index, k) in saved and (var in self._choosers or var not in self._compared)
        }

    def _name(self, index: int, position: int) -> str:
        """The `checkpoint_name` of an operation's output; unique among all programs that are
        emitted together."""
        return f"hremat/{self._program_name}{index}.{position}"

    def _checkpoint(
        self, region: Region, saved: frozenset[tuple[int, int]], inside: _Inside
    ) -> Callable[[dict[Any, Any]], None]:
        inputs, outputs = self._boundary(region)
        kept = (*self._kept(region), *self._choices(region))
        checkpointed = checkpoint(
            self.function(region, inputs, outputs, saved.union(kept)),
            names=[self._name(op, k) for op, k in kept],
            prevent_cse=inside.prevents_cse,
        )
        made = (v for v in inputs if v in self._differentiated and v not in self._arguments)
        joined = list(made) if region.barrier else []
        return _step(checkpointed, inputs, outputs, joined, self._held_back(region, inputs))

    def _choices(self, region: Region) -> list[ValueRef]:
        """The scalars made in a region that choose the branches of its conds. A checkpoint keeps
        them: a recompute that rounds differently could choose other branches than were run."""
        made = {
            var: (index, k)
            for index in range(region.start, region.stop)
            for k, var in enumerate(self._jaxpr.eqns[index].outvars)
        }
        chosen_by = (chooser_of(eqn) for eqn in self._jaxpr.eqns[region.start : region.stop])
        return sorted({made[var] for var in chosen_by if var in made})

    def _with_barriers(
        self, region: Region, saved: frozenset[tuple[int, int]], inside: _Inside
    ) -> Callable[[dict[Any, Any]], None]:
        inputs, outputs = self._boundary(region)
        inner = self.function(region, inputs, outputs, saved, is_nested=inside.checkpointed)
        active = (v for v in inputs if v in self._differentiated)
        joined = list(active) if region.barrier else []
        return _step(inner, inputs, outputs, joined, self._held_back(region, inputs))

    def _held_back(self, region: Region, inputs: Sequence[Any]) -> list[Any]:
        """The arguments that a region with late arguments reads, behind the last made of the other
        values that it reads; none if there is no such value."""
        made = [v for v in inputs if v in self._made_at]
        if not region.late_arguments or not made:
            return []
        last = max(made, key=self._made_at.__getitem__)
        return [last, *(v for v in inputs if v in self._given)]

    def _kept(self, region: Region) -> list[ValueRef]:
        """What a region keeps by name; values made of constants alone are made again."""
        eqns = self._jaxpr.eqns
        makers = self._constant_makers
        return [(op, k) for op, k in region.saved if eqns[op].outvars[k] not in makers]

    def _boundary(self, region: Region) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        own = range(region.start, region.stop)
        inputs: dict[Any, None] = {}
        made: set[Any] = set()
        for index in (*self._constants_of(region), *own):
            eqn = self._jaxpr.eqns[index]
            inputs.update(dict.fromkeys(v for v in variables(eqn.invars) if v not in made))
            made.update(eqn.outvars)
        results = (v for index in own for v in self._jaxpr.eqns[index].outvars)
        outputs = tuple(v for v in results if self._last_use.get(v, -1) >= region.stop)
        return tuple(inputs), outputs

    def _constants_of(self, region: Region, given: frozenset[Any] = frozenset()) -> list[int]:
        """The operations before a region that make what it reads and is not given of values made
        of constants alone; it runs them again for itself."""
        eqns = self._jaxpr.eqns
        again: set[int] = set()
        stack = [v for eqn in eqns[region.start : region.stop] for v in variables(eqn.invars)]
        while stack:
            var = stack.pop()
            maker = None if var in given else self._constant_makers.get(var)
            if maker is not None and maker < region.start and maker not in again:
                again.add(maker)
                stack += variables(eqns[maker].invars)
        return sorted(again)


@dataclass(frozen=True, slots=True)
class _Inside:
    """What surrounds an operation.

    Attributes:
        loop: The body of a scan that runs one step at a time.
        checkpointed: A checkpointed region of the same body.
    """

    loop: bool
    checkpointed: bool

    @property
    def prevents_cse(self) -> bool:
        """Whether XLA could merge a recompute with the first run. It cannot merge the outermost
        recompute of a scan's body, which is in another loop than the first run."""
        return self.checkpointed or not self.loop


def _step(
    function: Callable[..., Any],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    joined: Sequence[Any],
    held_back: Sequence[Any],
) -> Callable[[dict[Any, Any]], None]:
    """Calls a region's function on values of the environment.

    Args:
        function: The region's function.
        inputs: Its inputs.
        outputs: Its outputs.
        joined: The inputs that go through a cotangent barrier (`_tie`), for all that read them from
            the region on.
        held_back: An input, and those that are not available before it (`_available_after`).
    """

    def step(env: dict[Any, Any]) -> None:
        for alike in _of_one_type(joined, env):
            # What comes after the region reads the joined values too, so that a cotangent passes
            # the barrier as the sum of what this region and those after it add to it.
            env.update(zip(alike, _tie(*(env[v] for v in alike)), strict=True))
        given = {v: env[v] for v in inputs}
        if held_back:
            first, *others = held_back
            late = [v for v in others if _axes(env[v]) == _axes(env[first])]
            after = _held_back(env[first], [env[v] for v in late])
            given.update(zip(late, after, strict=True))
        env.update(zip(outputs, function(*given.values()), strict=True))

    return step


def _of_one_type(joined: Sequence[Any], env: dict[Any, Any]) -> list[list[Any]]:
    """Groups of values that vary along the same axes of an enclosing `shard_map`: a barrier makes
    all values that go through it vary along the same axes."""
    groups: dict[Any, list[Any]] = {}
    for var in joined:
        groups.setdefault(_axes(env[var]), []).append(var)
    return [*groups.values()]


def _axes(value: Any) -> Any:
    return varying_axes(jax.typeof(value))


def _held_back(first: Any, values: Sequence[Any]) -> list[Any]:
    """The values, none of them available before the first.

    A typed key goes through the barrier as the integers that it is made of: to JAX's check of
    reused keys (`jax_debug_key_reuse`), the barrier would be a use.
    """
    after = _available_after(*map(data_of, (first, *values)))
    return [from_data(new, like=old) for new, old in zip(after, values, strict=True)]


@jax.custom_jvp
def _available_after(first: Any, *values: Any) -> tuple[Any, ...]:
    """The values, none of them available before the first.

    What is made of arguments alone, such as weights cast to a shorter type, could be made at any
    time, and XLA's scheduler makes it for all layers at the start of the step.
    """
    return tuple(barrier([first, *values])[1:])


# Without symbolic zeros, what is not differentiated would get tangents, all of them zero, and the
# rules behind it would be told that it is.
@functools.partial(_available_after.defjvp, symbolic_zeros=True)
def _available_after_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return _available_after(*primals), tuple(tangents[1:])


@jax.custom_jvp
def _tie(*values: Any) -> tuple[Any, ...]:
    """Identity; the cotangents of all values become available together, and no kernel makes one of
    them and reads it too.

    Without this barrier XLA's scheduler may delay the part of a region's backward that leads to one
    input, and the values that the region recomputed stay alive until then. An example is an
    encoder's memory, which every decoder layer reads: its cotangent is summed at the end. And a
    kernel of XLA in JAX 0.10 that reads what was handed to a region both inside and outside of it
    may overwrite it (`_xla/hlo/overwrites.py`).
    """
    return values


@functools.partial(_tie.defjvp, symbolic_zeros=True)
def _tie_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    tied = iter(barrier([t for t in tangents if not isinstance(t, SymbolicZero)]))
    return _tie(*primals), tuple(t if isinstance(t, SymbolicZero) else next(tied) for t in tangents)
