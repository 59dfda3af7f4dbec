"""Which buffers of a scheduled program live when.

Follows XLA's buffer assignment: aliases share one buffer, element-wise kernels reuse a
dying operand's buffer, and temporaries move into result buffers that are not yet in use.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, TypeAlias

from jax_hremat._cost.hlo import (
    Computation,
    HloModule,
    Instruction,
    Shape,
    in_place_operands,
    leaf_number,
)

Kind: TypeAlias = Literal["parameter", "temp", "output", "constant"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A piece of device memory and the part of the schedule that needs it.

    Attributes:
      name: The instruction that first writes it, with the leaf's number behind a ``.`` and
        in braces when that instruction has several results: ``"fusion.3{1}"``.
      nbytes: Its size in bytes.
      start: First position that needs it.
      end: Last position that needs it, itself included. A buffer handed over in place to
        an element-wise kernel ends the position before, where it has a size to save.
      kind: Parameters and constants are there before the step, outputs after it.
      parameter_index: Number of the parameter, counting flattened entry parameters; None
        for other kinds.
      op_name: The traced operation that first writes it.
      opcode: Opcode of the instruction that first writes it.
      inside: The output or parameter whose memory this buffer borrows, None if it has its
        own: temporaries in results not yet written, outputs in donated parameters.
    """

    name: str
    nbytes: int
    start: int
    end: int
    kind: Kind
    parameter_index: int | None
    op_name: str
    opcode: str
    inside: str | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """The buffers of one computation along its schedule.

    Attributes:
      buffers: In the order in which they are first needed.
      num_positions: Number of instructions in the schedule.
      live_temp_bytes: For each position, the bytes of the temporaries with memory of their
        own that live there; loops, branches and calls count with their inner peak.
      inner_bytes: The part of them that loops, branches and calls need inside.
      names: Name of the instruction at each position.
      opcodes: Its opcode.
    """

    buffers: tuple[Buffer, ...]
    num_positions: int
    live_temp_bytes: tuple[int, ...]
    inner_bytes: tuple[int, ...]
    names: tuple[str, ...]
    opcodes: tuple[str, ...]

    def peak(self) -> tuple[int, int]:
        """The first position with most temporary bytes, and those bytes."""
        most_bytes = max(self.live_temp_bytes)
        return self.live_temp_bytes.index(most_bytes), most_bytes

    def packed_temp_bytes(self) -> int:
        """Bytes of one block that holds all temporaries at fixed places.

        XLA's ``temp_size`` is such a block: never below the peak, and above it where the
        gaps between longer-lived buffers fit nothing. Packs as XLA does, largest first and
        longest-lived first, and takes the smaller block.
        """
        own = [b for b in _own_temps(list(self.buffers)) if b.nbytes]
        waits = [
            (
                position,
                position,
                live_bytes - sum(b.nbytes for b in own if b.start <= position <= b.end),
            )
            for position, (live_bytes, opcode) in enumerate(
                zip(self.live_temp_bytes, self.opcodes, strict=True)
            )
            if opcode in _CALLERS
        ]
        spans = [(b.start, b.end, b.nbytes) for b in own] + [w for w in waits if w[2] > 0]
        by_size = sorted(spans, key=lambda s: (-s[2], s[0] - s[1]))
        by_life = sorted(spans, key=lambda s: (s[0] - s[1], -s[2]))
        return min(_packed_bytes(by_size), _packed_bytes(by_life))

    def live_at(self, position: int) -> tuple[Buffer, ...]:
        """All buffers that live at a position, whatever their kind.

        Raises:
          IndexError: The schedule has no such position.
        """
        if not 0 <= position < self.num_positions:
            raise IndexError(f"position {position} of a schedule of {self.num_positions}")
        return tuple(b for b in self.buffers if b.start <= position <= b.end)

    def position_of(self, name_or_opcode: str) -> int:
        """Position of the instruction of that name, else of the first with that opcode.

        Raises:
          KeyError: There is neither.
        """
        for labels in (self.names, self.opcodes):
            if name_or_opcode in labels:
                return labels.index(name_or_opcode)
        raise KeyError(name_or_opcode)


def buffer_timeline(module: HloModule) -> Timeline:
    """Finds the lifetimes of all buffers in the entry computation.

    Args:
      module: An optimised, scheduled module.

    Returns:
      The timeline; positions count the entry computation's instructions as printed.

    Raises:
      KeyError: The text names an instruction or a computation that it does not contain.

    Unchecked: alignment and fragmentation, the pointer tables of tuples, buffers in host
    memory (left out), and scratch memory that libraries ask for when they run.
    """
    entry = module.entry
    values = _Values(module, entry)
    buffers = _assigned(module, values, _donated(module, values))
    inside_bytes = _inside_bytes(module, entry, {})
    return Timeline(
        buffers=tuple(sorted(buffers, key=lambda b: b.start)),
        num_positions=len(entry.instructions),
        live_temp_bytes=_sum_live(_own_temps(buffers), inside_bytes),
        inner_bytes=tuple(inside_bytes),
        names=tuple(i.name for i in entry.instructions),
        opcodes=tuple(i.opcode for i in entry.instructions),
    )


def reads_and_results(module: HloModule) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Where each buffer of the entry computation is last read, and which are its results.

    Returns:
      For each buffer's name its last reader's position (that of its writer if there is none;
      being returned is no read), and for each flattened result the name of its buffer.
    """
    entry = module.entry
    values = _Values(module, entry)
    last_read = {_label(entry, key): position for key, position in values.end.items()}
    return last_read, tuple(_label(entry, key) for key in values.leaves[entry.root.name])


# --- aliases: which leaf of which instruction is which buffer --------------------------

# A buffer's identity is the first instruction that defines it and the leaf's number.
_Key: TypeAlias = tuple[str, int]
_Leaves: TypeAlias = tuple[_Key, ...]

_FORWARDS = frozenset(
    {"bitcast", "opt-barrier", "while", "add-dependency", "domain", "copy-done", "all-reduce-done"}
)
_PAIRED_STARTS = frozenset({"all-gather-start", "collective-permute-start", "async-start"})
_CALLERS = frozenset({"while", "conditional", "call", "async-start", "call-start"})
_HOST_SPACE = 5


class _Values:
    """The buffers behind each instruction of one computation, and when they are used.

    Attributes:
      leaves: For each instruction, the buffer behind each leaf of its result.
      shapes: Shape of each buffer.
      start: Position where a buffer is first written.
      end: Position of its last use; that of ``start`` if there is none.
    """

    def __init__(self, module: HloModule, computation: Computation) -> None:
        self.computation = computation
        self.leaves: dict[str, _Leaves] = {}
        self.shapes: dict[_Key, Shape] = {}
        self.start: dict[_Key, int] = {}
        self.end: dict[_Key, int] = {}
        for position, instruction in enumerate(computation.instructions):
            leaves = self._leaves_of(module, instruction)
            self.leaves[instruction.name] = leaves
            for key, shape in zip(leaves, instruction.shape.leaves, strict=True):
                if key not in self.start:
                    self.shapes[key] = shape
                    self.start[key] = self.end[key] = position
            if instruction.opcode in ("tuple", "get-tuple-element"):
                continue
            for operand in instruction.operands:
                for key in self.leaves[operand]:
                    self.end[key] = position

    def _leaves_of(self, module: HloModule, instruction: Instruction) -> _Leaves:
        opcode = instruction.opcode
        operands = [self.leaves[name] for name in instruction.operands]
        own = tuple((instruction.name, leaf) for leaf in range(len(instruction.shape.leaves)))
        if opcode == "tuple":
            return tuple(key for leaves in operands for key in leaves)
        if opcode == "get-tuple-element":
            whole = self.computation[instruction.operands[0]].shape
            index = int(instruction.attribute("index") or 0)
            first = leaf_number(whole, (index,))
            return operands[0][first : first + len(own)]
        if opcode in _FORWARDS:
            return operands[0][: len(own)]
        if opcode == "copy-start":
            return (own[0], operands[0][0], *own[2:])
        if opcode.endswith("-start") and _is_paired(instruction):
            taken = tuple(key for leaves in operands for key in leaves)
            return self._in_place(module, instruction, taken + own[len(taken) :], len(taken))
        if opcode == "call":
            return self._called(module, instruction, own)
        if opcode.endswith(("-done", "-update")):
            return self._done(instruction, operands[0], own)
        return self._in_place(module, instruction, own, 0)

    def _called(self, module: HloModule, call: Instruction, own: _Leaves) -> _Leaves:
        inner = _Values(module, module.computations[call.called[0]])
        given = dict(
            pair
            for operand, parameter in zip(call.operands, inner.computation.parameters, strict=True)
            for pair in zip(inner.leaves[parameter.name], self.leaves[operand], strict=True)
        )
        results = inner.leaves[inner.computation.root.name]
        return tuple(given.get(result, key) for result, key in zip(results, own, strict=True))

    def _done(self, done: Instruction, started: _Leaves, own: _Leaves) -> _Leaves:
        if done.opcode.endswith("-update"):
            return started
        shape = self.computation[done.operands[0]].shape
        if not _is_paired(self.computation[done.operands[0]]):
            return started[: len(own)] if len(started) >= len(own) else own
        first = leaf_number(shape, (1,))
        return started[first : first + len(own)]

    def _in_place(
        self, module: HloModule, instruction: Instruction, leaves: _Leaves, offset: int
    ) -> _Leaves:
        opcode = instruction.opcode.removesuffix("-start")
        plain = replace(instruction, opcode=opcode) if offset else instruction
        result = list(leaves)
        for leaf, operand, _ in in_place_operands(module, plain):
            result[offset + leaf] = self.leaves[instruction.operands[operand]][0]
        return tuple(result)


def _is_paired(start: Instruction) -> bool:
    """Whether an async start returns (operands, results, context)."""
    if start.opcode in _PAIRED_STARTS:
        return True
    return (
        start.shape.is_tuple
        and len(start.shape.elements) > 1
        and bool(start.called)
        and (start.shape.elements[0].is_tuple)
    )


# --- one computation's buffers ----------------------------------------------------------


def _buffers(values: _Values, donated: Mapping[_Key, _Key]) -> list[Buffer]:
    entry = values.computation
    last = len(entry.instructions) - 1
    outputs = values.leaves[entry.root.name]
    parameters = _flat_parameters(values)
    buffers = []
    for key, start in values.start.items():
        shape = values.shapes[key]
        if shape.memory_space == _HOST_SPACE:
            continue
        instruction = entry[key[0]]
        end = values.end[key]
        inside = None
        kind: Kind = "temp"
        if instruction.opcode == "parameter":
            kind, start = "parameter", 0
            end = end if key in donated.values() and key not in outputs else last
        elif instruction.opcode == "constant":
            kind, start, end = "constant", 0, last
        elif key in outputs:
            kind, end = "output", last
            inside = _label(entry, donated[key]) if key in donated else None
        buffers.append(
            Buffer(
                name=_label(entry, key),
                nbytes=shape.nbytes,
                start=start,
                end=end,
                kind=kind,
                parameter_index=parameters.get(key),
                op_name=instruction.op_name,
                opcode=instruction.opcode,
                inside=inside,
            )
        )
    return buffers


def _label(computation: Computation, key: _Key) -> str:
    name, leaf = key
    return f"{name}{{{leaf}}}" if computation[name].shape.is_tuple else name


def _flat_parameters(values: _Values) -> Mapping[_Key, int]:
    keys = [key for p in values.computation.parameters for key in values.leaves[p.name]]
    return {key: number for number, key in enumerate(keys)}


def _donated(module: HloModule, values: _Values) -> Mapping[_Key, _Key]:
    """For each output buffer in a donated parameter's memory, that parameter's buffer."""
    entry = values.computation
    found = {}
    for alias in module.output_aliases:
        parameter = entry.parameters[alias.parameter]
        source = (parameter.name, leaf_number(parameter.shape, alias.parameter_index))
        leaf = leaf_number(entry.root.shape, alias.output_index)
        found[values.leaves[entry.root.name][leaf]] = source
    return found


# --- reuse ------------------------------------------------------------------------------

_ELEMENTWISE = frozenset(
    "abs add and bitcast bitcast-convert cbrt ceil clamp compare convert copy cosine divide erf"
    " exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum"
    " minimum multiply negate not or popcnt power real reduce-precision remainder"
    " round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic"
    " shift-right-logical sign sine sqrt subtract tan tanh tuple xor".split()
)


@dataclass(frozen=True, slots=True)
class _HandOver:
    """A dying operand and the result that may be written over it.

    Attributes:
      source: Name of the operand's buffer.
      target: Name of the result's buffer.
      direct: Whether the kernel reads the buffer as it was defined, not through a view or
        a tuple. Between two temporaries XLA shares memory only then.
    """

    source: str
    target: str
    direct: bool


def _hand_overs(module: HloModule, values: _Values, buffers: list[Buffer]) -> tuple[_HandOver, ...]:
    entry = values.computation
    by_name = {b.name: b for b in buffers}
    found = []
    for position, instruction in enumerate(entry.instructions):
        for leaf, operand in _overwritable(module, instruction):
            operand_name = instruction.operands[operand]
            source_key = values.leaves[operand_name][0]
            source = by_name.get(_label(entry, source_key))
            target = by_name.get(_label(entry, (instruction.name, leaf)))
            if source is None or target is None or source.kind != "temp":
                continue
            if source.nbytes == target.nbytes and source.end == position > source.start:
                found.append(_HandOver(source.name, target.name, source_key[0] == operand_name))
    return tuple(found)


def _shortened(buffers: list[Buffer], hand_overs: tuple[_HandOver, ...]) -> list[Buffer]:
    """Ends temporaries one position early that another one writes over, one by one."""
    own = {b.name for b in buffers if b.kind == "temp" and b.inside is None}
    sources: set[str] = set()
    targets: set[str] = set()
    for pair in hand_overs:
        if not pair.direct or not {pair.source, pair.target} <= own:
            continue
        if pair.source not in sources and pair.target not in targets:
            sources.add(pair.source)
            targets.add(pair.target)
    return [replace(b, end=b.end - 1) if b.name in sources else b for b in buffers]


def _overwritable(module: HloModule, instruction: Instruction) -> Iterator[tuple[int, int]]:
    """Pairs of a result's leaf and an operand read at the very places it is written."""
    opcode = instruction.opcode
    if opcode in _ELEMENTWISE and not instruction.shape.is_tuple:
        yield from ((0, operand) for operand in range(len(instruction.operands)))
    if opcode == "sort":
        yield from ((operand, operand) for operand in range(len(instruction.operands)))
    if opcode != "fusion":
        return
    fused = module.computations[instruction.called[0]]
    root = fused.root
    results = root.operands if root.opcode == "tuple" else (root.name,)
    users: defaultdict[str, list[Instruction]] = defaultdict(list)
    for inner in fused.instructions:
        for name in inner.operands:
            users[name].append(inner)
    for operand, parameter in enumerate(fused.parameters):
        reached = _reached_elementwise(parameter, users, instruction.attribute("kind") == "kInput")
        for leaf, name in enumerate(results):
            if reached is not None and name in reached:
                yield leaf, operand


def _reached_elementwise(
    parameter: Instruction, users: Mapping[str, list[Instruction]], reduces_in_order: bool
) -> frozenset[str] | None:
    """What is computed element-wise from a parameter; None if it is used otherwise too.

    A fusion around a reduction reads each element once, before it writes that element.
    """
    reached = {parameter.name}
    waiting = [parameter.name]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user.opcode == "reduce" and reduces_in_order:
                continue
            if user.opcode not in _ELEMENTWISE:
                return None
            if user.name not in reached:
                reached.add(user.name)
                waiting.append(user.name)
    return frozenset(reached)


def _post_order(computation: Computation) -> dict[str, int]:
    """Numbers the instructions that the result depends on, operands before users."""
    ranks: dict[str, int] = {}
    waiting = [(computation.root.name, False)]
    while waiting:
        name, operands_done = waiting.pop()
        if name in ranks:
            continue
        if operands_done:
            ranks[name] = len(ranks)
            continue
        waiting.append((name, True))
        waiting.extend((operand, False) for operand in reversed(computation[name].operands))
    return ranks


def _borrowed(
    buffers: list[Buffer], hand_overs: tuple[_HandOver, ...], rank_of: Mapping[str, int]
) -> list[Buffer]:
    """Places temporaries in the memory of outputs and donated parameters, largest first.

    As XLA does, each goes to the smallest result it fits in that is idle all its life; of
    equals, temporaries come in the order of ``rank_of`` and results in the reverse one.
    """
    pairs = frozenset((pair.source, pair.target) for pair in hand_overs)
    last = max(b.end for b in buffers) if buffers else 0
    busy: dict[str, list[Buffer]] = {}
    for host in buffers:
        if host.inside is not None:
            busy.setdefault(host.inside, []).append(host)
        elif host.kind == "output" or (host.kind == "parameter" and host.end < last):
            busy.setdefault(host.name, []).append(host)
    by_name = {b.name: b for b in buffers}
    hosts = sorted((by_name[name] for name in busy), key=lambda b: (b.nbytes, -rank_of[b.name]))
    temps = [b for b in buffers if b.kind == "temp" and b.nbytes]
    placed: dict[str, Buffer] = {}
    for temp in sorted(temps, key=lambda b: (-b.nbytes, rank_of[b.name])):
        for host in hosts:
            if host.nbytes >= temp.nbytes and not any(
                _overlap(temp, other, pairs) for other in busy[host.name]
            ):
                placed[temp.name] = replace(temp, inside=host.name)
                busy[host.name].append(temp)
                break
    return [placed.get(b.name, b) for b in buffers]


def _overlap(one: Buffer, other: Buffer, pairs: frozenset[tuple[str, str]]) -> bool:
    if (one.name, other.name) in pairs and one.end == other.start:
        return False
    if (other.name, one.name) in pairs and other.end == one.start:
        return False
    return one.start <= other.end and other.start <= one.end


# --- packing ----------------------------------------------------------------------------

_ALIGNMENT_BYTES = 128


def _packed_bytes(spans: list[tuple[int, int, int]]) -> int:
    """Places (start, end, nbytes) one after the other, each in the tightest gap it fits."""
    placed: list[tuple[int, int, int, int]] = []
    total_bytes = 0
    for start, end, nbytes in spans:
        aligned_bytes = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        taken = sorted((at, to) for at, to, s, e in placed if s <= end and start <= e)
        best: tuple[int, int] | None = None
        free_from = 0
        for at, to in taken:
            gap = at - free_from
            if gap >= aligned_bytes and (best is None or gap < best[0]):
                best = (gap, free_from)
            free_from = max(free_from, to)
        place = free_from if best is None else best[1]
        placed.append((place, place + aligned_bytes, start, end))
        total_bytes = max(total_bytes, place + aligned_bytes)
    return total_bytes


def _assigned(module: HloModule, values: _Values, donated: Mapping[_Key, _Key]) -> list[Buffer]:
    """The buffers of one computation, with all the reuse that is modelled."""
    computation = values.computation
    buffers = _buffers(values, donated)
    hand_overs = _hand_overs(module, values, buffers)
    ranks = _post_order(computation)
    rank_of = {_label(computation, key): ranks.get(key[0], len(ranks)) for key in values.start}
    return _shortened(_borrowed(buffers, hand_overs, rank_of), hand_overs)


def _own_temps(buffers: list[Buffer]) -> list[Buffer]:
    return [b for b in buffers if b.kind == "temp" and b.inside is None]


# --- sums -------------------------------------------------------------------------------


def _sum_live(buffers: list[Buffer], inside_bytes: list[int]) -> tuple[int, ...]:
    change = [0] * (len(inside_bytes) + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.nbytes
        change[buffer.end + 1] -= buffer.nbytes
    live = accumulate(change[:-1])
    return tuple(own + inside for own, inside in zip(live, inside_bytes, strict=True))


def _inside_bytes(module: HloModule, computation: Computation, peaks: dict[str, int]) -> list[int]:
    """For each position, the temporary bytes its loop, branch or call needs at its peak."""
    return [
        max((_inner_peak(module, name, peaks) for name in instruction.called), default=0)
        if instruction.opcode in _CALLERS
        else 0
        for instruction in computation.instructions
    ]


def _inner_peak(module: HloModule, name: str, peaks: dict[str, int]) -> int:
    if name not in peaks:
        computation = module.computations[name]
        values = _Values(module, computation)
        temps = _own_temps(_assigned(module, values, _loop_state(values)))
        peaks[name] = max(_sum_live(temps, _inside_bytes(module, computation, peaks)))
    return peaks[name]


def _loop_state(values: _Values) -> Mapping[_Key, _Key]:
    """For each new value of a loop body's state, the old value whose memory it takes."""
    computation = values.computation
    parameters = computation.parameters
    if len(parameters) != 1 or parameters[0].shape != computation.root.shape:
        return {}
    old = values.leaves[parameters[0].name]
    new = values.leaves[computation.root.name]
    return {n: o for n, o in zip(new, old, strict=True) if n != o and n not in old}
