"""The arithmetic of a custom call, as far as its target, configuration and shapes determine it.

There is one rule for each library, found by the target's name as that library spells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any

from jax_hremat._primitives import formulas
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS
from jax_hremat._primitives.work import MatrixUnit, Work, one_product
from jax_hremat._xla.hlo.parse import Instruction, Shape

# From a call and the shapes of its operands to its work without its bytes; None if they do not
# determine it.
Rule = Callable[[Instruction, Sequence[Shape]], Work | None]


def library_work(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    """The arithmetic of a custom call to a known library; None for any other call."""
    for pattern, rule in _RULES.items():
        if re.fullmatch(pattern, call.library):
            return rule(call, operands) if call.shape.leaves else None
    return None


def is_host_callback(target: str) -> bool:
    """Whether a custom call with that target calls Python."""
    return re.fullmatch(_HOST_CALLBACK, target) is not None


def has_workspace(call: Instruction) -> bool:
    """Whether the call returns scratch memory as its last result. Calls to XLA's own wrappers of
    libraries return it as a flat byte array."""
    shape = call.shape
    if not call.library.startswith("__") or not shape.is_tuple or len(shape.elements) < 2:
        return False
    last = shape.elements[-1]
    return last.dtype in ("u8", "s8") and len(last.dims) == 1


def convolution_flops(instruction: Instruction, result: Shape, kernel: Shape) -> float:
    """Flops of a forward convolution: a full dot product for each element of its result.

    Multiplications with padding count, since library kernels do them; those with the holes of
    a dilated input do not. The kernel's input features are those of one group.
    """
    labels = (instruction.attribute("dim_labels") or "").split("->")[0].split("_")[1]
    inputs = prod(size for label, size in zip(labels, kernel.dims, strict=True) if label in "i?")
    window = prod(int(size) for size in instruction.window("size"))
    holes = prod(int(factor) for factor in instruction.window("lhs_dilate"))
    return 2.0 * result.size * inputs * window / holes


def factors_dtype(operands: Sequence[Shape]) -> str:
    """The wider of the two factors' types, which decides the unit that multiplies them."""
    return max(operands[:2], key=lambda shape: shape.element_bits).dtype


def _config(call: Instruction, part: str) -> Mapping[str, Any] | None:
    """A part of the configuration that XLA writes as JSON."""
    try:
        return json.loads(call.attribute("backend_config") or "{}").get(part)
    except json.JSONDecodeError:
        return None


def _ints(texts: Sequence[str]) -> list[int]:
    return [int(text) for text in texts]


# --- cuDNN ----------------------------------------------------------------------------


def _attention(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    config = _config(call, "cudnn_fmha_backend_config")
    if config is None:
        return None
    batch, heads, queries, keys = _ints(config["intermediate_tensor_shape"]["dimensions"])
    causal = config["mask_type"] in ("CAUSAL", "PADDING_CAUSAL")
    window = int(config.get("sliding_window_length", 0))
    # A head's size is the last dimension in either layout.
    query, _, value = (shape.dims for shape in operands[:3])
    return formulas.attention(
        operands[0].dtype,
        heads=batch * heads,
        scores=formulas.num_scores(queries, keys, causal=causal, window=window),
        key_dim=query[-1],
        value_dim=value[-1],
        moved_bytes=0.0,
        dropout=float(config.get("dropout_rate", 0.0)) > 0,
        backward=call.library.removesuffix("F8").endswith("Backward"),
    )


def _convolution(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    result = call.shape.leaves[0]
    # The window printed for all three kinds of call is the forward convolution's.
    if call.library == "__cudnn$convBackwardInput":
        flops = convolution_flops(call, operands[0], operands[1])
    elif call.library == "__cudnn$convBackwardFilter":
        flops = convolution_flops(call, operands[1], result)
    else:
        flops = convolution_flops(call, result, operands[1])
    # A bias and an activation, where there are any, take one flop for each element.
    fused = max(0, len(operands) - 2)
    return Work(
        flops=((MatrixUnit(factors_dtype(operands), True), flops),),
        vector_flops=float((fused + (fused > 0)) * result.size),
    )


def _norm(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    config = _config(call, "cudnn_norm_backend_config") or {}
    # Flops for each element: mean, variance, scaling and shift; in the backward, their gradients.
    each = 16 if config.get("kind") == "LAYER_BWD" else 8
    return Work(vector_flops=float(each * operands[0].size))


def _scaled_product(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    contracted = operands[0].dims[-1]
    return one_product(factors_dtype(operands), 2.0 * call.shape.leaves[0].size * contracted)


# --- cuBLAS ---------------------------------------------------------------------------

_EPILOGUE_FLOPS = MappingProxyType(
    {"BIAS": 1, "RELU": 1, "GELU": ELEMENT_FLOPS["tanh"], "SILU": 12, "DGELU": 24}
)


def _matmul(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    config = _config(call, "gemm_backend_config")
    if config is None:
        return None
    result = call.shape.leaves[0]
    contracted = _ints(config["dot_dimension_numbers"]["lhs_contracting_dimensions"])
    flops = 2.0 * result.size * prod(operands[0].dims[d] for d in contracted)
    parts = str(config.get("epilogue", "")).split("_")
    each = sum(_EPILOGUE_FLOPS.get(part, 0) for part in parts)
    return Work(
        flops=((MatrixUnit(factors_dtype(operands), False), flops),),
        vector_flops=float(each * result.size),
    )


def _triangular_solve(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    return Work(vector_flops=formulas.triangular_solve(operands[0].dims, operands[1].dims))


# --- linear algebra, of a GPU and of the CPU ------------------------------------------

_ROUTINES: Mapping[str, Callable[[int, int], float]] = MappingProxyType(
    {
        "potrf": lambda n, _: formulas.cholesky(n),
        "getrf": formulas.lu,
        "geqrf": formulas.qr,
        "geqp3": formulas.qr,
        **dict.fromkeys(("syev", "heev"), lambda n, _: formulas.eigh(n)),
        **dict.fromkeys(("geev", "gees"), lambda n, _: formulas.eig(n)),
        **dict.fromkeys(("gesvd", "gesdd"), formulas.svd),
        **dict.fromkeys(("gehrd", "sytrd", "hetrd"), lambda n, _: formulas.hessenberg(n)),
    }
)
# LAPACK's name of a routine, after the letter of its type and before the letter of its variant.
_FACTORIZATION = (
    r"(?:cusolver_|hipsolver_|lapack_[sdcz])"
    r"(?P<name>potrf|getrf|geqrf|geqp3|syev|heev|geev|gees|gesvd|gesdd|gehrd|sytrd|hetrd)"
    r"[djrpx]?(?:_ffi)?"
)
_HOST_CALLBACK = r"xla_(?:ffi_)?(?:partitioned_)?python_(?:cpu|gpu)_callback"
_REFLECTORS = r"(?:cusolver_|hipsolver_|lapack_[sdcz])(?:orgqr|ungqr|ormqr|unmqr)(?:_ffi)?"
_TRIANGLES = r"__cublas\$triangularSolve|(?:cu|hip)?blas_[sdcz]?trsm(?:_ffi)?|lapack_[sdcz]trsm_ffi"


def _factorization(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    match = re.fullmatch(_FACTORIZATION, call.library)
    matrix = next((shape for shape in operands if len(shape.dims) > 1), None)
    if match is None or matrix is None:
        return None
    *batch, rows, columns = matrix.dims
    return Work(vector_flops=prod(batch) * _ROUTINES[match["name"]](rows, columns))


def _reflectors(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    *batch, rows, columns = call.shape.leaves[0].dims
    count = operands[1].dims[-1]
    return Work(vector_flops=prod(batch) * formulas.reflectors_applied(rows, columns, count))


def _order(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    shape = operands[0]
    return Work(vector_flops=formulas.sort(shape.size, shape.dims[-1] if shape.dims else 1))


def _nothing(call: Instruction, operands: Sequence[Shape]) -> Work | None:
    """The work of a call that only moves indices and computes nothing."""
    return Work()


_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        r"__cudnn\$fmha\w*": _attention,
        r"__cudnn\$conv(Forward|ForwardGraph|BiasActivationForward|BackwardInput|BackwardFilter)": (
            _convolution
        ),
        r"__cudnn\$norm": _norm,
        r"__cudnn\$blockScaledDot": _scaled_product,
        r"__cublas\$(gemm|lt\$matmul)(\$\w+)?": _matmul,
        _TRIANGLES: _triangular_solve,
        _FACTORIZATION: _factorization,
        _REFLECTORS: _reflectors,
        r"__gpu\$TopK|TopK|__cub\$\w+": _order,
        r"(cu|hip)_lu_pivots_to_permutation": _nothing,
    }
)
