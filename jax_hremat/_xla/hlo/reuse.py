"""Finds the buffers that XLA places in the memory of others: an element-wise kernel overwrites an
operand that is not read again, and temporaries are placed in results that are not yet in use."""

from __future__ import annotations

import functools
import itertools
import operator
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_hremat._xla.hlo.aliases import Values, label
from jax_hremat._xla.hlo.buffer import Buffer
from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction

# Makes each element of those at the same place in the operands.
ELEMENTWISE = frozenset(
    "abs add and bitcast bitcast-convert cbrt ceil clamp compare convert cosine divide erf"
    " exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum"
    " minimum multiply negate not or popcnt power real reduce-precision remainder"
    " round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic"
    " shift-right-logical sign sine sqrt subtract tan tanh tuple xor".split()
)


@dataclass(frozen=True, slots=True)
class HandOver:
    """An operand that is read for the last time, and the result that may overwrite it.

    Attributes:
        source: Name of the operand's buffer.
        target: Name of the result's buffer.
        direct: Whether the kernel reads the buffer as it was defined, not through a view or
            a tuple. Only then does XLA share memory between two temporaries.
    """

    source: str
    target: str
    direct: bool


def hand_overs_of(module: HloModule, values: Values, buffers: list[Buffer]) -> tuple[HandOver, ...]:
    """The pairs of an operand and a result that may overwrite it, in the order in which XLA tries
    them: by the results of a kernel, first those that are needed for the shortest time, then by
    its operands."""
    entry = values.computation
    by_name = {b.name: b for b in buffers}
    found: list[HandOver] = []
    for position, instruction in enumerate(entry.instructions):
        tried: list[tuple[tuple[int, int, int], HandOver]] = []
        for leaf, operand in _overwritable(module, instruction):
            operand_name = instruction.operands[operand]
            source_key = values.leaves[operand_name][0]
            source = by_name.get(label(entry, source_key))
            target = by_name.get(label(entry, (instruction.name, leaf)))
            if source is None or target is None or source.kind != "temp":
                continue
            if source.nbytes == target.nbytes and source.end == position > source.start:
                pair = HandOver(source.name, target.name, source_key[0] == operand_name)
                tried.append(((target.end, leaf, operand), pair))
        found += [pair for _, pair in sorted(tried, key=operator.itemgetter(0))]
    return tuple(found)


def shortened(buffers: list[Buffer], hand_overs: tuple[HandOver, ...]) -> list[Buffer]:
    """Moves the end of each temporary that another one overwrites to one position earlier. Each
    buffer is at most once the source and once the target of such a pair: of the first that is
    free, as in XLA, so a kernel with two results may overwrite only one of two operands."""
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
    """Pairs of a result's leaf and an operand that is read at the same places where the leaf is
    written."""
    opcode = instruction.opcode
    if opcode in ELEMENTWISE and not instruction.shape.is_tuple:
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
    hero = _first_reduction(fused, results) if instruction.attribute("kind") == "kInput" else None
    for operand, parameter in enumerate(fused.parameters):
        reached = _reached_elementwise(parameter, users, hero)
        for leaf, name in enumerate(results):
            if reached is not None and name in reached:
                yield leaf, operand


def _first_reduction(fused: Computation, results: Sequence[str]) -> str | None:
    """The reduction that the first such result of a fusion is made of, element by element. It
    decides how a kernel runs: it reads all elements of a row before it writes other results."""
    for result in results:
        waiting = [result]
        while waiting:
            instruction = fused[waiting.pop()]
            if instruction.opcode == "reduce":
                return instruction.name
            if instruction.opcode in ELEMENTWISE:
                waiting.extend(instruction.operands)
    return None


def _reached_elementwise(
    parameter: Instruction, users: Mapping[str, list[Instruction]], hero: str | None
) -> frozenset[str] | None:
    """The names of the values computed element-wise from a parameter; None if the parameter has
    other uses too, but for the reduction that decides how the kernel runs."""
    reached = {parameter.name}
    waiting = [parameter.name]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user.name == hero:
                continue
            if user.opcode not in ELEMENTWISE:
                return None
            if user.name not in reached:
                reached.add(user.name)
                waiting.append(user.name)
    return frozenset(reached)


def post_order(computation: Computation) -> dict[str, int]:
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


def borrowed(
    buffers: list[Buffer], hand_overs: tuple[HandOver, ...], rank_of: Mapping[str, int]
) -> list[Buffer]:
    """Places temporaries in the memory of outputs and donated parameters, largest first.

    As in XLA, a temporary goes to the smallest result that it fits into and that is idle during its
    whole life. Of equal size, temporaries are taken in the order of ``rank_of`` and results in
    reverse order.
    """
    pairs = frozenset((pair.source, pair.target) for pair in hand_overs)
    paired = frozenset(itertools.chain.from_iterable(pairs))
    last = max(b.end for b in buffers) if buffers else 0
    busy: dict[str, list[Buffer]] = {}
    for host in buffers:
        if host.inside is not None:
            busy.setdefault(host.inside, []).append(host)
        elif host.kind == "output" or (host.kind == "parameter" and host.end < last):
            busy.setdefault(host.name, []).append(host)
    by_name = {b.name: b for b in buffers}
    hosts = sorted((by_name[name] for name in busy), key=lambda b: (b.nbytes, -rank_of[b.name]))
    sizes = [host.nbytes for host in hosts]
    # The positions at which the memory of each host is taken, as bits.
    taken = [functools.reduce(operator.or_, map(_lives, busy[host.name])) for host in hosts]
    temps = [b for b in buffers if b.kind == "temp" and b.nbytes]
    placed: dict[str, Buffer] = {}
    for temp in sorted(temps, key=lambda b: (-b.nbytes, rank_of[b.name])):
        lives = _lives(temp)
        for number in range(bisect_left(sizes, temp.nbytes), len(hosts)):
            name = hosts[number].name
            is_taken = taken[number] & lives
            if is_taken and temp.name in paired:
                is_taken = any(_overlap(temp, other, pairs) for other in busy[name])
            if not is_taken:
                placed[temp.name] = replace(temp, inside=name)
                busy[name].append(temp)
                taken[number] |= lives
                break
    return [placed.get(b.name, b) for b in buffers]


def _lives(buffer: Buffer) -> int:
    """The positions at which a buffer is alive, as bits."""
    return (1 << buffer.end + 1) - (1 << buffer.start)


def _overlap(one: Buffer, other: Buffer, pairs: frozenset[tuple[str, str]]) -> bool:
    if (one.name, other.name) in pairs and one.end == other.start:
        return False
    if (other.name, one.name) in pairs and other.end == one.start:
        return False
    return one.start <= other.end and other.start <= one.end
