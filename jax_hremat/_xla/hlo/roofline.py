"""A lower bound on the time of a compiled step: a roofline over its kernels.

Each kernel takes the time of its arithmetic or of its memory traffic, whichever is longer, and of
its launch. Operations that are not modelled are listed by name.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from jax_hremat._xla.hlo.collectives import COLLECTIVES, exchange_of
from jax_hremat._xla.hlo.kernel_work import work_of
from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction
from jax_hremat._xla.hlo.trips import trip_count
from jax_hremat._xla.rates import Rates
from jax_hremat._xla.target import DEVICES_PER_HOST


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
        unpriced: The target it calls, if only its bytes are known.
    """

    name: str
    opcode: str
    op_name: str
    flops: float
    vector_flops: float
    bytes: float
    time_s: float
    executions: int = 1
    unpriced: str = ""

    def repeated(self, times: int) -> "KernelCost":
        """The kernel in a loop that runs `times` times."""
        return replace(
            self,
            flops=self.flops * times,
            vector_flops=self.vector_flops * times,
            bytes=self.bytes * times,
            time_s=self.time_s * times,
            executions=self.executions * times,
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """The estimate for one execution of a module.

    Attributes:
        time_s: Sum of the kernels' times, in seconds.
        flops: Matrix flops.
        vector_flops: All other flops.
        bytes: Bytes read and written.
        kernels: The kernels in schedule order, with the body of a loop in its place.
        unknown: What the estimate leaves out, by opcode, and how often it occurs in the
            text: flops of operations and of called kernels that are not modelled (their bytes
            count), collectives and transfers to the host where the target has no rate for them,
            and loops of unknown length (counted as one pass).
        unpriced_kernels: Targets of the called kernels that are not modelled, sorted.
    """

    time_s: float
    flops: float
    vector_flops: float
    bytes: float
    kernels: tuple[KernelCost, ...]
    unknown: Mapping[str, int]
    unpriced_kernels: tuple[str, ...] = ()


def estimate_step(module: HloModule, rates: Rates) -> Roofline:
    """Estimates one execution of a compiled module.

    Args:
        module: An optimised, scheduled module.
        rates: The rates that the device sustains.

    Returns:
        Times in seconds, arithmetic in flops (a multiply-add is two), traffic in bytes.

    Raises:
        KeyError: The text names an instruction or a computation that it does not contain.

    A collective or a transfer to the host that the schedule starts and later waits for runs
    concurrently with the kernels in between, one transfer at a time; devices send round a ring.

    Unchecked: other kernels that run at the same time, the memory bandwidth that a collective takes
    from concurrent kernels, its latency (one launch is counted), cache hits between kernels,
    recompute inside a fusion, ``algorithm=`` and ``operand_precision=`` of a matmul, complex
    arithmetic (counted as real), and a loop's condition.
    """
    unknown: Counter[str] = Counter()
    kernels = tuple(_kernels(module, module.entry, rates, unknown))
    return Roofline(
        time_s=sum(kernel.time_s for kernel in kernels),
        flops=sum(kernel.flops for kernel in kernels),
        vector_flops=sum(kernel.vector_flops for kernel in kernels),
        bytes=sum(kernel.bytes for kernel in kernels),
        kernels=kernels,
        unknown=MappingProxyType(dict(unknown)),
        unpriced_kernels=tuple(sorted({k.unpriced for k in kernels if k.unpriced})),
    )


# --- the schedule: which kernels run, and how often -----------------------------------

_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier add-dependency"
    " domain partition-id replica-id get-dimension-size".split()
)
_FREE_CUSTOM_CALLS = frozenset({"AllocateBuffer", "Sharding", "MoveToHost", "MoveToDevice"})


def _kernels(
    module: HloModule, computation: Computation, rates: Rates, unknown: Counter[str]
) -> Iterator[KernelCost]:
    """The kernels of one pass over a computation."""
    transfers = _Transfers()
    for instruction in computation.instructions:
        for kernel in _kernels_of(module, computation, instruction, rates, unknown):
            if _is_started_transfer(computation, instruction):
                transfers.start(instruction.name, kernel.time_s)
                kernel = replace(kernel, time_s=rates.launch_s)
            transfers.elapsed_s += kernel.time_s
            yield kernel
        if instruction.opcode.endswith("-done"):
            wait_s = transfers.wait_s(instruction.operands[0])
            if wait_s > 0.0:
                transfers.elapsed_s += wait_s
                yield _waiting(instruction, wait_s)


def _kernels_of(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
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
        body = module.computations[instruction.called_as("body")]
        yield from (k.repeated(trips) for k in _kernels(module, body, rates, unknown))
    elif opcode == "conditional":
        yield from _dearest_branch(module, instruction, rates, unknown)
    elif opcode in ("call", "async-start", "call-start"):
        for name in instruction.called:
            yield from _kernels(module, module.computations[name], rates, unknown)
    elif instruction.library not in _FREE_CUSTOM_CALLS:
        yield _kernel(module, computation, instruction, rates, unknown)


class _Transfers:
    """The clock of one pass over a computation. Transfers run one after another, concurrently with
    the kernels after their start, until something waits for them."""

    def __init__(self) -> None:
        self.elapsed_s = 0.0
        self._free_s = 0.0
        self._ends_s: dict[str, float] = {}

    def start(self, name: str, time_s: float) -> None:
        """Start a transfer as soon as those before it are complete."""
        self._free_s = max(self._free_s, self.elapsed_s) + time_s
        self._ends_s[name] = self._free_s

    def wait_s(self, name: str) -> float:
        """How long the schedule waits for a transfer that must be complete now."""
        return max(0.0, self._ends_s.get(name, 0.0) - self.elapsed_s)


def _is_started_transfer(computation: Computation, instruction: Instruction) -> bool:
    opcode = instruction.opcode
    if opcode == "copy-start":
        return _crosses_memories(computation, instruction)
    return opcode.endswith("-start") and opcode.removesuffix("-start") in COLLECTIVES


def _waiting(done: Instruction, wait_s: float) -> KernelCost:
    return KernelCost(
        name=done.name,
        opcode=done.opcode,
        op_name=done.op_name,
        flops=0.0,
        vector_flops=0.0,
        bytes=0.0,
        time_s=wait_s,
    )


def _dearest_branch(
    module: HloModule, instruction: Instruction, rates: Rates, unknown: Counter[str]
) -> tuple[KernelCost, ...]:
    branches = []
    for name in instruction.called:
        branch_unknown: Counter[str] = Counter()
        branch = module.computations[name]
        kernels = tuple(_kernels(module, branch, rates, branch_unknown))
        branches.append((sum(kernel.time_s for kernel in kernels), kernels, branch_unknown))
    _, kernels, branch_unknown = max(branches, key=lambda branch: branch[0])
    unknown.update(branch_unknown)
    return kernels


def _kernel(
    module: HloModule,
    computation: Computation,
    instruction: Instruction,
    rates: Rates,
    unknown: Counter[str],
) -> KernelCost:
    target = instruction.library
    opcode = instruction.opcode + (f":{target}" if target else "")
    work, not_known = work_of(module, computation, _without_start(instruction), rates.kernels)
    unknown.update(not_known)
    sent_s = _sent_s(computation, instruction, rates)
    if sent_s is None:
        unknown[_transfer_name(instruction)] += 1
    time_s = max(rates.busy_s(work), sent_s or 0.0) + rates.launch_s
    return KernelCost(
        name=instruction.name,
        opcode=opcode,
        op_name=instruction.op_name,
        flops=work.matrix_flops,
        vector_flops=work.vector_flops,
        bytes=work.bytes,
        time_s=time_s,
        # A call that returns nothing, such as a print, is never recomputed.
        unpriced=target if target and not_known and instruction.shape.size else "",
    )


def _sent_s(computation: Computation, instruction: Instruction, rates: Rates) -> float | None:
    """Seconds to send data to other devices or the host; None where the rate or the groups are
    unknown."""
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
    """Whether a `copy` or a `copy-start` goes to another memory space. (The first result of a
    `copy-start` is the copy.)"""
    made = copy.shape.elements[0] if copy.opcode == "copy-start" else copy.shape
    return computation[copy.operands[0]].shape.memory_space != made.memory_space


def _without_start(instruction: Instruction) -> Instruction:
    """The operation that an instruction such as ``fusion-start`` starts; others unchanged."""
    if not instruction.opcode.endswith("-start"):
        return instruction
    shape = instruction.shape
    if instruction.opcode == "copy-start":
        shape = shape.elements[0]
    elif shape.is_tuple and len(shape.elements) > 1:
        shape = shape.elements[1]
    return replace(instruction, opcode=instruction.opcode.removesuffix("-start"), shape=shape)
