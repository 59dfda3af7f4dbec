"""Reports of what a plan decided for each block, in words and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from jax_hremat._cost.option import Option
from jax_hremat._partition.blocks import Partition
from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.own_checkpoint import words
from jax_hremat._plan.region import Loop, Region
from jax_hremat._shared.format import format_bytes
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.prediction import recompute_s
from jax_hremat._trace.graph import Graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.certify import CompiledStep

_MAX_PARTS = 3
_NOWHERE = "(no scope)"


@dataclass(frozen=True, slots=True)
class Decision:
    """A selection over a chain, with what is needed to describe it.

    Attributes:
        graph: The program.
        partition: Its blocks.
        chain: Blocks with their options.
        selection: The selection to describe.
        plain: For each block, its plain option.
        recomputed: How many times each operation is recomputed.
    """

    graph: Graph
    partition: Partition
    chain: Chain
    selection: Selection
    plain: Sequence[Option]
    recomputed: Sequence[int]


def block_reports(decision: Decision) -> tuple[BlockReport, ...]:
    """One report for each block, in program order."""
    grouped = {b for first, last in decision.selection.groups for b in range(first, last + 1)}
    keeps = dict(decision.selection.keeps)
    block_recompute_s = recompute_s(decision.chain, decision.selection)
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
        mode = option.region.shifted(block.start)
        source = _source(decision.graph, block.start, block.stop)
        reports.append(
            BlockReport(
                start=block.start,
                stop=block.stop,
                # NNX names no scopes; there the source line locates the block.
                scope=block_scope(decision.graph, block.start, block.stop) or source or _NOWHERE,
                mode=_mode_words(decision.graph, mode),
                kept_bytes=kept.cost.kept_bytes if kept else 0,
                plain_bytes=plain.cost.kept_bytes,
                added_s=option.cost.time_s - plain.cost.time_s + block_recompute_s[index],
                recomputed=sum(
                    count > 0 for count in decision.recomputed[block.start : block.stop]
                ),
                saved=tuple(
                    _value_words(decision.graph, op, k)
                    for _, region in (kept or option).region.shifted(block.start).walk()
                    for op, k in region.saved
                ),
                source=source,
            )
        )
    return tuple(reports)


def block_scope(graph: Graph, start: int, stop: int) -> str:
    """The block's innermost common scope and the parts of the scope that the block spans; empty if
    its operations have no scope."""
    paths = [op.scope.split("/") for op in graph.operations[start:stop] if op.scope and op.active]
    if not paths:
        return ""
    shared = 0
    while all(len(p) > shared and p[shared] == paths[0][shared] for p in paths):
        shared += 1
    parts = list(dict.fromkeys(p[shared] for p in paths if len(p) > shared))
    if len(parts) > _MAX_PARTS:
        parts = [parts[0], "…", parts[-1]]
    prefix = "/".join(paths[0][:shared])
    if not parts:
        return prefix
    return f"{prefix}: {', '.join(parts)}" if prefix else ", ".join(parts)


def _source(graph: Graph, start: int, stop: int) -> str:
    """File, line and function of the first operation whose source is not an installed package. The
    folder is left out: it says where the code is stored, not what it is."""
    lines = [op.source for op in graph.operations[start:stop] if op.active]
    own = [line for line in lines if line and "site-packages" not in PurePath(line).parts]
    return PurePath(own[0]).name if own else ""


def bottleneck_words(graph: Graph, partition: Partition, block: int, step: CompiledStep) -> str:
    """What sets the smallest peak: the largest buffer alive there, and the scope of the block where
    the peak occurs."""
    at = partition.blocks[block]
    scope = block_scope(graph, at.start, at.stop) or _NOWHERE
    if not step.buffers:
        return "its arguments and results"
    largest = step.buffers[0]
    what = {"parameter": "argument", "output": "result", "temp": "buffer"}[largest.kind]
    return (
        f"the {what} {largest.text} of {format_bytes(largest.size_bytes)} made by "
        f"`{largest.made_by}` (the largest at the peak, which is in `{scope}`)"
    )


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
        f"PlannerConfig(open_checkpoints=True) plans as if it were not there"
    )


def _mode_words(graph: Graph, mode: Region) -> str:
    loops = [c.loop for c in mode.children if c.loop is not None]
    branches = [b for c in mode.children for b in c.branches]
    inner = [_run_words(graph, c) for c in mode.children]
    if loops:
        words = _loop_words(loops[0], graph.operations[mode.start].trips)
    elif branches:
        words = "branches: " + " | ".join(_body_words(b) for b in branches)
    elif mode.checkpointed:
        words = "checkpointed"
        if mode.saved:
            words += f", keeps {len(mode.saved)} values"
        if inner:
            words += ", inside it " + ", ".join(inner)
    elif inner:
        words = "checkpoints " + ", ".join(inner)
    else:
        words = "plain"
    return words


def _loop_words(loop: Loop, trips: int) -> str:
    """Such as `each of 32 steps checkpointed, keeps 3 values; in segments of 8`."""
    words = f"each of {trips} steps {_body_words(loop.body)}"
    if loop.segments:
        words += "; in segments of " + " of ".join(map(str, reversed(loop.segments)))
    return words


def _body_words(body: Region) -> str:
    """Such as `checkpointed, keeps 3 values`."""
    if body.checkpointed:
        words = "checkpointed"
        if body.saved:
            words += f", keeps {len(body.saved)} values"
        if body.children:
            words += f", {len(body.children)} runs checkpointed inside it"
        return words
    return f"checkpoints {len(body.children)} runs" if body.children else "plain"


def _run_words(graph: Graph, run: Region) -> str:
    heavy = [op for op in graph.operations[run.start : run.stop] if not op.fusible]
    first, last = graph.operations[run.start], graph.operations[run.stop - 1]
    if heavy:
        first, last = heavy[0], heavy[-1]
    a = _op_words(first.scope, first.primitive)
    b = _op_words(last.scope, last.primitive)
    return f"[{a}]" if a == b else f"[{a} … {b}]"


def _op_words(scope: str, primitive: str) -> str:
    tail = scope.split("/")[-1]
    return f"{tail}:{primitive}" if tail else primitive


def _value_words(graph: Graph, op: int, k: int) -> str:
    operation = graph.operations[op]
    value = graph.values[operation.outputs[k]]
    words = _op_words(operation.scope, operation.primitive)
    return f"{words} {value.text} ({format_bytes(value.size_bytes)})"
