"""A block under one option as a function of its own: its forward, a mark, its backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jax_hremat._cost.profile import operation_scope
from jax_hremat._emit.barrier import barrier
from jax_hremat._emit.emit import emit_range
from jax_hremat._partition.blocks import Block
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import Graph, Value, cast_bytes
from jax_hremat._trace.mesh import abstract_sharding, laid, put
from jax_hremat._trace.trace import Program, abstract, cotangent

# The scope of the Fourier transform that separates the forward from the backward.
MARK = "hremat_mark"


@dataclass(frozen=True, slots=True)
class BlockStep:
    """A block's forward and backward as one flat function.

    Its results are the block's outputs, the cotangents of the block's active inputs, and the mark.

    Attributes:
        function: Takes the block's inputs, the cotangents of its active outputs, and the mark.
        avals: The abstract arguments of the function.
        num_outputs: How many outputs the block has.
        active_inputs: Positions in `Block.inputs` of the inputs that are differentiated.
        active_outputs: Positions in `Block.outputs` of the outputs that have a cotangent.
        computed_inputs: Positions in `Block.inputs` of the inputs that other blocks make.
        partial_bytes: Those of differentiated arguments of the program that earlier blocks read,
            too, with the bytes of the part of the gradient that this block makes.
        cotangent_parameters: Positions of their cotangents among the arguments.
        num_scopes: How many operations are traced in scopes of their own (`profile.py`): all of a
            plain block, none of another.
        mesh: The devices that the function runs on, where there are several.
    """

    function: Callable[..., Any]
    avals: tuple[Any, ...]
    num_outputs: int
    active_inputs: tuple[int, ...]
    active_outputs: tuple[int, ...]
    computed_inputs: tuple[int, ...]
    partial_bytes: Mapping[int, int]
    cotangent_parameters: range
    num_scopes: int
    mesh: DeviceMesh | None = None


def block_step(program: Program, graph: Graph, block: Block, region: Region) -> BlockStep:
    """The step of a block run as `region` says, a region with the block's `start` and `stop`."""
    with program.context.entered():
        return _block_step(program, graph, block, region)


def _block_step(program: Program, graph: Graph, block: Block, region: Region) -> BlockStep:
    atoms = program.values
    inputs = [atoms[v] for v in block.inputs]
    outputs = [atoms[v] for v in block.outputs]
    # A region is checkpointed by its parent, so the block's region gets a plain parent.
    parent = Region(block.start, block.stop, children=(region,))
    is_plain = region == Region(block.start, block.stop)
    scopes = {block.start + i: operation_scope(i) for i in range(len(block)) if is_plain}
    body = emit_range(program, parent, inputs, outputs, scopes)
    active_in = tuple(i for i, v in enumerate(block.inputs) if graph.values[v].active)
    active_out = tuple(i for i, v in enumerate(block.outputs) if graph.values[v].active)

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
        # The backward may only start after every output is computed. The mark shows where it
        # starts: a Fourier transform is never fused, moved or merged with anything.
        with jax.named_scope(MARK):
            *_, mark = barrier([*results, mark])
            mark = jnp.fft.fft(mark)
            *cotangents, mark = barrier([*cotangents, mark])
        # Shard the results and gradients as the rest of the step expects them.
        results = [put(x, s) for x, s in zip(results, lies_out, strict=True)]
        gradients = [
            put(x, lies_in[i]) for i, x in zip(active_in, pullback(cotangents), strict=True)
        ]
        return results, gradients, mark

    lies = [_sharding(graph, v) for v in (*block.inputs, *block.outputs)]
    lies_in, lies_out = lies[: len(inputs)], lies[len(inputs) :]
    avals = [laid(abstract(v.aval), s) for v, s in zip(inputs, lies_in, strict=True)]
    cotangent_avals = [laid(cotangent(outputs[i].aval), lies_out[i]) for i in active_out]
    return BlockStep(
        function=program.context.inside(function),
        avals=(*avals, *cotangent_avals, jax.ShapeDtypeStruct((8,), jnp.complex64)),
        num_outputs=len(outputs),
        active_inputs=active_in,
        active_outputs=active_out,
        computed_inputs=tuple(
            i for i, v in enumerate(block.inputs) if graph.values[v].kind == "computed"
        ),
        partial_bytes={
            i: _partial_bytes(graph, value, block)
            for i, value in ((i, graph.values[block.inputs[i]]) for i in active_in)
            if value.kind == "argument" and value.users[0] < block.start
        },
        cotangent_parameters=range(len(avals), len(avals) + len(cotangent_avals)),
        num_scopes=len(scopes),
        mesh=graph.mesh or program.mesh,
    )


def _partial_bytes(graph: Graph, argument: Value, block: Block) -> int:
    """Bytes of the part of an argument's gradient that comes from a block."""
    readers = (graph.operations[u] for u in argument.users if block.start <= u < block.stop)
    of_casts = cast_bytes(graph, readers)
    return argument.size_bytes if of_casts is None else of_casts


def _sharding(graph: Graph, value: int) -> NamedSharding | None:
    spec = graph.values[value].spec
    return None if graph.mesh is None or spec is None else abstract_sharding(graph.mesh, spec)
