"""The work of one kernel of a compiled step: its arithmetic and its memory traffic."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from types import MappingProxyType
from typing import TypeVar

from jax_hremat._primitives import formulas
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._primitives.work import Array, Call, MatrixUnit, Work
from jax_hremat._xla.hlo.collectives import COLLECTIVES
from jax_hremat._xla.hlo.library_calls import (
    convolution_flops,
    factors_dtype,
    has_workspace,
    library_work,
)
from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction, Shape, in_place_operands

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Part:
    """The work of one instruction if only a share of its result is needed.

    Attributes:
        shares: For each operand, the share of it that is then needed, between 0 and 1.
        vector_flops: Its flops that are not those of matrix products and convolutions.
        flops: Flops of matrix products and convolutions by unit.
        unknown: Operations that are not modelled, with their number.
    """

    shares: tuple[float, ...]
    vector_flops: float = 0.0
    flops: Mapping[MatrixUnit, float] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


def work_of(
    module: HloModule, computation: Computation, instruction: Instruction, kernels: KernelBook
) -> tuple[Work, Mapping[str, int]]:
    """The work of one instruction of a schedule, for example of a fusion or a library call, and the
    operations in it that are not modelled, with their number.

    Of an operand read in slices only the bytes read count; of an operand updated in place only the
    bytes written.
    """
    if instruction.opcode == "custom-call":
        return _called_work(module, computation, instruction, kernels)
    operands = tuple(computation[name].shape for name in instruction.operands)
    part = _part(module, instruction, operands, 1.0)
    shares = part.shares
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        shares = (0.0, *shares[1:])
    read: dict[str, float] = {}
    for name, shape, share in zip(instruction.operands, operands, shares, strict=True):
        read[name] = min(read.get(name, 0.0) + shape.nbytes * share, shape.nbytes)
    work = Work(
        flops=tuple(part.flops.items()),
        vector_flops=part.vector_flops,
        bytes=sum(read.values()) + _written_bytes(module, computation, instruction),
    )
    return work, part.unknown


def _called_work(
    module: HloModule, computation: Computation, instruction: Instruction, kernels: KernelBook
) -> tuple[Work, Mapping[str, int]]:
    """The work of a called kernel: by the user's price, or else by its library's configuration or
    its trace. Of any other kernel only the bytes are known."""
    operands = tuple(computation[name].shape for name in instruction.operands)
    read = {name: computation[name].shape.nbytes for name in instruction.operands}
    moved_bytes = float(sum(read.values()) + _written_bytes(module, computation, instruction))
    known = library_work(instruction, operands)
    results = instruction.shape.leaves
    if has_workspace(instruction):
        results = results[:-1]
    call = Call(
        names=(*_names(instruction), instruction.library),
        operands=tuple(Array(o.dtype, o.dims) for o in operands if o.size),
        results=tuple(Array(r.dtype, r.dims) for r in results if r.size),
        moved_bytes=moved_bytes,
        work=None if known is None else replace(known, bytes=moved_bytes),
    )
    work = kernels.work_of(call)
    if work is None:
        return call.work_or_bytes, {f"custom-call:{instruction.library}": 1}
    return work, {}


def _names(instruction: Instruction) -> list[str]:
    """The primitive that a call comes from, and the scope around it: for a Pallas kernel, its
    name."""
    scopes = instruction.op_name.split(";")[0].split("/")[-2:]
    return [scope.rsplit("(", 1)[-1].rstrip(")") for scope in reversed(scopes)]


def _written_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    leaves = [leaf.nbytes for leaf in instruction.shape.leaves]
    if instruction.opcode == "custom-call":
        if has_workspace(instruction):
            leaves.pop()
        return sum(leaves)
    for leaf, _, writer in in_place_operands(module, instruction):
        scope = computation
        if instruction.opcode == "fusion":
            scope = module.computations[instruction.called[0]]
        leaves[leaf] = _updated_bytes(scope, writer)
    return sum(leaves)


def _updated_bytes(scope: Computation, writer: Instruction) -> int:
    if writer.opcode == "dynamic-update-slice":
        return scope[writer.operands[1]].shape.nbytes
    # A scatter combines: it reads each element before it writes it.
    return 2 * sum(scope[name].shape.nbytes for name in _updates(writer.operands))


def _updates(scatter_operands: tuple[_T, ...]) -> tuple[_T, ...]:
    """The updates among a scatter's operands: n arrays, the indices, n updates."""
    return scatter_operands[len(scatter_operands) // 2 + 1 :]


def _part(
    module: HloModule, instruction: Instruction, operands: tuple[Shape, ...], share: float
) -> _Part:
    opcode = instruction.opcode
    if opcode == "fusion":
        return _fused_part(module, instruction, share)
    if opcode in _MATRIX_FLOPS:
        unit = MatrixUnit(factors_dtype(operands), opcode == "convolution")
        flops = _MATRIX_FLOPS[opcode](instruction, operands)
        return _Part((1.0,) * len(operands), flops={unit: flops})
    shares = _shares(instruction, operands, share)
    if opcode in COLLECTIVES:
        return _Part(shares)
    vector_flops = _vector_flops(module, instruction, operands)
    if vector_flops is None:
        return _Part(shares, unknown={opcode: 1})
    return _Part(shares, vector_flops * share)


def _fused_part(module: HloModule, fusion: Instruction, share: float) -> _Part:
    fused = module.computations[fusion.called[0]]
    asked: defaultdict[str, float] = defaultdict(float, {fused.root.name: share})
    in_place = {writer.name for _, _, writer in in_place_operands(module, fusion)}
    flops: defaultdict[MatrixUnit, float] = defaultdict(float)
    unknown: Counter[str] = Counter()
    vector_flops = 0.0
    # Operands come before their users, so in reverse order each share is complete when it is used.
    for instruction in reversed(fused.instructions):
        wanted = min(asked[instruction.name], 1.0)
        if wanted == 0.0 or instruction.opcode in ("parameter", "constant"):
            continue
        operands = tuple(fused[name].shape for name in instruction.operands)
        part = _part(module, instruction, operands, wanted)
        for number, (name, part_share) in enumerate(
            zip(instruction.operands, part.shares, strict=True)
        ):
            if number == 0 and instruction.name in in_place:
                continue
            asked[name] += part_share
        for unit, part_flops in part.flops.items():
            flops[unit] += part_flops
        unknown.update(part.unknown)
        vector_flops += part.vector_flops
    shares = tuple(min(asked[parameter.name], 1.0) for parameter in fused.parameters)
    return _Part(shares, vector_flops, flops, unknown)


# --- the share of each operand that an operation reads --------------------------------

_SLICES = frozenset({"slice", "dynamic-slice", "gather"})


def _shares(
    instruction: Instruction, operands: tuple[Shape, ...], share: float
) -> tuple[float, ...]:
    opcode = instruction.opcode
    if opcode in _SLICES:
        part = share * instruction.shape.size / max(operands[0].size, 1)
        return (min(part, 1.0), *(1.0,) * (len(operands) - 1))
    if opcode == "broadcast":
        return (min(1.0, share * instruction.shape.size / max(operands[0].size, 1)),)
    if opcode in ("dynamic-update-slice", "scatter"):
        return (share, *(1.0,) * (len(operands) - 1))
    if opcode == "sort":
        return (1.0,) * len(operands)
    return (share,) * len(operands)


# --- vector flops ---------------------------------------------------------------------

_MOVES = frozenset(
    "bitcast bitcast-convert broadcast concatenate constant copy dynamic-reshape dynamic-slice"
    " dynamic-update-slice gather get-tuple-element iota pad parameter reshape reverse slice"
    " stochastic-convert transpose tuple optimization-barrier opt-barrier".split()
)


def _vector_flops(
    module: HloModule, instruction: Instruction, operands: tuple[Shape, ...]
) -> float | None:
    """Flops of the whole result; None for an operation that is not modelled."""
    opcode = instruction.opcode
    if opcode in _MOVES:
        return 0.0
    if opcode in ELEMENT_FLOPS:
        return float(instruction.shape.size * ELEMENT_FLOPS[opcode])
    if opcode == "fft":
        return _fft_flops(instruction, operands)
    if opcode in _OF_MATRICES:
        return _OF_MATRICES[opcode](operands)
    if not instruction.called:
        return None
    region_flops = sum(_region_flops(module, name) for name in instruction.called)
    if opcode == "map":
        return float(instruction.shape.size * region_flops)
    if opcode == "reduce":
        return float(operands[0].size * region_flops)
    if opcode == "reduce-window":
        window = prod(int(size) for size in instruction.window("size"))
        return float(instruction.shape.leaves[0].size * window * region_flops)
    if opcode == "select-and-scatter":
        window = prod(int(size) for size in instruction.window("size"))
        return float(operands[1].size * window * region_flops)
    if opcode == "scatter":
        return float(_updates(operands)[0].size * region_flops)
    if opcode == "sort":
        along = operands[0].dims[instruction.int_list("dimensions")[0]]
        return formulas.sort(operands[0].size, along) * region_flops
    return None


def _fft_flops(fft: Instruction, operands: tuple[Shape, ...]) -> float:
    elements = max(operands[0].size, fft.shape.size)
    length = prod(fft.int_list("fft_length"))
    return formulas.fft(elements, length, real=fft.attribute("fft_type") in ("RFFT", "IRFFT"))


def _cholesky_flops(operands: tuple[Shape, ...]) -> float:
    *batch, n, _ = operands[0].dims
    return prod(batch) * formulas.cholesky(n)


def _triangular_solve_flops(operands: tuple[Shape, ...]) -> float:
    return formulas.triangular_solve(operands[0].dims, operands[1].dims)


_OF_MATRICES: Mapping[str, Callable[[tuple[Shape, ...]], float]] = MappingProxyType(
    {"cholesky": _cholesky_flops, "triangular-solve": _triangular_solve_flops}
)


def _region_flops(module: HloModule, name: str) -> int:
    """Flops of a scalar function, such as one that a reduction applies to two elements."""
    region = module.computations[name]
    return sum(ELEMENT_FLOPS.get(i.opcode, 0) for i in region.instructions) + sum(
        _region_flops(module, called) for i in region.instructions for called in i.called
    )


# --- matrix flops ---------------------------------------------------------------------


def _dot_flops(dot: Instruction, operands: tuple[Shape, ...]) -> float:
    """Flops of a product; of a ragged one too, where each row is multiplied by the matrix of its
    own group."""
    contracted = dot.int_list("lhs_contracting_dims")
    return 2.0 * dot.shape.size * prod(operands[0].dims[d] for d in contracted)


def _convolution_flops(convolution: Instruction, operands: tuple[Shape, ...]) -> float:
    return convolution_flops(convolution, convolution.shape, operands[1])


_MATRIX_FLOPS: Mapping[str, Callable[[Instruction, tuple[Shape, ...]], float]] = MappingProxyType(
    {"dot": _dot_flops, "ragged-dot": _dot_flops, "convolution": _convolution_flops}
)
