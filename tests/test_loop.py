"""Scans in another mode: the same values and gradients, whatever the regions and segments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name
from programs import jit_peak_bytes, normal
from random_plans import QUICK, loop_losses, region_trees, struct
from random_plans import WIDTH as WIDE
from tracing import emit, loss_call, trace_loss

import jax_hremat
from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr
from jax_hremat._plan.region import Loop, Region
from jax_hremat._trace.bodies import scan_body
from jax_hremat._trace.call import TracedCall
from jax_hremat._trace.trace import Program

WIDTH = 3


def loss(w: jax.Array, h: jax.Array, xs: jax.Array, reverse: bool, unroll: int = 1) -> jax.Array:
    def body(carry: Any, x: Any) -> Any:
        h, key = carry
        key, here = jax.random.split(key)
        y = jnp.tanh(h @ w + x)
        y = jnp.where(jax.random.bernoulli(here, 0.8, y.shape), y, 0.0)
        return (y * 0.5 + h, key), (y * h).sum()

    carry = (h, jax.random.key(0))
    (h, _), ys = jax.lax.scan(body, carry, xs, reverse=reverse, unroll=unroll)
    return (h * h).sum() + (ys * jnp.arange(ys.size)).sum()


@functools.cache
def traced_call(length: int, **options: Any) -> tuple[TracedCall, list[jax.Array]]:
    w, h, xs = normal(0, WIDTH, WIDTH), normal(1, WIDTH), normal(2, length, WIDTH)
    call = loss_call(lambda w, h, xs: loss(w, h, xs, **options), (w, h, xs), argnums=(0, 1, 2))
    return call, [w, h, xs]


def traced(length: int, **options: Any) -> tuple[Program, list[jax.Array]]:
    call, args = traced_call(length, **options)
    return call.program, args


def scan_index(program: Program) -> int:
    return next(i for i, e in enumerate(program.jaxpr.jaxpr.eqns) if e.primitive.name == "scan")


def in_mode(program: Program, loop: Loop, *, checkpointed: bool = False) -> Region:
    at = scan_index(program)
    scan = Region(at, at + 1, loop=loop)
    if checkpointed:
        scan = Region(at, at + 1, checkpointed=True, children=(scan,))
    return Region(0, program.num_operations, children=(scan,))


def body_of(program: Program) -> Program:
    return scan_body(program.jaxpr.jaxpr.eqns[scan_index(program)])


def body_modes(program: Program) -> list[Region]:
    eqns = body_of(program).jaxpr.jaxpr.eqns
    n = len(eqns)
    product = next(i for i, e in enumerate(eqns) if e.primitive.name == "dot_general")
    return [
        Region(0, n),
        Region(0, n, checkpointed=True),
        Region(0, n, checkpointed=True, saved=((product, 0),)),
        Region(0, n, children=(Region(product, n, checkpointed=True),)),
        Region(0, n, checkpointed=True, children=(Region(product, n - 1, checkpointed=True),)),
    ]


@functools.cache
def plain_step(program: Program) -> Callable[..., Any]:
    """The step without regions, compiled once for all tests of a program."""
    return jax.jit(program.step(emit_flat(program, Region(0, program.num_operations))))


def assert_same_step(program: Program, inputs: list[jax.Array], root: Region) -> None:
    plain = plain_step(program)(*inputs)
    planned = jax.jit(program.step(emit_flat(program, root)))(*inputs)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(planned), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("segments", [(), pytest.param((4,), marks=pytest.mark.slow), (6, 2)])
def test_a_complex_carry(segments: tuple[int, ...]) -> None:
    def loss(w: jax.Array, xs: jax.Array) -> jax.Array:
        def body(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.exp(jax.lax.complex(-w * w, w)) * h + x
            return h, jnp.abs(h)

        h, ys = jax.lax.scan(body, jnp.zeros(WIDTH, np.complex64), xs)
        return (ys * ys).sum() + jnp.real(h).sum()

    inputs = [jnp.linspace(0.1, 1.0, WIDTH), jnp.ones((13, WIDTH))]
    program = trace_loss(loss, tuple(inputs), argnums=(0, 1))
    body = Region(0, body_of(program).num_operations, checkpointed=True)
    assert_same_step(program, inputs, in_mode(program, Loop(body, segments)))


# Every body mode and every kind of segments, forward and reverse, leftover steps in two levels.
CASES = [
    (False, 0, (4,)),
    (False, 1, ()),
    (False, 2, (3,)),
    (False, 3, (6, 2)),
    (False, 4, (40,)),
    (True, 0, (5, 4, 3)),
    (True, 1, (1,)),
    (True, 2, ()),
    (True, 3, ()),
    (True, 4, (4,)),
]


# Still every body mode, and segments of one level and of two, with and without leftover steps.
QUICKLY = [CASES[i] for i in (0, 3, 4, 6, 7)]


@pytest.mark.parametrize(
    "reverse, mode, segments",
    [pytest.param(*c, marks=[] if c in QUICKLY else [pytest.mark.slow]) for c in CASES],
)
def test_every_region_gives_the_same_step(
    reverse: bool, mode: int, segments: tuple[int, ...]
) -> None:
    check_mode(reverse, mode, segments, checkpointed=False)


@pytest.mark.parametrize(
    "reverse, mode, segments",
    [
        pytest.param(*case, marks=[] if case in (CASES[0], CASES[8]) else [pytest.mark.slow])
        for case in CASES
    ],
)
def test_every_region_in_a_checkpointed_region_gives_the_same_step(
    reverse: bool, mode: int, segments: tuple[int, ...]
) -> None:
    check_mode(reverse, mode, segments, checkpointed=True)


def check_mode(reverse: bool, mode: int, segments: tuple[int, ...], *, checkpointed: bool) -> None:
    program, inputs = traced(13, reverse=reverse)
    root = in_mode(program, Loop(body_modes(program)[mode], segments), checkpointed=checkpointed)
    assert_same_step(program, inputs, root)


@pytest.mark.parametrize("length", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_short_scans(length: int) -> None:
    program, inputs = traced(length, reverse=False)
    assert_same_step(program, inputs, in_mode(program, Loop(body_modes(program)[2], (2,))))


@pytest.mark.slow
def test_an_unrolled_scan_stays_one() -> None:
    program, inputs = traced(12, reverse=False, unroll=4)
    assert_same_step(program, inputs, in_mode(program, Loop(body_modes(program)[1], (6, 3))))


@settings(QUICK, max_examples=examples(8))
@given(st.data())
def test_random_programs_in_random_options_give_the_same_step(data: st.DataObject) -> None:
    loss = data.draw(loop_losses())
    program = trace_loss(loss, (struct(WIDE, WIDE), struct(WIDE, WIDE)), argnums=(0, 1))
    tree = data.draw(region_trees(program, max_depth=2))
    inputs = [0.5 * normal(seed, WIDE, WIDE) for seed in range(2)]
    plain = program.step(emit_flat(program, Region(0, tree.stop)))(*inputs)
    planned = program.step(emit_flat(program, tree))(*inputs)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(planned), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_under_vmap_and_second_derivatives() -> None:
    program, inputs = traced(6, reverse=False)
    modes = [Loop(body_modes(program)[mode], (2,)) for mode in (2, 4)]
    plain = emit_flat(program, Region(0, program.num_operations))
    w, h, xs = inputs
    batch = jnp.stack([xs, 2 * xs])

    def curvature(flat: Any, x: jax.Array) -> jax.Array:
        slope = jax.grad(lambda w: flat(w, h, x)[0])
        return jax.jvp(slope, (w,), (jnp.ones_like(w),))[1]

    expected = jax.jit(jax.vmap(lambda x: curvature(plain, x)))(batch)
    for mode in modes:
        flat = emit_flat(program, in_mode(program, mode))
        got = jax.jit(jax.vmap(lambda x, flat=flat: curvature(flat, x)))(batch)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def kept_bytes(program: Program, root: Region) -> int:
    """Stacked residuals: outputs of scans in the differentiated step beyond the program's."""
    step = jax.make_jaxpr(program.step(emit_flat(program, root)))(*program.in_avals)
    first = next(e for e in step.jaxpr.eqns if e.primitive.name == "scan")
    return sum(v.aval.size for v in first.outvars if v.aval.dtype == jnp.float32)


def test_a_checkpointed_body_keeps_less_and_segments_less_still() -> None:
    program, _ = traced(64, reverse=False)
    n = len(body_of(program).jaxpr.jaxpr.eqns)
    plain, checkpointed = (Region(0, n, checkpointed=w) for w in (False, True))
    kept = [
        kept_bytes(program, in_mode(program, loop))
        for loop in (Loop(plain), Loop(checkpointed), Loop(plain, (8,)))
    ]
    assert kept[0] > 1.5 * kept[1] > 3 * kept[2]


def test_names_of_two_scans_are_apart() -> None:
    def two(w: jax.Array, x: jax.Array) -> jax.Array:
        def body(h: jax.Array, _: None) -> Any:
            return jnp.tanh(h @ w), None

        x, _ = jax.lax.scan(body, x, None, length=4)
        x, _ = jax.lax.scan(body, x, None, length=4)
        return checkpoint_name(x, "own").sum()

    program = trace_loss(two, (jnp.eye(WIDTH), jnp.ones((WIDTH,))))
    at = [i for i, e in enumerate(program.jaxpr.jaxpr.eqns) if e.primitive.name == "scan"]
    n = len(scan_body(program.jaxpr.jaxpr.eqns[at[0]]).jaxpr.jaxpr.eqns)
    body = Region(0, n, checkpointed=True, saved=((0, 0),))
    root = Region(
        0,
        program.num_operations,
        children=tuple(Region(i, i + 1, loop=Loop(body)) for i in at),
    )
    text = str(jax.make_jaxpr(emit_flat(program, root))(*program.in_avals))
    assert {f"name=hremat/{i}/0.0" in text for i in at} == {True}


def test_a_loop_is_one_bare_scan_and_its_lengths_decrease() -> None:
    body = Region(0, 4)
    with pytest.raises(ValueError, match="one plain scan"):
        Region(0, 2, loop=Loop(body))
    with pytest.raises(ValueError, match="one plain scan"):
        Region(0, 1, checkpointed=True, loop=Loop(body))
    for segments in ((2, 4), (3, 3), (0,)):
        with pytest.raises(ValueError, match="decreasing"):
            Loop(body, segments)
    region = Region(3, 4, loop=Loop(Region(0, 4, checkpointed=True), (9, 3)))
    assert (region.num_checkpointed, region.depth) == (3, 3)
    assert region.shifted(2) == Region(5, 6, loop=region.loop)


def mlp_scan(w: jax.Array, x: jax.Array, unroll: Any, wrap: Any = lambda f: f) -> jax.Array:
    def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return x + jnp.sin(jax.nn.gelu(jnp.tanh(x @ w) @ w) @ w), None

    return (jax.lax.scan(wrap(step), x, None, length=8, unroll=unroll)[0] ** 2).mean()


@pytest.mark.parametrize(
    "unroll", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, True)), 2]
)
def test_the_steps_of_an_unrolled_scan_take_no_more_than_checkpointed_by_hand(unroll: Any) -> None:
    args = jnp.eye(16), jnp.ones((64, 16))
    options = {"compiler_options": jax_hremat.compiler_options("cpu")}
    call = loss_call(lambda w, x: mlp_scan(w, x, unroll), args)
    program = call.program
    body = Region(0, len(body_of(program).jaxpr.jaxpr.eqns), checkpointed=True)
    planned = emit(call, in_mode(program, Loop(body)))
    by_hand = functools.partial(mlp_scan, unroll=unroll, wrap=jax.checkpoint)
    plain = functools.partial(mlp_scan, unroll=unroll)
    peaks_bytes = [
        jit_peak_bytes(jax.jit(jax.value_and_grad(fun)), *args, **options)
        for fun in (planned, by_hand, plain)
    ]
    assert peaks_bytes[0] <= 1.01 * peaks_bytes[1]
    assert peaks_bytes[0] < 0.8 * peaks_bytes[2]


def barriers(jaxpr: Any) -> list[bool]:
    """Of each recompute at any depth, whether it is kept apart from the first run."""
    found = []
    for eqn in open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name in ("checkpoint", "remat2"):
            found.append(bool(np.all(eqn.params["prevent_cse"])))
        found += [b for inner in inner_jaxprs(eqn) for b in barriers(inner)]
    return found


@pytest.mark.parametrize(
    ("unroll", "segments", "expected"),
    [
        # A step, in a loop of its own.
        (1, (), [False]),
        # Two steps in one body.
        (2, (), [True]),
        # Segments in a loop, a loop in each.
        (1, (2,), [False, False]),
        # One segment of three is in no loop, and so is the rest.
        (1, (3,), [True, False, True, False]),
        # The first run of the inner segments is in the outer ones' recompute.
        (1, (2, 1), [False, False, False]),
    ],
)
def test_recomputes_in_reach_of_their_first_run_are_kept_apart(
    unroll: int, segments: tuple[int, ...], expected: list[bool]
) -> None:
    call, args = traced_call(4, reverse=False, unroll=unroll)
    program = call.program
    body = Region(0, len(body_of(program).jaxpr.jaxpr.eqns), checkpointed=True)
    planned = emit(call, in_mode(program, Loop(body, segments)))
    assert barriers(jax.make_jaxpr(planned)(*args)) == expected


def test_a_plain_region_with_a_barrier_changes_nothing_about_what_is_around() -> None:
    call, args = traced_call(4, reverse=False)
    program = call.program
    n = len(body_of(program).jaxpr.jaxpr.eqns)
    inner = Region(1, n - 1, checkpointed=True)
    for between in (inner, Region(0, n - 1, children=(inner,), barrier=True)):
        body = Region(0, n, checkpointed=True, children=(between,))
        root = in_mode(program, Loop(body))
        assert barriers(jax.make_jaxpr(emit(call, root))(*args)) == [False, True]
        assert_same_step(program, args, root)
