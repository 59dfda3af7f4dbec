"""The chain of a program: the options of each kind of block, assigned to its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import TO_THE_END, OptionCost, Phase
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._partition.blocks import Partition
from jax_hremat._solve.chain import BoundaryValue, Chain, PartialGradient
from jax_hremat._trace.graph import Graph, cast_bytes


def make_chain(
    graph: Graph,
    partition: Partition,
    options: Mapping[int, BlockOptions],
    chosen: Sequence[tuple[Option, ...]],
    fixed_bytes: int,
) -> Chain:
    """Make the chain of a program from the options of each kind of block.

    Args:
        graph: The program's graph.
        partition: The program's blocks.
        options: For each kind of block, its options.
        chosen: For each block, the options to choose from.
        fixed_bytes: Arguments, outputs and constants of the step.
    """
    block_of = partition.block_of
    needed: dict[int, set[tuple[int, int]]] = {}
    for index, block in enumerate(partition.blocks):
        for o, option in enumerate(chosen[index]):
            for position in option.cost.kept_inputs:
                needed.setdefault(block.inputs[position], set()).add((index, o))
            for position in option.cost.kept_outputs:
                needed.setdefault(block.outputs[position], set()).add((index, o))
    boundary_values = []
    for index, block in enumerate(partition.blocks):
        for output, v in enumerate(block.outputs):
            value = graph.values[v]
            readers = sorted({block_of[u] for u in value.users} - {index})
            if readers:
                boundary_values.append(
                    BoundaryValue(
                        size_bytes=value.size_bytes,
                        producer=index,
                        readers=tuple(readers),
                        active=value.active,
                        needed=frozenset(needed.get(v, ())),
                        output=output,
                        input=partition.blocks[readers[-1]].inputs.index(v),
                    )
                )
    return Chain(
        starts=tuple(b.start for b in partition.blocks),
        options=tuple(chosen),
        # The forward of a group writes no residuals, like that of a checkpointed block.
        recompute_s=tuple(options[kind].checkpointed.cost.forward_s for kind in partition.kinds),
        handing_on_bytes=tuple(
            options[kind].checkpointed.cost.forward_peak_bytes for kind in partition.kinds
        ),
        handing_on=tuple(_handing_on(options[kind].checkpointed.cost) for kind in partition.kinds),
        last_recompute_s=tuple(
            tuple(_last_recompute_s(options[kind], option) for option in chosen[index])
            for index, kind in enumerate(partition.kinds)
        ),
        # Besides boundary values, a checkpointed block keeps only these constants.
        shared_bytes=tuple(options[kind].checkpointed.cost.kept_bytes for kind in partition.kinds),
        boundary_values=tuple(boundary_values),
        fixed_bytes=fixed_bytes,
        effectful=frozenset(
            index
            for index, block in enumerate(partition.blocks)
            if any(op.effectful for op in graph.operations[block.start : block.stop])
        ),
        partial_gradients=tuple(_partial_gradients(graph, partition, block_of)),
    )


def _partial_gradients(
    graph: Graph, partition: Partition, block_of: Sequence[int]
) -> Iterator[PartialGradient]:
    """The gradients of arguments that several blocks read, such as those of tied embeddings: the
    part of the last such block waits for that of the first."""
    for value in graph.values:
        blocks = sorted({block_of[u] for u in value.users})
        if value.kind == "argument" and value.active and len(blocks) > 1:
            first, last = blocks[0], blocks[-1]
            position = partition.blocks[last].inputs.index(value.id)
            later = (graph.operations[u] for u in value.users if block_of[u] > first)
            of_casts = cast_bytes(graph, later)
            if of_casts is not None:
                yield PartialGradient(of_casts, range(first, last), position)
            else:
                # In the memory of the gradient, from the first block's backward on.
                yield PartialGradient(value.size_bytes, range(first + 1, last), position)


def _handing_on(checkpointed: OptionCost) -> Phase:
    """The forward of a checkpointed block, with what it keeps among its buffers."""
    forward = checkpointed.forward
    kept = (b._replace(last=TO_THE_END) for b in checkpointed.kept_buffers)
    return forward._replace(buffers=(*kept, *forward.buffers))


def _last_recompute_s(options: BlockOptions, option: Option) -> float:
    """Seconds that a group's recompute of its last block takes.

    A checkpointed block is a group of one, so its time above that of the plain block is the forward
    as far as the backward reads it. What a wholly checkpointed option recomputes itself, the group
    need not recompute.
    """
    spared = option if option.region.checkpointed else options.plain
    added_s = options.checkpointed.cost.time_s - spared.cost.time_s
    return min(max(added_s, 0.0), options.checkpointed.cost.forward_s)
