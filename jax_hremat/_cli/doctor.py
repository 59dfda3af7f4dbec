"""Checks of everything that planning needs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version

import jax
import jax.numpy as jnp

from jax_hremat._jax.checkpoints import remat3_enabled
from jax_hremat._jax.cudnn import INSTALL as INSTALL_CUDNN
from jax_hremat._jax.cudnn import cudnn_version, load_cudnn
from jax_hremat._shared.errors import HRematError
from jax_hremat._solve.backend import SolverConfig, solve
from jax_hremat._solve.modelling import cp
from jax_hremat._xla.cache import ENVIRONMENT_VARIABLE, CompileCache
from jax_hremat._xla.compile import compile_flat, compiler_versions
from jax_hremat._xla.target import Target, get_target


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked.

    Attributes:
        name: What was checked.
        passed: Whether it is as it should be.
        needed: Whether planning is impossible without it.
        found: What was found.
        advice: What to do if the check failed.
    """

    name: str
    passed: bool
    needed: bool
    found: str
    advice: str = ""


def check_all(target_name: str) -> Iterator[Check]:
    """The checks, each run when the iterator reaches it.

    Raises:
        UnknownTargetError: There is no such target.
    """
    target = get_target(target_name)
    yield _versions()
    yield _settings()
    yield _solver()
    yield _compiles("compile for this CPU", get_target("cpu"), needed=True)
    if target.platform != "cpu":
        yield _compiles(f"compile for {target.name}, without one", target, needed=False)
        yield _cudnn()
    yield _devices()
    yield _cache()


def _versions() -> Check:
    versions = compiler_versions()
    return Check("versions", True, True, ", ".join(f"{k} {v}" for k, v in versions.items()))


def _settings() -> Check:
    on = remat3_enabled()
    advice = "jax.config.update('jax_remat3', False), or unset JAX_REMAT3" if on else ""
    return Check("jax_remat3", not on, True, "on" if on else "off", advice)


def _solver() -> Check:
    def found() -> str:
        x = cp.Variable(3, boolean=True)
        problem = cp.Problem(cp.Maximize(cp.sum(x)), [x[0] + x[1] <= 1])
        outcome = solve(problem, SolverConfig())
        return f"HiGHS through cvxpy {version('cvxpy')}: {outcome.status.value}"

    return _tried("solver", found, needed=True)


def _compiles(name: str, target: Target, *, needed: bool) -> Check:
    def found() -> str:
        shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        compiled = compile_flat(lambda a: jnp.tanh(a @ a), [shape], target)
        return f"{compiled.memory.peak_bytes} bytes for a small product, as XLA says"

    return _tried(name, found, needed=needed)


def _cudnn() -> Check:
    load_cudnn()
    found = cudnn_version()
    number = "not found" if found is None else f"version {found}"
    advice = INSTALL_CUDNN if found is None else ""
    return Check("cuDNN, for fused attention", found is not None, False, number, advice)


def _devices() -> Check:
    devices = ", ".join(sorted({device.device_kind for device in jax.local_devices()}))
    return Check("JAX's devices in this process", True, True, devices)


def _cache() -> Check:
    name = f"cache ({ENVIRONMENT_VARIABLE})"
    cache = CompileCache.at(None)
    if cache is None and not os.environ.get(ENVIRONMENT_VARIABLE):
        return Check(name, True, False, "none; name a folder there, and planning again is quicker")
    if cache is None or cache.is_read_only:
        return Check(name, False, True, "cannot be written", "name another folder there")

    def found() -> str:
        cache.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache.folder):
            return f"{cache.folder}, writable"

    return _tried(name, found, needed=True)


def _tried(name: str, found: Callable[[], str], *, needed: bool) -> Check:
    try:
        return Check(name, True, needed, found())
    except (HRematError, OSError, ImportError) as error:
        return Check(name, False, needed, type(error).__name__, str(error))
