"""The root program against every selection there is, on random small programs with the costs of the
analytic model: options of blocks, groups, nests of any depth, and what groups keep."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from drawing import examples
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_plans import losses
from test_schedule import all_predictions
from tracing import trace_loss

import jax_hremat
from jax_hremat._emit.step import own_step
from jax_hremat._planner.cost_table import priced
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.prediction import predict
from jax_hremat._solve.schedule import Schedules
from jax_hremat._trace.graph import Graph

MATRIX = jax.ShapeDtypeStruct((512, 512), jnp.float32)
BLOCKS = 5
# More selections of options than these take too long to list.
MOST_SELECTIONS = 2000


def chain_of(loss: Any) -> Chain:
    """The program in a few blocks, each with a few options."""

    def even(graph: Graph) -> list[int]:
        return [i * len(graph.operations) // BLOCKS for i in range(1, BLOCKS)]

    config = jax_hremat.PlannerConfig(
        cost="analytic",
        partitioner=even,
        search=jax_hremat.SearchConfig(max_packings=2, max_saved_sets=2),
        cache_dir="",
    )
    program = trace_loss(loss, (MATRIX, MATRIX))
    step = own_step(program)
    costs = priced(step, jax_hremat.get_target("cpu"), config, 0.0, None, lambda *_: None)
    return costs.chain(0)


@pytest.mark.slow
@given(losses(sizes=(8, 14)), st.data())
@settings(
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_no_selection_of_blocks_groups_and_nests_is_faster_by_a_hundredth(
    loss: Any, data: st.DataObject
) -> None:
    chain = chain_of(loss)
    assume(len(chain) > 3)
    assume(math.prod(map(len, chain.options)) <= MOST_SELECTIONS)
    everything = all_predictions(chain)
    peaks = sorted({p.peak_bytes for p in everything})
    for limit in data.draw(st.sets(st.sampled_from(peaks), min_size=1, max_size=4)):
        best_s = min(p.time_s for p in everything if p.peak_bytes <= limit)
        config = jax_hremat.SolverConfig()
        found = Schedules(chain).fastest_within(limit, config)
        assert found.selection is not None
        assert predict(chain, found.selection).time_s <= 1.01 * best_s
        assert found.bound_s <= best_s + 1e-9
