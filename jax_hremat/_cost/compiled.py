"""What one block costs in one mode, read off the executable XLA builds for it alone.

The block's forward and backward are compiled as one program with a mark between them, so that
fusion, layouts and materialised buffers are XLA's own. Everything is then a difference between
two modes of the same block, in which what the block's surroundings would change cancels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp

from jax_hremat._compiler.cache import CompileCache
from jax_hremat._compiler.compile import compile_flat
from jax_hremat._compiler.target import Target
from jax_hremat._cost.hlo import HloModule, parse_hlo
from jax_hremat._cost.liveness import Buffer, buffer_timeline, reads_and_results
from jax_hremat._cost.roofline import estimate_step, rates
from jax_hremat._partition.blocks import Block
from jax_hremat._program.emit import emit_range
from jax_hremat._program.graph import Graph
from jax_hremat._program.region import Region
from jax_hremat._program.trace import Program, abstract
from jax_hremat._shared import compat

_MARK = "hremat_mark"


@dataclass(frozen=True, slots=True)
class ModeCost:
    """One block, run in one way.

    Attributes:
        forward_s: Kernels before the mark.
        backward_s: Kernels after it, recomputation included.
        kept_bytes: Buffers made by the block's forward and read by its backward; the block's
            inputs and outputs are not counted.
        kept_inputs: Positions in `Block.inputs` of computed values that the backward reads.
        kept_outputs: Positions in `Block.outputs` of values that the backward reads.
        forward_peak_bytes: Most bytes at once in the forward: buffers made inside, outputs.
        backward_peak_bytes: Most bytes at once in the backward: kept buffers, temporaries,
            cotangents of the outputs until last read, cotangents of computed inputs.
    """

    forward_s: float
    backward_s: float
    kept_bytes: int
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    forward_peak_bytes: int
    backward_peak_bytes: int

    @property
    def time_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def measure_block(
    program: Program,
    graph: Graph,
    block: Block,
    mode: Region,
    target: Target,
    cache: CompileCache | None = None,
) -> ModeCost:
    """Compile the block's forward and backward in one mode and read its cost.

    Args:
        program: The program the block is a part of.
        graph: Its graph.
        block: The block.
        mode: A region with the block's `start` and `stop`.
        target: What to compile for.
        cache: What was compiled before.

    Unchecked: fusion across the block's boundary.
    """
    step = _block_step(program, graph, block, mode)
    compiled = compile_flat(step.function, step.avals, target, keep_unused=True, cache=cache)
    module = parse_hlo(compiled.hlo_text)
    timeline = buffer_timeline(module)
    mark = _mark_position(module)
    kernels = estimate_step(module, rates(target)).kernels
    split = next(i for i, k in enumerate(kernels) if k.name == timeline.names[mark])

    buffers = {b.name: b for b in timeline.buffers}
    last_read, results = reads_and_results(module)
    outputs = [buffers[name] for name in results[: len(block.outputs)]]
    input_cotangents = [
        buffers[name]
        for i, name in zip(step.active_inputs, results[len(block.outputs) :], strict=False)
        if graph.values[block.inputs[i]].kind == "computed"
    ]
    parameters = {b.parameter_index: b for b in timeline.buffers if b.kind == "parameter"}
    cotangents = [
        replace(parameters[i], start=mark, end=max(mark, last_read[parameters[i].name]))
        for i in step.cotangent_parameters
    ]
    own = [b for b in timeline.buffers if b.kind == "temp"]
    inner = timeline.inner_bytes
    forward = _live_bytes([*own, *_distinct(outputs)], inner)
    backward = _live_bytes([*own, *cotangents, *_distinct(input_cotangents)], inner)
    return ModeCost(
        forward_s=sum(k.time_s for k in kernels[:split]),
        backward_s=sum(k.time_s for k in kernels[split + 1 :]),
        kept_bytes=sum(b.nbytes for b in own if b.start < mark < b.end),
        kept_inputs=tuple(
            i
            for i, v in enumerate(block.inputs)
            if graph.values[v].kind == "computed" and last_read[parameters[i].name] > mark
        ),
        kept_outputs=tuple(i for i, b in enumerate(outputs) if last_read[b.name] > mark),
        forward_peak_bytes=max(forward[: mark + 1]),
        backward_peak_bytes=max(backward[mark:]),
    )


def _mark_position(module: HloModule) -> int:
    return next(
        i
        for i, instruction in enumerate(module.entry.instructions)
        if instruction.opcode == "fft" and _MARK in instruction.op_name
    )


def _distinct(buffers: Sequence[Buffer]) -> list[Buffer]:
    return list({b.name: b for b in buffers if b.kind == "output"}.values())


def _live_bytes(buffers: Sequence[Buffer], inner_bytes: Sequence[int]) -> list[int]:
    """Bytes at each position: the buffers that live there and what loops need inside."""
    change = [0] * (len(inner_bytes) + 1)
    for buffer in buffers:
        change[buffer.start] += buffer.nbytes
        change[buffer.end + 1] -= buffer.nbytes
    live = accumulate(change[:-1])
    return [a + b for a, b in zip(live, inner_bytes, strict=True)]


@dataclass(frozen=True, slots=True)
class _BlockStep:
    """A block's forward and backward as one flat function.

    Results are the block's outputs, then the cotangents of its active inputs.

    Attributes:
        function: Takes the block's inputs, the cotangents of its active outputs, a mark.
        avals: Its arguments.
        active_inputs: Positions in `Block.inputs` of what is differentiated.
        cotangent_parameters: Positions of the cotangents among the arguments.
    """

    function: Callable[..., Any]
    avals: tuple[Any, ...]
    active_inputs: tuple[int, ...]
    cotangent_parameters: range


def _block_step(program: Program, graph: Graph, block: Block, mode: Region) -> _BlockStep:
    jaxpr = compat.open_jaxpr(program.jaxpr)
    atoms = [*jaxpr.constvars, *jaxpr.invars, *(v for e in jaxpr.eqns for v in e.outvars)]
    inputs = [atoms[v] for v in block.inputs]
    outputs = [atoms[v] for v in block.outputs]
    # A region's own mode is its parent's business, so the block gets a bare parent.
    parent = Region(block.start, block.stop, children=(mode,))
    body = emit_range(program, parent, inputs, outputs)
    active_in = tuple(i for i, v in enumerate(block.inputs) if graph.values[v].active)
    active_out = [i for i, v in enumerate(block.outputs) if graph.values[v].active]

    def function(*flat: Any) -> Any:
        values = list(flat[: len(inputs)])
        cotangents = list(flat[len(inputs) : -1])
        mark = flat[-1]

        def forward(*active: Any) -> tuple[Any, Any]:
            merged = list(values)
            for i, x in zip(active_in, active, strict=True):
                merged[i] = x
            results = body(*merged)
            return [results[i] for i in active_out], results

        _, pullback, results = jax.vjp(forward, *(values[i] for i in active_in), has_aux=True)
        # The backward may start only after every output is there, and the mark tells where: a
        # Fourier transform is never fused, moved or merged with anything.
        with jax.named_scope(_MARK):
            _, mark = jax.lax.optimization_barrier((results, mark))
            mark = jnp.fft.fft(mark)
            cotangents, mark = jax.lax.optimization_barrier((cotangents, mark))
        return results, pullback(cotangents), mark

    avals = [abstract(v.aval) for v in inputs]
    cotangent_avals = [abstract(outputs[i].aval) for i in active_out]
    return _BlockStep(
        function=function,
        avals=(*avals, *cotangent_avals, jax.ShapeDtypeStruct((8,), jnp.complex64)),
        active_inputs=active_in,
        cotangent_parameters=range(len(avals), len(avals) + len(cotangent_avals)),
    )
