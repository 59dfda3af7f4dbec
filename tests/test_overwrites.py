"""Kernels that may read what they have overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tracing import emit, loss_call

import jax_hremat
from jax_hremat._emit.step import own_step
from jax_hremat._plan.region import Region
from jax_hremat._xla import certify
from jax_hremat._xla.certify import StepCompiler
from jax_hremat._xla.hlo.overwrites import may_overwrite
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.target import get_target

# The result is as large as what is read twice: here and, moved by `BODY`, under another name.
MODULE = """HloModule step, is_scheduled=true

%fused (p0: f32[8,4], p1: f32[8,4]) -> {result} {{
  %p0 = f32[8,4]{{1,0}} parameter(0)
  %p1 = f32[8,4]{{1,0}} parameter(1)
  %zero = f32[] constant(0)
{body}
}}

ENTRY %main (x: f32[8,4]) -> {result} {{
  %x = f32[8,4]{{1,0}} parameter(0)
  %h = f32[8,4]{{1,0}} copy(%x)
  %all = (f32[8,4]{{1,0}}) tuple(%h)
  %held = (f32[8,4]{{1,0}}) opt-barrier(%all)
  %again = f32[8,4]{{1,0}} get-tuple-element(%held), index=0
  ROOT %fusion = {result} fusion(%h, %{other}), kind=kLoop, calls=%fused
}}
"""
MOVED = """
  %cut = f32[7,4]{1,0} slice(%p1), slice={[1:8], [0:4]}
  %moved = f32[8,4]{1,0} pad(%cut, %zero), padding=0_1x0_0
  ROOT %sum = f32[8,4]{1,0} add(%p0, %moved)"""
BACK_AGAIN = """
  %more = f32[9,4]{1,0} pad(%p1, %zero), padding=1_0x0_0
  %moved = f32[8,4]{1,0} slice(%more), slice={[1:9], [0:4]}
  ROOT %sum = f32[8,4]{1,0} add(%p0, %moved)"""
JOINED = """
  %both = f32[16,4]{1,0} concatenate(%p1, %p1), dimensions={0}
  %moved = f32[8,4]{1,0} slice(%both), slice={[LOW:HIGH], [0:4]}
  ROOT %sum = f32[8,4]{1,0} add(%p0, %moved)"""
TURNED = """
  %moved = f32[8,4]{1,0} reverse(%p1), dimensions={0}
  ROOT %sum = f32[8,4]{1,0} add(%p0, %moved)"""
BOTH_TURNED = """
  %moved = f32[8,4]{1,0} reverse(%p1), dimensions={0}
  %too = f32[8,4]{1,0} reverse(%p0), dimensions={0}
  ROOT %sum = f32[8,4]{1,0} add(%too, %moved)"""
STRIDES = """
  %half = f32[4,4]{1,0} slice(%p1), slice={[0:8:2], [0:4]}
  %moved = f32[8,4]{1,0} concatenate(%half, %half), dimensions={0}
  ROOT %sum = f32[8,4]{1,0} add(%p0, %moved)"""


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("  ROOT %sum = f32[8,4]{1,0} add(%p0, %p1)", False),
        (MOVED, True),
        (BACK_AGAIN, False),
        # At its own place and at another one; only at another one.
        (JOINED.replace("LOW", "0").replace("HIGH", "8"), True),
        (JOINED.replace("LOW", "4").replace("HIGH", "12"), True),
        (TURNED, True),
        # XLA asks of each operand whether it is read elsewhere, and of these both are.
        (BOTH_TURNED, False),
        (STRIDES, True),
    ],
)
def test_what_is_read_here_and_elsewhere_may_be_overwritten(body: str, found: bool) -> None:
    module = parse_hlo(MODULE.format(body=body, other="again", result="f32[8,4]{1,0}"))
    assert may_overwrite(module) == (("fusion",) if found else ())


def test_another_buffer_may_be_read_elsewhere() -> None:
    module = parse_hlo(MODULE.format(body=MOVED, other="x", result="f32[8,4]{1,0}"))
    assert may_overwrite(module) == ()


def test_an_argument_is_not_overwritten() -> None:
    text = MODULE.format(body=MOVED, other="again", result="f32[8,4]{1,0}")
    text = text.replace("tuple(%h)", "tuple(%x)").replace("fusion(%h,", "fusion(%x,")
    assert may_overwrite(parse_hlo(text)) == ()


def test_a_smaller_result_has_a_buffer_of_its_own() -> None:
    body = MOVED.replace("ROOT %sum", "%sum") + (
        "\n  ROOT %few = f32[2,4]{1,0} slice(%sum), slice={[0:2], [0:4]}"
    )
    module = parse_hlo(MODULE.format(body=body, other="again", result="f32[2,4]{1,0}"))
    assert may_overwrite(module) == ()


def test_what_is_read_afterwards_is_not_overwritten() -> None:
    text = MODULE.format(body=MOVED, other="again", result="f32[8,4]{1,0}")
    last = "  ROOT %late = f32[8,4]{1,0} add(%fusion, %h)\n}\n"
    text = text.replace("ROOT %fusion", "%fusion").rstrip().removesuffix("}") + last
    assert may_overwrite(parse_hlo(text)) == ()


def test_a_reduction_that_is_a_result_reads_in_the_same_pass() -> None:
    result = "(f32[8,4]{1,0}, f32[4]{0})"
    body = """
  %double = f32[8,4]{{1,0}} add(%p0, %p0)
  %total = f32[4]{{0}} reduce({read}, %zero), dimensions={{0}}, to_apply=%add
  ROOT %both = (f32[8,4]{{1,0}}, f32[4]{{0}}) tuple(%double, %total)"""
    for read, found in (("%p1", False), ("%turned", True)):
        turned = "" if read == "%p1" else "  %turned = f32[8,4]{1,0} reverse(%p1), dimensions={0}"
        text = MODULE.format(body=turned + body.format(read=read), other="again", result=result)
        add = (
            "%add (a: f32[], b: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
            "  %b = f32[] parameter(1)\n  ROOT %c = f32[] add(%a, %b)\n}\n\n"
        )
        module = parse_hlo(text.replace("%fused (", add + "%fused (", 1))
        assert may_overwrite(module) == (("fusion",) if found else ())


RUNNING = {
    "maximum": lambda h: lax.cummax(h, axis=0),
    "sum of exponentials": lambda h: lax.cumlogsumexp(h, axis=1),
}


def layers(running: Callable[[jax.Array], jax.Array]) -> tuple[Callable[..., Any], Any]:
    """Layers whose running maximum, or the like, is of what the derivative of tanh reads."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w1, w2 in params:
            x = x + running(jnp.tanh(x @ w1)) @ w2
        return jnp.mean(x**2)

    def normal(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape)

    params = [(normal(i, 32, 64) * 0.2, normal(i + 100, 64, 32) * 0.2) for i in range(2)]
    return loss, (params, normal(7, 128, 32))


def assert_equal(ours: Any, theirs: Any) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * float(abs(b).max()))


@pytest.mark.parametrize("running", RUNNING.values(), ids=RUNNING)
def test_barriers_keep_such_kernels_apart(running: Callable[[jax.Array], jax.Array]) -> None:
    loss, args = layers(running)
    call = loss_call(loss, args)
    program = call.program
    alone = Region(0, program.num_operations, children=(Region(2, 3, checkpointed=True),))
    compile_whole = StepCompiler(own_step(program), get_target("cpu"))
    if compile_whole(alone).overwrites:
        assert jax.__version_info__ < (0, 12)
    root, step = compile_whole.without_overwriting(alone)
    assert not step.overwrites
    assert root == (alone.with_barriers() if compile_whole(alone).overwrites else alone)
    original = jax.jit(jax.value_and_grad(loss))(*args)
    assert_equal(jax.jit(jax.value_and_grad(emit(call, root)))(*args), original)
    assert_equal(jax.jit(jax.value_and_grad(emit(call, alone.with_barriers())))(*args), original)


def test_no_plan_overwrites_what_it_reads() -> None:
    loss, args = layers(RUNNING["maximum"])
    plan = jax_hremat.plan_remat(loss, max_slowdown=50.0, target="cpu", effort="low")(*args)
    planned = jax_hremat.apply_plan(loss, plan)
    # Of the running maximum alone, as above.
    assert any(r.checkpointed and (r.start, r.stop) == (2, 3) for _, r in plan.root.walk())
    found = jax.jit(jax.value_and_grad(planned))(*args)
    assert_equal(found, jax.jit(jax.value_and_grad(loss))(*args))
    again = jax_hremat.certify(loss, plan, budget=1.0, target="cpu")(*args)
    assert again.root == plan.root


def test_a_plan_that_overwrites_at_other_shapes_is_not_certified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss, (params, x) = layers(jnp.sin)
    plan = jax_hremat.plan_remat(loss, budget=0.9, target="cpu", effort="low")(params, x)
    # As found in the step of the plan, with all barriers too, and not in that without it.
    answers = iter([("fusion.1",), ("fusion.1",), ()])
    monkeypatch.setattr(certify, "may_overwrite", lambda module: next(answers))
    with pytest.raises(jax_hremat.CertificationError, match=r"overwritten.*: fusion\.1\. .*0\.12"):
        jax_hremat.certify(loss, plan, budget=1.0, target="cpu")(params, x[:64])
    assert not [*answers]
