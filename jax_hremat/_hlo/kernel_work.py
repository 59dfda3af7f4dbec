"""What one kernel of a compiled step computes and moves."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log2, prod
from types import MappingProxyType
from typing import TypeVar

from jax_hremat._compiler.rates import MatrixUnit
from jax_hremat._hlo.collectives import COLLECTIVES
from jax_hremat._hlo.parse import Computation, HloModule, Instruction, Shape, in_place_operands

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Work:
    """Arithmetic and traffic of one execution; ``flops`` are matrix flops by their unit."""

    flops: Mapping[MatrixUnit, float] = field(default_factory=dict)
    vector_flops: float = 0.0
    bytes: float = 0.0
    unknown: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one instruction does when a share of its result is asked for.

    ``shares`` says which share of each operand it then asks for, between 0 and 1.
    """

    shares: tuple[float, ...]
    vector_flops: float = 0.0
    flops: Mapping[MatrixUnit, float] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


def work_of(module: HloModule, computation: Computation, instruction: Instruction) -> Work:
    """The work of one instruction of a schedule, a fusion or a library call for instance.

    An operand read in slices counts by what is read of it, one updated in place by what is written.
    """
    operands = tuple(computation[name].shape for name in instruction.operands)
    part = _part(module, instruction, operands, 1.0)
    shares = part.shares
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        shares = (0.0, *shares[1:])
    read: dict[str, float] = {}
    for name, shape, share in zip(instruction.operands, operands, shares, strict=True):
        read[name] = min(read.get(name, 0.0) + shape.nbytes * share, shape.nbytes)
    return Work(
        flops=part.flops,
        vector_flops=part.vector_flops,
        bytes=sum(read.values()) + _written_bytes(module, computation, instruction),
        unknown=part.unknown,
    )


def _written_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    leaves = [leaf.nbytes for leaf in instruction.shape.leaves]
    if instruction.opcode == "custom-call":
        if instruction.library.startswith("__") and _has_workspace(instruction.shape):
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
    # A scatter combines: what it writes it has read before.
    return 2 * sum(scope[name].shape.nbytes for name in _updates(writer.operands))


def _updates(scatter_operands: tuple[_T, ...]) -> tuple[_T, ...]:
    """The updates among a scatter's operands: n arrays, the indices, n updates."""
    return scatter_operands[len(scatter_operands) // 2 + 1 :]


def _has_workspace(shape: Shape) -> bool:
    """Library calls return scratch memory as a last, flat byte array."""
    if not shape.is_tuple or len(shape.elements) < 2:
        return False
    last = shape.elements[-1]
    return last.dtype in ("u8", "s8") and len(last.dims) == 1


def _part(
    module: HloModule, instruction: Instruction, operands: tuple[Shape, ...], share: float
) -> _Part:
    opcode = instruction.opcode
    if opcode == "fusion":
        return _fused_part(module, instruction, share)
    if opcode in ("dot", "convolution", "custom-call"):
        everything = (1.0,) * len(operands)
        flops = _matrix_flops(instruction, operands)
        if flops is None:
            target = instruction.library
            return _Part(everything, unknown={f"{opcode}:{target}" if target else opcode: 1})
        convolves = opcode == "convolution" or instruction.library.startswith("__cudnn$conv")
        return _Part(everything, flops={MatrixUnit(_matrix_dtype(operands), convolves): flops})
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
    # Operands stand before their users, so backwards each share is complete when it is met.
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


# --- which share of its operands an operation reads -----------------------------------

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

# Flops one element costs on the vector units. Functions are counted as the multiply-adds
# of their usual polynomial or of a special-function unit at a quarter of the rate.
_ELEMENT_FLOPS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(
        "abs add and ceil compare convert floor imag is-finite maximum minimum multiply negate"
        " not or popcnt count-leading-zeros real reduce-precision round-nearest-afz"
        " round-nearest-even select shift-left shift-right-arithmetic shift-right-logical sign"
        " subtract xor complex".split(),
        1,
    )
    | dict.fromkeys(["clamp"], 2)
    | dict.fromkeys(["divide", "remainder", "rsqrt", "sqrt"], 4)
    | dict.fromkeys(["exponential", "log", "logistic"], 8)
    | dict.fromkeys(["cbrt", "cosine", "exponential-minus-one", "log-plus-one", "sine"], 12)
    | dict.fromkeys(["acosh", "asinh", "atan2", "erf", "power", "tan", "tanh"], 16)
    | dict.fromkeys(["rng-bit-generator"], 32)
)
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
    if opcode in _ELEMENT_FLOPS:
        return float(instruction.shape.size * _ELEMENT_FLOPS[opcode])
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
        return float(operands[0].size * log2(max(along, 2)) * region_flops)
    return None


def _region_flops(module: HloModule, name: str) -> int:
    """Flops of a scalar function, as a reduction applies to two elements."""
    region = module.computations[name]
    return sum(_ELEMENT_FLOPS.get(i.opcode, 0) for i in region.instructions) + sum(
        _region_flops(module, called) for i in region.instructions for called in i.called
    )


# --- matrix flops ---------------------------------------------------------------------

_CONTRACTING = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


def _matrix_dtype(operands: tuple[Shape, ...]) -> str:
    """The wider type of the two factors, which decides the unit that multiplies them."""
    return max(operands[:2], key=lambda shape: shape.element_bits).dtype


def _matrix_flops(instruction: Instruction, operands: tuple[Shape, ...]) -> float | None:
    """Flops of a matmul or convolution; None for a custom call that is neither."""
    if not instruction.shape.leaves:
        return None
    result = instruction.shape.leaves[0]
    if instruction.opcode == "dot":
        contracted = instruction.int_list("lhs_contracting_dims")
        return 2.0 * result.size * prod(operands[0].dims[d] for d in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, result, operands[1])
    target = instruction.library
    if target.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        match = _CONTRACTING.search(instruction.attributes)
        if match is None:
            return None
        contracted = [int(d) for d in re.findall(r"\d+", match.group(1))]
        return 2.0 * result.size * prod(operands[0].dims[d] for d in contracted)
    # The window of all three is the forward convolution's.
    if target == "__cudnn$convBackwardInput":
        return _convolution_flops(instruction, operands[0], operands[1])
    if target == "__cudnn$convBackwardFilter":
        return _convolution_flops(instruction, operands[1], result)
    if target.startswith(("__cudnn$convForward", "__cudnn$convBiasActivationForward")):
        return _convolution_flops(instruction, result, operands[1])
    return None


def _convolution_flops(instruction: Instruction, result: Shape, kernel: Shape) -> float:
    """Flops of a forward convolution: a full dot product for each element of its result.

    Multiplications with padding count, as library kernels do them; those with the holes of
    a dilated input do not. The kernel's input features are those of one group.
    """
    labels = (instruction.attribute("dim_labels") or "").split("->")[0].split("_")[1]
    inputs = prod(size for label, size in zip(labels, kernel.dims, strict=True) if label in "i?")
    window = prod(int(size) for size in instruction.window("size"))
    holes = prod(int(factor) for factor in instruction.window("lhs_dilate"))
    return 2.0 * result.size * inputs * window / holes
