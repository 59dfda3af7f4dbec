"""Measures the rates of the attached device, for a target file of your own."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_hremat._shared.progress import Progress, reporting
from jax_hremat._xla.target import Platform, Target, attached_target

# A measurement is made larger until one run takes this long …
_LONG_ENOUGH_S = 0.03
# … or works on this many bytes; then several runs in a row fill the time. The host takes some
# tenths of a millisecond to start a run and to see its end, as long as a GPU takes to read a
# gigabyte.
_MOST_BYTES = 2**31
_NUM_RUNS = 5
# Number of products in a row, so that their operands stay where they are.
_NUM_PRODUCTS = 4
# Degree of the polynomial. On a GPU it is high enough that reading and writing a number takes less
# time than its polynomial, even at a low bandwidth; on a CPU low enough that the loop is unrolled.
_DEGREES: Mapping[Platform, int] = {"cuda": 512, "cpu": 64}
_NUM_KERNELS = 200
_NUM_DRAWN = 2**16 + 1
_IMAGE, _CHANNELS = 64, 64
# From a number of runs in a row to the seconds that one of them takes.
_Run = Callable[[int], float]
_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}


def calibrate(progress: Progress | None = None) -> Target:
    """Measure the rates that the attached device sustains.

    On a GPU it takes a minute or two, most of it for compiling.

    Measured are square matrix products and convolutions of each type (a layer's convolution and its
    gradients), a sum of two long vectors, a polynomial of a vector, and many small kernels in a
    row, all on random numbers. Each figure is the median of five measurements. The rates are those
    that were reached, so both efficiencies are 1. Save the target to plan for this device
    elsewhere::

        jax_hremat.calibrate().save("my_gpu.toml")
        jax_hremat.plan_remat(loss_fn, budget="70GiB", target="my_gpu.toml")

    Args:
        progress: Called as `progress(stage, done, total)`.

    Returns:
        The target of JAX's default backend with the measured rates.

    Raises:
        UnknownTargetError: The default backend is neither a CPU nor a GPU.

    Unchecked: the rates to other devices and to the host, which stay the published ones; that
    nothing else uses the device meanwhile. Large products reach a higher rate than those of a model
    do: the rates serve to compare plans, not to predict run times.
    """
    base = attached_target()
    stages: list[tuple[str, Callable[[], float]]] = [
        *((f"products of {name}", lambda d=d: _matrix_rate(d)) for name, d in _DTYPES.items()),
        *((f"convolutions of {name}", lambda d=d: _conv_rate(d)) for name, d in _DTYPES.items()),
        ("bandwidth", _bandwidth),
        ("arithmetic", lambda: _vector_rate(_DEGREES[base.platform])),
        ("launches", lambda: _launch_s(base.platform)),
    ]
    found = []
    with reporting(progress, "calibrating") as tell:
        for index, (stage, measure) in enumerate(stages):
            tell(stage, index, len(stages))
            found.append(measure())
        tell("calibrated", len(stages), len(stages))
    *matrix, bandwidth, vector, launch_s = found
    products, convolutions = matrix[: len(_DTYPES)], matrix[len(_DTYPES) :]
    return dataclasses.replace(
        base,
        matrix_flops_per_s=dict(zip(_DTYPES, products, strict=True)),
        convolution_flops_per_s=dict(zip(_DTYPES, convolutions, strict=True)),
        vector_flops_per_s=vector,
        bandwidth_bytes_per_s=bandwidth,
        flops_efficiency=1.0,
        bandwidth_efficiency=1.0,
        launch_s=launch_s,
        source=f"measured on {jax.local_devices()[0].device_kind} with jax {jax.__version__}, "
        f"{time.strftime('%Y-%m-%d')}",
    )


def _matrix_rate(dtype: Any) -> float:
    def make(size: int) -> tuple[_Run, int]:
        x = _random((size, size), dtype)

        def products(x: jax.Array, w: jax.Array) -> jax.Array:
            for _ in range(_NUM_PRODUCTS):
                x = x @ w
            return x

        return _compiled(products, x, x * size**-0.5), x.nbytes

    size, seconds = _long_enough(make, 512, power=3)
    return _NUM_PRODUCTS * 2 * size**3 / seconds


def _conv_rate(dtype: Any) -> float:
    """The rate of a three-by-three convolution on images and both of its gradients."""
    kernel = _random((3, 3, _CHANNELS, _CHANNELS), dtype) / _CHANNELS

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)

    def make(images: int) -> tuple[_Run, int]:
        x = _random((images, _IMAGE, _IMAGE, _CHANNELS), dtype)

        def all_three(x: jax.Array, w: jax.Array) -> Any:
            y, pullback = jax.vjp(convolve, x, w)
            return y, pullback(y)

        return _compiled(all_three, x, kernel), x.nbytes

    images, seconds = _long_enough(make, 1)
    return 3 * 2 * images * _IMAGE**2 * 9 * _CHANNELS**2 / seconds


def _bandwidth() -> float:
    def make(size: int) -> tuple[_Run, int]:
        x = _random((size,), jnp.float32)
        # Into the memory of the first operand: pages new to the process are slow on a CPU.
        return _compiled(lambda a, b: a * 0.5 + b, x, x + 1, in_place=True), 3 * x.nbytes

    size, seconds = _long_enough(make, 2**22)
    return 3 * 4 * size / seconds


def _vector_rate(degree: int) -> float:
    def make(size: int) -> tuple[_Run, int]:
        x = _random((size,), jnp.float32)

        def polynomial(a: jax.Array) -> jax.Array:
            y = a
            for _ in range(degree):
                y = y * a + 0.25
            return y

        # Between -0.5 and 0.5, so that all powers stay small.
        return _compiled(polynomial, jnp.tanh(x) / 2), x.nbytes

    size, seconds = _long_enough(make, 2**18)
    return 2 * degree * size / seconds


def _launch_s(platform: Platform) -> float:
    """Seconds between two kernels that do next to nothing."""

    def small(x: jax.Array) -> jax.Array:
        # XLA:CPU drops barriers before it fuses, so sums in a row would be one kernel there.
        return x @ x if platform == "cpu" else jax.lax.optimization_barrier(x + 1)

    def many(x: jax.Array) -> jax.Array:
        for _ in range(_NUM_KERNELS):
            x = small(x)
        return x

    return _median_s(_compiled(many, jnp.zeros((8, 8)))) / _NUM_KERNELS


def _random(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random numbers like those of a model: a GPU's clock is higher where all numbers are equal.

    The drawn numbers repeat with a period that does not match the rows; drawing all of them would
    take longer than the measurement.
    """
    drawn = np.random.default_rng(0).standard_normal(_NUM_DRAWN, np.float32)
    return jnp.asarray(drawn, dtype)[jnp.arange(math.prod(shape)) % _NUM_DRAWN].reshape(shape)


def _long_enough(
    make: Callable[[int], tuple[_Run, int]], size: int, power: int = 1
) -> tuple[int, float]:
    """The size, made larger by powers of two until a run takes long enough to be timed, and the
    time of that run. Each size is compiled, which takes longest, so it grows by what is missing.

    Args:
        make: From a size to its run and the bytes that it works on.
        size: The first size.
        power: Arithmetic grows as this power of the size.
    """
    while True:
        run, used_bytes = make(size)
        missing = _LONG_ENOUGH_S / run(1)
        if missing <= 1 or 2 * used_bytes > _MOST_BYTES:
            return size, _median_s(run)
        growth = min(missing, _MOST_BYTES / used_bytes)
        size *= max(2, 2 ** int(math.log2(growth) / power))


def _median_s(run: _Run) -> float:
    """Median seconds of one run, timed over enough runs in a row."""
    count = math.ceil(_LONG_ENOUGH_S / run(1))
    return statistics.median(run(count) for _ in range(_NUM_RUNS))


def _compiled(fun: Callable[..., Any], *args: jax.Array, in_place: bool = False) -> _Run:
    """`fun`, compiled and run once; if `in_place`, each run takes the result of the last one as its
    first argument."""
    compiled = jax.jit(fun, donate_argnums=0 if in_place else ()).lower(*args).compile()
    first, *rest = args

    def run(count: int) -> float:
        nonlocal first
        result: Any = None
        start_s = time.perf_counter()
        for _ in range(count):
            result = compiled(first, *rest)
            first = result if in_place else first
        jax.block_until_ready(result)
        return (time.perf_counter() - start_s) / count

    run(1)
    return run
