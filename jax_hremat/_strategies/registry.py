"""The strategies that are known by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax_hremat._strategies.checkmate import Checkmate
from jax_hremat._strategies.chen import Chen, ChenRecursive
from jax_hremat._strategies.greedy import Greedy
from jax_hremat._strategies.hrockmate import HRockmate
from jax_hremat._strategies.rotor import Rockmate, Rotor
from jax_hremat._strategies.strategy import Strategy
from jax_hremat._strategies.tw_remat import TwRemat

# The library's own, which is the default; it is the planner itself, not one of the classes here.
TREE = "tree"
TREE_SUMMARY = "options of blocks, groups and nests in one program, with corrected predictions"

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            Chen(),
            ChenRecursive(),
            Greedy(),
            TwRemat(),
            Rotor(),
            Rockmate(),
            HRockmate(),
            Checkmate(),
        )
    }
)

# The names of all strategies, the library's own first.
ALL_STRATEGIES = (TREE, *STRATEGIES)


def strategy_of(given: str | Strategy) -> Strategy | None:
    """The strategy given, or that of a name; None for the library's own.

    Raises:
        ValueError: There is none of that name.
    """
    if isinstance(given, Strategy):
        return given
    if given == TREE:
        return None
    if given in STRATEGIES:
        return STRATEGIES[given]
    known = ", ".join(map(repr, ALL_STRATEGIES))
    raise ValueError(
        f"strategy={given!r}: the strategies are {known}, or a jax_hremat.Strategy of your own"
    )
