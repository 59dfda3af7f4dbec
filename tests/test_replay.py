"""What a plan recomputes, against JAX's rules, XLA's own counts and a second liveness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_plans import losses, region_trees
from tracing import trace_call, trace_loss

from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.equations import bind_equation
from jax_hremat._jax.jaxprs import Literal, jaxpr_consts, open_jaxpr, without_dead_code
from jax_hremat._plan.region import Loop, Region
from jax_hremat._primitives.primitives import equation_flops
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay

F32 = np.float32


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def primitives(program: Program) -> list[str]:
    return [eqn.primitive.name for eqn in open_jaxpr(program.jaxpr).eqns]


def untouched(program: Program, *children: Region) -> Region:
    return Region(0, len(primitives(program)), children=children)


def find(program: Program, name: str, occurrence: int = 0) -> int:
    return [i for i, p in enumerate(primitives(program)) if p == name][occurrence]


def chain(*functions: Any) -> Program:
    """One equation for each function, and a matrix product before and after."""

    def loss(w, x):
        x = x @ w
        for function in functions:
            x = function(x)
        return (x @ w).sum()

    return trace_loss(loss, (struct(8, 8), struct(8, 8)))


def mlp(depth: int, batch: int, width: int) -> tuple[Program, list[Region]]:
    """A deep network and its blocks, each a product, a bias and an activation."""

    def loss(ws, bs, x):
        for w, b in zip(ws, bs, strict=True):
            x = jnp.tanh(x @ w + b)
        return (x * x).mean()

    args = ([struct(width, width)] * depth, [struct(width)] * depth, struct(batch, width))
    program = trace_loss(loss, args, argnums=(0, 1))
    ends = [i + 1 for i, p in enumerate(primitives(program)) if p == "tanh"]
    starts = [0, *ends[:-1]]
    return program, [Region(a, b, True) for a, b in zip(starts, ends, strict=True)]


def attention(length: int, width: int, heads: int) -> Program:
    def loss(params, x):
        def split(v):
            return v.reshape(length, heads, width // heads).transpose(1, 0, 2)

        for layer in params:
            mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
            y = (x - mean) * jax.lax.rsqrt(var + 1e-6)
            q, k, v = (split(y @ layer[name]) for name in "qkv")
            probs = jax.nn.softmax(jnp.einsum("htd,hsd->hts", q, k) / 4.0)
            y = jnp.einsum("hts,hsd->htd", probs, v).transpose(1, 0, 2).reshape(length, width)
            x = x + y @ layer["o"]
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return (x * x).mean()

    layer = {name: struct(width, width) for name in "qkvo"}
    layer |= {"up": struct(width, 4 * width), "down": struct(4 * width, width)}
    return trace_loss(loss, ([layer, layer], struct(length, width)))


# Every kind of operation whose derivative rule is out of the ordinary.
def oddities(w, x):
    x = jnp.tanh(x @ w) ** 3
    x = jnp.power(jnp.exp(x), 1.5 + jnp.sin(x))
    x = x + jnp.max(x, axis=-1, keepdims=True)
    x = jax.nn.relu(x) * jax.nn.softmax(x)
    x, ys = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) * jnp.cos(c), c), x, None, length=3)
    return (x * jnp.cumsum(x, 0)).sum() + ys.mean()


def branching(w, x):
    x = jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda v: jnp.cos(v) * v, jnp.exp(x))
    return oddities(w, x)


def odd_program(loss: Any = oddities) -> Program:
    return trace_loss(loss, (struct(8, 8), struct(8, 8)), argnums=(0, 1))


@pytest.mark.parametrize("fun", [oddities, branching])
def test_a_plain_program_recomputes_nothing(fun):
    program = odd_program(fun)
    found = replay(program, untouched(program))
    assert not any(found.recomputed)
    assert found.num_barriers == 0
    # The same count from JAX's own jaxpr, wrappers and all.
    body = emit_flat(program, untouched(program))

    def loss(active, inputs):
        for i, value in zip(program.differentiated, active, strict=True):
            inputs[i] = value
        return body(*inputs)[0]

    inputs = list(program.in_avals)
    active = [inputs[i] for i in program.differentiated]
    plain = without_dead_code(jax.make_jaxpr(jax.value_and_grad(loss))(active, inputs))
    assert found.flops == sum(equation_flops(eqn) for eqn in plain.eqns)


def test_a_checkpointed_program_recomputes_what_its_backward_needs_once():
    program = chain(jnp.sin, jnp.exp)
    assert primitives(program) == ["dot_general", "sin", "exp", "dot_general", "reduce_sum"]
    found = replay(program, Region(0, 5, True))
    # The last product's derivative reads what is before it, never its own result.
    assert found.recomputed == (1, 1, 1, 0, 0)
    assert found.num_barriers == 1
    assert found.kept_bytes == 0


def test_each_level_of_nesting_recomputes_once_more():
    program = chain(jnp.sin, jnp.cos, jnp.sin, jnp.cos, jnp.sin)
    root = Region(1, 3, True)
    expected = {1: (0, 1, 0, 0, 0, 0, 0, 0), 2: (0, 2, 1, 0, 0, 0, 0, 0)}
    expected[3] = (0, 3, 2, 1, 0, 0, 0, 0)
    for depth in (1, 2, 3):
        found = replay(program, untouched(program, root))
        # A region's last operation feeds only what follows it, so its own level spares it.
        assert found.recomputed == expected[depth]
        root = Region(1, root.stop + 1, True, children=(root,))


def test_nested_regions_that_end_together_recompute_once():
    program = chain(jnp.sin, jnp.exp, jnp.cos)
    inner = Region(1, 4, True)
    once, twice = (inner, Region(0, 4, True, children=(inner,)))
    assert replay(program, untouched(program, once)).recomputed == (0, 1, 1, 0, 0, 0)
    # Nothing in the outer region reads the inner one's result: only its input is made again.
    assert replay(program, untouched(program, twice)).recomputed == (1, 1, 1, 0, 0, 0)


def test_a_value_only_its_consumers_outside_read_is_not_recomputed():
    program = chain(jnp.sin, jnp.cos)
    # cos is the run's last operation: its derivative reads its input, and the run keeps none
    # of its inside, so sin runs again and cos does not.
    found = replay(program, untouched(program, Region(1, 3, True)))
    assert found.recomputed == (0, 1, 0, 0, 0)


def test_saving_a_product_or_an_exponential_spares_it():
    program = chain(jnp.sin, jnp.exp, jnp.cos)
    size = 8 * 8 * 4
    nothing = replay(program, Region(0, 6, True))
    product = replay(program, Region(0, 6, True, saved=((0, 0),)))
    exponential = replay(program, Region(0, 6, True, saved=((2, 0),)))
    assert nothing.recomputed == (1, 1, 1, 1, 0, 0)
    assert product.recomputed == (0, 1, 1, 1, 0, 0)
    assert product.kept_bytes == size
    assert product.flops == nothing.flops - 2 * 8**3
    # Its derivative reads the result, and is made to read the named one.
    assert exponential.recomputed == (1, 0, 0, 1, 0, 0)
    assert exponential.kept_bytes == size
    # What its consumers read is spared: cos's own argument is the named one.
    both = replay(program, Region(0, 6, True, saved=((1, 0), (3, 0))))
    assert both.recomputed == (1, 0, 1, 0, 0, 0)
    # All but the product that the sine reads.
    all_of_them = replay(program, Region(0, 6, True, saved=((1, 0), (2, 0), (3, 0))))
    assert all_of_them.recomputed == (1, 0, 0, 0, 0, 0)


def test_a_name_acts_in_the_region_that_saves_it_only():
    program = chain(jnp.sin, jnp.exp, jnp.cos)
    inside = Region(1, 4, True, saved=((1, 0),))
    # The outer recompute makes sin and keeps it for the inner backward; exp runs in both.
    found = replay(program, Region(0, 6, True, children=(inside,)))
    assert found.recomputed == (1, 1, 2, 1, 0, 0)
    assert found.kept_bytes == 0
    # The outer policy reaches into the inner region: what it keeps is never made again, though
    # the inner region alone would make it.
    outside = Region(0, 6, True, saved=((1, 0),), children=(Region(1, 4, True),))
    found = replay(program, outside)
    assert found.recomputed == (1, 0, 2, 1, 0, 0)
    assert found.kept_bytes == 8 * 8 * 4


def test_a_rule_that_adds_operands_is_recognised():
    # The derivative of sort sorts the positions along with the values.
    program = chain(jnp.sin, jnp.sort, jnp.cos)
    assert replay(program, Region(0, 6, True)).recomputed == (1, 1, 1, 1, 0, 0)


def test_a_power_in_a_derivative_is_no_recompute():
    def loss(w, x):
        return jnp.sin(jnp.power(x, w) + jnp.sin(x) ** 3).sum()

    program = trace_loss(loss, (struct(8), struct(8)), argnums=(0, 1))
    power, cube = find(program, "pow"), find(program, "integer_pow")
    names = primitives(program)
    found = replay(program, untouched(program, Region(0, names.index("add"), True)))
    # pow's derivative in w reads x ** w itself; the cube's reads a square, another operation.
    assert found.recomputed[power] == 1
    assert found.recomputed[cube] == 0


def test_what_an_operation_recomputes_of_its_own_accord_is_not_the_plan():
    block = jax.checkpoint(lambda x: jnp.sin(jnp.exp(x)))
    program = chain(jnp.sin, block, jnp.cos)
    found = replay(program, untouched(program))
    assert not any(found.recomputed)
    assert found.num_barriers == 1
    found = replay(program, Region(0, 6, True))
    assert found.recomputed == (1, 1, 1, 1, 0, 0)
    assert found.num_barriers == 2


def test_checkpointing_a_normalisation_with_its_product_recomputes_the_normalisation_only():
    def loss(w, x):
        y = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
        return jnp.sin(y @ w).sum()

    program = trace_loss(loss, (struct(8, 8), struct(8, 8)), argnums=(0, 1))
    product, sine = find(program, "dot_general"), find(program, "sin")
    found = replay(program, untouched(program, Region(0, sine, True)))
    assert found.recomputed[product] == 0
    assert found.recomputed[find(program, "rsqrt")] == 1
    # What sin's derivative reads is kept, being outside.
    assert found.kept_bytes == 8 * 8 * 4


@pytest.mark.parametrize(
    ("checkpointed", "segments", "forwards"),
    [(False, (), 0), (True, (), 1), (False, (4,), 1), (True, (6, 3), 3), (False, (5,), 1)],
)
def test_the_flops_of_a_loop_tell_how_often_its_steps_run_again(checkpointed, segments, forwards):
    def loss(w, x):
        return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=12)[0].sum()

    program = trace_loss(loss, (struct(8, 8), struct(8, 8)), argnums=(0, 1))
    at = find(program, "scan")
    loop = Loop(Region(0, 2, checkpointed=checkpointed), segments)
    found = replay(program, untouched(program, Region(at, at + 1, loop=loop)))
    one_forward = 12 * (2 * 8**3 + 8**2)
    added = found.flops - replay(program, untouched(program)).flops
    # Each level of segments also adds up the cotangent of `w`.
    assert forwards * one_forward <= added < (forwards + 0.1) * one_forward


@pytest.mark.slow
@settings(
    max_examples=examples(40),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_recomputed_operations_account_for_all_added_flops(data):
    """No operation is missed or counted twice: derivatives cost the same in every plan."""
    if data.draw(st.booleans()):
        program = odd_program()
    else:
        loss = data.draw(losses(rewritten=False))
        program = trace_loss(loss, (struct(4, 4), struct(4, 4)))
    found = replay(program, data.draw(region_trees(program, in_loops=False)))
    plain = replay(program, untouched(program))
    equations = open_jaxpr(program.jaxpr).eqns
    costs = [equation_flops(eqn) for eqn in equations]
    added = sum(times * cost for times, cost in zip(found.recomputed, costs, strict=True))
    assert found.flops - plain.flops == added


@settings(max_examples=examples(25), derandomize=True)
@given(data=st.data())
def test_recomputed_operations_are_those_lowering_emits(data):
    program = chain(jnp.sin, jnp.exp, jnp.cos, jnp.tanh, jnp.log)
    root = data.draw(region_trees(program))
    names = primitives(program)
    found = replay(program, root)
    avals = program.in_avals

    counted = ("tanh", "log", "dot_general", "optimization_barrier")

    def count(root: Region) -> Counter[str]:
        traced = jax.jit(program.step(emit_flat(program, root))).trace(*avals)
        # For a GPU, since on the CPU a call may stand in a barrier's place.
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        return Counter({p: text.count(f"stablehlo.{p} ") for p in counted})

    told = count(untouched(program))
    for name, times in zip(names, found.recomputed, strict=True):
        told[name] += times
    told["optimization_barrier"] += found.num_barriers
    assert count(root) == Counter({p: told[p] for p in counted})


def xla_flops(program: Program, root: Region) -> float:
    step = jax.jit(program.step(emit_flat(program, root)))
    compiled = step.lower(*program.in_avals).compile()
    analysis = compiled.cost_analysis()
    assert analysis is not None
    return analysis["flops"]


def test_flops_follow_xla_on_a_deep_network():
    program, blocks = mlp(depth=6, batch=64, width=64)
    saving = tuple(Region(b.start, b.stop, True, ((b.start, 0),)) for b in blocks)
    pair = Region(blocks[0].start, blocks[1].stop, True, children=tuple(blocks[:2]))
    nested = Region(blocks[0].start, blocks[3].stop, True, children=(pair, *blocks[2:4]))
    plans = [(), tuple(blocks), saving, (pair, blocks[4]), (nested,)]
    for children in plans:
        root = untouched(program, *children)
        assert replay(program, root).flops == pytest.approx(xla_flops(program, root), rel=0.05)


@pytest.mark.slow
def test_flops_follow_xla_on_attention():
    program = attention(64, 64, 4)
    names = primitives(program)
    middle = find(program, "erf" if "erf" in names else "tanh")
    half = next(i for i in range(middle, len(names)) if names[i] == "dot_general") + 2
    core = Region(find(program, "dot_general", 3), find(program, "dot_general", 5), True)
    plans = [
        (),
        (Region(0, half, True), Region(half, len(names) - 4, True)),
        (core,),
        (Region(0, half, True, children=(core,)),),
        (Region(0, len(names), True, children=(Region(0, half, True, children=(core,)),)),),
    ]
    for children in plans:
        root = untouched(program, *children)
        assert replay(program, root).flops == pytest.approx(xla_flops(program, root), rel=0.05)


def test_checkpointing_the_blocks_of_a_deep_network_lowers_its_peak():
    program, blocks = mlp(depth=16, batch=256, width=16)
    none = replay(program, untouched(program))
    each = replay(program, untouched(program, *blocks))
    fours = [
        Region(blocks[i].start, blocks[i + 3].stop, True, children=tuple(blocks[i : i + 4]))
        for i in range(0, 16, 4)
    ]
    nested = replay(program, untouched(program, *fours))
    assert nested.peak_bytes < each.peak_bytes < none.peak_bytes
    assert nested.kept_bytes < each.kept_bytes < none.kept_bytes
    assert none.flops < each.flops < nested.flops
    activation = 256 * 16 * 4
    # Blocks checkpointed one by one keep their outputs; groups of four theirs (the first group's
    # input is an argument).
    assert each.kept_bytes - nested.kept_bytes == 12 * activation


def test_the_peak_tells_where_it_is():
    def loss(w, x):
        big = jnp.outer(jnp.sin(x), jnp.cos(x))
        return (jnp.tanh(big).sum(0) * w).sum()

    program = trace_loss(loss, (struct(64), struct(64)))
    found = replay(program, untouched(program))
    assert found.peak_operation is not None
    shape = open_jaxpr(program.jaxpr).eqns[found.peak_operation].outvars[0].aval.shape
    assert shape == (64, 64)


def test_a_call_counts_its_cotangents_as_arguments():
    program = trace_call(lambda w, x: jnp.sin(x @ w), (struct(8, 8), struct(8, 8)), (0, 1))
    found = replay(program, untouched(program))
    size = 8 * 8 * 4
    # Two arguments and a cotangent; the value and two gradients; x @ w or its cosine, and
    # the cotangent of the product.
    assert found.peak_bytes == (3 + 3 + 2) * size
    assert found.kept_bytes == size


def brute_force_peak(program: Program, root: Region) -> int:
    """Peak by asking of every value at every equation whether anything later reads it."""
    step = program.step(emit_flat(program, root))
    nested = jax.make_jaxpr(step)(*program.in_avals)

    def evaluate(jaxpr, consts, args):
        jaxpr = open_jaxpr(jaxpr)
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
        for eqn in jaxpr.eqns:
            inputs = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            body = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            if body is not None:
                outputs = evaluate(body, jaxpr_consts(body), inputs)
            elif eqn.primitive.name in ("name", "reduce_precision", "hremat_barrier"):
                outputs = inputs
            else:
                outputs = bind_equation(eqn, inputs)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    flat = jax.make_jaxpr(lambda *a: evaluate(nested, jaxpr_consts(nested), a))
    jaxpr = without_dead_code(flat(*program.in_avals))

    def nbytes(var):
        return int(np.prod(var.aval.shape)) * var.aval.dtype.itemsize

    def alive(var, made_at, now):
        read_later = any(var in reads(e) for e in jaxpr.eqns[now:])
        return made_at == now or (made_at < now and read_later)

    def reads(eqn):
        return {v for v in eqn.invars if not isinstance(v, Literal)}

    ends = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    always = sum(nbytes(v) for v in (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars))
    made = [(v, i) for i, e in enumerate(jaxpr.eqns) for v in e.outvars if v not in ends]
    return always + max(
        sum(nbytes(v) for v, i in made if alive(v, i, now)) for now in range(len(jaxpr.eqns))
    )


@settings(
    max_examples=examples(25),
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(loss=losses(), data=st.data())
def test_peak_equals_a_brute_force_liveness(loss, data):
    program = trace_loss(loss, (struct(4, 4), struct(4, 4)), argnums=(0, 1))
    root = data.draw(region_trees(program))
    assert replay(program, root).peak_bytes == brute_force_peak(program, root)
