"""Regions: what is refused, shifting, walking."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_hremat._plan.region import Region

INNER = Region(3, 5, checkpointed=True, saved=((4, 0),))
OUTER = Region(2, 8, checkpointed=True, saved=((2, 1), (4, 0)), children=(INNER, Region(6, 7)))
ROOT = Region(0, 10, children=(OUTER, Region(8, 10, checkpointed=True)))


@st.composite
def regions(draw: st.DrawFn, start: int = 0, stop: int = 12, depth: int = 3) -> Region:
    checkpointed = draw(st.booleans())
    saved = draw(st.sets(st.integers(start, stop - 1), max_size=3)) if checkpointed else ()
    edges = sorted(draw(st.sets(st.integers(start, stop), max_size=4))) if depth else []
    children = tuple(
        draw(regions(a, b, depth - 1)) for a, b in zip(edges[::2], edges[1::2], strict=False)
    )
    return Region(start, stop, checkpointed, tuple((op, 0) for op in sorted(saved)), children)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": 3, "stop": 2}, r"\[3, 2\) is not a range"),
        ({"start": -1, "stop": 2}, r"\[-1, 2\) is not a range"),
        ({"start": 0, "stop": 4, "saved": ((1, 0),)}, "plain region .* saves"),
        ({"start": 2, "stop": 4, "checkpointed": True, "saved": ((1, 0),)}, "made outside it"),
        ({"start": 2, "stop": 4, "checkpointed": True, "saved": ((4, 0),)}, "made outside it"),
        ({"start": 0, "stop": 9, "children": (Region(1, 4), Region(3, 5))}, "overlap or leave"),
        ({"start": 0, "stop": 9, "children": (Region(5, 6), Region(1, 2))}, "overlap or leave"),
        ({"start": 0, "stop": 9, "children": (Region(7, 10),)}, "overlap or leave"),
        ({"start": 2, "stop": 9, "children": (Region(1, 3),)}, "overlap or leave"),
    ],
)
def test_what_is_not_a_region_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Region(**fields)


def test_empty_and_adjacent_regions_are_regions() -> None:
    assert Region(4, 4).num_checkpointed == 0
    assert Region(0, 4, children=(Region(0, 2), Region(2, 2), Region(2, 4))).depth == 0


def test_walk_is_outermost_first_and_in_order() -> None:
    visited = [(depth, r.start, r.stop) for depth, r in ROOT.walk()]
    assert visited == [(0, 0, 10), (1, 2, 8), (2, 3, 5), (2, 6, 7), (1, 8, 10)]


def test_depth_and_number_count_checkpointed_regions_alone() -> None:
    assert (ROOT.num_checkpointed, ROOT.depth) == (3, 2)
    assert (INNER.num_checkpointed, INNER.depth) == (1, 1)
    bare_between = Region(0, 9, checkpointed=True, children=(Region(1, 8, children=(INNER,)),))
    assert (bare_between.num_checkpointed, bare_between.depth) == (2, 2)


def test_shifted_moves_everything() -> None:
    moved = OUTER.shifted(10)
    assert (moved.start, moved.stop, moved.checkpointed) == (12, 18, True)
    assert moved.saved == ((12, 1), (14, 0))
    assert moved.children == (Region(13, 15, True, ((14, 0),)), Region(16, 17))


@given(regions(), st.integers(0, 50))
def test_shifting_there_and_back_changes_nothing(region: Region, offset: int) -> None:
    moved = region.shifted(offset)
    assert moved.shifted(-offset) == region
    assert (moved.num_checkpointed, moved.depth) == (region.num_checkpointed, region.depth)
    pairs = zip(region.walk(), moved.walk(), strict=True)
    assert all(
        (d, r.start + offset, r.checkpointed) == (e, m.start, m.checkpointed)
        for (d, r), (e, m) in pairs
    )


@given(regions())
def test_depth_is_at_most_the_number_of_checkpointed_regions(region: Region) -> None:
    assert int(region.num_checkpointed > 0) <= region.depth <= region.num_checkpointed


def test_a_tie_moves_along_and_can_be_undone() -> None:
    barrier = Region(1, 3, checkpointed=True, barrier=True)
    assert barrier.shifted(4) == Region(5, 7, checkpointed=True, barrier=True)
    assert barrier != Region(1, 3, checkpointed=True)
    assert Region(0, 9, children=(barrier,)).without_barriers() == Region(
        0, 9, children=(Region(1, 3, checkpointed=True),)
    )
