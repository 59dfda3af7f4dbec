"""Settings of the whole suite: the platform, the property tests, and what needs a GPU."""

import os

# Both are read when JAX is imported, so they stand before anything that imports it. The CPU is
# named outright because, on a machine without a GPU, JAX's CUDA plugin (with which the tests
# compile for GPUs) does not start otherwise.
if os.environ.get("JAX_HREMAT_TEST_GPU") != "1":
    os.environ["JAX_PLATFORMS"] = os.environ.get("JAX_HREMAT_TEST_PLATFORM", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's own chatter.

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# For the tests of steps on a mesh; all others use the first.
jax.config.update("jax_num_cpu_devices", 8)

# No deadline: the first example of a test compiles, and takes many times what the others do.
hypothesis.settings.register_profile("jax_hremat", deadline=None)
hypothesis.settings.load_profile("jax_hremat")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where no GPU is attached."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason="needs an attached GPU, and JAX_HREMAT_TEST_GPU=1")
        for item in gpu_items:
            item.add_marker(skip)
