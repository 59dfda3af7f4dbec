"""Kinds of blocks whose sizes lie on a line."""

from __future__ import annotations

from drawing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from jax_hremat._options.lines import lines

LAYERS, CHANNELS = 6, 64


def layer_sizes(pixels: int, layer: int) -> list[int]:
    """A layer that reads the channels of all before it: those, its weight, what it makes."""
    read = CHANNELS * (1 + layer)
    return [pixels * read, read * CHANNELS, pixels * CHANNELS]


def test_layers_of_one_resolution_lie_on_a_line() -> None:
    stages = [56**2, 28**2, 14**2]
    sizes = {
        stage * LAYERS + layer: layer_sizes(pixels, layer)
        for stage, pixels in enumerate(stages)
        for layer in range(LAYERS)
    }
    assert sorted(lines(sizes)) == [
        tuple(range(stage * LAYERS, (stage + 1) * LAYERS)) for stage in range(len(stages))
    ]


def test_two_kinds_or_three_that_turn_are_no_line() -> None:
    assert lines({0: [1, 2], 1: [5, 9]}) == []
    assert lines({0: [1, 2], 1: [2, 5], 2: [3, 9]}) == []
    assert lines({}) == []


points = st.lists(st.integers(1, 50), min_size=3, max_size=3)


@settings(max_examples=examples(60))
@given(st.lists(points, max_size=8))
def test_each_line_is_one_and_no_kind_is_on_two(drawn: list[list[int]]) -> None:
    sizes = dict(enumerate(drawn))
    found = lines(sizes)
    on_lines = [kind for line in found for kind in line]
    assert len(on_lines) == len(set(on_lines))
    for line in found:
        assert len(line) >= 3
        totals = [sum(sizes[kind]) for kind in line]
        assert totals == sorted(totals)
        start, end = sizes[line[0]], sizes[line[-1]]
        step = [b - a for a, b in zip(start, end, strict=True)]
        for kind in line:
            away = [b - a for a, b in zip(start, sizes[kind], strict=True)]
            # Parallel: all products of two coordinates agree.
            pairs = list(zip(step, away, strict=True))
            assert all(x * b == y * a for x, a in pairs for y, b in pairs)
