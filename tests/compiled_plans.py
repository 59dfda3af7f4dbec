"""Compiled plans with figures that a test chooses."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from tracing import trace_loss

from jax_hremat import PlannerConfig
from jax_hremat._emit.step import own_step
from jax_hremat._plan.region import Region
from jax_hremat._planner.candidate import Candidate
from jax_hremat._planner.candidates import Candidates
from jax_hremat._planner.context import prepare
from jax_hremat._solve.regions import Barriers
from jax_hremat._xla.compile import MemoryStats
from jax_hremat._xla.target import get_target

FEW, MANY = Barriers.USUAL, Barriers.USUAL | Barriers.PLAIN
PREDICTED_BYTES = 100_000


def plain_candidate() -> Candidate:
    """A compiled plan without rematerialization, of a program of one operation."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.tanh(w).sum()

    program = trace_loss(loss, (jax.ShapeDtypeStruct((8,), np.float32),))
    config = PlannerConfig(cost="analytic")
    context = prepare(own_step(program), get_target("cpu"), config, 0.0, lambda *_: None)
    return Candidates(context, lambda *_: None).plain


def compiled(
    plain: Candidate,
    *,
    plan: int,
    more_bytes: int = 0,
    excess_bytes: int = 0,
    groups: bool = False,
    block: int = 0,
    barriers: Barriers = FEW,
) -> Candidate:
    """A compiled plan. Those of the same number differ in barriers alone.

    Args:
        plan: Its number.
        more_bytes: Its predicted peak, over that of the others.
        excess_bytes: Its compiled peak, over the predicted one.
        groups: Whether it has groups.
        block: The block whose backward sets the peak.
        barriers: Its barriers.
    """
    peak_bytes = PREDICTED_BYTES + more_bytes
    late = Barriers.LATE_ARGUMENTS in barriers
    child = Region(plan, plan + 1, True, barrier=Barriers.PLAIN in barriers, late_arguments=late)
    return replace(
        plain,
        root=Region(0, 99, children=(child,)),
        selection=replace(plain.selection, groups=((0, 1),) if groups else ()),
        prediction=replace(
            plain.prediction,
            peak_bytes=peak_bytes,
            peak=replace(plain.prediction.peak, block=block, in_backward=True),
        ),
        step=replace(plain.step, memory=MemoryStats(0, 0, peak_bytes + excess_bytes, 0, 0)),
        barriers=barriers,
    )
