"""The region tree as lines: groups before what is in them, equal neighbours as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_plans import place

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.region import Region
from jax_hremat._plan.tree import Line, tree_lines

SIZE = 10


def block(index: int, scope: str = "", **changes: Any) -> BlockReport:
    given: dict[str, Any] = dict(
        start=SIZE * index,
        stop=SIZE * (index + 1),
        place=place(scope or f"layer_{index}", "model.py:12 (layer)"),
        decision="plain",
        kept_bytes=3,
        plain_bytes=7,
        added_s=1e-3,
        recomputed=2,
        saved=(),
    )
    return BlockReport(**given | changes)


def group(first: int, last: int, *inside: Region, **options: Any) -> Region:
    return Region(SIZE * first, SIZE * (last + 1), checkpointed=True, children=inside, **options)


def root(count: int, *children: Region) -> Region:
    return Region(0, SIZE * count, children=children)


def shown(region: Region, blocks: list[BlockReport]) -> list[tuple[int, int, str, str]]:
    return [(x.depth, x.count, x.report.scope, str(x.last)) for x in tree_lines(region, blocks)]


def test_blocks_alone() -> None:
    blocks = [block(0), block(1), block(2, decision="checkpointed"), block(3)]
    assert shown(root(4, group(2, 2)), blocks) == [
        (0, 2, "layer_0", "layer_1"),
        (0, 1, "layer_2", "layer_2"),
        (0, 1, "layer_3", "layer_3"),
    ]


def test_equal_groups_are_one_line_above_the_blocks_of_the_first() -> None:
    blocks = [block(i) for i in range(7)]
    region = root(7, group(0, 2), group(3, 5))
    assert shown(region, blocks) == [
        (0, 2, "layer_0", "layer_5"),
        (1, 3, "layer_0", "layer_2"),
        (0, 1, "layer_6", "layer_6"),
    ]
    line = tree_lines(region, blocks)[0].report
    assert (line.kept_bytes, line.plain_bytes, line.recomputed) == (9, 21, 6)
    assert line.decision == "one checkpoint around 3 blocks"


def test_groups_in_groups() -> None:
    blocks = [block(i) for i in range(5)]
    region = root(5, group(0, 3, group(0, 1), group(2, 3)))
    assert shown(region, blocks) == [
        (0, 1, "layer_0", "layer_3"),
        (1, 2, "layer_0", "layer_3"),
        (2, 2, "layer_0", "layer_1"),
        (0, 1, "layer_4", "layer_4"),
    ]


def test_a_group_says_what_it_keeps_and_differs_by_it() -> None:
    blocks = [block(i) for i in range(4)]
    lines = tree_lines(root(4, group(0, 1, saved=((3, 0),)), group(2, 3)), blocks)
    assert [(x.depth, x.report.decision) for x in lines if x.depth == 0] == [
        (0, "one checkpoint around 2 blocks; 1 value kept by name"),
        (0, "one checkpoint around 2 blocks"),
    ]


def test_differences_that_are_not_shown_are_none() -> None:
    blocks = [block(0, added_s=1e-3), block(1, added_s=1.000001e-3), block(2, added_s=2e-3)]
    assert [count for _, count, *_ in shown(root(3), blocks)] == [2, 1]


def test_layers_of_several_blocks_are_one_line_above_the_blocks_of_the_first() -> None:
    def layer(k: int) -> list[BlockReport]:
        attention = block(2 * k + 1, scope=f"layer_{k}: attn", kept_bytes=5)
        return [attention, block(2 * k + 2, scope=f"layer_{k}: up, down", added_s=2e-3)]

    blocks = [block(0, scope="embed", kept_bytes=1), *(b for k in range(12) for b in layer(k))]
    blocks.append(block(25, scope="head", decision="checkpointed"))
    assert shown(root(26), blocks) == [
        (0, 1, "embed", "embed"),
        (0, 12, "layer_0", "layer_11"),
        (1, 1, "layer_0: attn", "layer_0: attn"),
        (1, 1, "layer_0: up, down", "layer_0: up, down"),
        (0, 1, "head", "head"),
    ]
    layers, *parts = tree_lines(root(26), blocks)[1:4]
    assert layers.kept_bytes == 12 * 8 == sum(part.kept_bytes for part in parts)
    assert [part.kept_bytes for part in parts] == [12 * 5, 12 * 3]
    assert layers.report.kept_bytes == 8


def test_repetitions_inside_a_repetition() -> None:
    kinds = [0, 0, 1, 0, 0, 1]
    blocks = [block(i, plain_bytes=kind) for i, kind in enumerate(kinds)]
    assert [(d, n) for d, n, *_ in shown(root(6), blocks)] == [(0, 2), (1, 2), (1, 1)]


def check_sums(lines: Sequence[Line]) -> None:
    """The lines below each line add up to it."""
    for at, line in enumerate(lines):
        ends = [i for i in range(at + 1, len(lines)) if lines[i].depth <= line.depth]
        below = lines[at + 1 : min(ends, default=len(lines))]
        parts = [x for x in below if x.depth == line.depth + 1]
        if parts:
            assert sum(x.kept_bytes for x in parts) == line.kept_bytes
            assert sum(x.plain_bytes for x in parts) == line.plain_bytes
            assert sum(x.added_s for x in parts) == pytest.approx(line.added_s)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.data())
def test_every_block_is_told_once(kinds: list[int], data: st.DataObject) -> None:
    blocks = [block(i, plain_bytes=kind) for i, kind in enumerate(kinds)]
    edges = sorted(data.draw(st.sets(st.integers(0, len(kinds)))))
    groups = [group(a, b - 1) for a, b in zip(edges, edges[1:], strict=False)]
    lines = tree_lines(root(len(kinds), *groups), blocks)
    assert sum(x.count * x.report.plain_bytes for x in lines if x.depth == 0) == sum(kinds)
    assert sum(x.count * x.report.recomputed for x in lines if x.depth == 0) == 2 * len(kinds)
    assert sum(x.plain_bytes for x in lines if x.depth == 0) == sum(kinds)
    check_sums(lines)
    for above, below in zip(lines, lines[1:], strict=False):
        assert below.depth <= above.depth + 1
