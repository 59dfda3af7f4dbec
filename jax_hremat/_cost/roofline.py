"""How long a compiled step takes at least: a roofline over its kernels.

Each kernel is bound by its arithmetic or by its memory traffic, whichever takes longer,
and pays for its launch. What the model does not know, it names.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, log2, prod
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from jax_hremat._compiler.target import DEVICES_PER_HOST, Target
from jax_hremat._cost.collectives import COLLECTIVES, exchange_of
from jax_hremat._cost.hlo import Computation, HloModule, Instruction, Shape, in_place_operands

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device sustains; peak numbers times the share reached in practice.

    Attributes:
      flops_per_s: Matrix-unit rate by the HLO type of a matmul's operands. A type that is
        missing runs at ``vector_flops_per_s``.
      vector_flops_per_s: Rate of everything that is no matmul or convolution.
      bytes_per_s: Memory bandwidth, reads and writes together.
      launch_s: Time one kernel costs even when it does nothing.
      convolution_flops_per_s: Likewise of a convolution's. A type that is missing runs at the
        rate of a matmul.
      link_bytes_per_s: What a device sends to others of its host; None if it is not known.
      network_bytes_per_s: What it sends to other hosts, likewise.
      host_bytes_per_s: What it sends to its host's memory, or receives from it, likewise.
    """

    flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    convolution_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None

    def of(self, unit: "MatrixUnit") -> float:
        """The rate of what multiplies matrices, or convolves."""
        rate = self.flops_per_s.get(unit.dtype, self.vector_flops_per_s)
        return self.convolution_flops_per_s.get(unit.dtype, rate) if unit.convolves else rate


class MatrixUnit(NamedTuple):
    """What a matmul or a convolution runs on: the HLO type of its operands, and which it is."""

    dtype: str
    convolves: bool


def rates(target: Target) -> Rates:
    """What the target sustains: its published peaks times its efficiencies."""
    share = target.flops_efficiency

    def sustained(peaks: Mapping[str, float]) -> Mapping[str, float]:
        return MappingProxyType({dtype: peak * share for dtype, peak in peaks.items()})

    def reached(peak: float | None) -> float | None:
        return None if peak is None else peak * target.link_efficiency

    return Rates(
        flops_per_s=sustained(target.matrix_flops_per_s),
        vector_flops_per_s=target.vector_flops_per_s * share,
        bytes_per_s=target.bandwidth_bytes_per_s * target.bandwidth_efficiency,
        launch_s=target.launch_s,
        convolution_flops_per_s=sustained(target.convolution_flops_per_s),
        link_bytes_per_s=reached(target.link_bytes_per_s),
        network_bytes_per_s=reached(target.network_bytes_per_s),
        host_bytes_per_s=reached(target.host_bytes_per_s),
    )


@dataclass(frozen=True, slots=True)
class KernelCost:
    """One kernel of the schedule, all its executions together.

    Attributes:
      name: The instruction's name.
      opcode: Its opcode; a custom call's is followed by its target.
      op_name: The traced operation it comes from.
      flops: Matrix flops.
      vector_flops: All other flops.
      bytes: Bytes read and written.
      time_s: Seconds of all executions.
      executions: How often it runs in one step; more than once inside a loop.
    """

    name: str
    opcode: str
    op_name: str
    flops: float
    vector_flops: float
    bytes: float
    time_s: float
    executions: int = 1


@dataclass(frozen=True, slots=True)
class Roofline:
    """The estimate for one execution of a module.

    Attributes:
      time_s: Sum of the kernels' times, in seconds.
      flops: Matrix flops.
      vector_flops: All other flops.
      bytes: Bytes read and written.
      kernels: In schedule order, loop bodies in place of their loop.
      unknown: What the estimate leaves out, by opcode, and how often it occurs in the
        text: flops of unknown operations, collectives and transfers to the host where the
        target has no rate for them, and loops of unknown length (counted as one pass).
    """

    time_s: float
    flops: float
    vector_flops: float
    bytes: float
    kernels: tuple[KernelCost, ...]
    unknown: Mapping[str, int]


def estimate_step(module: HloModule, rates: Rates) -> Roofline:
    """Estimates one execution of a compiled module.

    Args:
      module: An optimised, scheduled module.
      rates: What the device sustains.

    Returns:
      Times in seconds, arithmetic in flops (a multiply-add is two), traffic in bytes.

    Raises:
      KeyError: The text names an instruction or a computation that it does not contain.

    A collective or a transfer to the host that the schedule starts and later waits for runs
    beside the kernels in between, one at a time; a device sends round a ring.

    Unchecked: other kernels that run at the same time, what a collective takes of the memory's
    bandwidth from those beside it, its latency (one launch is counted), cache hits between
    kernels, recompute inside a fusion, ``algorithm=`` and ``operand_precision=`` of a matmul,
    complex arithmetic (counted as real), and a loop's condition.
    """
    unknown: Counter[str] = Counter()
    kernels = tuple(_kernels(module, module.entry, rates, 1, unknown))
    return Roofline(
        time_s=sum(kernel.time_s for kernel in kernels),
        flops=sum(kernel.flops for kernel in kernels),
        vector_flops=sum(kernel.vector_flops for kernel in kernels),
        bytes=sum(kernel.bytes for kernel in kernels),
        kernels=kernels,
        unknown=MappingProxyType(dict(unknown)),
    )


# --- the schedule: which kernels run, and how often -----------------------------------

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier add-dependency"
    " domain partition-id replica-id get-dimension-size".split()
)
_FREE_CUSTOM_CALLS = frozenset({"AllocateBuffer", "Sharding", "MoveToHost", "MoveToDevice"})


def _kernels(
    module: HloModule,
    computation: Computation,
    rates: Rates,
    executions: int,
    unknown: Counter[str],
) -> Iterator[KernelCost]:
    transfers = _Transfers()
    for instruction in computation.instructions:
        for kernel in _kernels_of(module, computation, instruction, rates, executions, unknown):
            if _is_started_transfer(computation, instruction):
                transfers.start(instruction.name, kernel.time_s / executions)
                kernel = replace(kernel, time_s=rates.launch_s * executions)
            transfers.elapsed_s += kernel.time_s / executions
            yield kernel
        if instruction.opcode.endswith("-done"):
            wait_s = transfers.wait_s(instruction.operands[0])
            if wait_s > 0.0:
                transfers.elapsed_s += wait_s
                yield _waiting(instruction, wait_s, executions)


def _kernels_of(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    executions: int,
    unknown: Counter[str],
) -> Iterator[KernelCost]:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith(("-done", "-update")):
        return
    if opcode == "while":
        trips = trip_count(module, computation, instruction)
        if trips is None:
            unknown["while"] += 1
            trips = 1
        body = module.computations[_called_as(instruction, "body")]
        yield from _kernels(module, body, rates, executions * trips, unknown)
    elif opcode == "conditional":
        yield from _dearest_branch(module, instruction, rates, executions, unknown)
    elif opcode in ("call", "async-start", "call-start"):
        for name in instruction.called:
            called = module.computations[name]
            yield from _kernels(module, called, rates, executions, unknown)
    elif _target(instruction) not in _FREE_CUSTOM_CALLS:
        yield _kernel(module, computation, instruction, rates, executions, unknown)


class _Transfers:
    """The clock of one pass over a computation: transfers that were started run beside the
    kernels that follow, one after another, until something waits for them."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._free_s = 0.0
        self._ends_s: dict[str, float] = {}

    def start(self, name: str, time_s: float) -> None:
        """A transfer starts as soon as those before it are through."""
        self._free_s = max(self._free_s, self.elapsed_s) + time_s
        self._ends_s[name] = self._free_s

    def wait_s(self, name: str) -> float:
        """How long nothing runs but the transfer, which must be complete now."""
        return max(0.0, self._ends_s.get(name, 0.0) - self.elapsed_s)


def _is_started_transfer(computation: Computation, instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode == "copy-start":
        return _crosses_memories(computation, instruction)
    return opcode.endswith("-start") and opcode.removesuffix("-start") in COLLECTIVES


def _waiting(done: Instruction, wait_s: float, executions: int) -> KernelCost:
    return KernelCost(
        name=done.name,
        opcode=done.opcode,
        op_name=done.op_name,
        flops=0.0,
        vector_flops=0.0,
        bytes=0.0,
        time_s=wait_s * executions,
        executions=executions,
    )


def _dearest_branch(
    module: HloModule,
    instruction: Instruction,
    rates: Rates,
    executions: int,
    unknown: Counter[str],
) -> tuple[KernelCost, ...]:
    branches = []
    for name in instruction.called:
        branch_unknown: Counter[str] = Counter()
        branch = module.computations[name]
        kernels = tuple(_kernels(module, branch, rates, executions, branch_unknown))
        branches.append((sum(kernel.time_s for kernel in kernels), kernels, branch_unknown))
    _, kernels, branch_unknown = max(branches, key=lambda branch: branch[0])
    unknown.update(branch_unknown)
    return kernels


def _kernel(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    executions: int,
    unknown: Counter[str],
) -> KernelCost:
    target = _target(instruction)
    opcode = instruction.opcode + (f":{target}" if target else "")
    work = _work(module, computation, _without_start(instruction))
    unknown.update(work.unknown)
    sent_s = _sent_s(computation, instruction, rates)
    if sent_s is None:
        unknown[_transfer_name(instruction)] += 1
    arithmetic_s = work.vector_flops / rates.vector_flops_per_s + sum(
        flops / rates.of(unit) for unit, flops in work.flops.items()
    )
    time_s = max(arithmetic_s, work.bytes / rates.bytes_per_s, sent_s or 0.0) + rates.launch_s
    return KernelCost(
        name=instruction.name,
        opcode=opcode,
        op_name=instruction.op_name,
        flops=sum(work.flops.values()) * executions,
        vector_flops=work.vector_flops * executions,
        bytes=work.bytes * executions,
        time_s=time_s * executions,
        executions=executions,
    )


def _sent_s(computation: Computation, instruction: Instruction, rates: Rates) -> float | None:
    """Seconds on the way to other devices or the host; None where nothing is known of them."""
    opcode = instruction.opcode.removesuffix("-start")
    given_bytes = sum(computation[name].shape.nbytes for name in instruction.operands)
    if opcode in COLLECTIVES:
        exchange = exchange_of(instruction, given_bytes, DEVICES_PER_HOST)
        if exchange is None:
            return None
        rate = rates.network_bytes_per_s if exchange.across_hosts else rates.link_bytes_per_s
        return _at(rate, exchange.sent_bytes)
    if opcode == "copy" and _crosses_memories(computation, instruction):
        return _at(rates.host_bytes_per_s, given_bytes)
    return 0.0


def _at(rate: float | None, sent_bytes: float) -> float | None:
    if sent_bytes == 0.0:
        return 0.0
    return None if rate is None else sent_bytes / rate


def _transfer_name(instruction: Instruction) -> str:
    opcode = instruction.opcode.removesuffix("-start")
    return "copy between memory spaces" if opcode == "copy" else opcode


def _crosses_memories(computation: Computation, copy: Instruction) -> bool:
    """Whether a `copy`, or a `copy-start`, whose first result is the copy, leaves the memory."""
    made = copy.shape.elements[0] if copy.opcode == "copy-start" else copy.shape
    return computation[copy.operands[0]].shape.memory_space != made.memory_space


def _without_start(instruction: Instruction) -> Instruction:
    """``fusion-start`` and its like as the operation they start."""
    if not instruction.opcode.endswith("-start"):
        return instruction
    shape = instruction.shape
    if instruction.opcode == "copy-start":
        shape = shape.elements[0]
    elif shape.is_tuple and len(shape.elements) > 1:
        shape = shape.elements[1]
    return replace(instruction, opcode=instruction.opcode.removesuffix("-start"), shape=shape)


def _called_as(instruction: Instruction, role: str) -> str:
    return (instruction.attribute(role) or "").lstrip("%")


def _target(instruction: Instruction) -> str:
    if instruction.opcode != "custom-call":
        return ""
    return (instruction.attribute("custom_call_target") or "").strip('"')


# --- loops ----------------------------------------------------------------------------

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def trip_count(module: HloModule, computation: Computation, loop: Instruction) -> int | None:
    """How often a ``while`` runs its body; None if the text does not tell.

    XLA's own ``known_trip_count`` is used where it is printed. Else the loop must count
    one scalar of its state from a constant by a constant up to a constant.

    Args:
      module: The loop's module.
      computation: Where the loop stands.
      loop: A ``while`` instruction.
    """
    known = _TRIP_COUNT.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[_called_as(loop, "condition")]
    body = module.computations[_called_as(loop, "body")]
    compare = _unfused(module, condition, condition.root)
    if compare is None or compare[0].opcode != "compare":
        return None
    direction = compare[0].attribute("direction")
    counter, limit = compare[1]
    bound = _constant(condition, limit)
    if direction not in ("LT", "LE") or bound is None:
        return None
    if counter.opcode != "get-tuple-element" or body.root.opcode != "tuple":
        return None
    index = int(counter.attribute("index") or 0)
    state = computation[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    first = _constant(computation, computation[state.operands[index]])
    step = _step(module, body, index)
    if first is None or step is None or step <= 0:
        return None
    return max(0, ceil((bound + (direction == "LE") - first) / step))


def _step(module: HloModule, body: Computation, index: int) -> int | None:
    add = _unfused(module, body, body[body.root.operands[index]])
    if add is None or add[0].opcode != "add":
        return None
    counters = [i for i in add[1] if i.opcode == "get-tuple-element"]
    if len(counters) != 1 or counters[0].attribute("index") != str(index):
        return None
    steps = [_constant(body, i) for i in add[1] if i.opcode != "get-tuple-element"]
    return steps[0] if len(steps) == 1 else None


def _unfused(
    module: HloModule, computation: Computation, instruction: Instruction
) -> tuple[Instruction, tuple[Instruction, Instruction]] | None:
    """A binary operation and its operands, looking through a fusion and copies."""
    instruction = _through_copies(computation, instruction)
    if instruction.opcode != "fusion":
        if len(instruction.operands) != 2:
            return None
        left, right = (_through_copies(computation, computation[o]) for o in instruction.operands)
        return instruction, (left, right)
    fused = module.computations[instruction.called[0]]
    if len(fused.root.operands) != 2:
        return None

    def outside(name: str) -> Instruction:
        inner = _through_copies(fused, fused[name])
        if inner.opcode != "parameter":
            return inner
        operand = instruction.operands[int(inner.literal)]
        return _through_copies(computation, computation[operand])

    left, right = (outside(name) for name in fused.root.operands)
    return fused.root, (left, right)


def _through_copies(computation: Computation, instruction: Instruction) -> Instruction:
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation[instruction.operands[0]]
    return instruction


def _constant(computation: Computation, instruction: Instruction) -> int | None:
    instruction = _through_copies(computation, instruction)
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.literal):
        return None
    return int(instruction.literal)


# --- one kernel -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Work:
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


def _work(module: HloModule, computation: Computation, instruction: Instruction) -> _Work:
    operands = tuple(computation[name].shape for name in instruction.operands)
    part = _part(module, instruction, operands, 1.0)
    shares = part.shares
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        shares = (0.0, *shares[1:])
    read: dict[str, float] = {}
    for name, shape, share in zip(instruction.operands, operands, shares, strict=True):
        read[name] = min(read.get(name, 0.0) + shape.nbytes * share, shape.nbytes)
    return _Work(
        flops=part.flops,
        vector_flops=part.vector_flops,
        bytes=sum(read.values()) + _written_bytes(module, computation, instruction),
        unknown=part.unknown,
    )


def _written_bytes(module: HloModule, computation: Computation, instruction: Instruction) -> float:
    leaves = [leaf.nbytes for leaf in instruction.shape.leaves]
    if instruction.opcode == "custom-call":
        if _target(instruction).startswith("__") and _has_workspace(instruction.shape):
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
            target = _target(instruction)
            return _Part(everything, unknown={f"{opcode}:{target}" if target else opcode: 1})
        convolves = opcode == "convolution" or _target(instruction).startswith("__cudnn$conv")
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
    target = _target(instruction)
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
