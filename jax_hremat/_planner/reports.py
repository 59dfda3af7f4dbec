"""Reports of what a plan decided for each block, in words and bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax_hremat._cost.option import Option
from jax_hremat._partition.blocks import Partition
from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.own_checkpoint import words
from jax_hremat._plan.region import Region
from jax_hremat._planner.names import Names, OperationNames
from jax_hremat._shared.format import format_bytes
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.prediction import recompute_s
from jax_hremat._trace.bodies import Cond, Scan
from jax_hremat._trace.graph import Graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.certify import CompiledStep

_MAX_PARTS = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """A selection over a chain, with what is needed to describe it.

    Attributes:
        graph: The program.
        input_names: A path for each of its arguments.
        partition: Its blocks.
        bodies: Its scans and conds that have a backward, by operation.
        chain: Blocks with their options.
        selection: The selection to describe.
        plain: For each block, its plain option.
        recomputed: How many times each operation is recomputed.
    """

    graph: Graph
    input_names: Sequence[str]
    partition: Partition
    bodies: Mapping[int, Scan | Cond]
    chain: Chain
    selection: Selection
    plain: Sequence[Option]
    recomputed: Sequence[int]


def block_reports(decision: Decision) -> tuple[BlockReport, ...]:
    """One report for each block, in program order."""
    grouped = {b for first, last in decision.selection.groups for b in range(first, last + 1)}
    keeps = dict(decision.selection.keeps)
    block_recompute_s = recompute_s(decision.chain, decision.selection)
    names = Names(decision.graph, decision.input_names)
    reports = []
    for index, block in enumerate(decision.partition.blocks):
        options = decision.chain.options[index]
        option = options[decision.selection.options[index]]
        in_group = index in grouped
        # The option whose values are kept between forward and backward: for a block in a group,
        # the one whose values the group keeps.
        kept = None if in_group else option
        if index in keeps:
            kept = options[keeps[index]]
        plain = decision.plain[index]
        region = option.region.shifted(block.start)
        body = decision.bodies.get(block.start) if len(block) == 1 else None
        if isinstance(body, Scan) and not region.checkpointed:
            done, saved, runs = _scan_words(
                names.inside(block.start, body.body.graph), body, region
            )
            if in_group:
                done = f"recomputed with its group: {done}"
        else:
            done = _decision_words(region, in_group)
            values = OperationNames.of(names, block.start, block.stop)
            saved = _saved(values, (kept or option).region.shifted(block.start))
            runs = tuple(values.run(child) for child in region.children if child.checkpointed)
        reports.append(
            BlockReport(
                start=block.start,
                stop=block.stop,
                place=names.block(block.start, block.stop),
                decision=done,
                kept_bytes=kept.cost.kept_bytes if kept else 0,
                plain_bytes=plain.cost.kept_bytes,
                added_s=option.cost.time_s - plain.cost.time_s + block_recompute_s[index],
                recomputed=sum(
                    count > 0 for count in decision.recomputed[block.start : block.stop]
                ),
                saved=saved,
                runs=runs,
            )
        )
    return tuple(reports)


def bottleneck_words(names: Names, partition: Partition, block: int, step: CompiledStep) -> str:
    """What sets the smallest peak: the largest buffer alive there, and the block where the peak
    occurs, by its scope and its source line."""
    at = partition.blocks[block]
    place = names.block(at.start, at.stop)
    if not step.buffers:
        return largest_words(step)
    where = f", {place.line}" if place.line else ""
    return f"{largest_words(step)}, the largest at the peak, which is in the block `{place}`{where}"


def largest_words(step: CompiledStep) -> str:
    """The largest buffer at the peak of a step."""
    if not step.buffers:
        return "its arguments, results and constants"
    largest = step.buffers[0]
    what, origin = {
        "parameter": ("argument", ""),
        "output": ("result", "made by "),
        "temp": ("buffer", "made by "),
        "constant": ("constant", "read by "),
    }[largest.kind]
    where = f", {origin}`{largest.made_by}`" if largest.made_by else ""
    return f"the {what} {largest.text} of {format_bytes(largest.size_bytes)}{where}"


def once_words(graph: Graph) -> str:
    """The part of a refusal about operations that must run exactly once; empty without any."""
    once = list(dict.fromkeys(op.once for op in graph.operations if op.once))
    if not once:
        return ""
    named = ", ".join([*once[:_MAX_PARTS], *["…"] * (len(once) > _MAX_PARTS)])
    return (
        f"; nothing is checkpointed together with what must run exactly once, because of an effect "
        f"or of hidden state: {named}"
    )


def closed_words(program: Program) -> str:
    """The part of a refusal about the program's own checkpoints, which stay in every plan; empty if
    there are none."""
    if not program.own_checkpoints or program.opened.checkpoints:
        return ""
    return (
        f" under the function's own {words(program.own_checkpoints)}, which no plan changes: "
        f"PlannerConfig(open_checkpoints=True) plans as if they were not there"
    )


def _decision_words(region: Region, in_group: bool) -> str:
    branches = [b for c in region.children for b in c.branches]
    if branches:
        return "branches: " + " | ".join(_body_words(b) for b in branches)
    if region.checkpointed:
        return "checkpointed again inside the group" if in_group else "checkpointed"
    if region.children:
        return "checkpointed in part"
    return "recomputed with its group" if in_group else "not checkpointed"


def _scan_words(
    body_names: Names, scan: Scan, region: Region
) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """What is done with each step and with the steps together; the values of its own that a step
    keeps; the runs that it recomputes."""
    graph = scan.body.graph
    loop = next((c.loop for c in region.children if c.loop is not None), None)
    body = Region(0, len(graph.operations)) if loop is None else loop.body
    segments = () if loop is None else loop.segments
    names = OperationNames.of(body_names, 0, len(graph.operations))
    sized = {v: scan.body.kept.values[v].size_bytes for v in _made_and_kept(graph, body)}
    order = sorted(sized, key=lambda v: -sized[v])
    saved = tuple(names.value(v, sized[v], " per step") for v in order)
    runs = tuple(names.run(run) for run in body.children if run.checkpointed)
    keeps = f"{_count(order, 'value')} ({format_bytes(sum(sized.values()))})"
    if body.checkpointed:
        also = f" and {keeps}" if sized else ""
        kept_words = f"keeps the carry it starts with{also}, recomputes the rest"
    elif runs:
        kept_words = f"keeps {keeps}, recomputes {_count(runs, 'run')} of operations"
    else:
        kept_words = f"keeps {keeps}"
    words = f"scan of {scan.trips} steps, each {_body_words(body)}: {kept_words}"
    if segments:
        lengths = ", each in segments of ".join(map(str, segments))
        words += (
            f"; in checkpointed segments of {lengths} steps, each of which keeps only the carry "
            f"that it starts with until its backward"
        )
    return words, saved, runs


def _made_and_kept(graph: Graph, region: Region) -> list[int]:
    """The values made in a region that it keeps for its backward, in program order."""
    if region.checkpointed:
        return [graph.operations[op].outputs[k] for op, k in region.saved]
    runs = [child for child in region.children if child.checkpointed]
    within = {op: run for run in runs for op in range(run.start, run.stop)}
    kept: set[int] = set()
    for op in graph.operations[region.start : region.stop]:
        run = within.get(op.id)
        # What a run reads of what was made before it is kept, as its recompute starts from it.
        before = region.stop if run is None else run.start
        read = op.needs if run is None else op.reads if op.on_path else ()
        kept.update(v for v in read if _maker(graph, v) < before)
    for run in runs:
        kept.update(_made_and_kept(graph, run))
    return sorted(v for v in kept if _maker(graph, v) >= region.start)


def _maker(graph: Graph, value: int) -> int:
    producer = graph.values[value].producer
    return -1 if producer is None else producer


def _body_words(body: Region) -> str:
    if not body.checkpointed:
        return "checkpointed in part" if body.children else "not checkpointed"
    return "checkpointed, with runs checkpointed again" if body.children else "checkpointed"


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _saved(names: OperationNames, region: Region) -> tuple[str, ...]:
    """The values that a region and those inside it keep by name, largest first."""
    graph = names.graph
    values = [
        graph.values[graph.operations[op].outputs[k]]
        for _, inner in region.walk()
        for op, k in inner.saved
    ]
    values.sort(key=lambda value: -value.size_bytes)
    return tuple(names.value(value.id, value.size_bytes) for value in values)
