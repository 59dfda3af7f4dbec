"""The cost of a block under one option, measured by running it on the attached device."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._cost.block_step import BlockStep
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._shared.errors import TargetUnavailableError
from jax_hremat._xla.target import Target

_logger = logging.getLogger("jax_hremat")

_NUM_RUNS = 5
# A run calls the step often enough to take at least this long: the host's time for each call is
# hidden behind the call before it.
_LEAST_RUN_S = 0.005


def attached_device(target: Target) -> Any:
    """The device of this process that the target stands for.

    Raises:
        TargetUnavailableError: None is attached.
    """
    platform = "cpu" if target.platform == "cpu" else "gpu"
    try:
        device = jax.local_devices(backend=platform)[0]
    except RuntimeError as error:
        raise TargetUnavailableError(_why_not(target, f"no {platform} is attached")) from error
    if target.device_kinds and platform == "gpu" and device.device_kind not in target.device_kinds:
        raise TargetUnavailableError(_why_not(target, f"a {device.device_kind!r} is attached"))
    return device


def _why_not(target: Target, instead: str) -> str:
    return (
        f"cost='measured' runs every block on the target's device, which is {target.name!r}, and "
        f"{instead}. Plan where that device is, or with cost='compiled'"
    )


def measured_cost(step: BlockStep, compiled: OptionCost, target: Target, device: Any) -> OptionCost:
    """The compiled cost, with its time replaced by the median of several runs.

    After a warm-up there are five runs. The split of the time between forward and backward is taken
    from the roofline, the memory from the compiler.

    Args:
        step: The block under its option.
        compiled: Its cost by `compiled_cost`.
        target: The target that it is compiled for.
        device: The device that it is run on.

    Unchecked: that nothing else runs on the device.
    """
    if not compiled.time_s:
        # The block only passes its inputs on.
        return compiled
    # On zeros, a norm is not a number.
    with jax.default_device(device), jax.debug_nans(False), jax.debug_infs(False):
        function = jax.jit(
            step.function, keep_unused=True, compiler_options=dict(target.compiler_options)
        )
        args = [jnp.zeros(aval.shape, aval.dtype) for aval in step.avals]
        one_s = _run_s(function, args, 1)
        one_s = min(one_s, _run_s(function, args, 1))
        calls = max(1, round(_LEAST_RUN_S / max(one_s, 1e-9)))
        runs_s = [_run_s(function, args, calls) for _ in range(_NUM_RUNS)]
    low_s, run_s, high_s = statistics.quantiles(runs_s, n=4)
    _logger.debug(
        "block run: %.3g ms, quartiles %.3g, %.3g", *(1e3 * s for s in (run_s, low_s, high_s))
    )
    scale = run_s / compiled.time_s
    return replace(
        compiled,
        forward_s=scale * compiled.forward_s,
        backward_s=scale * compiled.backward_s,
        profile=None if compiled.profile is None else compiled.profile.scaled(scale),
    )


def _run_s(function: Callable[..., Any], args: list[Any], calls: int) -> float:
    """Seconds per call, averaged over `calls` calls in a row."""
    start_s = time.perf_counter()
    results = None
    for _ in range(calls):
        results = function(*args)
    jax.block_until_ready(results)
    return (time.perf_counter() - start_s) / calls
