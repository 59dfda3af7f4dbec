"""The cost of one block under one option, read off the executable that XLA builds for it alone.

The block's forward and backward are compiled as one program with a mark between them, so that
fusion, layouts and materialised buffers are XLA's own. Costs are then used as differences between
two options of the same block, in which the effects of the block's surroundings cancel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from jax_hremat._cost.block_step import MARK, BlockStep
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._trace.mesh import abstract_mesh
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.buffer import Buffer
from jax_hremat._xla.hlo.liveness import buffer_timeline, reads_and_results
from jax_hremat._xla.hlo.parse import HloModule, parse_hlo
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
        step.function,
        step.avals,
        target,
        keep_unused=True,
        cache=cache,
        mesh=None if step.mesh is None else abstract_mesh(step.mesh),
    )
    module = parse_hlo(compiled.hlo_text)
    timeline = buffer_timeline(module)
    mark = _mark_position(module)
    kernels = estimate_step(module, rates(target, book)).kernels
    split = next(i for i, k in enumerate(kernels) if k.name == timeline.names[mark])

    buffers = {b.name: b for b in timeline.buffers}
    last_read, results = reads_and_results(module)
    outputs = [buffers[name] for name in results[: step.num_outputs]]
    input_cotangents = [
        buffers[name]
        for i, name in zip(step.active_inputs, results[step.num_outputs :], strict=False)
        if i in step.computed_inputs
    ]
    parameters = {b.parameter_index: b for b in timeline.buffers if b.kind == "parameter"}
    cotangents = [
        replace(parameters[i], start=mark, end=max(mark, last_read[parameters[i].name]))
        for i in step.cotangent_parameters
    ]
    own = [b for b in timeline.buffers if b.kind == "temp"]
    inner = timeline.inner_bytes
    kept = [b for b in own if b.start < mark < b.end]
    in_forward = [*own, *_distinct(outputs)]
    in_backward = [*own, *cotangents, *_distinct(input_cotangents)]
    forward = _live_bytes(in_forward, inner)
    backward = _live_bytes(in_backward, inner)
    forward_peak = max(range(mark + 1), key=lambda i: forward[i])
    backward_peak = max(range(mark, len(backward)), key=lambda i: backward[i])
    return OptionCost(
        forward_s=sum(k.time_s for k in kernels[:split]),
        backward_s=sum(k.time_s for k in kernels[split + 1 :]),
        kept_bytes=sum(b.nbytes for b in kept),
        kept_inputs=tuple(i for i in step.computed_inputs if last_read[parameters[i].name] > mark),
        kept_outputs=tuple(i for i, b in enumerate(outputs) if last_read[b.name] > mark),
        forward_peak_bytes=forward[forward_peak],
        backward_peak_bytes=backward[backward_peak],
        kept_sizes=tuple(b.nbytes for b in kept),
        forward_sizes=_sizes_at(in_forward, forward_peak),
        backward_sizes=_sizes_at(in_backward, backward_peak),
    )


def _mark_position(module: HloModule) -> int:
    return next(
        i
        for i, instruction in enumerate(module.entry.instructions)
        if instruction.opcode == "fft" and MARK in instruction.op_name
    )


def _distinct(buffers: Sequence[Buffer]) -> list[Buffer]:
    return list({b.name: b for b in buffers if b.kind == "output"}.values())


def _sizes_at(buffers: Sequence[Buffer], position: int) -> tuple[int, ...]:
    return tuple(b.nbytes for b in buffers if b.start <= position <= b.end)


def _live_bytes(buffers: Sequence[Buffer], inner_bytes: Sequence[int]) -> list[int]:
    """Bytes at each position: the live buffers, and what a loop needs inside its body."""
    change = [0] * (len(inner_bytes) + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.nbytes
        change[buffer.end + 1] -= buffer.nbytes
    live = accumulate(change[:-1])
    return [a + b for a, b in zip(live, inner_bytes, strict=True)]
