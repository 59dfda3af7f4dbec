"""Steps of random programs that are one operation of JAX each, or few: rows and a square matrix
give rows again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

_DIMENSIONS = ("NWC", "WIO", "NWC")


def _convolved(x: Any, w: Any) -> Any:
    kernel = jnp.stack([w, 0.5 * w, -w])
    return lax.conv_general_dilated(x[None], kernel, (1,), "SAME", dimension_numbers=_DIMENSIONS)[0]


def _convolved_back(x: Any, w: Any) -> Any:
    kernel = jnp.stack([w, w.T])
    y = lax.conv_transpose(jnp.tanh(x)[None], kernel, (1,), "SAME", dimension_numbers=_DIMENSIONS)
    return y[0]


def _turned_by_position(x: Any, w: Any) -> Any:
    a, b = jnp.split(x @ w, 2, axis=-1)
    angle = 0.1 * jnp.arange(len(x))[:, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(x: Any, w: Any) -> Any:
    earlier = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return jnp.where(earlier, jax.nn.softmax(x @ w @ x.T), 0) @ x


def _recurrence(x: Any, w: Any) -> Any:
    def after(a: Any, b: Any) -> Any:
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lax.associative_scan(after, (jax.nn.sigmoid(x), x @ w), axis=0)[1]


def _window(x: Any, start: Any, reduced: Callable[[Any, Any], Any]) -> Any:
    return lax.reduce_window(x, start, reduced, (3, 1), (1, 1), "SAME")


def _solved(x: Any, w: Any) -> Any:
    root = jnp.linalg.cholesky(0.1 * w @ w.T + jnp.eye(len(w)))
    return jsp.linalg.solve_triangular(root, x.T, lower=True).T


def _at_a_place(x: Any, w: Any) -> Any:
    at = (7 * jnp.abs(x[0, 0])).astype(jnp.int32) % len(x)
    some = lax.dynamic_slice(jnp.sin(x), (at, 0), (3, x.shape[1]))
    return lax.dynamic_update_slice(x, some @ w, (1, 0))


def _segments(x: Any, w: Any) -> Any:
    of = jnp.arange(len(x)) % 5
    return jax.ops.segment_sum(jnp.tanh(x @ w), of, 5)[of]


def _halves(x: Any, w: Any) -> Any:
    a, b = jnp.split(jnp.tanh(x @ w), 2, axis=-1)
    return jnp.concatenate([b, a * b], -1)


def _steps(x: Any, w: Any) -> Any:
    return jnp.pad(jnp.diff(jnp.tanh(x), axis=0), ((0, 1), (0, 0)))


def _spectrum(x: Any, w: Any) -> Any:
    return jnp.real(jnp.fft.ifft(0.9 * jnp.fft.fft(jnp.sin(x), axis=0), axis=0))


def _where_kept(x: Any, w: Any, copy: Callable[[Any], Any]) -> Any:
    y = jax.nn.silu(x @ w)
    return jnp.where(copy(y) == y, jnp.sin(y), 0.3 * y)


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "running maximum": lambda x, w: lax.cummax(x, axis=1),
    "running maximum of tanh": lambda x, w: lax.cummax(jnp.tanh(x @ w)),
    "running minimum": lambda x, w: lax.cummin(jnp.sin(x), reverse=True),
    "running product": lambda x, w: lax.cumprod(jnp.cos(0.3 * x), axis=1),
    "running sum": lambda x, w: 0.2 * lax.cumsum(jax.nn.sigmoid(x), reverse=True),
    "running log-sum-exp": lambda x, w: lax.cumlogsumexp(jnp.tanh(x @ w), axis=1),
    "recurrence": _recurrence,
    "roll": lambda x, w: jnp.roll(jnp.exp(-x * x), 1, axis=0) + x,
    "reverse": lambda x, w: jnp.tanh(x)[::-1] * x,
    "steps": _steps,
    "halves": _halves,
    "turned by position": _turned_by_position,
    "repeat": lambda x, w: jnp.repeat(jnp.tanh(x[::2] @ w), 2, axis=0) + x,
    "reshape": lambda x, w: jnp.sin(x.reshape(x.shape[::-1])).T,
    "transpose": lambda x, w: jnp.tanh(x).T[::-1].T @ w,
    "update": lambda x, w: x.at[::2].multiply(0.5).at[1::3].set(jnp.tanh(x @ w)[1::3]),
    "update of others": lambda x, w: jnp.tanh(x).at[3:9].set(x[4:10] @ w),
    "update by maxima": lambda x, w: x.at[jnp.arange(len(x)) // 2].max(jnp.tanh(x @ w)),
    "at a place": _at_a_place,
    "segments": _segments,
    "along an axis": lambda x, w: jnp.take_along_axis(jnp.tanh(x @ w), jnp.argsort(x, 0), 0),
    "sort with keys": lambda x, w: lax.sort((jnp.tanh(x), x @ w), dimension=0, num_keys=1)[1],
    "highest in order": lambda x, w: lax.top_k(jnp.tanh(x @ w), x.shape[1])[0] * x,
    "median": lambda x, w: x - jnp.median(jnp.tanh(x), axis=0),
    "largest of neighbours": lambda x, w: _where_kept(
        x, w, lambda y: _window(y, -jnp.inf, lax.max)
    ),
    "largest so far": lambda x, w: _where_kept(
        x, w, lambda y: lax.associative_scan(jnp.maximum, y, axis=0)
    ),
    "rectified": lambda x, w: _where_kept(x, w, jax.nn.relu),
    "least of its largest": lambda x, w: jnp.minimum(
        jax.nn.silu(x @ w), jax.nn.silu(x @ w).max(-1, keepdims=True)
    ),
    "largest": lambda x, w: x * jax.nn.one_hot(jnp.argmax(x, -1), x.shape[1]) + x @ w,
    "convolution": _convolved,
    "transposed convolution": _convolved_back,
    "largest of windows": lambda x, w: _window(jnp.tanh(x @ w), -jnp.inf, lax.max),
    "mean of windows": lambda x, w: _window(jnp.tanh(x @ w), 0.0, lax.add) / 3,
    "attention": _attention,
    "einsum": lambda x, w: jnp.einsum("ij,jk,ik->ij", x, w, jnp.tanh(x)),
    "outer product": lambda x, w: (x[:, :, None] * jnp.tanh(x @ w)[:, None, :]).sum(1),
    "log-sum-exp": lambda x, w: x - jax.nn.logsumexp(x @ w, -1, keepdims=True),
    "product": lambda x, w: x * jnp.prod(jnp.cos(x @ w), -1, keepdims=True),
    "deviation": lambda x, w: x / (jnp.std(x @ w, -1, keepdims=True) + 1),
    "triangles": lambda x, w: x @ jnp.tril(w) + jnp.triu(jnp.tanh(x)[: len(w)]).sum(),
    "cholesky": _solved,
    "solve": lambda x, w: jnp.linalg.solve(0.1 * w + jnp.eye(len(w)), x.T).T,
    "spectrum": _spectrum,
    "gated": lambda x, w: jax.nn.glu(jnp.concatenate([x, x @ w], -1)),
    "swish": lambda x, w: jax.nn.silu(x @ w) * jnp.sqrt(1 + x * x),
    "log-sigmoid": lambda x, w: jax.nn.softplus(x) * jax.nn.log_sigmoid(x @ w),
    "error function": lambda x, w: lax.erf(x) + lax.erf_inv(0.9 * jnp.tanh(x @ w)),
    "gamma function": lambda x, w: 0.1 * (lax.lgamma(1 + jnp.abs(x)) + lax.digamma(2 + x * x)),
    "powers": lambda x, w: jnp.power(1 + x * x, 0.3) + jnp.cbrt(1 + x * x),
    "angle": lambda x, w: jnp.arctan2(x, 1 + jnp.abs(x @ w)),
    "distance": lambda x, w: jnp.abs(lax.complex(x, x @ w)),
    "select": lambda x, w: lax.select(x > 0, jnp.expm1(0.3 * x), jnp.log1p(x * x)),
    "clamp": lambda x, w: lax.clamp(-0.5, x @ w, 0.8) + x,
    "remainder": lambda x, w: jnp.mod(x, 3.0) + 0.1 * lax.rem(x, jnp.float32(2)),
    "reduced precision": lambda x, w: lax.reduce_precision(jnp.tanh(x @ w), 8, 7),
}
