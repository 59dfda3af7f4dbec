"""Chen et al. 2016: segments of equal size, each recomputed from its first input."""

from __future__ import annotations

import math
from collections.abc import Iterator

from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._strategies.segments import even_segments, weights_bytes, with_groups
from jax_hremat._strategies.strategy import Choices, Curve, Strategy

_SOURCE = "Chen, Xu, Zhang, Guestrin: Training Deep Nets with Sublinear Memory Cost (2016)"
_LEAVES_OUT = (
    "in-place operations and sharing of memory, which XLA does itself; a scan is one block, plain "
    "or with each step checkpointed"
)


class Chen(Strategy):
    """The program in k segments, each under `jax.checkpoint`, for every k."""

    name = "chen"
    summary = "equal segments, each recomputed from its input (√n)"
    source = f"{_SOURCE}, algorithm 3 with the search over its budget of section 4.2"
    leaves_out = _LEAVES_OUT

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        weights = weights_bytes(chain)
        # The last segment's backward follows its forward at once: it is not recomputed.
        counts = range(1, len(chain) + 1)
        segments = (even_segments(weights, 0, count)[:-1] for count in counts)
        return Curve(chain, (with_groups(chain, groups) for groups in segments))


class ChenRecursive(Strategy):
    """Segments of segments: each of k segments is divided again, to some depth."""

    name = "chen-recursive"
    summary = "equal segments, each divided again and again (log n)"
    source = f"{_SOURCE}, section 4.3: g(n) = k + g(n / (k + 1))"
    leaves_out = _LEAVES_OUT

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        return Curve(chain, _all_depths(chain))


def _all_depths(chain: Chain) -> Iterator[Selection]:
    weights = weights_bytes(chain)
    for count in range(2, len(chain) + 1):
        for depth in range(1 + max(1, math.ceil(math.log(len(chain), count)))):
            yield with_groups(chain, _divided(weights, 0, count, depth))


def _divided(weights: list[int], first: int, count: int, depth: int) -> Iterator[Group]:
    """The groups of blocks divided into `count` segments, each of which but the last is a group and
    all of which are divided again, `depth` times."""
    segments = even_segments(weights, first, count)
    if depth == 0 or len(segments) < 2:
        return
    for a, z in segments:
        if z != segments[-1][1]:
            yield a, z
        yield from _divided(weights[a - first : z + 1 - first], a, count, depth - 1)
