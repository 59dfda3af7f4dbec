"""Coarsening: a shorter chain whose blocks are groups of the chain below, for nested groups.

A coarsened block is a range of consecutive blocks that is always checkpointed as one group. In the
shorter chain it is one block whose options are the Pareto-optimal columns of that group
(`_solve/groups.py`). Every schedule of the shorter chain is a schedule of the chain itself with
the same predicted time and peak, and its groups of coarsened blocks are groups of groups. The
shorter chain can be coarsened in turn. n equal blocks in r levels of groups hold about r·n^(1/r)
boundaries at once and cost at most r further forwards (Chen et al. 2016, section 4.3, nest groups
in the same manner).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._plan.region import Region
from jax_hremat._solve.chain import BoundaryValue, Chain, Group, Selection
from jax_hremat._solve.groups import MAX_GROUP, Column, Groups
from jax_hremat._solve.layers import layer_runs

# With fewer equal layers in a row than this, one level of groups comes near the least peak.
_MANY_LAYERS = 3 * MAX_GROUP


@dataclass(frozen=True, slots=True)
class CoarsenedChain:
    """A chain some of whose blocks are ranges of blocks of the chain below.

    Attributes:
        chain: The shorter chain.
        bottom: The original chain, not coarsened.
        under: The chain below, if that is coarsened too; None if the chain below is `bottom`.
        spans: For each block of `chain`, the first and last block of its range in the chain below.
        ways: For each block and option of `chain`, the option of each block of its range.
    """

    chain: Chain
    bottom: Chain
    under: CoarsenedChain | None
    spans: tuple[Group, ...]
    ways: tuple[tuple[tuple[int, ...], ...], ...]

    def expanded(self, selection: Selection) -> Selection:
        """The same selection on the original chain, with nested groups."""
        chosen = zip(self.ways, selection.options, strict=True)
        groups = {(self.spans[a][0], self.spans[b][1]) for a, b in selection.groups}
        groups |= {span for span in self.spans if span[0] < span[1]}
        below = Selection(
            options=tuple(o for ways, picked in chosen for o in ways[picked]),
            groups=tuple(sorted(groups, key=lambda g: (g[0], -g[1]))),
        )
        return below if self.under is None else self.under.expanded(below)


# What the solver chooses from: the chain, or a coarsened one.
Space = Chain | CoarsenedChain


def bottom(space: Space) -> Chain:
    """The original chain, to which the selections of a space refer."""
    return space if isinstance(space, Chain) else space.bottom


def coarsened(chain: Chain, kinds: Sequence[Hashable]) -> tuple[CoarsenedChain, ...]:
    """The chain with the layers of each deep stack of equal layers coarsened; that chain coarsened
    once more, and so on as long as there are many equal blocks in a row.

    Args:
        chain: Blocks and their options.
        kinds: The kind of each block; equal kinds are equal blocks.
    """
    found: list[CoarsenedChain] = []
    top, under = chain, None
    while spans := _spans(top, kinds):
        under = _coarsened_once(top, spans, chain, under)
        found.append(under)
        top = under.chain
        kinds = [tuple(kinds[a : b + 1]) for a, b in under.spans]
    return tuple(found)


def _spans(chain: Chain, kinds: Sequence[Hashable]) -> dict[int, Group]:
    """The ranges to coarsen, by their first block. In a stack of n equal layers each range has ∛n
    layers, which leaves about ∛n ranges for each group and about ∛n groups."""
    spans = {}
    for layers in layer_runs(kinds):
        period = layers[0][1] - layers[0][0] + 1
        count = min(round(math.cbrt(len(layers))), MAX_GROUP // period)
        if len(layers) < _MANY_LAYERS or count * period < 2:
            continue
        parts = (layers[i : i + count] for i in range(0, len(layers), count))
        spans |= {part[0][0]: (part[0][0], part[-1][1]) for part in parts}
    return {
        first: (first, last)
        for first, last in spans.values()
        if first < last and chain.effectful.isdisjoint(range(first, last + 1))
    }


def _coarsened_once(
    chain: Chain, ranges: Mapping[int, Group], bottom: Chain, under: CoarsenedChain | None
) -> CoarsenedChain:
    spans, block = [], 0
    while block < len(chain):
        spans.append(ranges.get(block, (block, block)))
        block = spans[-1][1] + 1
    columns: dict[Group, list[Column]] = {span: [] for span in ranges.values()}
    for column in Groups(chain).columns(math.inf, only=frozenset(columns)):
        columns[column.first, column.last].append(column)
    ways = tuple(
        tuple(p.options for p in columns[span])
        if span in columns
        else tuple((o,) for o in range(len(chain.options[span[0]])))
        for span in spans
    )
    top_of = {b: top for top, (a, z) in enumerate(spans) for b in range(a, z + 1)}
    boundary_values = tuple(
        _boundary_value(c, spans, top_of, ways)
        for c in chain.boundary_values
        if len(_tops(c, top_of)) > 1
    )
    # The chain without options: enough to know the pending cotangents of each block.
    plain = replace(
        chain,
        starts=tuple(chain.starts[a] for a, _ in spans),
        options=(),
        boundary_values=boundary_values,
        recompute_s=tuple(sum(chain.recompute_s[a : z + 1]) for a, z in spans),
        last_recompute_s=tuple(
            # A coarsened block at the end of a group is not recomputed by that group: nothing
            # would read what it makes.
            (0.0,) * len(ways[top]) if span in columns else chain.last_recompute_s[span[0]]
            for top, span in enumerate(spans)
        ),
        shared_bytes=tuple(sum(chain.shared_bytes[a : z + 1]) for a, z in spans),
        effectful=frozenset(top_of[b] for b in chain.effectful),
        keeping=(),
    )
    options = tuple(
        tuple(_option(chain, p, plain.pending_cotangent_bytes(top)) for p in columns[span])
        if span in columns
        else chain.options[span[0]]
        for top, span in enumerate(spans)
    )
    return CoarsenedChain(replace(plain, options=options), bottom, under, tuple(spans), ways)


def _tops(boundary_value: BoundaryValue, top_of: Mapping[int, int]) -> list[int]:
    return sorted({top_of[b] for b in (boundary_value.producer, *boundary_value.readers)})


def _boundary_value(
    boundary_value: BoundaryValue,
    spans: Sequence[Group],
    top_of: Mapping[int, int],
    ways: Sequence[Sequence[tuple[int, ...]]],
) -> BoundaryValue:
    """The value as it passes between the blocks of the shorter chain."""
    producer, *readers = _tops(boundary_value, top_of)
    alone = {b for b, _ in boundary_value.needed if spans[top_of[b]] == (b, b)}
    needed = {(top_of[b], o) for b, o in boundary_value.needed if b in alone}
    # The recompute of a coarsened block reads all its inputs, whatever its option.
    ranges = (top for top in readers if spans[top][0] < spans[top][1])
    needed |= {(top, o) for top in ranges for o in range(len(ways[top]))}
    return replace(
        boundary_value, producer=producer, readers=tuple(readers), needed=frozenset(needed)
    )


def _option(chain: Chain, column: Column, pending_bytes: int) -> Option:
    """A column of a coarsened range, as an option of the coarsened block."""
    blocks = range(column.first, column.last + 1)
    fastest_s = sum(min(o.cost.time_s for o in chain.options[b]) for b in blocks)
    forward_s = sum(chain.recompute_s[b] for b in blocks)
    cost = OptionCost(
        forward_s=forward_s,
        backward_s=fastest_s + column.added_ms / 1e3 - forward_s,
        kept_bytes=column.kept_bytes,
        # `BoundaryValue.needed` says which values of other blocks are read.
        kept_inputs=(),
        kept_outputs=(),
        forward_peak_bytes=column.forward_bytes[0],
        backward_peak_bytes=column.backward_bytes - pending_bytes,
    )
    last = chain.options[column.last][column.options[-1]].region
    size = chain.starts[column.last] + last.stop - chain.starts[column.first]
    return Option(Region(0, size, checkpointed=True), cost, "checkpointed")
