"""All strategies, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax_hremat._schedules.checkmate import Checkmate
from jax_hremat._schedules.checkmate_lp import CheckmateLP
from jax_hremat._schedules.chen import Chen, ChenRecursive
from jax_hremat._schedules.greedy import Greedy
from jax_hremat._schedules.hrockmate import HRockmate
from jax_hremat._schedules.keep_all import KeepAll
from jax_hremat._schedules.rockmate import Rockmate
from jax_hremat._schedules.rotor import Rotor
from jax_hremat._schedules.strategy import Strategy
from jax_hremat._schedules.tree import Tree
from jax_hremat._schedules.tw_remat import TwRemat

STRATEGIES: Mapping[str, Strategy] = MappingProxyType(
    {
        strategy.name: strategy
        for strategy in (
            KeepAll(),
            Chen(),
            ChenRecursive(),
            Rotor(),
            Greedy(),
            TwRemat(),
            Rockmate(),
            HRockmate(),
            Tree(),
            CheckmateLP(),
            Checkmate(),
        )
    }
)
