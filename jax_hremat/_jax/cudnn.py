"""The cuDNN library, whose version JAX queries when a function that calls it is traced."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jax._src.lib import cuda_versions

from jax_hremat._shared.errors import TargetUnavailableError

_LIBRARY = "libcudnn.so.9"
INSTALL = (
    'Install it with: pip install "jax_hremat[gpu-aot-cudnn]" (some 700 MB). No GPU and no driver '
    "is needed."
)


@functools.cache
def load_cudnn() -> bool:
    """Loads the cuDNN library that is installed beside JAX as a Python package.

    JAX does so itself where a GPU is attached. Elsewhere, a function that calls cuDNN's kernels,
    such as `jax.nn.dot_product_attention(..., implementation="cudnn")`, can be traced only after
    the library is loaded. Planning loads it first. Call this function if you trace such a function
    before planning, for example in `jax.eval_shape` of a model's initialiser: once JAX has found no
    cuDNN, it does not look again.

    Returns:
        Whether such a package is installed. Without one, JAX uses a library that the system's
        loader finds, if there is one.

    Raises:
        OSError: The library does not load.
    """
    package = importlib.util.find_spec("nvidia")
    for folder in (package.submodule_search_locations or ()) if package else ():
        path = Path(folder) / "cudnn" / "lib" / _LIBRARY
        if path.is_file():
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return True
    return False


@contextmanager
def with_cudnn() -> Iterator[None]:
    """Functions that call cuDNN can be traced inside, if cuDNN is installed.

    Raises:
        TargetUnavailableError: A function calls cuDNN, and cuDNN is not installed.
    """
    load_cudnn()
    try:
        yield
    except RuntimeError as error:
        if not _says_that_it_is_missing(error):
            raise
        raise TargetUnavailableError(
            f"the function calls kernels of cuDNN, such as its fused attention, and cuDNN's "
            f"library is not installed here, so it cannot be traced. {INSTALL}"
        ) from error


def cudnn_version() -> int | None:
    """The version of the cuDNN library that JAX finds, such as 92800; None if it finds none."""
    if cuda_versions is None:
        return None
    try:
        return cuda_versions.cudnn_get_version()
    except RuntimeError as error:
        if _says_that_it_is_missing(error):
            return None
        raise


def _says_that_it_is_missing(error: RuntimeError) -> bool:
    """Whether JAX's error is that cuDNN is missing; the error has no class of its own."""
    return str(error).startswith(("cuDNN not found", "cuDNN is not detected"))
