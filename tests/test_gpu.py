"""What only an attached GPU can show: that planned steps run there and the peak is kept."""

import jax
import pytest

import jax_hremat
from benchmarks import zoo
from benchmarks.device import measured_peak_bytes
from jax_hremat._xla.compile import memory_stats

pytestmark = pytest.mark.gpu

LIGHT = jax_hremat.PlannerConfig(search=jax_hremat.SearchConfig(max_packings=2, max_saved_sets=1))


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


@pytest.fixture(scope="module")
def planned_step(planned):
    problem, plan = planned
    step = jax.value_and_grad(jax_hremat.apply_plan(problem.loss_fn, plan))
    options = jax_hremat.compiler_options()
    args = problem.concrete(seed=0)
    return jax.jit(step, compiler_options=options).lower(*args).compile(), args


def test_the_step_compiled_where_it_runs_keeps_the_certified_peak(planned, planned_step):
    certificate, (step, _) = planned[1].certificate, planned_step
    # Both were compiled on this device, and kernels are tried out once in a process.
    assert certificate.attached
    assert memory_stats(step).argument_bytes == certificate.argument_bytes
    assert memory_stats(step).peak_bytes == certificate.peak_bytes <= certificate.budget_bytes


def test_the_device_never_takes_more_than_the_budget(planned, planned_step):
    assert 0 < measured_peak_bytes(*planned_step) <= planned[1].certificate.budget_bytes


def test_measured_rates_are_below_the_published_ones():
    published, measured = jax_hremat.get_target(), jax_hremat.calibrate()
    assert measured.config_text == published.config_text
    assert 0.2 < measured.bandwidth_bytes_per_s / published.bandwidth_bytes_per_s <= 1
    assert 0.2 < measured.vector_flops_per_s / published.vector_flops_per_s <= 1
    for dtype in ("bf16", "f16", "f32"):
        ratio = measured.matrix_flops_per_s[dtype] / published.matrix_flops_per_s[dtype]
        assert 0.1 < ratio <= 1, dtype
