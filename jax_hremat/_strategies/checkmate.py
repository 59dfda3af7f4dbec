"""Checkmate: an integer program over all forwards and backwards of the blocks."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._schedules.checkmate import order_of
from jax_hremat._schedules.checkmate_lp import least_possible_bytes, rounded
from jax_hremat._schedules.schedule import with_drops, without_unread
from jax_hremat._schedules.simulate import Simulation, simulate, without_recompute
from jax_hremat._solve.backend import SolverConfig, Status
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.checkmate import fastest_stages
from jax_hremat._strategies.nearest_nest import nearest_nest
from jax_hremat._strategies.step_graph import StepGraph, step_graph
from jax_hremat._strategies.strategy import Choices, Curve, Strategy

PROVEN = "integer program, proven optimal"
NODE_LIMIT = "integer program, best found within the limit of nodes"
ROUNDED = "relaxation, rounded"

# The limits for which schedules are made, and the thresholds above which fractions are rounded up.
_NUM_LIMITS = 8
_THRESHOLDS = (0.1, 0.3, 0.5, 0.7, 0.9)


class Checkmate(Strategy):
    """Free schedules of the blocks by integer programming, and the nests nearest to them."""

    name = "checkmate"
    summary = "integer program over all blocks at all times, and the nest nearest to its schedule"
    source = (
        "Jain, Jain, Nrusimha, Gholami, Abbeel, Keutzer, Stoica, Gonzalez: Checkmate: Breaking the "
        "Memory Wall with Optimal Tensor Rematerialization (MLSys 2020), sections 4 and 5"
    )
    leaves_out = (
        "operations inside blocks; backwards that run again; randomised rounding. Its schedules "
        "drop and compute in any order: what is emitted is the nearest nest of checkpoints"
    )
