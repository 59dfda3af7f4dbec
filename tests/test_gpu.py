"""What only an attached GPU can show: that planned steps run there and the peak is kept."""

import jax
import pytest

import jax_hremat
from benchmarks import zoo

pytestmark = pytest.mark.gpu

LIGHT = jax_hremat.PlannerConfig(
    search=jax_hremat.SearchConfig(max_runs=4, max_packings=2, max_saved_sets=1)
)


@pytest.fixture(scope="module")
def planned():
    problem = zoo.make("gpt2-6", "small")
    plan = jax_hremat.plan_remat(problem.loss_fn, budget=0.7, config=LIGHT)(*problem.args)
    return problem, plan


def test_the_default_target_is_the_attached_gpu(planned):
    _, plan = planned
    assert plan.certificate.target == jax_hremat.get_target().name
    assert jax_hremat.get_target().platform == "cuda"


def test_the_planned_step_computes_the_same(planned):
    problem, plan = planned
    args = problem.concrete(seed=0)
    planned_fn = jax_hremat.apply_plan(problem.loss_fn, plan)
    expected = jax.jit(problem.value_and_grad)(*args)
    got = jax.jit(jax.value_and_grad(planned_fn))(*args)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        # bf16 activations: products are summed in another order once XLA fuses differently.
        assert jax.numpy.allclose(a, b, rtol=5e-2, atol=5e-3)


def test_the_device_never_takes_more_than_the_budget(planned):
    problem, plan = planned
    args = problem.concrete(seed=0)
    step = (
        jax.jit(
            jax.value_and_grad(jax_hremat.apply_plan(problem.loss_fn, plan)),
            compiler_options=jax_hremat.compiler_options(),
        )
        .lower(*args)
        .compile()
    )
    device = jax.local_devices()[0]
    before = device.memory_stats()["bytes_in_use"]
    jax.block_until_ready(step(*args))
    peak = device.memory_stats()["peak_bytes_in_use"]
    # What was allocated before is the arguments, which the certificate counts too, and what
    # making them left behind, which it does not.
    slack = max(0, before - plan.certificate.argument_bytes)
    assert peak - slack <= plan.certificate.budget_bytes
