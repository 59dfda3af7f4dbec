"""Custom derivative rules taken apart: values, gradients, and what a checkpointed region spares."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from tracing import emit, loss_call, trace_loss

import jax_hremat
from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.custom_rules import DETACH
from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr
from jax_hremat._plan.region import Loop, Region
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.saved import saved_value_sets, value_refs
from jax_hremat._trace.bodies import branch_bodies, scan_body
from jax_hremat._trace.flat import flatten
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay

SIZE = 4
X = jnp.linspace(0.1, 0.9, SIZE * SIZE).reshape(SIZE, SIZE)
Y = jnp.cos(X) + 0.3

# Stands for a kernel: one primitive of its own, with no derivative that is used.
kernel = functools.partial(jax.lax.cumsum, axis=0)
KERNEL = "cumsum"


@jax.custom_vjp
def fused(x: jax.Array, y: jax.Array) -> jax.Array:
    return kernel(jnp.sin(x)) * y


def _fused_forward(x: jax.Array, y: jax.Array) -> Any:
    sums = kernel(jnp.sin(x))
    return sums * y, (x, y, sums)


def _fused_backward(kept: Any, g: jax.Array) -> Any:
    x, y, sums = kept
    return jax.lax.cumsum(g * y, axis=0, reverse=True) * jnp.cos(x), g * sums


fused.defvjp(_fused_forward, _fused_backward)


def primitives(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in open_jaxpr(program.jaxpr).eqns]


def count(jaxpr: Any, primitive: str) -> int:
    """Live equations of a primitive, bodies included."""
    total = 0
    for equation in flatten(jaxpr).equations:
        total += equation.eqn.primitive.name == primitive
        total += sum(count(open_jaxpr(b), primitive) for b in inner_jaxprs(equation.eqn))
    return total


def kernels(program: Program, region: Region, primitive: str = KERNEL) -> int:
    """Forward kernels in the step of a program under a plan."""
    step = program.step(emit_flat(program, region))
    return count(jax.make_jaxpr(step)(*program.in_avals, *program.cotangent_avals), primitive)


def whole(program: Program, *, saved: Any = (), checkpointed: bool = True) -> Region:
    return Region(0, program.num_operations, checkpointed=checkpointed, saved=tuple(saved))


def made_by(program: Program, primitive: str) -> list[tuple[int, int]]:
    names = primitives(program)
    eqns = open_jaxpr(program.jaxpr).eqns
    return [
        (i, k) for i, n in enumerate(names) if n == primitive for k in range(len(eqns[i].outvars))
    ]


def same(found: Any, expected: Any) -> None:
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), found, expected
    )


def same_gradients(loss: Callable[..., Any], others: Any, *args: Any) -> None:
    """In one compilation."""
    expected, *found = jax.jit(lambda *a: [jax.value_and_grad(f)(*a) for f in (loss, *others)])(
        *args
    )
    for one in found:
        same(one, expected)


def check(
    loss: Callable[..., Any], *args: Any, argnums: Any = 0, more: Callable[..., Any] | None = None
) -> Program:
    """The loss has the same value and gradient with its rules apart, plain, checkpointed, and with
    every value saved; checkpointed, also whatever `more` computes of it."""
    call = loss_call(loss, args, argnums=argnums)
    program = call.program
    everything = [
        (i, k)
        for i, eqn in enumerate(open_jaxpr(program.jaxpr).eqns)
        for k in range(len(eqn.outvars))
    ]
    regions = [whole(program, checkpointed=False), whole(program, saved=everything), whole(program)]
    modes = [emit(call, region) for region in regions]

    @jax.jit
    def all_of_them(*args: Any) -> Any:
        pairs = [(jax.value_and_grad(f, argnums)(*args), f(*args)) for f in (loss, *modes)]
        return pairs, [more(f, *args) for f in (loss, modes[-1]) if more is not None]

    (expected, *found), furthers = all_of_them(*args)
    for one in found:
        same(one, expected)
    for further in furthers[1:]:
        same(further, furthers[0])
    return program


def test_a_rule_is_its_forward_and_an_operation_that_only_hands_on() -> None:
    program = check(lambda x: (fused(x * 2, x) * x).sum(), X)
    assert primitives(program)[1:6] == [DETACH, "sin", "cumsum", "mul", "custom_vjp_call"]
    graph = build_graph(program)
    attached = graph.operations[5]
    assert attached.active
    assert attached.flops == attached.moved_bytes == attached.opaque_bytes == 0
    assert attached.fusible
    _, _, sums, product = (op.outputs[0] for op in graph.operations[1:5])
    computed = {v for v in attached.needs if graph.values[v].kind == "computed"}
    assert computed == {graph.operations[0].outputs[0], sums}
    assert attached.reads == (product,)
    assert [op.of_rule for op in graph.operations[:7]] == [False, False, *[True] * 3, False, False]


def test_kept_residuals_spare_the_kernel() -> None:
    program = trace_loss(lambda x: jnp.sin(fused(jnp.sin(x), x)).sum(), (X,))
    assert kernels(program, whole(program, checkpointed=False)) == 2
    assert kernels(program, whole(program)) == 3
    saved = made_by(program, KERNEL)
    assert kernels(program, whole(program, saved=saved)) == 2
    # The result alone is not what the backward reads.
    assert kernels(program, whole(program, saved=made_by(program, "custom_vjp_call"))) == 3
    seen = replay(program, whole(program, saved=saved))
    assert not any(seen.recomputed[op] for op, _ in saved)


# --- rules of many kinds


@jax.custom_vjp
def with_integers(x: jax.Array, shift: jax.Array, unused: jax.Array) -> Any:
    return x * shift + unused, shift * 2


with_integers.defvjp(
    lambda x, shift, unused: ((x * shift + unused, shift * 2), shift),
    # The cotangent of an integer is of no use, that of an integer result has no values.
    lambda shift, g: (g[0] * shift, np.zeros((), jax.dtypes.float0), None),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def applied(fun: Callable[[jax.Array], jax.Array], x: jax.Array, power: int) -> jax.Array:
    return fun(x) ** power


applied.defvjp(
    lambda fun, x, power: (fun(x) ** power, (x, fun(x))),
    lambda fun, power, kept, g: (g * power * kept[1] ** (power - 1) * jnp.cos(kept[0]),),
)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return fused(x, x) * 2


# The rule calls a function with a rule of its own, and another one in its backward.
doubled.defvjp(
    lambda x: (fused(x, x) * 2, x),
    lambda x, g: (sum(jax.vjp(fused, x, x)[1](g * 2)),),
)


@jax.custom_vjp
def lazy(x: jax.Array, y: jax.Array) -> jax.Array:
    return kernel(x) * jnp.sin(y)


def _lazy_forward(x: Any, y: Any) -> Any:
    kept = (jnp.cos(y.value) if y.perturbed else None, kernel(x.value), x.perturbed and y.value)
    return kept[1] * jnp.sin(y.value), kept


def _lazy_backward(kept: Any, g: Any) -> Any:
    cos, sums, y = kept
    if isinstance(g, SymbolicZero):
        return None, None
    in_x = None if y is False else jax.lax.cumsum(g * jnp.sin(y), axis=0, reverse=True)
    return in_x, None if cos is None else g * sums * cos


lazy.defvjp(_lazy_forward, _lazy_backward, symbolic_zeros=True)


@jax.custom_vjp
def remade(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * 2


remade.defvjp(
    lambda x: (jnp.sin(x) * 2, kernel(jnp.cos(x))),
    lambda sums, g: (g * jnp.diff(sums, axis=0, prepend=0) * 2,),
    optimize_remat=True,
)


@jax.custom_gradient
def graded(x: jax.Array) -> Any:
    sums = kernel(x)
    return sums * x, lambda g: g * sums + jax.lax.cumsum(g * x, axis=0, reverse=True)


def closing_over(x: jax.Array, table: Any) -> jax.Array:
    @jax.custom_vjp
    def scaled(x: jax.Array) -> jax.Array:
        return x * table

    scaled.defvjp(lambda x: (x * table, jnp.sin(x)), lambda sin, g: (g * table + 0 * sin,))
    return scaled(x)


CASES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "fused": lambda x: fused(x, x),
    "second input only": lambda x: fused(Y, x),
    "integers": lambda x: with_integers(x, jnp.int32(3), x)[0] * with_integers(x, 2, 1.0)[1],
    "nondiff_argnums": lambda x: applied(jnp.sin, x, 3),
    "nested": lambda x: doubled(x) * x,
    "optimize_remat": lambda x: remade(jnp.tanh(x)),
    "custom_gradient": lambda x: graded(jnp.tanh(x)),
    "symbolic zeros, both": lambda x: lazy(x, x),
    "symbolic zeros, first": lambda x: lazy(x, Y),
    "symbolic zeros, second": lambda x: lazy(Y, x),
    "closed-over constant": lambda x: closing_over(x, Y),
    "twice the same": lambda x: fused(fused(x, Y), Y),
    "in a jit": lambda x: jax.jit(lambda x: fused(x, Y))(x * 2),
    "in a vmap": lambda x: jax.vmap(fused, (0, None))(jnp.stack([x, x * x]), x).sum(0),
    "batched closure": lambda x: jax.vmap(lambda a: graded(a * x))(jnp.arange(3.0)).sum(0),
}


# What JAX itself cannot do: differentiate a second time what asks for an optimized remat, or
# forward where a forward rule calls a function with a rule.
ONCE_ONLY, REVERSE_ONLY = ("optimize_remat",), ("nested",)


# One of each mechanism; the others take their time.
QUICKLY = (
    *("fused", "integers", "nondiff_argnums", "nested", "optimize_remat"),
    *("custom_gradient", "symbolic zeros, first", "in a vmap"),
)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICKLY else [pytest.mark.slow]) for c in CASES]
)
def test_values_gradients_and_second_derivatives(case: str) -> None:
    fun = CASES[case]

    def loss(x: jax.Array) -> jax.Array:
        return (fun(jnp.sin(x)) * x).sum()

    def more(loss: Callable[..., Any], x: jax.Array) -> Any:
        grad, direction = jax.grad(loss), jnp.flip(x)
        found = [jax.vmap(jax.value_and_grad(loss))(jnp.stack([x, x * 0.5]))]
        if case not in ONCE_ONLY:
            found.append(jax.grad(lambda x: (grad(x) * direction).sum())(x))
        if case not in (*ONCE_ONLY, *REVERSE_ONLY):
            found.append(jax.jvp(grad, (x,), (direction,))[1])
        return found

    program = check(loss, X, more=more)
    assert DETACH in primitives(program)


def test_other_derivatives() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return (fused(jnp.sin(x), y) * lazy(x, y)).sum()

    call = loss_call(loss, (X, Y))
    program = call.program
    emitted = emit(call, whole(program))

    @jax.jit
    def both(x: jax.Array, y: jax.Array) -> Any:
        def found(loss: Callable[..., Any]) -> Any:
            # The inner one is of what the program was not planned for, and of the two apart.
            mixed = jax.grad(lambda x: jax.grad(loss, 1)(x, y).sum())(x)
            pushed = jax.linearize(jax.grad(loss, (0, 1)), x, y)[1](y, x)
            return mixed, pushed, jax.grad(loss, 1)(x, y)

        return found(emitted), found(loss)

    same(*both(X, Y))
    # Forward mode alone is refused, as it is without a plan.
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(emitted, (X, Y), (X, Y))


# --- flash attention, written by hand

HEADS, LENGTH, WIDTH, PART = 2, 8, 4, 4


def _parts(x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1, PART, x.shape[-1]).swapaxes(0, 1)


def _flash(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Context and the logarithm of the weights' sum, from a part of keys and values at a time."""

    def step(carry: Any, part: Any) -> Any:
        largest, total, context = carry
        scores = jnp.einsum("htd,hsd->hts", q, part[0])
        larger = jnp.maximum(largest, scores.max(-1))
        weights = jnp.exp(scores - larger[..., None])
        shrunk = jnp.exp(largest - larger)
        context = context * shrunk[..., None] + jnp.einsum("hts,hsd->htd", weights, part[1])
        return (larger, total * shrunk + weights.sum(-1), context), None

    zeros = jnp.zeros(q.shape[:2])
    start = (zeros - 1e9, zeros, jnp.zeros_like(q))
    (largest, total, context), _ = jax.lax.scan(step, start, (_parts(k), _parts(v)))
    return context / total[..., None], largest + jnp.log(total)


@jax.custom_vjp
def flash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return _flash(q, k, v)[0]


def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
    context, sums = _flash(q, k, v)
    return context, (q, k, v, context, sums)


def _flash_backward(kept: Any, g: jax.Array) -> Any:
    q, k, v, context, sums = kept
    shares = (g * context).sum(-1)

    def step(dq: jax.Array, part: Any) -> Any:
        k, v = part
        weights = jnp.exp(jnp.einsum("htd,hsd->hts", q, k) - sums[..., None])
        change = weights * (jnp.einsum("htd,hsd->hts", g, v) - shares[..., None])
        dq = dq + jnp.einsum("hts,hsd->htd", change, k)
        return dq, (jnp.einsum("hts,htd->hsd", change, q), jnp.einsum("hts,htd->hsd", weights, g))

    dq, grads = jax.lax.scan(step, jnp.zeros_like(q), (_parts(k), _parts(v)))
    return dq, *(x.swapaxes(0, 1).reshape(k.shape) for x in grads)


flash.defvjp(_flash_forward, _flash_backward)

H = jnp.sin(jnp.arange(LENGTH * HEADS * WIDTH, dtype=jnp.float32)).reshape(LENGTH, HEADS * WIDTH)
W = jnp.cos(jnp.arange(64.0 * 4)).reshape(4, 8, 8) / 3


def attention(h: jax.Array, w: jax.Array) -> jax.Array:
    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(-1, HEADS, WIDTH).swapaxes(0, 1)

    context = flash(*(heads(h @ w[i]) for i in range(3)))
    return jnp.tanh(context.swapaxes(0, 1).reshape(h.shape) @ w[3]) + h


def flash_runs(program: Program, region: Region) -> int:
    """How often the forward of the attention stands in the step: only there is a maximum taken."""
    return kernels(program, region, "max")


def residuals_of_flash(program: Program) -> list[tuple[int, int]]:
    """The results of the forward's scan and what it is divided by."""
    eqns = open_jaxpr(program.jaxpr).eqns
    (scan,) = [i for i, e in enumerate(eqns) if e.primitive.name == "scan"]
    return [(scan, k) for k in range(3)]


def test_flash_attention_runs_once_where_its_residuals_are_kept() -> None:
    program = check(lambda w, h: attention(h, w).sum(), W, H)
    assert flash_runs(program, whole(program, checkpointed=False)) == 1
    assert flash_runs(program, whole(program)) == 2
    assert flash_runs(program, whole(program, saved=residuals_of_flash(program))) == 1
    # Many equations, one after the other kept or not: a scan that keeps all it returns.
    graph = build_graph(program)
    assert not any(op.opaque_bytes for op in graph.operations if op.primitive == "custom_vjp_call")


def test_flash_attention_in_a_scan() -> None:
    def loss(w: jax.Array, h: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda h, w: (attention(h, w), None), h, w)[0].sum()

    stack = jnp.stack([W, W * 0.5, W + 0.1])
    call = loss_call(loss, (stack, H))
    program = call.program
    (scan,) = [i for i, n in enumerate(primitives(program)) if n == "scan"]
    body = scan_body(open_jaxpr(program.jaxpr).eqns[scan], [True, True])
    assert DETACH in primitives(body)

    def keeping(saved: Any) -> Region:
        loop = Region(scan, scan + 1, loop=Loop(whole(body, saved=saved)))
        return Region(0, program.num_operations, children=(loop,))

    regions = [keeping(()), keeping(residuals_of_flash(body))]
    assert [flash_runs(program, region) for region in regions] == [2, 1]
    same_gradients(loss, [emit(call, region) for region in regions], stack, H)


def test_a_rule_in_a_branch() -> None:
    def loss(x: jax.Array, index: jax.Array) -> jax.Array:
        return jax.lax.switch(
            index, [lambda x: fused(x, x), jnp.sin, lambda x: lazy(Y, x)], x
        ).sum()

    call = loss_call(loss, (X, jnp.int32(0)))
    program = call.program
    (cond,) = [i for i, n in enumerate(primitives(program)) if n == "cond"]
    eqn = open_jaxpr(program.jaxpr).eqns[cond]
    # The index, a constant, what is differentiated.
    bodies = branch_bodies(eqn, [v is eqn.invars[-1] for v in eqn.invars])

    def keeping(saved: bool) -> Region:
        branches = tuple(whole(b, saved=made_by(b, KERNEL) if saved else ()) for b in bodies)
        child = Region(cond, cond + 1, branches=branches)
        return Region(0, program.num_operations, children=(child,))

    regions = [keeping(False), keeping(True)]
    without, kept = (kernels(program, region) for region in regions)
    assert without - kept == 2
    emitted = [emit(call, region) for region in regions]
    for index in range(3):
        same_gradients(loss, emitted, X, jnp.int32(index))


# --- what stays one operation


def test_nothing_is_taken_apart_that_is_not_differentiated() -> None:
    program = check(lambda x: (fused(Y, Y) * jax.lax.stop_gradient(fused(x, x)) * x).sum(), X)
    attached = [op for op in build_graph(program).operations if op.primitive == "custom_vjp_call"]
    # The second is, since JAX runs its forward rule, but has no backward.
    assert [op.active for op in attached] == [False, False]
    assert primitives(program).count(DETACH) == 1


def test_a_rule_with_an_effect_stays_one_operation() -> None:
    seen: list[str] = []

    @jax.custom_vjp
    def noted(x: jax.Array) -> jax.Array:
        return x * 2

    def forward(x: jax.Array) -> Any:
        jax.debug.callback(lambda: seen.append("forward"))
        return x * 2, None

    noted.defvjp(forward, lambda _, g: (g * 2,))
    call = loss_call(lambda x: noted(x).sum(), (X,))
    program = call.program
    assert DETACH not in primitives(program)
    emitted = emit(call, whole(program, checkpointed=False))
    jax.jit(emitted)(X)
    jax.effects_barrier()
    assert seen == []
    jax.jit(jax.grad(emitted))(X)
    jax.effects_barrier()
    assert seen == ["forward"]


def closing_over_made(
    table_of: Callable[[jax.Array], jax.Array],
) -> Callable[[jax.Array], jax.Array]:
    """A loss with a `custom_vjp` that closes over what is made of its argument."""

    def loss(x: jax.Array) -> jax.Array:
        table = table_of(x)

        @jax.custom_vjp
        def scaled(x: jax.Array) -> jax.Array:
            return x * table

        scaled.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 2.0,))
        return scaled(x).sum()

    return loss


@jax.custom_jvp
def step_function(x: jax.Array) -> jax.Array:
    return jnp.where(x > 0.5, 1.0, 0.0)


@functools.partial(step_function.defjvp, symbolic_zeros=True)
def _step_function_rule(primals: Any, tangents: Any) -> Any:
    x = primals[0]
    return step_function(x), SymbolicZero(jax.typeof(x).to_tangent_aval())


# The last is detached by itself.
STEPS = [
    *((step, 1) for step in (jnp.sign, jnp.floor, jnp.ceil, jnp.round)),
    (lambda x: step_function(jnp.sin(x)), 2),
]


@pytest.mark.parametrize(("step", "num_detached"), STEPS)
def test_a_rule_may_close_over_what_no_derivative_gets_past(
    step: Callable[[jax.Array], jax.Array], num_detached: int
) -> None:
    # So JAX does not refuse.
    loss = closing_over_made(step)
    assert primitives(check(loss, X)).count(DETACH) == num_detached
    config = jax_hremat.PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)
    plan = jax_hremat.plan_remat(loss, budget=1.0, target="cpu", config=config)(X)
    same(jax.grad(jax_hremat.apply_plan(loss, plan))(X), jax.grad(loss)(X))


def test_a_rule_that_closes_over_what_is_differentiated_stays_one_operation() -> None:
    # JAX differentiates it, for the results of the scan that are closed over do not depend on the
    # argument; which no analysis of the scan as a whole shows.
    def table(x: jax.Array) -> jax.Array:
        def body(carry: jax.Array, row: jax.Array) -> Any:
            return carry + row, jnp.sign(row)

        return jax.lax.scan(body, x[0], x)[1]

    assert DETACH not in primitives(check(closing_over_made(table), X))


def test_a_derivative_that_a_rule_stops_is_stopped_where_all_move() -> None:
    def loss(x: jax.Array, y: jax.Array) -> jax.Array:
        return (step_function(x * y) * jnp.sin(x) + y).sum()

    call = loss_call(loss, (X, Y))
    emitted = emit(call, whole(call.program))
    assert primitives(call.program).count(DETACH) == 1
    for argnums in (0, 1, (0, 1)):
        same(jax.grad(emitted, argnums)(X, Y), jax.grad(loss, argnums)(X, Y))
    same(jax.hessian(emitted)(X, Y), jax.hessian(loss)(X, Y))


def test_what_a_function_closes_over_may_not_be_differentiated_later() -> None:
    def loss(x: jax.Array, table: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def scaled(x: jax.Array) -> jax.Array:
            return x * table

        scaled.defvjp(lambda x: (x * 2.0, None), lambda _, g: (g * 2.0,))
        return scaled(x).sum()

    call = loss_call(loss, (X, Y))
    program = call.program
    assert DETACH in primitives(program)
    emitted = emit(call, whole(program))
    same(jax.grad(emitted)(X, Y), jax.grad(loss)(X, Y))
    for fun in (loss, emitted):
        with pytest.raises(Exception, match="closed-over value"):
            jax.grad(jax.jit(fun), 1)(X, Y)


def test_the_function_itself_runs_where_nothing_is_differentiated() -> None:
    @jax.custom_vjp
    def told(x: jax.Array) -> jax.Array:
        return x * 0

    told.defvjp(lambda x: (x * 0 + 1, None), lambda _, g: (g * 5,))
    call = loss_call(lambda x: told(x).sum(), (X,))
    program = call.program
    for checkpointed in (False, True):
        emitted = emit(call, whole(program, checkpointed=checkpointed))
        for evaluate in (emitted, jax.jit(emitted)):
            assert evaluate(X) == 0
        value, grad = jax.value_and_grad(emitted)(X)
        assert value == X.size
        assert (grad == 5).all()


# --- what the models say, and XLA

SELF_READING = {
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "rsqrt": jax.lax.rsqrt,
    "sqrt": jnp.sqrt,
    "pow": lambda x: jnp.power(x, 1.5),
    "max": lambda x: jnp.maximum(x, 0.5),
    "reduce_max": lambda x: x + x.max(-1, keepdims=True),
    "top_k": lambda x: jax.lax.top_k(x, SIZE)[0],
    "softmax": jax.nn.softmax,
    "cholesky": lambda x: jnp.linalg.cholesky(x @ x.T + 3 * jnp.eye(SIZE)),
}
LAWFUL = SELF_READING | {
    "fused": lambda x: fused(x, x),
    "graded": graded,
    "sparse_plus": jax.nn.sparse_plus,
    "silu": jax.nn.silu,
    "scaled gradient": lambda x: optax.scale_gradient(x, 0.5),
}


@pytest.mark.parametrize("case", LAWFUL)
def test_what_is_saved_spares_what_the_leaf_program_says(case: str) -> None:
    """The leaf program against the jaxpr of the step, differentiated by JAX."""
    fun = LAWFUL[case]

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sin(fun(jnp.cos(x @ w) + 1.5) @ w).sum()

    program = trace_loss(loss, (X, Y))
    graph = build_graph(program)
    times = [1e-3 + 1e-4 * op.id for op in graph.operations]
    answers = saved_value_sets(graph, 0, len(times), times, SolverConfig(relative_gap=0.0), 2)
    modes = [whole(program, saved=value_refs(graph, answer.values)) for answer in answers]
    for answer, mode in zip(answers, modes, strict=True):
        again = {op for op, runs in enumerate(replay(program, mode).recomputed) if runs}
        assert again == set(answer.recomputed)
    # With everything kept that helps, nothing runs again but what compares its results, and what
    # makes constants.
    compared = tuple(op.id for op in graph.operations if op.compares_results)
    constants = {op.id for op in graph.operations if graph.values[op.outputs[0]].of_constants}
    assert set(answers[0].recomputed) - constants == set(compared)
    # Since JAX 0.12 the derivative of max compares its inputs with each other.
    assert {"reduce_max"} & {case} <= {case for _ in compared} <= {"max", "reduce_max"}


def test_saved_results_of_what_reads_them_have_all_derivatives() -> None:
    def loss(x: jax.Array) -> jax.Array:
        for name in ("rsqrt", "softmax", "top_k", "reduce_max"):
            x = jnp.sin(SELF_READING[name](x + 1.5))
        return (x * jnp.exp(1j * x).real).sum()

    def more(loss: Callable[..., Any], x: jax.Array) -> Any:
        grad, direction = jax.grad(loss), jnp.flip(x)
        outer = jax.grad(lambda x: (grad(x) * direction).sum())(x)
        batch = jax.vmap(jax.value_and_grad(loss))(jnp.stack([x, x * 0.5]))
        return batch, outer, jax.jvp(loss, (x,), (direction,)), jax.jvp(grad, (x,), (direction,))

    call = loss_call(loss, (X,))
    program = call.program
    everything = [
        (i, k)
        for i, eqn in enumerate(open_jaxpr(program.jaxpr).eqns)
        for k in range(len(eqn.outvars))
    ]
    emitted = emit(call, whole(program, saved=everything))
    found, expected = jax.jit(lambda x: [more(f, x) for f in (emitted, loss)])(X)
    same(found, expected)


def test_a_bare_program_is_compiled_to_what_it_was() -> None:
    def loss(w: jax.Array, h: jax.Array) -> jax.Array:
        return attention(h, w).sum()

    call = loss_call(loss, (W, H))
    program = call.program
    emitted = emit(call, whole(program, checkpointed=False))
    for transform in (jax.value_and_grad, lambda f: f):
        mine, theirs = (jax.jit(transform(f)).lower(W, H).compile() for f in (emitted, loss))
        assert mine.memory_analysis().temp_size_in_bytes == (
            theirs.memory_analysis().temp_size_in_bytes
        )
        assert mine.cost_analysis()["flops"] == theirs.cost_analysis()["flops"]


def two_axes() -> jax.sharding.Mesh:
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=kinds)


def mapped_twice(mesh: jax.sharding.Mesh, check_vma: bool) -> Callable[..., jax.Array]:
    """Two rules in the body, with operations before, between and after them."""
    specs = (P(None, "model"), P("data"), P())

    def body(w: jax.Array, x: jax.Array, scale: jax.Array) -> jax.Array:
        h = fused(jnp.tanh(x @ w), x @ w * scale)
        return fused(h, x @ w) * scale

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        out = P("data", "model")
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
        return (mapped(w, x, x.mean()) ** 2).sum()

    return loss


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rules_inside_a_shard_map(check_vma: bool) -> None:
    loss = mapped_twice(two_axes(), check_vma)
    program = check(loss, X, Y, argnums=(0, 1))
    assert primitives(program).count(DETACH) == 2
    rules = [op for op in build_graph(program).operations if op.of_rule]
    forward = [(op.id, k) for op in rules for k in range(len(op.outputs))]
    assert kernels(program, whole(program)) == 6
    assert kernels(program, whole(program, saved=forward)) == 4
    attached = [op for op in build_graph(program).operations if op.spared]
    assert [(op.fusible, op.flops, op.opaque_bytes) for op in attached] == [(True, 0, 0)] * 2


def test_a_rule_inside_a_shard_map_costs_no_more_exchange() -> None:
    loss = mapped_twice(two_axes(), check_vma=False)
    call = loss_call(loss, (X, Y), argnums=(0, 1))
    program = call.program
    emitted = emit(call, whole(program, checkpointed=False))

    def sums(fun: Callable[..., Any]) -> int:
        step = jax.jit(jax.value_and_grad(fun, (0, 1)))
        return step.lower(X, Y).compile().as_text().count(" all-reduce(")

    assert sums(emitted) <= sums(loss)


def test_a_rule_inside_a_shard_map_of_explicit_axes() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))

    def loss(x: jax.Array) -> jax.Array:
        x = jax.device_put(x, jax.NamedSharding(mesh, P("x")))
        inside = jax.shard_map(
            lambda x: fused(jnp.sin(x), x).sum()[None], mesh=mesh, in_specs=P("x"), out_specs=P("x")
        )
        return inside(x).sum()

    with jax.set_mesh(mesh):
        assert DETACH in primitives(check(loss, X))


def test_a_program_called_inside_a_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    call = loss_call(lambda x: (fused(jnp.sin(x), x) * x).sum(), (X,))
    program = call.program
    emitted = emit(call, whole(program, saved=made_by(program, KERNEL)))

    def gradients(loss: Callable[..., Any]) -> Any:
        inside = jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        return jax.jit(inside)(X)

    same(gradients(emitted), gradients(lambda x: (fused(jnp.sin(x), x) * x).sum()))


def test_equinox_rules() -> None:
    eqx = pytest.importorskip("equinox")

    @eqx.filter_custom_vjp
    def scaled(xy: Any, power: int) -> jax.Array:
        return kernel(xy[0]) * xy[1] ** power

    @scaled.def_fwd
    def _(perturbed: Any, xy: Any, power: int) -> Any:
        sums = kernel(xy[0])
        return sums * xy[1] ** power, sums

    @scaled.def_bwd
    def _(sums: Any, g: Any, perturbed: Any, xy: Any, power: int) -> Any:
        in_x = jax.lax.cumsum(g * xy[1] ** power, axis=0, reverse=True)
        return in_x, g * sums * power * xy[1] ** (power - 1)

    program = check(lambda x: scaled((jnp.sin(x), x), 3).sum(), X)
    assert kernels(program, whole(program, saved=made_by(program, KERNEL))) == 2
    assert kernels(program, whole(program)) == 3


def test_one_thread_at_a_time_evaluates_the_rules_of_a_program() -> None:
    """JAX evaluates the function of such a rule once, when a checkpoint around it is traced, and
    fails if two threads do."""

    @jax.custom_vjp
    def act(h: jax.Array) -> jax.Array:
        time.sleep(0.1)
        return jnp.sin(h)

    act.defvjp(lambda h: (jnp.sin(h), h), lambda h, g: (g * jnp.cos(h),), optimize_remat=True)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return act(x @ w).sum()

    program = trace_loss(loss, (X, Y))
    last = program.num_operations
    roots = [Region(0, last, children=(Region(0, k, checkpointed=True),)) for k in (last, last - 1)]
    steps = [program.step(emit_flat(program, root)) for root in roots]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda step: jax.jit(step)(X, Y)[2], steps))
    same(found, 2 * [[jax.grad(loss)(X, Y)]])


def test_a_planned_function_inside_the_rule_of_another() -> None:
    """It is planned while the other is being traced, by threads of its own."""
    config = jax_hremat.PlannerConfig(cost="analytic", max_rounds=0, floor_rounds=0)
    planned = functools.partial(jax_hremat.hremat, budget=1.0, target="cpu", config=config)

    @planned()
    def inner(x: jax.Array) -> jax.Array:
        return (jnp.sin(jnp.sin(x)) ** 2).sum()

    @jax.custom_vjp
    def outer(x: jax.Array) -> jax.Array:
        return (jnp.sin(jnp.sin(x)) ** 2).sum()

    outer.defvjp(jax.value_and_grad(inner), lambda gradient, g: (g * gradient,))

    def loss(x: jax.Array) -> jax.Array:
        return outer(jnp.tanh(x))

    found: list[Any] = []
    thread = Thread(target=lambda: found.append(jax.jit(jax.grad(planned()(loss)))(X)), daemon=True)
    thread.start()
    thread.join(120)
    assert found, "it waits for itself"
    same(found[0], jax.grad(loss)(X))


def test_a_rule_that_gives_a_scalar_no_cotangent() -> None:
    @jax.custom_vjp
    def scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.sin(x) * scale

    scaled.defvjp(
        lambda x, scale: (jnp.sin(x) * scale, (x, scale)),
        lambda kept, g: (g * jnp.cos(kept[0]) * kept[1], None),
    )
    program = check(lambda x: scaled(x, x.mean()).sum(), X)
    (mean, *_) = [v for v in build_graph(program).values if v.text == "f32[]"]
    assert not mean.active


def test_what_a_rule_gives_no_cotangent_is_not_differentiated() -> None:
    """The rule of what comes before is not asked for cotangents that the program never gives."""

    @jax.custom_vjp
    def two(x: jax.Array) -> Any:
        return jnp.sin(x), jnp.exp(x)

    def two_backward(x: jax.Array, gs: Any) -> Any:
        if not isinstance(gs[1], SymbolicZero):
            raise TypeError("the second result has no derivative")
        return (gs[0] * jnp.cos(x),)

    two.defvjp(
        lambda x: ((jnp.sin(x.value), jnp.exp(x.value)), x.value), two_backward, symbolic_zeros=True
    )

    @jax.custom_vjp
    def first(x: jax.Array, y: jax.Array) -> jax.Array:
        return x * y

    first.defvjp(lambda x, y: (x * y, y), lambda y, g: (g * y, None))

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(first(*two(x)))

    call = loss_call(loss, (X,))
    program = call.program
    graph = build_graph(program)
    (rule,) = [
        op for op in graph.operations if op.primitive == "custom_vjp_call" and len(op.outputs) == 2
    ]
    assert [graph.values[v].active for v in rule.outputs] == [True, False]
    planned = emit(call, Region(0, program.num_operations, checkpointed=True))
    np.testing.assert_allclose(jax.grad(planned)(X), jax.grad(loss)(X), rtol=1e-6)
