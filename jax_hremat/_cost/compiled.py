"""The cost of one block under one option, read off the executable that XLA builds for it alone.

The block's forward and backward are compiled as one program with a mark between them, so that
fusion, layouts and materialised buffers are XLA's own. Costs are then used as differences between
two options of the same block, in which the effects of the block's surroundings cancel.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from jax_hremat._cost.attribution import attributed
from jax_hremat._cost.block_step import MARK, BlockStep
from jax_hremat._cost.list_order import BEHIND, in_list_order
from jax_hremat._cost.option_cost import LiveRange, OptionCost, Phase
from jax_hremat._emit.destinations import HELD_BACK
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._trace.mesh import abstract_mesh
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.buffer import Buffer
from jax_hremat._xla.hlo.liveness import part_timeline, reads_and_results
from jax_hremat._xla.hlo.parse import HloModule
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target


def compiled_cost(
    step: BlockStep,
    target: Target,
    cache: CompileCache | None = None,
    book: KernelBook | None = None,
) -> OptionCost:
    """Compile a block's step and read its cost.

    Args:
        step: The block under its option.
        target: What to compile for.
        cache: Earlier results of the compiler.
        book: What is known about kernels that XLA only calls.

    Unchecked: fusion across the block's boundary.
    """
    compiled = compile_flat(
        in_list_order(step.function, target),
        step.avals,
        target,
        keep_unused=True,
        cache=cache,
        mesh=None if step.mesh is None else abstract_mesh(step.mesh),
    )
    module = compiled.module
    mark = _mark_position(module)
    timeline = part_timeline(
        module,
        given=dict.fromkeys(step.cotangent_parameters, mark),
        passed_on=_read_by_others(step),
    )
    kernels = estimate_step(module, rates(target, book)).kernels
    split = next(i for i, k in enumerate(kernels) if k.name == timeline.names[mark])
    forward_kernels = kernels[:split]
    backward_kernels = [k for k in kernels[split + 1 :] if BEHIND not in k.op_name]

    last_read, results = reads_and_results(module)
    parameters = {b.parameter_index: b for b in timeline.buffers if b.parameter_index is not None}
    buffers = {b.name: b for b in timeline.buffers}
    outputs = [buffers[name] for name in results[: step.num_outputs]]
    passed = _passed(step, parameters, outputs, [buffers[n] for n in results[step.num_outputs :]])
    is_passed = passed.names
    own = [
        b
        for b in timeline.buffers
        if b.kind == "temp" and b.name not in is_passed and BEHIND not in b.op_name
    ]
    inner = timeline.inner_bytes
    # The first kernel after the mark may be written over one of them.
    kept = [b for b in own if b.start < mark <= b.end]
    in_forward = [*own, *passed.outputs.values()]
    in_backward = [*own, *passed.cotangents.values(), *passed.gradients.values()]
    of_constants = frozenset(b.name for b in own if _is_of_constants(module, b))
    forward = _Part(in_forward, inner[: mark + 1], 0)
    backward = _Part(in_backward, inner[mark:], mark)
    is_kept = frozenset(b.name for b in kept)
    return OptionCost(
        forward_s=sum(k.time_s for k in forward_kernels),
        backward_s=sum(k.time_s for k in backward_kernels),
        kept_bytes=sum(b.nbytes for b in kept),
        kept_inputs=tuple(i for i in step.computed_inputs if last_read[parameters[i].name] > mark),
        kept_outputs=tuple(i for i, b in enumerate(outputs) if last_read[b.name] > mark),
        forward_peak_bytes=max(forward.live_bytes),
        backward_peak_bytes=max(backward.live_bytes),
        kept_buffers=tuple(
            LiveRange(
                b.nbytes,
                forward.number(b.start),
                backward.number(b.end),
                b.name in of_constants,
            )
            for b in kept
        ),
        forward=forward.phase(is_kept, of_constants),
        backward=backward.phase(is_kept | is_passed, of_constants)._replace(
            cotangents=tuple((i, backward.live_range(b)) for i, b in passed.cotangents.items()),
            gradients=tuple((i, backward.live_range(b)) for i, b in passed.gradients.items()),
        ),
        profile=attributed(module, mark, kept, forward_kernels, step.num_scopes)
        if step.num_scopes
        else None,
    )


def _mark_position(module: HloModule) -> int:
    return next(
        i
        for i, instruction in enumerate(module.entry.instructions)
        if instruction.opcode == "fft" and MARK in instruction.op_name
    )


def _read_by_others(step: BlockStep) -> tuple[int, ...]:
    """The results of a block's step that other blocks read: outputs, and cotangents of inputs that
    blocks make."""
    active = enumerate(step.active_inputs, start=step.num_outputs)
    return (*range(step.num_outputs), *(n for n, i in active if i in step.computed_inputs))


class _Passed(NamedTuple):
    """The buffers that a block shares with others.

    Attributes:
        outputs: Its outputs, by position in `Block.outputs`, but for inputs and constants that it
            hands on; of several in one buffer the first.
        cotangents: Theirs, by position in `Block.outputs`.
        gradients: The cotangents of its inputs that it makes, and its parts of the gradients of
            arguments that earlier blocks read, too, by position in `Block.inputs`.
    """

    outputs: Mapping[int, Buffer]
    cotangents: Mapping[int, Buffer]
    gradients: Mapping[int, Buffer]

    @property
    def names(self) -> frozenset[str]:
        """The names of all of them."""
        return frozenset(b.name for some in self for b in some.values())


def _passed(
    step: BlockStep,
    parameters: Mapping[int, Buffer],
    outputs: Sequence[Buffer],
    gradients: Sequence[Buffer],
) -> _Passed:
    cotangents = [parameters[i] for i in step.cotangent_parameters]
    handed_on = {b.name for b in cotangents}
    made = {
        i: b for i, b in zip(step.active_inputs, gradients, strict=False) if b.name not in handed_on
    }
    parts = {
        i: replace(made[i], nbytes=nbytes)
        for i, nbytes in step.partial_bytes.items()
        if i in made and made[i].kind == "output"
    }
    of_computed = {i: made[i] for i in step.computed_inputs if i in made}
    return _Passed(
        outputs=_made_once(dict(enumerate(outputs))),
        cotangents=dict(zip(step.active_outputs, cotangents, strict=True)),
        gradients={**_made_once(of_computed), **parts},
    )


def _made_once(buffers: Mapping[int, Buffer]) -> dict[int, Buffer]:
    """Those that the block makes; of several that are one buffer, the first."""
    first: dict[str, int] = {}
    for i, buffer in buffers.items():
        if buffer.kind == "temp":
            first.setdefault(buffer.name, i)
    return {i: buffers[i] for i in first.values()}


def _is_of_constants(module: HloModule, buffer: Buffer) -> bool:
    """Whether what first writes a buffer reads nothing but constants, and no barrier holds these
    back."""
    writer = module.entry[buffer.name.partition("{")[0]]
    reads_constants = all(module.entry[name].opcode == "constant" for name in writer.operands)
    return reads_constants and HELD_BACK not in writer.op_name


class _Part:
    """The part of a schedule from a position on, with the buffers that are alive in it.

    Attributes:
        live_bytes: At each position at which one of them begins to be alive, the most bytes up to
            the next: theirs, and what a loop needs inside its body.
    """

    def __init__(self, buffers: Sequence[Buffer], inner_bytes: Sequence[int], start: int) -> None:
        stop = start + len(inner_bytes)
        self._buffers = [b for b in buffers if b.start < stop and b.end >= start and b.nbytes]
        self._begins = sorted({start, *(max(b.start, start) for b in self._buffers)})
        change = [0] * (len(inner_bytes) + 1)
        for buffer in self._buffers:
            change[max(buffer.start - start, 0)] += buffer.nbytes
            change[min(buffer.end + 1, stop) - start] -= buffer.nbytes
        live = list(map(operator.add, accumulate(change[:-1]), inner_bytes))
        self.live_bytes = tuple(
            max(live[begin - start : end - start]) for begin, end in pairwise((*self._begins, stop))
        )

    def number(self, position: int) -> int:
        """The number of the last of these positions up to a position of the whole schedule."""
        return max(bisect_right(self._begins, position) - 1, 0)

    def live_range(self, buffer: Buffer, of_constants: bool = False) -> LiveRange:
        """A buffer, and the numbers of the positions at which it is alive."""
        first, last = self.number(buffer.start), self.number(buffer.end)
        return LiveRange(buffer.nbytes, first, last, of_constants)

    def phase(self, without: frozenset[str], of_constants: frozenset[str]) -> Phase:
        """This part as a phase of a block, some buffers left out, given those made of constants
        alone."""
        ranges = (
            self.live_range(b, b.name in of_constants)
            for b in self._buffers
            if b.name not in without
        )
        return Phase(tuple(ranges), self.live_bytes)
