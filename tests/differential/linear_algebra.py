"""Decompositions, solvers, transforms, convolutions, sorting, gathering and scattering."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
from jax import lax

from differential.program import Loss, layered, normal, program, rows, weights

EYE = jnp.eye(8)


def positive(w: Any) -> Any:
    return w @ w.T + EYE


@program()
def cholesky() -> Loss:
    return layered(lambda x, w: jnp.tanh(x @ jnp.linalg.cholesky(positive(w))))


@program()
def qr() -> Loss:
    return layered(lambda x, w: jnp.tanh(x @ jnp.linalg.qr(w + 3 * EYE)[0]), tolerance=1e-4)


@program()
def svd() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        u, s, vt = jnp.linalg.svd(w + jnp.diag(jnp.arange(1.0, 9.0)))
        return jnp.tanh(x @ (u * jnp.log(s)) @ vt)

    return layered(layer, tolerance=1e-3)


@program()
def eigh() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        values, vectors = jnp.linalg.eigh(w + w.T + jnp.diag(4 * jnp.arange(1.0, 9.0)))
        return jnp.tanh(x @ vectors * jnp.sin(values))

    return layered(layer, tolerance=1e-3)


@program()
def solve() -> Loss:
    return layered(lambda x, w: jnp.tanh(jnp.linalg.solve(positive(w), x.T).T), tolerance=1e-4)


@program()
def triangular_solve() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jsp.linalg.solve_triangular(jnp.tril(w) + 2 * EYE, x.T, lower=True).T)

    return layered(layer)


@program()
def cholesky_solve() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jsp.linalg.cho_solve(jsp.linalg.cho_factor(positive(w)), x.T).T)

    return layered(layer, tolerance=1e-4)


@program()
def lu_and_determinant() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w) * jnp.linalg.slogdet(positive(w))[1]

    return layered(layer)


@program()
def custom_linear_solve() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        matrix = positive(w)

        def solver(matvec: Any, b: Any) -> Any:
            return jnp.linalg.solve(matrix, b)

        out = lax.custom_linear_solve(lambda v: matrix @ v, x.T, solver, symmetric=True)
        return jnp.tanh(out.T)

    return layered(layer, tolerance=1e-4)


@program()
def conjugate_gradients() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        matrix = positive(w)
        out, _ = jsp.sparse.linalg.cg(lambda v: matrix @ v, x.T, maxiter=20)
        return jnp.tanh(out.T)

    return layered(layer, tolerance=1e-3)


@program()
def matrix_exponential() -> Loss:
    return layered(lambda x, w: jnp.tanh(x @ jsp.linalg.expm(w * 0.3)), tolerance=1e-4)


@program()
def inverse_and_pseudo_inverse() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        inverse = jnp.linalg.inv(w + 3 * EYE)
        return jnp.tanh(x @ inverse @ jnp.linalg.pinv(w + 4 * EYE))

    return layered(layer, tolerance=1e-3)


@program()
def fourier_transform() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        spectrum = jnp.fft.rfft(x @ w, axis=0)
        return jnp.fft.irfft(spectrum * jnp.abs(spectrum), n=x.shape[0], axis=0) * 0.1

    return layered(layer, tolerance=1e-4)


@program()
def fourier_transform_in_two_dimensions() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.real(jnp.fft.ifft2(jnp.fft.fft2(x @ w) * 1j)))

    return layered(layer, tolerance=1e-4)


@program()
def convolutions() -> Loss:
    def loss(kernels: Any, images: Any) -> Any:
        x = images
        for kernel in kernels:
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = x + jax.nn.relu(y)
        return (x * x).mean()

    return Loss(loss, (list(normal(3, 3, 3, 4, 4) * 0.3), normal(4, 8, 8, 4)))


@program()
def convolutions_grouped_strided_and_dilated() -> Loss:
    names = ("NHWC", "HWIO", "NHWC")

    def loss(kernels: Any, x: Any) -> Any:
        grouped, strided, dilated, transposed = kernels
        x = jnp.tanh(
            lax.conv_general_dilated(
                x, grouped, (1, 1), "SAME", dimension_numbers=names, feature_group_count=4
            )
        )
        x = jnp.tanh(lax.conv_general_dilated(x, strided, (2, 2), "VALID", dimension_numbers=names))
        x = jnp.tanh(
            lax.conv_general_dilated(
                x, dilated, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=names
            )
        )
        return (lax.conv_transpose(x, transposed, (2, 2), "SAME") ** 2).mean()

    kernels = [normal(3, 3, 1, 4), normal(3, 3, 4, 8), normal(3, 3, 8, 8), normal(2, 2, 8, 4)]
    return Loss(loss, (kernels, normal(4, 9, 9, 4)))


@program()
def pooling() -> Loss:
    def loss(w: Any, x: Any) -> Any:
        x = jnp.tanh(x @ w)
        high = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME")
        mean = lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
        sums = lax.cumsum(mean, axis=1)
        return (high**2).sum() + (jnp.sin(sums) ** 2).mean()

    return Loss(loss, (normal(4, 4), normal(4, 8, 8, 4)))


@program()
def sort_and_argsort() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        return jnp.sort(y, axis=0) + jnp.take_along_axis(y, jnp.argsort(-y, axis=1), axis=1)

    return layered(layer)


@program()
def sort_of_several_operands() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        keys, values = lax.sort((jnp.sin(x @ w), jnp.cos(x @ w)), dimension=0, num_keys=1)
        return keys * values

    return layered(layer)


@program()
def top_k_of_experts() -> Loss:
    def loss(params: Any, x: Any) -> Any:
        for w, router in params:
            gates, chosen = lax.top_k(jax.nn.softmax(x @ router), 2)
            out = jnp.einsum("bkio,bi->bko", w[chosen], x)
            x = x + jnp.tanh((out * gates[..., None]).sum(1))
        return (x * x).mean()

    params = [(normal(4, 8, 8, seed=i), normal(8, 4, seed=i)) for i in range(2)]
    return Loss(loss, (params, rows()))


@program()
def gather_and_scatter() -> Loss:
    def loss(params: Any, index: Any) -> Any:
        x = params["table"][index]
        for w in params["ws"]:
            sums = jnp.zeros((5, 8)).at[index].add(jnp.tanh(x @ w), mode="drop")
            x = x + sums.at[0].set(1.0)[index[::-1]]
        return (x * x).mean()

    params = {"table": normal(5, 8), "ws": list(weights(3))}
    return Loss(loss, (params, jnp.arange(64) % 5))


@program()
def scatter_of_every_kind() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        index = jnp.arange(8)
        y = y.at[index].multiply(2.0).at[index + 8].max(x[:8]).at[index + 16].min(x[8:16])
        return y.at[jnp.array([3, 5]), 1].set(x[0, :2]).at[1:4, ::2].add(1.0)

    return layered(layer)


@program()
def dynamic_slices() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        start = (jnp.abs(w).sum() * 3).astype(jnp.int32) % 8
        part = lax.dynamic_slice(y, (start, 0), (16, 8))
        return lax.dynamic_update_slice(y, part * 2, (start + 3, 0))

    return layered(layer)


@program()
def segment_sums() -> Loss:
    """Messages on a graph."""

    def loss(ws: Any, x: Any, senders: Any, receivers: Any) -> Any:
        for w in ws:
            messages = jnp.tanh(x[senders] @ w)
            sums = jax.ops.segment_sum(messages, receivers, num_segments=len(x))
            highest = jax.ops.segment_max(messages, receivers, num_segments=len(x))
            x = x + sums * 0.2 + jnp.where(jnp.isfinite(highest), highest, 0)
        return (x * x).mean()

    senders = jnp.arange(96) % 16
    return Loss(loss, (list(weights(3)), rows(16), senders, (senders * 7 + 3) % 16))


@program()
def cumulative_operations() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w) * 0.2
        sums = jnp.cumsum(y, axis=0) + lax.cummax(y, axis=1) + lax.cumlogsumexp(y, axis=1)
        return sums * jnp.cumprod(1 + y * 0.1, axis=1)

    return layered(layer)


@program()
def attention_by_einsum() -> Loss:
    def loss(params: Any, x: Any) -> Any:
        for w in params:
            q, k, v = jnp.einsum("btd,sdhe->sbthe", x, w["qkv"])
            scores = jnp.einsum("bthe,bshe->bhts", q, k) / 2
            mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            attention = jax.nn.softmax(jnp.where(mask, scores, -1e9))
            x = x + jnp.einsum("bhts,bshe,hed->btd", attention, v, w["out"])
        return (x * x).mean()

    params = [{"qkv": normal(3, 8, 2, 4, seed=i), "out": normal(2, 4, 8)} for i in range(2)]
    return Loss(loss, (params, normal(2, 12, 8)))


@program()
def attention_of_jax_nn() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            heads = (x @ w).reshape(*x.shape[:2], 2, 4)
            out = jax.nn.dot_product_attention(heads, heads, x.reshape(heads.shape), is_causal=True)
            x = x + out.reshape(x.shape)
        return (x * x).mean()

    return Loss(loss, (list(weights(3)), normal(2, 12, 8)))


@program()
def products_of_mixed_precision() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        wide = jnp.einsum("bi,io->bo", x, w, precision="highest")
        low = lax.dot(
            x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32
        )
        return jnp.tanh(wide) * low

    return layered(layer, tolerance=3e-2)


@program()
def special_functions() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = jax.nn.softplus(x @ w) + 0.5
        return (
            lax.lgamma(y) + lax.digamma(y) + lax.erf(y) + jsp.special.i0e(y) + lax.erf_inv(0.1 / y)
        )

    return layered(layer, tolerance=1e-4)


@program()
def interpolation_and_resizing() -> Loss:
    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            larger = jax.image.resize(jnp.tanh(x @ w), (4, 12, 12, 4), "bicubic")
            x = x + jax.image.resize(larger, x.shape, "linear")
        return (x * x).mean()

    return Loss(loss, (list(weights(2, 4)), normal(4, 8, 8, 4)))


@program()
def norms_and_reductions() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = x @ w
        size = jnp.linalg.norm(y, axis=-1, keepdims=True) + jnp.std(y) + jnp.median(y)
        return y / size * jax.nn.logsumexp(y) + jnp.prod(y * 0.1, axis=1, keepdims=True)

    return layered(layer, tolerance=1e-4)


@program()
def polynomial_and_toeplitz() -> Loss:
    def layer(x: Any, w: Any) -> Any:
        y = jnp.polyval(w[0], jnp.tanh(x @ jsp.linalg.toeplitz(w[1])))
        return jnp.convolve(y.ravel(), w[2], mode="same").reshape(x.shape) * 0.1

    return layered(layer, tolerance=1e-4)
