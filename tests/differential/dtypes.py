"""Number types: narrow, wide, complex, quantised, masks."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from differential.program import Loss, layers, program, rows, weights

WIDE = partial(jax.enable_x64, True)


def tanh_layer(x: Any, w: Any) -> Any:
    return jnp.tanh(x @ w)


def of_type(dtype: Any, **options: Any) -> Loss:
    args = (list(weights(dtype=dtype)), rows(dtype=dtype))
    return Loss(layers(tanh_layer), args, **options)


@program()
def bfloat16() -> Loss:
    return of_type(jnp.bfloat16, tolerance=5e-2)


@program()
def float16() -> Loss:
    return of_type(jnp.float16, tolerance=1e-2)


@program(context=WIDE)
def float64() -> Loss:
    return of_type(np.float64, tolerance=1e-12)


@program(context=WIDE)
def float64_with_weak_scalars() -> Loss:
    def loss(ws: Any, x: Any, scale: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(x @ w) * 0.1 + 1
        return (x * x).mean() * scale, x.astype(jnp.float32)

    args = (list(weights(dtype=np.float64)), rows(dtype=np.float32), jnp.asarray(2))
    return Loss(loss, args, has_aux=True)


@program()
def complex_parameters() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jnp.tanh(x @ w * 0.3) * jnp.exp(1j * jnp.abs(x))
        return (jnp.abs(x) ** 2).mean(), x

    ws = [lax.complex(w, w.T) for w in weights()]
    return Loss(loss, (ws, rows().astype(jnp.complex64)), has_aux=True, tolerance=1e-4)


@program()
def complex_inside_real() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        turned = lax.complex(jnp.cos(x @ w), jnp.sin(x @ w))
        return jnp.real(turned * jnp.conj(turned[::-1]))

    return Loss(layers(layer), (list(weights()), rows()))


@program(context=WIDE)
def complex128() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = x + jnp.sin(x @ w * 0.2)
        return jnp.abs(x).sum()

    ws = [w + 1j * w.T for w in np.asarray(weights(), np.complex128)]
    return Loss(loss, (ws, rows(dtype=np.complex128)), tolerance=1e-10)


@program()
def quantised_to_int8() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        scale = lax.stop_gradient(jnp.abs(w).max()) / 127
        low = jnp.round(lax.stop_gradient(w) / scale).astype(jnp.int8)
        near = low.astype(x.dtype) * scale
        return jnp.tanh(x @ (w + lax.stop_gradient(near - w)))

    return Loss(layers(layer), (list(weights()), rows()))


@program()
def int8_products_that_accumulate() -> Loss:
    def loss(scales: Any, low: Any, x: Any) -> Any:
        for scale, w in zip(scales, low, strict=True):
            whole = jnp.clip(jnp.round(lax.stop_gradient(x) * 16), -127, 127).astype(jnp.int8)
            sums = lax.dot(whole, w, preferred_element_type=jnp.int32)
            x = x + jnp.tanh(sums.astype(jnp.float32) * scale / 16)
        return (x * x).mean()

    low = [(w * 10).astype(jnp.int8) for w in weights()]
    return Loss(loss, ([jnp.full(8, 0.1)] * 4, low, rows()))


@program(quick=True)
def float8() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        low = w.astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return jnp.tanh(x.astype(jnp.float8_e5m2).astype(jnp.float32) @ low)

    return Loss(layers(layer), (list(weights()), rows()), tolerance=5e-2)


@program()
def mixed_precision_with_a_master_copy() -> Loss:
    def loss(params: Any, x: Any) -> Any:
        low = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
        x = x.astype(jnp.bfloat16)
        for w in low:
            x = x + jax.nn.gelu(x @ w)
        return (x.astype(jnp.float32) ** 2).mean() * 128.0

    return Loss(loss, (list(weights()), rows()), tolerance=5e-2)


@program()
def boolean_masks() -> Loss:
    def loss(ws: Any, x: Any, mask: Any) -> Any:
        kept = mask
        for w in ws:
            y = jnp.tanh(x @ w)
            kept = kept & (y > -0.5) | ~mask
            x = jnp.where(kept, x + y, x)
        return (x * x).mean(where=kept), (kept, kept.sum())

    return Loss(loss, (list(weights()), rows(), rows() > 0), has_aux=True)


@program()
def unsigned_and_bits() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            bits = lax.bitcast_convert_type(lax.stop_gradient(x), jnp.uint32)
            sign = ((bits >> 31) ^ jnp.uint32(1)).astype(jnp.float32)
            x = x + jnp.tanh(x @ w) * sign
        return (x * x).mean(), lax.population_count(bits).sum()

    return Loss(loss, (list(weights()), rows()), has_aux=True)


@program()
def reduced_precision() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(lax.reduce_precision(x @ w, exponent_bits=8, mantissa_bits=7))

    return Loss(layers(layer), (list(weights()), rows()), tolerance=5e-2)


@program()
def infinities_and_nans() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        x = x.at[0, 0].set(jnp.inf).at[1, 1].set(jnp.nan)
        for w in ws:
            x = jnp.where(jnp.isfinite(x), x, 0.0)
            x = x + jnp.tanh(x @ w) / jnp.where(jnp.abs(x) > 1e-3, 1.0, jnp.nan)
        return jnp.nanmean(x * x), x

    return Loss(loss, (list(weights()), rows()), has_aux=True)
