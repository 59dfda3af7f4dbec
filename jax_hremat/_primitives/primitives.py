"""Equations -> work: rules by primitive name where the shapes alone do not give the cost, and one
default for all other primitives.

A rule takes an equation and returns the work of one execution. The default reads every operand,
writes every result, and costs one flop per element of the results, as XLA counts too: elementwise
operations are bound by their traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jax_hremat._jax.jaxprs import Literal, inner_jaxprs, open_jaxpr
from jax_hremat._jax.sizes import size_bytes_of
from jax_hremat._primitives import formulas, products
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS
from jax_hremat._primitives.kernels import array_of
from jax_hremat._primitives.pallas import kernel_work
from jax_hremat._primitives.trips import while_trips
from jax_hremat._primitives.work import Array, Call, Work, total

Rule = Callable[[Any], Work]


def equation_work(eqn: Any) -> Work:
    """The work of one equation; its bytes are those of its operands and results.

    Bodies of loops count with their trip count (`while`: once, where it is unknown); of the
    branches of a cond, the most expensive counts.

    Unchecked: bytes inside bodies.
    """
    rule = _RULES.get(eqn.primitive.name, _default)
    work = rule(eqn)
    return Work(work.flops, work.vector_flops, _moved_bytes(eqn), work.concurrent, work.calls)


def runs_bodies(eqn: Any) -> bool:
    """Whether an equation runs only the equations of its bodies."""
    rule = _RULES.get(eqn.primitive.name, _default)
    own = rule not in (_default, _scan, _cond, _while, _shard_map)
    return not own and any(True for _ in inner_jaxprs(eqn))


def is_called_kernel(eqn: Any) -> bool:
    """Whether the equation is a kernel that XLA only calls."""
    return _RULES.get(eqn.primitive.name) in _CALLED


def equation_flops(eqn: Any) -> int:
    """All floating-point operations of one equation, multiply and add counted separately."""
    return round(equation_work(eqn).total_flops)


def _default(eqn: Any) -> Work:
    """The bodies, one after another; without bodies, one flop for each element of the results."""
    bodies = [_body_work(body) for body in inner_jaxprs(eqn)]
    if bodies:
        return total(bodies)
    return Work(vector_flops=float(sum(math.prod(v.aval.shape) for v in eqn.outvars)))


def _body_work(body: Any) -> Work:
    return total(equation_work(eqn) for eqn in open_jaxpr(body).eqns)


def _moved_bytes(eqn: Any) -> float:
    return float(sum(size_bytes_of(v.aval) for v in (*eqn.invars, *eqn.outvars)))


def _arrays(atoms: Sequence[Any]) -> tuple[Array, ...]:
    """The arrays that are not empty: a compiled kernel gets only these."""
    avals = [v.aval for v in atoms]
    return tuple(array_of(a.dtype, a.shape) for a in avals if math.prod(a.shape) > 0)


# --- control flow ---------------------------------------------------------------------


def _scan(eqn: Any) -> Work:
    return _body_work(eqn.params["jaxpr"]).repeated(eqn.params["length"])


def _cond(eqn: Any) -> Work:
    return max(map(_body_work, eqn.params["branches"]), key=lambda w: w.total_flops)


def _while(eqn: Any) -> Work:
    """A loop counts once where its number of steps is not known."""
    scalars = [v.val if isinstance(v, Literal) else None for v in eqn.invars]
    return total(_loop_bodies(eqn)).repeated(while_trips(eqn, scalars) or 1)


def _loop_bodies(eqn: Any) -> list[Work]:
    return [_body_work(eqn.params[part]) for part in ("cond_jaxpr", "body_jaxpr")]


def _shard_map(eqn: Any) -> Work:
    """The work of all devices together, as for other equations."""
    return _default(eqn).repeated(eqn.params["mesh"].size)


# --- reductions and reorderings -------------------------------------------------------


def _reduction(eqn: Any) -> Work:
    return Work(vector_flops=float(sum(math.prod(v.aval.shape) for v in eqn.invars)))


def _window(eqn: Any) -> Work:
    window = math.prod(eqn.params["window_dimensions"])
    return Work(vector_flops=float(window * math.prod(eqn.outvars[0].aval.shape)))


def _cumulative(eqn: Any) -> Work:
    shape = eqn.invars[0].aval.shape
    return Work(vector_flops=formulas.sort(math.prod(shape), shape[eqn.params["axis"]]))


# JAX sorts floats in a total order: it canonicalizes zeros and NaNs of both sides before comparing.
_FLOAT_COMPARISON_FLOPS = 15


def _sort(eqn: Any) -> Work:
    shape = eqn.invars[0].aval.shape
    along = shape[eqn.params.get("dimension", -1)] if shape else 1
    floating = eqn.invars[0].aval.dtype.kind not in "biu"
    each = _FLOAT_COMPARISON_FLOPS if floating else 1
    return Work(vector_flops=each * formulas.sort(math.prod(shape), along))


def _fft(eqn: Any) -> Work:
    lengths = eqn.params["fft_lengths"]
    dtypes = {v.aval.dtype.kind for v in (*eqn.invars, *eqn.outvars)}
    elements = max(math.prod(v.aval.shape) for v in (*eqn.invars, *eqn.outvars))
    real = dtypes != {"c"}
    return Work(vector_flops=formulas.fft(elements, math.prod(lengths), real=real))


def _scatter(eqn: Any) -> Work:
    return Work(vector_flops=float(math.prod(eqn.invars[2].aval.shape)))


# --- linear algebra -------------------------------------------------------------------


def _of_matrices(flops: Callable[[int, int], float]) -> Rule:
    """A rule with the given flops for each matrix of the first operand."""

    def rule(eqn: Any) -> Work:
        *batch, rows, columns = eqn.invars[0].aval.shape
        return Work(vector_flops=math.prod(batch) * flops(rows, columns))

    return rule


def _triangular_solve(eqn: Any) -> Work:
    triangle, right = (v.aval.shape for v in eqn.invars)
    return Work(vector_flops=formulas.triangular_solve(triangle, right))


def _householder(eqn: Any) -> Work:
    *batch, rows, columns = eqn.outvars[0].aval.shape
    count = eqn.invars[1].aval.shape[-1]
    return Work(vector_flops=math.prod(batch) * formulas.reflectors_applied(rows, columns, count))


# --- kernels that are only called -----------------------------------------------------


def _opaque(eqn: Any, *names: str, work: Work | None = None) -> Work:
    """A kernel that is only called, by its names, the last of which is its primitive's."""
    call = Call(
        names=(*names, eqn.primitive.name),
        operands=_arrays(eqn.invars),
        results=_arrays(eqn.outvars),
        moved_bytes=_moved_bytes(eqn),
        work=work,
    )
    return Work(calls=(call,))


def _ffi_call(eqn: Any) -> Work:
    return _opaque(eqn, eqn.params["target_name"])


def _callback(eqn: Any) -> Work:
    return _opaque(eqn)


def _pallas_call(eqn: Any) -> Work:
    """The author's estimate if there is one; else the work of the kernel's jaxpr over its grid."""
    moved_bytes = _moved_bytes(eqn)
    found = kernel_work(eqn, moved_bytes)
    estimate = eqn.params["cost_estimate"]
    if estimate is not None:
        # The estimate does not name the unit of its flops; the kernel's jaxpr shows it.
        units = found.flops if found is not None else ()
        unit = max(units, key=lambda of: of[1])[0] if units else None
        transcendental = float(ELEMENT_FLOPS["exp"] * estimate.transcendentals)
        found = Work(
            flops=((unit, float(estimate.flops)),) if unit else (),
            vector_flops=transcendental + (0.0 if unit else float(estimate.flops)),
            bytes=float(estimate.bytes_accessed) or moved_bytes,
            concurrent=True,
        )
    return _opaque(eqn, eqn.params["name"], work=found)


# JAX's number for the layout (batch, heads, length, dim); the other is (batch, length, heads, dim).
_HEADS_FIRST = 1


def _is_causal(eqn: Any) -> bool:
    mask = eqn.params.get("mask_type")
    if mask is None:
        return bool(eqn.params["use_causal_mask"])
    return mask.name in ("CAUSAL", "PADDING_CAUSAL")


def _cudnn_attention(*, backward: bool) -> Rule:
    def rule(eqn: Any) -> Work:
        query, key, value = (v.aval.shape for v in eqn.invars[:3])
        heads_at, length_at = (1, 2) if eqn.params["layout"] == _HEADS_FIRST else (2, 1)
        window = eqn.params.get("sliding_window_length") or 0
        moved_bytes = _moved_bytes(eqn)
        work = formulas.attention(
            array_of(eqn.invars[0].aval.dtype, ()).dtype,
            heads=query[0] * query[heads_at],
            scores=formulas.num_scores(
                query[length_at], key[length_at], causal=_is_causal(eqn), window=window
            ),
            key_dim=query[-1],
            value_dim=value[-1],
            moved_bytes=moved_bytes,
            dropout=eqn.params.get("dropout_rate", 0.0) > 0,
            backward=backward,
        )
        return _opaque(eqn, work=work)

    return rule


_ATTENTION = {
    f"dot_product_attention_{kind}{suffix}": _cudnn_attention(backward=kind.endswith("bwd"))
    for kind in ("fwd", "bwd", "fp8_fwd", "fp8_bwd")
    for suffix in ("", "_wrapper")
}

_CALLED = frozenset({_ffi_call, _callback, _pallas_call, *_ATTENTION.values()})

_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "scan": _scan,
        "cond": _cond,
        "while": _while,
        "shard_map": _shard_map,
        "dot_general": products.dot_general,
        "ragged_dot_general": products.ragged_dot,
        "conv_general_dilated": products.convolution,
        "fft": _fft,
        "cholesky": _of_matrices(lambda n, _: formulas.cholesky(n)),
        "lu": _of_matrices(formulas.lu),
        "qr": _of_matrices(lambda m, n: formulas.qr(m, n) + formulas.reflectors_applied(m, n, n)),
        "geqrf": _of_matrices(formulas.qr),
        "geqp3": _of_matrices(formulas.qr),
        "householder_product": _householder,
        "ormqr": _householder,
        "eigh": _of_matrices(lambda n, _: formulas.eigh(n)),
        "eig": _of_matrices(lambda n, _: formulas.eig(n)),
        "schur": _of_matrices(lambda n, _: formulas.eig(n)),
        "svd": _of_matrices(formulas.svd),
        "hessenberg": _of_matrices(lambda n, _: formulas.hessenberg(n)),
        "tridiagonal": _of_matrices(lambda n, _: formulas.hessenberg(n)),
        "triangular_solve": _triangular_solve,
        "ffi_call": _ffi_call,
        "pallas_call": _pallas_call,
        **dict.fromkeys(("pure_callback", "io_callback", "triton_kernel_call"), _callback),
        **dict.fromkeys(("sort", "top_k", "approx_top_k"), _sort),
        **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _cumulative),
        **dict.fromkeys(
            "reduce reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor"
            " argmax argmin".split(),
            _reduction,
        ),
        **dict.fromkeys(
            "reduce_window_sum reduce_window_max reduce_window_min reduce_window"
            " select_and_scatter_add select_and_gather_add".split(),
            _window,
        ),
        **dict.fromkeys(
            "scatter scatter-add scatter-sub scatter-mul scatter-min scatter-max".split(),
            _scatter,
        ),
        **_ATTENTION,
    }
)
