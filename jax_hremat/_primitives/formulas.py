"""Flops of library routines from shapes: the leading terms given in textbooks.

Linear algebra after Golub and Van Loan, "Matrix Computations"; each figure is for one
matrix, unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2, prod

from jax_hremat._primitives.elementwise import ELEMENT_FLOPS
from jax_hremat._primitives.work import MatrixUnit, Work

# Flops of the softmax in an attention kernel, for one score: the exponential, and the scaling,
# shift and sums around it. For dropout, one call of the generator serves four scores.
_SCORE_FLOPS = ELEMENT_FLOPS["exp"] + 4
_DROPOUT_FLOPS = ELEMENT_FLOPS["random_bits"] // 4 + 2


def attention(
    dtype: str,
    *,
    heads: int,
    scores: float,
    key_dim: int,
    value_dim: int,
    moved_bytes: float,
    dropout: bool = False,
    backward: bool = False,
) -> Work:
    """A fused attention: two products for each score, five in the backward.

    Args:
        dtype: HLO type of the queries.
        heads: Total number of heads of all sequences of the batch.
        scores: Number of scores of one head, as `num_scores` counts them.
        key_dim: Size of a query and of a key.
        value_dim: Size of a value.
        moved_bytes: Operands and results, each once.
        dropout: Whether probabilities are dropped.
        backward: Whether this is the backward, which recomputes the scores.
    """
    of_keys, of_values = (3, 2) if backward else (1, 1)
    flops = 2.0 * heads * scores * (of_keys * key_dim + of_values * value_dim)
    vector_flops = heads * scores * (_SCORE_FLOPS + _DROPOUT_FLOPS * dropout)
    return Work(
        flops=((MatrixUnit(dtype, False), flops),),
        vector_flops=float(vector_flops),
        bytes=moved_bytes,
        concurrent=True,
    )


def num_scores(queries: int, keys: int, *, causal: bool, window: int = 0) -> float:
    """Scores of one head that are not masked; kernels that work in whole blocks compute more.

    Args:
        queries: Length of the queries.
        keys: Length of the keys.
        causal: Whether position i reads only the positions up to i.
        window: If causal, a position reads at most this many positions, its own included; 0 for no
            limit.
    """
    if not causal:
        return float(queries * keys)
    most = min(keys, window) if window > 0 else keys
    rising = min(queries, most)
    # A score on the diagonal counts as half, so that a full square counts as exactly half.
    return rising * rising / 2 + (queries - rising) * float(most)


def cholesky(n: int) -> float:
    """L of an n × n matrix."""
    return n**3 / 3


def lu(rows: int, columns: int) -> float:
    """L and U of a matrix."""
    small, large = sorted((rows, columns))
    return small**2 * (large - small / 3)


def qr(rows: int, columns: int) -> float:
    """The reflectors and R of a matrix."""
    small, large = sorted((rows, columns))
    return 2 * small**2 * (large - small / 3)


def reflectors_applied(rows: int, columns: int, count: int) -> float:
    """`count` reflectors multiplied out to a matrix, or applied to one."""
    return 4 * rows * columns * count - 2 * (rows + columns) * count**2 + 4 * count**3 / 3


def eigh(n: int) -> float:
    """Eigenvalues and vectors of a symmetric matrix."""
    return 9.0 * n**3


def eig(n: int) -> float:
    """Eigenvalues and vectors of any square matrix."""
    return 25.0 * n**3


def svd(rows: int, columns: int) -> float:
    """Singular values and both sets of vectors."""
    small, large = sorted((rows, columns))
    return 4.0 * large**2 * small + 8.0 * large * small**2 + 9.0 * small**3


def hessenberg(n: int) -> float:
    """The Hessenberg form of a matrix, or the tridiagonal form of a symmetric one."""
    return 10 * n**3 / 3


def triangular_solve(triangles: Sequence[int], right_sides: Sequence[int]) -> float:
    """Triangular systems, all together: the dimensions of the matrices, and of the right-hand
    sides."""
    *batch, n, _ = triangles
    each = prod(right_sides) // max(prod(batch) * n, 1)
    return prod(batch) * float(n**2 * each)


def fft(elements: int, length: int, *, real: bool) -> float:
    """Transforms of the given length; `elements` counts those of all transforms together."""
    return 5.0 * elements * log2(max(length, 2)) / (2 if real else 1)


def sort(elements: int, along: int) -> float:
    """Comparisons needed to sort `elements` elements in rows of length `along`."""
    return elements * log2(max(along, 2))
