"""What columns count at prices, and that equal blocks have equal groups."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_nests import equal_layers, stacks
from test_output_reuse import in_buffers
from test_schedule import QUICK, chains

from jax_hremat._solve.assumed_reuse import NO_PRICES, Prices
from jax_hremat._solve.chain import Chain
from jax_hremat._solve.column import MAX_GROUP, MIB, Column
from jax_hremat._solve.groups import _columns, _GroupStart, group_columns, single_columns
from jax_hremat._solve.keeping import keeping_columns
from jax_hremat._solve.kinds import Kinds, found_once
from jax_hremat._solve.label_search import Columns
from jax_hremat._solve.lifetimes import kept_cost
from jax_hremat._solve.spans import spans


def counted(chain: Chain, p: Column, prices: Prices) -> tuple[int, tuple[int, ...], int]:
    """What a column keeps and the peaks of its forwards and of its backward, buffer by buffer."""
    spared = prices.spared_bytes
    blocks = range(p.first, p.last + 1)
    keeps = dict(p.keeps) if len(blocks) > 1 else {p.first: p.options[0]}
    options = [chain.options[k][o] for k, o in zip(blocks, p.options, strict=True)]
    # In a group, or one inside it, a block may be the last.
    costs = [[o.cost, o.ending] if len(blocks) > 1 else [o.cost] for o in options]
    kept = 0
    forward = []
    for block, peak_bytes in zip(blocks, p.forward_bytes, strict=True):
        if block in keeps:
            cost = kept_cost(chain, (p.first, p.last), block, keeps[block])
            forward.append(peak_bytes - kept - spared(cost.forward_sizes))
            kept += spared(cost.kept_sizes)
        else:
            forward.append(peak_bytes - kept - spared(chain.handing_on[block].sizes_at_peak))
    in_backward = [(k, cost) for k, some in zip(blocks, costs, strict=True) for cost in some]
    if p.last in keeps:
        in_backward.append((p.last, chain.options[p.last][keeps[p.last]].cost))
    own = max(
        spared((*cost.backward_sizes, *chain.pending_cotangents(k))) for k, cost in in_backward
    )
    if len(blocks) > 1:
        own += kept + sum(max(spared(cost.kept_sizes) for cost in some) for some in costs)
        own += sum(spared((v.size_bytes,)) for v in chain.boundary_values if v.producer in blocks)
    return (
        p.kept_bytes - kept,
        tuple(max(size, 0) for size in forward),
        max(p.backward_bytes - own, 0),
    )


def some_prices(data: st.DataObject) -> Prices:
    sizes = sorted(data.draw(st.sets(st.integers(1, 20), min_size=1, max_size=3)))
    prices = sorted(data.draw(st.integers(0, size)) for size in sizes)
    return Prices(tuple(s * MIB for s in sizes), tuple(p * MIB for p in prices))


@given(chains(), st.data())
@QUICK
def test_a_column_counts_its_buffers_at_prices(chain: Chain, data: st.DataObject) -> None:
    chain = in_buffers(chain)
    chain = replace(chain, listed=keeping_columns(chain))
    columns = [*single_columns(chain), *group_columns(chain)]
    prices = data.draw(st.sampled_from([NO_PRICES, some_prices(data)]))
    found = Columns(chain, spans(chain, columns), prices)
    counts = {
        (p.first, p.options, p.keeps): (counted(chain, p, prices), p.added_ms) for p in columns
    }
    for families in (f for some in found.families for f in some):
        for position in range(len(families.columns)):
            p = families.column(position)
            was = counts.pop((p.first, p.options, p.keeps))
            assert ((p.kept_bytes, p.forward_bytes, p.backward_bytes), p.added_ms) == was
    # What is left out is no better than a column that covers, keeps and holds the same.
    every = [f.column(n) for some in found.families for f in some for n in range(len(f.columns))]
    for p in columns:
        if (p.first, p.options, p.keeps) in counts:
            (kept_bytes, forward_bytes, backward_bytes), added_ms = counts[
                p.first, p.options, p.keeps
            ]
            assert any(
                (q.first, q.last, q.holds, q.kept_bytes) == (p.first, p.last, p.holds, kept_bytes)
                and q.forward_bytes == forward_bytes
                and q.backward_bytes <= backward_bytes
                and q.added_ms <= added_ms
                for q in every
            )


def test_equal_blocks_are_of_one_kind() -> None:
    chain = equal_layers(8)
    kinds = Kinds(chain)
    first, middle, later = (kinds.of(range(k, k + 2)) for k in (0, 2, 4))
    assert middle.key == later.key != first.key
    assert middle.onto(later) == (2, dict(zip(middle.values, later.values, strict=True)))
    assert [chain.boundary_values[v].producer for v in middle.values] == [1, 2, 3]
    unlike = replace(chain, shared_bytes=(0,) * 4 + (MIB,) + (0,) * 3)
    assert Kinds(unlike).of(range(4, 6)).key != Kinds(unlike).of(range(2, 4)).key


@given(stacks())
@QUICK
def test_groups_of_equal_blocks_are_found_once(stack: tuple[Chain, list[int]]) -> None:
    chain, kinds = stack
    end = len(chain) - 1
    ranges = [range(first, min(first + MAX_GROUP, end)) for first in range(end)]

    def groups(chain: Chain, blocks: range) -> list[Column]:
        return [*_columns(_GroupStart(chain, chain.needs(), blocks))]

    everything = [p for blocks in ranges for p in groups(chain, blocks)]
    assert group_columns(chain) == everything
    # Without values that skip, blocks are of one kind if they are alike themselves.
    alike = replace(chain, boundary_values=())
    pairs = [range(k, k + 2) for k in range(end - 1)]
    asked: list[range] = []

    def find(blocks: range) -> list[Column]:
        asked.append(blocks)
        return groups(alike, blocks)

    assert found_once(alike, pairs, find) == [p for pair in pairs for p in groups(alike, pair)]
    assert len(asked) <= len({tuple(kinds[k] for k in pair) for pair in pairs})


def test_a_moved_column_is_that_of_the_later_blocks() -> None:
    p = Column(0, 1, (1, 0), 2.0, 3, (4, 5), 6, ((0, 0), (2, 1)), ((1, 0),), ((0, 1),))
    assert p.moved(3, {0: 7, 2: 9}) == Column(
        3, 4, (1, 0), 2.0, 3, (4, 5), 6, ((7, 3), (9, 4)), ((4, 0),), ((3, 4),)
    )
