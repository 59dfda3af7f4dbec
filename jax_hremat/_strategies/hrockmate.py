"""H-Rockmate: a hierarchy made by a score, and a program at each of its levels."""

from __future__ import annotations

from collections.abc import Sequence

from jax_hremat._cost.option import Option
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._options.config import SearchConfig
from jax_hremat._partition.blocks import Partitioner
from jax_hremat._partition.score import partition_by_score
from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.schedule import Schedules
from jax_hremat._strategies.strategy import Choices, Strategy


class HRockmate(Strategy):
    """Parts by a score of their boundaries; options of each part by programs inside it; one program
    over the parts, with groups of parts."""

    name = "hrockmate"
    summary = "parts made by a score, a program in each and one over them"
    source = (
        "Gusak, Zhao, Le Hellard, Li, Eyraud-Dubois, Beaumont: HiRemate: Hierarchical Approach for "
        "Efficient Re-materialization of Neural Networks (ICML 2025), sections 3 and 4"
    )
    leaves_out = (
        "offloading; orders of recomputation that nested checkpoints cannot express; three levels "
        "(operations, parts, groups of parts) in place of any number"
    )

    def partitioner(self, default: Partitioner) -> Partitioner:
        return partition_by_score

    def search(self, config: SearchConfig) -> SearchConfig:
        return config

    def options(self, kind: BlockOptions) -> Sequence[Option]:
        return tuple(dict.fromkeys((kind.plain, *kind.options)))

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        return _Program(chain, solver)


class _Program:
    """The selections of the program over the parts."""

    def __init__(self, chain: Chain, solver: SolverConfig) -> None:
        self._schedules = Schedules(chain)
        self._solver = solver

    def fastest(self, peak_bytes: int) -> Selection | None:
        return self._schedules.fastest_within(peak_bytes, self._solver).selection

    def lowest(self) -> Selection:
        selection = self._schedules.least_peak(self._solver).selection
        assert selection is not None, "without a peak bound a selection exists"
        return selection
