"""`Program` -> `Graph`: operations, values, bytes, and what each backward reads.

Nothing here or downstream holds a JAX object: operation `i` stands for equation `i`.
"""

from __future__ import annotations

import hashlib
import typing
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax

from jax_hremat._jax.custom_rules import DETACH
from jax_hremat._jax.describe import describe_jaxpr, describe_params, functions_key
from jax_hremat._jax.equations import bind_equation
from jax_hremat._jax.jaxprs import Literal, open_jaxpr
from jax_hremat._jax.scopes import module_path, source_line
from jax_hremat._jax.sizes import size_bytes_of
from jax_hremat._plan.device_mesh import DeviceMesh, Spec
from jax_hremat._plan.fingerprint import RULES
from jax_hremat._primitives.elementwise import FUSIBLE, MOVES
from jax_hremat._primitives.primitives import equation_work
from jax_hremat._primitives.work import Work
from jax_hremat._trace.comparisons import compared_values
from jax_hremat._trace.constants import constant_makers
from jax_hremat._trace.residuals import backward_of, run_once
from jax_hremat._trace.trace import Program, abstract

ValueKind = typing.Literal["argument", "constant", "computed"]


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the program.

    Attributes:
        id: Position in `Graph.values`.
        text: Dtype and shape, such as `bf16[16,1024,768]`.
        size_bytes: Bytes it takes on one device.
        kind: Where it comes from.
        producer: The operation that computes it, or None.
        active: Whether it gets a cotangent (`residuals.py`).
        users: Operations that read it, in program order.
        is_output: Whether the program returns it.
        spec: How it is sharded over a mesh of devices; None where there is one device.
        is_compared: Whether it must not be kept without what it is made of
            (`_trace/comparisons.py`).
        of_constants: Whether it is made of constants alone and is never kept
            (`_trace/constants.py`).
    """

    id: int
    text: str
    size_bytes: int
    kind: ValueKind
    producer: int | None
    active: bool
    users: tuple[int, ...]
    is_output: bool
    spec: Spec | None = None
    is_compared: bool = False
    of_constants: bool = False

    @property
    def last_use(self) -> int:
        """The last operation that reads it in the forward, or -1."""
        return self.users[-1] if self.users else -1


@dataclass(frozen=True, slots=True)
class Operation:
    """One equation of the flat program.

    Attributes:
        id: Position in `Graph.operations`, and of the equation in the program.
        primitive: Name of the primitive.
        inputs: Value ids read, None for a literal.
        outputs: Value ids made.
        active: Whether its output is active, so that it has a backward.
        needs: Values (inputs or own outputs) that JAX's linearization keeps for the backward.
        opaque_bytes: Bytes of residuals that are neither inputs nor outputs and that a recompute of
            just this operation would have to produce (a `custom_vjp`'s, a scan's).
        work: What its forward computes, and the bytes it reads and writes when nothing is fused.
        fusible: Whether XLA fuses it into its neighbours.
        has_batch_dims: For a matrix product, whether it has batch dimensions.
        trips: How many steps a scan has; 1 for anything else.
        once: The operation (itself or one inside it) because of which it must run exactly once (an
            effect, or a read of hidden state), and its source line; empty if it may be recomputed.
        signature: What it computes, literal values left out; equal signatures cost the same.
        literals: The literal values.
        scope: `jax.named_scope` path (the Flax module path).
        source: User's source line.
        spared: Inputs that it does not read when run under differentiation (the arguments of a
            custom rule that was taken apart, which it takes only to give them cotangents).
        of_rule: Whether it is part of a custom rule's forward: it is not active itself, but the
            rule's backward reads what it computes from a differentiated argument.
        compares_results: Whether its backward computes its results again, to compare them with its
            inputs.
    """

    id: int
    primitive: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    active: bool
    needs: tuple[int, ...]
    opaque_bytes: int
    work: Work
    fusible: bool
    has_batch_dims: bool
    trips: int
    once: str
    signature: str
    literals: str
    scope: str
    source: str
    spared: tuple[int, ...] = ()
    of_rule: bool = False
    compares_results: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """Values that must be available to recompute it."""
        return tuple(v for v in self.inputs if v is not None and v not in self.spared)

    @property
    def on_path(self) -> bool:
        """Whether it is on a path from the differentiated arguments to the results."""
        return self.active or self.of_rule

    @property
    def effectful(self) -> bool:
        """Whether it must run exactly once."""
        return bool(self.once)

    @property
    def is_view(self) -> bool:
        """Whether it only moves or names the elements of one value."""
        return self.primitive in MOVES and len(self.inputs) == 1

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward, multiply and add counted separately."""
        return round(self.work.total_flops)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written when nothing is fused."""
        return round(self.work.bytes)


@dataclass(frozen=True, slots=True)
class Graph:
    """The forward program as operations and values, in program order.

    Attributes:
        mesh: The devices it runs on, where there are several; all sizes are then those of one
            device.
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    arguments: tuple[int, ...]
    outputs: tuple[int | None, ...]
    differentiated: tuple[int, ...]
    mesh: DeviceMesh | None = None

    def __repr__(self) -> str:
        active = sum(op.active for op in self.operations)
        return (
            f"Graph({len(self.operations)} operations, {active} active, {len(self.values)} values)"
        )


def cast_bytes(graph: Graph, readers: Iterable[Operation]) -> int | None:
    """Bytes of the largest of the results of some operations that read a value, if all of them
    cast it; None if others read it. The part of its gradient that comes from casts has their type
    until the parts are added."""
    readers = [*readers]
    if any(op.primitive != "convert_element_type" for op in readers):
        return None
    return max(graph.values[op.outputs[0]].size_bytes for op in readers)


def is_loop(operation: Operation) -> bool:
    """Whether it is a scan of more than one step that keeps something for its backward."""
    return operation.trips > 1 and operation.active


def is_cond(operation: Operation) -> bool:
    """Whether it is a cond or switch whose branches keep something of their own for the
    backward."""
    return operation.primitive == "cond" and operation.active and operation.opaque_bytes > 0


def build_graph(program: Program) -> Graph:
    """Read operations, values, activity and needs off the program.

    Needs come from differentiating each operation alone (`residuals.py`).
    """
    with program.context.entered():
        return _graph_of(program)


def _graph_of(program: Program) -> Graph:
    jaxpr = open_jaxpr(program.jaxpr)
    ids: dict[Any, int] = {}
    avals: list[Any] = []
    kinds: list[ValueKind] = []
    producers: list[int | None] = []

    def declare(var: Any, kind: ValueKind, producer: int | None) -> int:
        ids[var] = len(avals)
        avals.append(var.aval)
        kinds.append(kind)
        producers.append(producer)
        return ids[var]

    for var in jaxpr.constvars:
        declare(var, "constant", None)
    arguments = tuple(declare(var, "argument", None) for var in jaxpr.invars)
    differentiated = tuple(arguments[i] for i in program.differentiated)
    users: dict[int, list[int]] = {}
    detached: set[int] = set()
    is_compared: set[int] = set()
    operations: list[Operation] = []
    signatures = [_signature(eqn) for eqn in jaxpr.eqns]
    backward = backward_of(program, signatures)
    compared = compared_values(
        jaxpr, lambda index: backward.residuals[index].compared, program.sources
    )
    for index, (eqn, residuals) in enumerate(zip(jaxpr.eqns, backward.residuals, strict=True)):
        inputs = tuple(None if isinstance(v, Literal) else ids[v] for v in eqn.invars)
        outputs = tuple(declare(v, "computed", index) for v in eqn.outvars)
        for value in dict.fromkeys(v for v in inputs if v is not None):
            users.setdefault(value, []).append(index)
        is_compared.update(o for o, v in zip(outputs, eqn.outvars, strict=True) if v in compared)
        is_compared.update(outputs if residuals.compares_results else ())
        needs = [inputs[i] for i in residuals.inputs] + [outputs[i] for i in residuals.outputs]
        spared = {inputs[i] for i in residuals.spared}
        spared.difference_update(v for i, v in enumerate(inputs) if i not in residuals.spared)
        of_rule = not residuals.differentiable and not detached.isdisjoint(inputs)
        if of_rule or eqn.primitive.name == DETACH:
            detached.update(outputs)
        operations.append(
            Operation(
                id=index,
                primitive=eqn.primitive.name,
                inputs=inputs,
                outputs=outputs,
                active=residuals.differentiable,
                needs=tuple(v for v in dict.fromkeys(needs) if v is not None),
                opaque_bytes=residuals.opaque_bytes,
                work=Work() if residuals.renames else equation_work(eqn),
                fusible=residuals.renames or eqn.primitive.name in FUSIBLE,
                has_batch_dims=_has_batch_dims(eqn),
                trips=eqn.params["length"] if eqn.primitive.name == "scan" else 1,
                once=run_once(eqn) or residuals.once,
                signature=signatures[index],
                literals=",".join(str(v.val) for v in eqn.invars if isinstance(v, Literal)),
                scope=module_path(eqn),
                source=source_line(eqn),
                spared=tuple(v for v in dict.fromkeys(inputs) if v is not None and v in spared),
                of_rule=of_rule,
                compares_results=residuals.compares_results,
            )
        )
    outputs_ids = tuple(None if isinstance(v, Literal) else ids[v] for v in jaxpr.outvars)
    returned = set(outputs_ids)
    active = {ids[v] for v in backward.reached}
    of_constants = {ids[v] for v in constant_makers(jaxpr)}
    operations = _with_rules(operations, jaxpr.eqns, active)
    values = tuple(
        Value(
            id=i,
            text=aval.str_short(short_dtypes=True),
            size_bytes=size_bytes_of(aval),
            kind=kinds[i],
            producer=producers[i],
            active=i in active,
            users=tuple(users.get(i, ())),
            is_output=i in returned,
            is_compared=i in is_compared,
            of_constants=i in of_constants,
        )
        for i, aval in enumerate(avals)
    )
    return Graph(
        operations=tuple(operations),
        values=values,
        arguments=arguments,
        outputs=outputs_ids,
        differentiated=differentiated,
    )


def _signature(eqn: Any) -> str:
    """Primitive, parameters, shapes and which inputs are literals (not their values)."""
    shapes_in = ",".join(
        ("lit:" if isinstance(v, Literal) else "") + v.aval.str_short(short_dtypes=True)
        for v in eqn.invars
    )
    shapes_out = ",".join(v.aval.str_short(short_dtypes=True) for v in eqn.outvars)
    params = describe_params(eqn.params)
    if len(params) > 200:
        params = hashlib.sha256(params.encode()).hexdigest()[:16]
    return f"{eqn.primitive.name}[{params}]({shapes_in})->{shapes_out}"


def _with_rules(
    operations: Sequence[Operation], eqns: Sequence[Any], active: Set[int]
) -> list[Operation]:
    """The operations, those that use derivative rules with a hash of the rules in `signature`."""
    known: dict[Any, str] = {}
    found = []
    for op, eqn in zip(operations, eqns, strict=True):
        functions = functions_key(eqn) if op.active else ()
        if functions:
            moving = tuple(i for i, v in enumerate(op.inputs) if v in active)
            moved = tuple(i for i, v in enumerate(op.outputs) if v in active)
            key = (op.signature, functions, moving, moved)
            if key not in known:
                done = describe_jaxpr(_differentiated(eqn, moving, moved))
                known[key] = hashlib.sha256(done.encode()).hexdigest()[:16]
            op = replace(op, signature=f"{op.signature}{RULES}{known[key]}")
        found.append(op)
    return found


def _differentiated(eqn: Any, moving: Sequence[int], moved: Sequence[int]) -> Any:
    """A jaxpr of the equation and its pullback, from its inputs and the cotangents of `moved`."""
    num_inputs = len(eqn.invars)
    literals = {i: v.val for i, v in enumerate(eqn.invars) if isinstance(v, Literal)}

    def both(*flat: Any) -> Any:
        inputs = [literals.get(i, x) for i, x in enumerate(flat[:num_inputs])]

        def active_part(*values: Any) -> Any:
            merged = list(inputs)
            for position, value in zip(moving, values, strict=True):
                merged[position] = value
            outputs = bind_equation(eqn, merged)
            return [outputs[i] for i in moved]

        outputs, pullback = jax.vjp(active_part, *(inputs[i] for i in moving))
        return outputs, pullback(list(flat[num_inputs:]))

    avals = [v.aval for v in (*eqn.invars, *(eqn.outvars[i] for i in moved))]
    return jax.make_jaxpr(both)(*map(abstract, avals))


def _has_batch_dims(eqn: Any) -> bool:
    if eqn.primitive.name != "dot_general":
        return False
    _, (lhs_batch, _) = eqn.params["dimension_numbers"]
    return bool(lhs_batch)
