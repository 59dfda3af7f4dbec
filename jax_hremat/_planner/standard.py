"""Plans that a user could write by hand, as selections; the planner must not be worse."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from jax_hremat._cost.option import Option
from jax_hremat._partition.layers import layer_runs
from jax_hremat._solve.chain import Chain, Group, Selection
from jax_hremat._solve.prediction import predict

# Numbers n: n consecutive blocks checkpointed together, or one of every n layers checkpointed.
COUNTS = (2, 3, 4)


def grouped_selections(chain: Chain) -> Iterator[Selection]:
    """`jax.checkpoint` around every two, three or four consecutive blocks, each in its first
    option."""
    for count in COUNTS:
        if count < len(chain):
            phases = (_every(chain, count, first) for first in range(count))
            yield min(phases, key=lambda selection: predict(chain, selection).peak_bytes)


def layer_selection(
    chain: Chain,
    kinds: Sequence[Hashable],
    plain: Sequence[Option],
    under_policy: Sequence[Option],
    every: int = 1,
) -> Selection:
    """Every layer, or one in `every` layers of each stack, under `jax.checkpoint` with a policy.

    All other blocks are plain.

    Args:
        chain: Blocks and their options.
        kinds: The kind of each block; equal kinds are equal blocks.
        plain: For each block, its plain option.
        under_policy: For each block, the option that checkpoints it alone under the policy.
        every: One in this many layers is checkpointed.
    """
    options = [chain.options[b].index(option) for b, option in enumerate(plain)]
    layers = [layer for run in layer_runs(kinds) for layer in run[::every]]
    groups, keeps = [], []
    for first, last in _wrappable(chain, layers):
        if first == last:
            options[first] = chain.options[first].index(under_policy[first])
        else:
            groups.append((first, last))
            blocks = (b for b in range(first, last + 1) if under_policy[b].region.saved)
            keeps += [(b, chain.options[b].index(under_policy[b])) for b in blocks]
    return Selection(tuple(options), tuple(groups), tuple(keeps))


def _every(chain: Chain, count: int, first: int) -> Selection:
    """Every `count` blocks from `first` on checkpointed together, except the block at the loss."""
    groups = [(a, a + count - 1) for a in range(first, len(chain) - count, count)]
    return Selection((0,) * len(chain), tuple(_wrappable(chain, groups)))


def _wrappable(chain: Chain, groups: Sequence[Group]) -> Iterator[Group]:
    """The groups that contain no block with an effect."""
    return (g for g in groups if chain.effectful.isdisjoint(range(g[0], g[1] + 1)))
