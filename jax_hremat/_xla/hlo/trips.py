"""How often a loop of a compiled step runs."""

import re
from math import ceil

from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction

_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def trip_count(module: HloModule, computation: Computation, loop: Instruction) -> int | None:
    """How often a ``while`` runs its body; None if the text does not determine it.

    XLA's own ``known_trip_count`` is used where it is printed. Otherwise the loop must count
    one scalar of its state from a constant to a constant, by a constant step.

    Args:
        module: The loop's module.
        computation: The computation that contains the loop.
        loop: A ``while`` instruction.
    """
    known = _TRIP_COUNT.search(loop.attributes)
    if known:
        return int(known.group(1))
    condition = module.computations[loop.called_as("condition")]
    body = module.computations[loop.called_as("body")]
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
