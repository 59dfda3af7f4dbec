"""The gaps between a step's buffers, as XLA's heap leaves them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from jax_hremat._cost.option_cost import LiveRange
from jax_hremat._solve.heap import gaps_bytes


def test_buffers_of_one_size_that_replace_each_other_leave_no_gaps() -> None:
    assert gaps_bytes([]) == 0
    assert gaps_bytes([LiveRange(5, 0, 0), LiveRange(5, 1, 1), LiveRange(5, 2, 2)]) == 0


def test_a_buffer_between_two_that_lie_apart_is_placed_on_top() -> None:
    # Two are alive at a time. The longest comes first, at the bottom, then the others as they are
    # made: bottom, above it, and the last, which meets both places, on top.
    chain = [LiveRange(4, 0, 1), LiveRange(4, 1, 2), LiveRange(4, 2, 3), LiveRange(4, 3, 5)]
    assert gaps_bytes(chain) == 4
    # If it ends as the others do, each is placed as it is made, in turns.
    assert gaps_bytes([*chain[:-1], LiveRange(4, 3, 4)]) == 0


def by_the_definition(buffers: Iterable[LiveRange]) -> int:
    """The same, byte by byte."""
    buffers = list(buffers)
    end = max(b.last for b in buffers) + 1
    live = max(sum(b.size_bytes for b in buffers if b.is_alive(at)) for at in range(end))
    heaps = []
    for order in (
        lambda b: (-b.size_bytes, -(b.last - b.first), b.first),
        lambda b: (-(b.last - b.first), -b.size_bytes, b.first),
    ):
        placed: list[tuple[int, LiveRange]] = []
        for buffer in sorted(buffers, key=order):
            taken = {
                byte
                for begin, other in placed
                if other.first <= buffer.last and buffer.first <= other.last
                for byte in range(begin, begin + other.size_bytes)
            }
            top = max(taken, default=-1) + 1
            # The lengths of the gaps below the top, by where they begin.
            free = [byte not in taken for byte in range(top)]
            lengths = [*accumulate(reversed(free), lambda n, is_free: (n + 1) * is_free)][::-1]
            begins = [at for at in range(top) if free[at] and (at == 0 or not free[at - 1])]
            fitting = [at for at in begins if lengths[at] >= buffer.size_bytes]
            placed.append((min(fitting, key=lambda at: (lengths[at], at), default=top), buffer))
        heaps.append(max(begin + b.size_bytes for begin, b in placed))
    return min(heaps) - live


@st.composite
def some_buffers(draw: st.DrawFn) -> list[LiveRange]:
    def one() -> LiveRange:
        first = draw(st.integers(0, 9))
        return LiveRange(draw(st.integers(1, 9)), first, first + draw(st.integers(0, 4)))

    return [one() for _ in range(draw(st.integers(1, 12)))]


@given(some_buffers())
def test_gaps_are_those_of_placing_byte_by_byte(buffers: list[LiveRange]) -> None:
    assert gaps_bytes(buffers) == by_the_definition(buffers)
