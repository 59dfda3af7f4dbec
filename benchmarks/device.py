"""Executables run on the attached device: how long they take, and how much of its memory."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat import Target
from jax_hremat._xla.compile import memory_stats
from jax_hremat._xla.target import attached_device

NUM_RUNS = 9
# Runs in a row of one measurement take at least this long, so that the host's start does not count.
LONG_ENOUGH_S = 0.1
# Two dimensions, since the indices of a longer one need 64 bits.
_MIB = 2**20


def is_attached(target: Target) -> bool:
    """Whether JAX's default backend is a device of the target."""
    device = jax.local_devices()[0]
    return device.platform == target.name == "cpu" or attached_device(target) is not None


@dataclass(frozen=True)
class Timed:
    """Runs of one executable: the median, and the difference of the upper and the lower
    quartile."""

    median_s: float
    spread_s: float


def timed_in_turn(
    executables: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    num_runs: int = NUM_RUNS,
    long_enough_s: float = LONG_ENOUGH_S,
) -> list[Timed]:
    """Times of each, measured in turn, so that what else the machine does meets all alike.

    Args:
        executables: Compiled functions of the same arguments.
        args: Arrays.
        num_runs: Measurements of each, after two runs that are left out.
        long_enough_s: What one measurement takes at least; runs in a row make it so.
    """

    def once(executable: Callable[..., Any], count: int) -> float:
        result: Any = None
        start_s = time.perf_counter()
        for _ in range(count):
            result = executable(*args)
        jax.block_until_ready(result)
        return (time.perf_counter() - start_s) / count

    for executable in executables:
        once(executable, 1)
    counts = [max(1, math.ceil(long_enough_s / once(step, 1))) for step in executables]
    measured: list[list[float]] = [[] for _ in executables]
    for _ in range(num_runs):
        for executable, count, own in zip(executables, counts, measured, strict=True):
            own.append(once(executable, count))
    return [_timed(own) for own in measured]


def measured_peak_bytes(executable: jax.stages.Compiled, args: Sequence[Any]) -> int | None:
    """The device's memory at the peak of one run, its arguments included, beside what else is
    alive; None where the device does not say, as a CPU does not.

    The allocator tells only the highest peak since the process began. So memory is first filled
    until this run must exceed that: at first as if the run took nearly what its compiler says, and
    if it does not, as if it took nothing.

    Args:
        executable: A compiled function.
        args: Arrays; only those that the function uses count.

    Raises:
        jax.errors.JaxRuntimeError: The device's memory does not suffice for filling and run.
    """
    device = jax.local_devices()[0]
    if not device.memory_stats():
        return None
    compiled = memory_stats(executable)
    before_bytes = compiled.argument_bytes + compiled.constant_bytes
    own_bytes = compiled.peak_bytes - before_bytes
    filling = []
    for expected_bytes in (int(0.9 * own_bytes), 0):
        stats = device.memory_stats()
        missing_bytes = stats["peak_bytes_in_use"] - stats["bytes_in_use"] - expected_bytes
        filling.append(_bytes_on_device(max(0, missing_bytes)))
        before = device.memory_stats()
        jax.block_until_ready(executable(*args))
        peak_bytes = device.memory_stats()["peak_bytes_in_use"]
        if peak_bytes > before["peak_bytes_in_use"]:
            return peak_bytes - before["bytes_in_use"] + before_bytes
    raise AssertionError("the run took no memory at all")


def _bytes_on_device(count_bytes: int) -> jax.Array:
    return jax.block_until_ready(jnp.zeros((-(-count_bytes // _MIB), _MIB), jnp.uint8))


def machine() -> str:
    """This machine and the device attached to it, in words."""
    device = jax.local_devices()[0]
    attached = "no GPU" if device.platform == "cpu" else device.device_kind
    drivers = "" if device.platform == "cpu" else f", {device.client.platform_version}"
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} cores, {attached}{drivers}"


def _timed(runs_s: Sequence[float]) -> Timed:
    low, _, high = statistics.quantiles(runs_s, n=4)
    return Timed(statistics.median(runs_s), high - low)
