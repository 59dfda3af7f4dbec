"""Region trees that are not of a program are refused before anything is run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from tracing import trace_loss

from jax_hremat import PlanFormatError
from jax_hremat._emit.emit import emit_flat
from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._plan.region import Loop, Region
from jax_hremat._trace.trace import Program


def loss(w: jax.Array) -> jax.Array:
    mask = lax.rng_uniform(0.0, 1.0, (4,))
    x = lax.cond(w[0] > 0, jnp.sin, jnp.tanh, w * mask)
    return lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0].sum()


@pytest.fixture(scope="module")
def program() -> Program:
    return trace_loss(loss, (jnp.ones(4),))


def place(program: Program, primitive: str) -> int:
    names = [eqn.primitive.name for eqn in open_jaxpr(program.jaxpr).eqns]
    return names.index(primitive)


def refused(program: Program, *children: Region) -> str:
    with pytest.raises(PlanFormatError) as error:
        emit_flat(program, Region(0, program.num_operations, children=children))
    return str(error.value)


def test_the_whole_program_is_in_the_tree(program: Program) -> None:
    with pytest.raises(PlanFormatError, match="operations 0 to 1, and the program has"):
        emit_flat(program, Region(0, 1))


def test_what_must_run_once_is_not_recomputed(program: Program) -> None:
    at = place(program, "rng_uniform")
    said = refused(program, Region(at, at + 2, checkpointed=True))
    assert f"at operation {at} it recomputes it, and it must run exactly once" in said
    assert f"→ {at} rng_uniform  " in said and "test_check.py" in said


def test_saved_values_are_outputs(program: Program) -> None:
    at = place(program, "mul")
    said = refused(program, Region(at, at + 1, checkpointed=True, saved=((at, 1),)))
    assert "saves output 1 of it" in said


def test_loops_are_scans_and_branches_those_of_conds(program: Program) -> None:
    scan, cond, other = (place(program, name) for name in ("scan", "cond", "mul"))
    body = Loop(Region(0, 1))
    assert "as a scan" in refused(program, Region(other, other + 1, loop=body))
    three = (Region(0, 1),) * 3
    assert "a cond of 3 branches" in refused(program, Region(cond, cond + 1, branches=three))
    # A body is a program of its own, with a tree of its own.
    beyond = Loop(Region(0, 9))
    assert "0 to 9" in refused(program, Region(scan, scan + 1, loop=beyond))
