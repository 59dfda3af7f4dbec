"""What JAX does not offer for compiling: no cache, and the configuration of attached GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax._src import config
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]


@contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Compilations inside bypass JAX's cache, so that they can be observed."""
    with config.enable_compilation_cache(False):
        yield


def attached_gpu_target_config() -> str:
    """Returns XLA's target configuration of the attached GPUs, as a text proto.

    Not checked: that the default backend is a GPU; it must be.
    """
    topology = xla_client.get_topology_for_devices(jax.local_devices())
    return str(topology.target_config)
