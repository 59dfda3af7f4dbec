"""The lifetimes of the buffers of a scheduled program.

Follows XLA's buffer assignment: aliases share one buffer, an element-wise kernel overwrites an
operand that is read there for the last time, and temporaries are placed in result buffers that are
not yet in use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate

from jax_hremat._xla.hlo.aliases import Key, Values, donations, flat_parameters, label
from jax_hremat._xla.hlo.buffer import Buffer, Kind, own_temps
from jax_hremat._xla.hlo.parse import Computation, HloModule
from jax_hremat._xla.hlo.reuse import borrowed, hand_overs_of, post_order, shortened

_CALLERS = frozenset({"while", "conditional", "call", "async-start", "call-start"})
_HOST_SPACE = 5


@dataclass(frozen=True, slots=True)
class Timeline:
    """The buffers of one computation along its schedule.

    Attributes:
        buffers: The buffers in the order in which they are first needed.
        num_positions: Number of instructions in the schedule.
        live_temp_bytes: For each position, the bytes of the live temporaries with memory of their
            own; loops, branches and calls count with their inner peak.
        inner_bytes: For each position, the part of these bytes that a loop, branch or call needs
            inside.
        names: Name of the instruction at each position.
    """

    buffers: tuple[Buffer, ...]
    num_positions: int
    live_temp_bytes: tuple[int, ...]
    inner_bytes: tuple[int, ...]
    names: tuple[str, ...]

    def peak(self) -> tuple[int, int]:
        """The first position with most temporary bytes, and those bytes."""
        most_bytes = max(self.live_temp_bytes)
        return self.live_temp_bytes.index(most_bytes), most_bytes

    def live_at(self, position: int) -> tuple[Buffer, ...]:
        """All buffers of any kind that are live at a position.

        Raises:
            IndexError: The schedule has no such position.
        """
        if not 0 <= position < self.num_positions:
            raise IndexError(f"position {position} of a schedule of {self.num_positions}")
        return tuple(b for b in self.buffers if b.start <= position <= b.end)


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
    return _timeline(module, module.entry, {})


def part_timeline(
    module: HloModule, given: Mapping[int, int], passed_on: Collection[int]
) -> Timeline:
    """Finds the lifetimes of all buffers in a part of a program that is compiled alone. What other
    parts give it and what it makes for them is temporary in the whole program: it may be
    overwritten, or written over something else. Nothing is placed in the memory of results.

    Args:
        module: An optimised, scheduled module.
        given: The parameters that other parts make, by their number, each with the position from
            which it is there.
        passed_on: The numbers of the flattened results that are read by other parts.

    Raises:
        KeyError: As for `buffer_timeline`.

    Unchecked: As for `buffer_timeline`.
    """
    values = Values(module, module.entry)
    last_read, results = _reads_and_results(values)
    made = {results[number] for number in passed_on}
    last = len(module.entry.instructions) - 1
    starts = {
        label(module.entry, key): given[number]
        for key, number in flat_parameters(values).items()
        if number in given
    }

    def in_whole(buffer: Buffer) -> Buffer:
        start = starts.get(buffer.name)
        if start is not None:
            end = last if buffer.name in results else max(start, last_read[buffer.name])
            return replace(buffer, kind="temp", start=start, end=end)
        is_made = buffer.kind == "output" and buffer.name in made
        return replace(buffer, kind="temp") if is_made else buffer

    buffers = [in_whole(buffer) for buffer in _buffers(values, {})]
    buffers = shortened(buffers, hand_overs_of(module, values, buffers))
    return _as_timeline(module, module.entry, buffers, {})


def live_at_peak(module: HloModule) -> list[tuple[Computation, Buffer]]:
    """The buffers that are live at the peak of the entry computation's temporaries, each with the
    computation that it belongs to.

    If a loop, a branch or a call runs at the peak, the temporaries at its own inner peak are
    included: the buffers of a step over microbatches are inside a loop.

    Raises:
        KeyError: As for `buffer_timeline`.

    Unchecked: As for `buffer_timeline`.
    """
    known: dict[str, Timeline] = {}
    found: list[tuple[Computation, Buffer]] = []
    computation: Computation | None = module.entry
    while computation is not None:
        timeline = _timeline(module, computation, known)
        position, _ = timeline.peak()
        live = timeline.live_at(position)
        # The inputs of a body belong to its caller.
        own = live if computation is module.entry else own_temps(live)
        found += [(computation, buffer) for buffer in own]
        inside = timeline.inner_bytes[position] > 0
        called = computation.instructions[position].called if inside else ()
        largest = max(called, key=lambda name: _inner_peak(module, name, known), default=None)
        computation = None if largest is None else module.computations[largest]
    return found


def constant_bytes(module: HloModule) -> int:
    """The bytes of the constants that XLA keeps on the device as long as the program is loaded:
    those of the entry computation, and of what it calls, such as loops, branches and the orders of
    sorts, but not those inside fusions.

    Unchecked: whether two equal constants share memory.
    """
    waiting, seen, found = [module.entry], {module.entry.name}, 0
    while waiting:
        for instruction in waiting.pop().instructions:
            if instruction.opcode == "constant":
                leaves = instruction.shape.leaves
                found += sum(s.nbytes for s in leaves if s.memory_space != _HOST_SPACE)
            elif instruction.opcode != "fusion":
                called = [name for name in instruction.called if name not in seen]
                seen.update(called)
                waiting += [module.computations[name] for name in called]
    return found


def reads_and_results(module: HloModule) -> tuple[Mapping[str, int], tuple[str, ...]]:
    """Where each buffer of the entry computation is last read, and which buffers are its results.

    Returns:
        For each buffer's name the position of its last reader (of its writer if nothing reads it;
        being returned is not a read), and for each flattened result the name of its buffer.
    """
    return _reads_and_results(Values(module, module.entry))


def _reads_and_results(values: Values) -> tuple[Mapping[str, int], tuple[str, ...]]:
    entry = values.computation
    last_read = {label(entry, key): position for key, position in values.end.items()}
    return last_read, tuple(label(entry, key) for key in values.leaves[entry.root.name])


def _timeline(module: HloModule, computation: Computation, known: dict[str, Timeline]) -> Timeline:
    """The timeline of any computation; `known` stores those made so far by computation name."""
    if computation.name in known:
        return known[computation.name]
    values = Values(module, computation)
    in_place = donations(module, values) if computation is module.entry else _loop_state(values)
    buffers = _assigned(module, values, in_place)
    known[computation.name] = _as_timeline(module, computation, buffers, known)
    return known[computation.name]


def _as_timeline(
    module: HloModule, computation: Computation, buffers: list[Buffer], known: dict[str, Timeline]
) -> Timeline:
    inside_bytes = _inside_bytes(module, computation, known)
    return Timeline(
        buffers=tuple(sorted(buffers, key=lambda b: b.start)),
        num_positions=len(computation.instructions),
        live_temp_bytes=_sum_live(own_temps(buffers), inside_bytes),
        inner_bytes=tuple(inside_bytes),
        names=tuple(i.name for i in computation.instructions),
    )


def _buffers(values: Values, donated: Mapping[Key, Key]) -> list[Buffer]:
    entry = values.computation
    last = len(entry.instructions) - 1
    outputs = values.leaves[entry.root.name]
    parameters = flat_parameters(values)
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
            inside = label(entry, donated[key]) if key in donated else None
        buffers.append(
            Buffer(
                name=label(entry, key),
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


def _assigned(module: HloModule, values: Values, donated: Mapping[Key, Key]) -> list[Buffer]:
    """The buffers of one computation after all the reuse that is modelled."""
    computation = values.computation
    buffers = _buffers(values, donated)
    hand_overs = hand_overs_of(module, values, buffers)
    ranks = post_order(computation)
    rank_of = {label(computation, key): ranks.get(key[0], len(ranks)) for key in values.start}
    return shortened(borrowed(buffers, hand_overs, rank_of), hand_overs)


def _sum_live(buffers: list[Buffer], inside_bytes: list[int]) -> tuple[int, ...]:
    change = [0] * (len(inside_bytes) + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.nbytes
        change[buffer.end + 1] -= buffer.nbytes
    live = accumulate(change[:-1])
    return tuple(own + inside for own, inside in zip(live, inside_bytes, strict=True))


def _inside_bytes(
    module: HloModule, computation: Computation, known: dict[str, Timeline]
) -> list[int]:
    """For each position, the temporary bytes that a loop, branch or call there needs at its
    peak."""
    return [
        max((_inner_peak(module, name, known) for name in instruction.called), default=0)
        if instruction.opcode in _CALLERS
        else 0
        for instruction in computation.instructions
    ]


def _inner_peak(module: HloModule, name: str, known: dict[str, Timeline]) -> int:
    return _timeline(module, module.computations[name], known).peak()[1]


def _loop_state(values: Values) -> Mapping[Key, Key]:
    """For each new value of a loop body's state, the old value whose memory it takes over."""
    computation = values.computation
    parameters = computation.parameters
    if len(parameters) != 1 or parameters[0].shape != computation.root.shape:
        return {}
    old = values.leaves[parameters[0].name]
    new = values.leaves[computation.root.name]
    return {n: o for n, o in zip(new, old, strict=True) if n != o and n not in old}
