"""The options of one kind of block, from the costs of its candidates.

A candidate is a region (`_plan/region.py`); once compiled or timed, it is an option with a cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jax_hremat._cost.option import Option, Origin, pareto
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.config import PRECISION
from jax_hremat._plan.region import Region
from jax_hremat._shared.hull import above_lower_hull


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The options of one kind of block.

    Attributes:
        options: The Pareto-optimal options, fastest first.
        plain: The block without checkpoints.
        checkpointed: The block under one `jax.checkpoint` without a policy, except operations that
            must run exactly once.
        by_hand: (policy name, option) pairs: the block as a user would write it under the policy;
            "block" stands for `jax.checkpoint` without a policy.
        num_measured: How many options were compiled or timed.
    """

    options: tuple[Option, ...]
    plain: Option
    checkpointed: Option
    by_hand: tuple[tuple[str, Option], ...]
    num_measured: int

    @property
    def near_hull(self) -> tuple[Region, ...]:
        """The regions worth trying in a block that differs in sizes alone, the plain one first:
        those of the options on the lower convex hull of time over bytes kept, or hardly above it,
        and those that need no search."""
        points = [(option.cost.kept_bytes, option.cost.time_s) for option in self.options]
        precision_s = PRECISION * self.plain.cost.forward_s
        heights_s = above_lower_hull(points)
        near = (o for o, h in zip(self.options, heights_s, strict=True) if h <= precision_s)
        by_hand = (option for _, option in self.by_hand)
        every = (self.plain, self.checkpointed, *by_hand, *near)
        return tuple(dict.fromkeys(option.region for option in every))

    @property
    def in_groups(self) -> tuple[Option, ...]:
        """The options that a group may use: the Pareto-optimal ones, the plain one unless one of
        them has the same costs, and every option of `by_hand` that keeps values by name, even if it
        is dominated."""
        also = [option for _, option in self.by_hand if option.origin == "names"]
        if not any(o.dominates(self.plain) and self.plain.dominates(o) for o in self.options):
            also.insert(0, self.plain)
        return tuple(dict.fromkeys((*self.options, *also)))

    def mapped(self, change: Callable[[Option], Option]) -> BlockOptions:
        """The same options, each changed by a function."""
        return replace(
            self,
            options=tuple(map(change, self.options)),
            plain=change(self.plain),
            checkpointed=change(self.checkpointed),
            by_hand=tuple((name, change(option)) for name, option in self.by_hand),
        )

    def under_policy(self, policy: str) -> Option:
        """The block as a user would write it under a policy; plain if there is no such option."""
        return dict(self.by_hand).get(policy, self.plain)


def block_options(
    start: int,
    plain: Region,
    checkpointed: Region,
    by_hand: Mapping[str, Region],
    measured: Mapping[Region, OptionCost],
) -> BlockOptions:
    """The options of one block, from the measured costs of its candidates.

    Args:
        start: The block's first operation.
        plain: The plain region.
        checkpointed: The region that checkpoints the whole block.
        by_hand: Regions that a user would write, by the name of the policy.
        measured: The cost of each region that was compiled or timed.
    """

    whole = checkpointed if checkpointed in measured else plain

    def option(region: Region) -> Option:
        at_end = replace(whole, children=region.children)
        is_plain = whole.checkpointed and not region.checkpointed
        return replace(
            option_of(region.shifted(-start), measured[region]),
            at_end=measured.get(at_end) if is_plain else None,
        )

    return BlockOptions(
        options=pareto(option(region) for region in measured),
        plain=option(plain),
        checkpointed=option(whole),
        by_hand=tuple(
            (name, option(region)) for name, region in by_hand.items() if region in measured
        ),
        num_measured=len(measured),
    )


def option_of(region: Region, cost: OptionCost) -> Option:
    """A candidate with its cost as an option."""
    return Option(region, cost, _origin(region))


def _origin(region: Region) -> Origin:
    if any(r.loop is not None for _, r in region.walk()):
        return "loop"
    if any(r.branches for _, r in region.walk()):
        return "branches"
    if region.saved:
        return "names"
    if region.children:
        return "runs"
    return "checkpointed" if region.checkpointed else "plain"
