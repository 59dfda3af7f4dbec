"""Tracing in another thread: what is in force in the one that asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import RLock
from typing import Any

import jax
from jax._src import config, core
from jax.sharding import AbstractMesh


@dataclass(frozen=True, slots=True)
class TraceContext:
    """What must hold where the operations of a program are traced, in whichever thread.

    Attributes:
        mesh: The mesh in force, empty if there is none; manual axes are those of a surrounding
            `shard_map`.
        check_vma: Whether types record along which manual axes a value varies.
        lock: Held by the thread that traces. JAX evaluates the rules in an equation's parameters
            (of a `custom_vjp`, say) at their first use, and fails if two threads use them at once.
    """

    mesh: AbstractMesh
    check_vma: bool
    lock: RLock = field(default_factory=RLock, compare=False, repr=False)

    @staticmethod
    def current() -> TraceContext:
        """The context at the call, of operations that no other context is for."""
        return TraceContext(jax.sharding.get_abstract_mesh(), config._check_vma.value)

    def here(self) -> TraceContext:
        """The context at the call, of the same operations."""
        return replace(TraceContext.current(), lock=self.lock)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Code inside is traced in this context, in whichever thread."""
        with self.lock, self._mesh_in_force():
            yield

    @contextmanager
    def _mesh_in_force(self) -> Iterator[None]:
        if self.mesh.empty:
            yield
            return
        mapped = [(name, self.mesh.shape[name]) for name in self.mesh.manual_axes]
        with (
            core.extend_axis_env_nd(mapped),
            jax.sharding.use_abstract_mesh(self.mesh),
            config._check_vma(self.check_vma),
        ):
            yield

    def inside(self, fun: Callable[..., Any]) -> Callable[..., Any]:
        """The function, traced in this context."""

        @functools.wraps(fun)
        def run(*args: Any) -> Any:
            with self.entered():
                return fun(*args)

        return run


def even_without_jit(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, run as if `jax.disable_jit` were not in force, under which loops are unrolled while
    they are traced: a plan is for the program that `jax.jit` compiles."""

    @functools.wraps(fun)
    def run(*args: Any, **kwargs: Any) -> Any:
        with jax.disable_jit(False):
            return fun(*args, **kwargs)

    return run


def apart(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, run in another thread, where nothing is being traced and no mesh is in force."""

    def run(*args: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(in_settings_of_this_thread(fun), *args).result()

    return run


def in_settings_of_this_thread(fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun`, for another thread, with all settings that JAX's context managers made in this one.

    Such settings apply to one thread only.
    """
    local = [(state, state.get_local()) for state in config.config_states.values()]
    settings = [(state, value) for state, value in local if value is not config.config_ext.unset]

    def run(*args: Any) -> Any:
        with ExitStack() as stack:
            for state, value in settings:
                stack.enter_context(state(value))
            return fun(*args)

    return run
