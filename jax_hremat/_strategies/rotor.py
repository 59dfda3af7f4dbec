"""Rotor and Rockmate: optimal persistent schedules, a block kept in one way or in several."""

from __future__ import annotations

from collections.abc import Sequence

from jax_hremat._cost.option import Option
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.config import SearchConfig
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain
from jax_hremat._strategies.persistent import NUM_SLOTS, persistent_selections
from jax_hremat._strategies.strategy import Choices, Curve, Strategy


class Rotor(Strategy):
    """The chain of blocks, each kept whole or not at all."""

    name = "rotor"
    summary = "optimal persistent schedules of the chain of blocks (dynamic program)"
    source = (
        "Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal Checkpointing for Heterogeneous "
        "Chains (2019), theorem 1"
    )
    leaves_out = (
        f"a scan is one block, plain or with each step checkpointed; sizes are rounded up to "
        f"1/{NUM_SLOTS} of the memory without rematerialization; values that skip blocks are held "
        f"until their last reader's range ends"
    )

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        return Curve(chain, persistent_selections(chain))


class Rockmate(Rotor):
    """The chain of blocks, each in one of the options that programs inside the block propose."""

    name = "rockmate"
    summary = "integer programs inside each block, rotor's dynamic program over the blocks"
    source = (
        "Zhao, Le Hellard, Eyraud-Dubois, Gusak, Beaumont: Rockmate: an Efficient, Fast, Automatic "
        "and Generic Tool for Re-materialization in PyTorch (ICML 2023), section 3"
    )
    leaves_out = (
        "inside a block, options are those of this library (runs of operations checkpointed, and "
        "values kept by name), not Rockmate's free schedules; rounding as for rotor"
    )

    def search(self, config: SearchConfig) -> SearchConfig:
        return config

    def options(self, kind: BlockOptions) -> Sequence[Option]:
        steps = kind.under_policy("block")
        return tuple(dict.fromkeys((kind.plain, *kind.options, steps)))
