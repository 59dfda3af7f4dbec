"""Settings of the whole suite: the platform, the property tests, and what needs a GPU."""

import gc
import os
from importlib.metadata import version

# Both are read when JAX is imported, so they stand before anything that imports it. The CPU is
# named outright because, on a machine without a GPU, JAX's CUDA plugin (with which the tests
# compile for GPUs) does not start otherwise.
if os.environ.get("JAX_HREMAT_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_HREMAT_TEST_PLATFORM", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own chatter.
# Source lines in lowered programs, which nothing reads, take a twentieth of the tests' time.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
os.environ["JAX_HREMAT_CACHE_DIR"] = ""  # No test depends on what was compiled before it.
# Without optimising the code of kernels, and without MLIR, XLA:CPU compiles three times as fast;
# memory is assigned before that. From 0.11 on, MLIR cannot be left out, and little is gained. The
# slow run and that on a GPU take XLA as it is.
_UNOPTIMISED = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1"
)
if not {"JAX_HREMAT_TEST_OPTIMISED", "JAX_HREMAT_TEST_GPU"} & {*os.environ}:
    if tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11):
        os.environ.setdefault("XLA_FLAGS", _UNOPTIMISED)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

import jax_hremat  # noqa: E402
from jax_hremat._shared.errors import TargetUnavailableError  # noqa: E402
from jax_hremat._xla.compile import compile_flat  # noqa: E402
from jax_hremat._xla.target import Target, get_target  # noqa: E402

# Tracing and compiling make so many objects that Python's collector, as it is set by default, takes
# a sixth of the suite's time.
gc.set_threshold(200_000, 50, 1000)

jax_hremat.progress(False)  # But in the tests of what is shown.

# For the tests of steps on a mesh; all others use the first.
jax.config.update("jax_num_cpu_devices", 8)

# No deadline: the first example of a test compiles, and takes many times what the others do.
hypothesis.settings.register_profile("all", deadline=None, max_examples=100)
hypothesis.settings.register_profile("some", deadline=None, max_examples=30)


@pytest.fixture(scope="session")
def h200() -> Target:
    """The target, if something can be compiled for it here."""
    target = get_target("h200")
    try:
        compile_flat(jax.numpy.tanh, [jax.ShapeDtypeStruct((4,), "float32")], target)
    except TargetUnavailableError as error:
        pytest.skip(f"nothing compiles for a GPU here: {error}")
    return target


def _is_slow_run(config: pytest.Config) -> bool:
    asked_for = config.getoption("markexpr")
    return "slow" in asked_for and "not slow" not in asked_for


def pytest_configure(config: pytest.Config) -> None:
    """Chooses how many examples are drawn, before any test is imported."""
    hypothesis.settings.load_profile("all" if _is_slow_run(config) else "some")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where no GPU is attached; in the slow run, draws all examples of
    the property tests as well, which the default run draws a part of."""
    if _is_slow_run(config):
        for item in items:
            if hasattr(getattr(item, "obj", None), "hypothesis"):
                item.add_marker(pytest.mark.slow)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs an attached GPU, and JAX_HREMAT_TEST_GPU=1")
        for item in gpu_items:
            item.add_marker(skip)
