"""What a search for the options of one kind of block is, whatever is in the block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._plan.region import Region


class OptionSearch(Protocol):
    """Candidate regions of one block, in waves, and what becomes of them once they are priced.

    It holds no results: each wave follows from the block, the configuration and the costs that are
    passed in. Every region covers the block exactly, and the same question has the same answer.
    """

    def plain_regions(self) -> list[Region]:
        """The candidates that need no search. The first is the block as it is."""
        ...

    def first_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        """Candidates that follow from the cost of the block as it is.

        Args:
            measured: The costs of the candidates so far that could be compiled, the block as it is
                among them.
            lower_peak: Whether candidates that only lower the peak of the block's backward are
                worth anything.
        """
        ...

    def second_wave(
        self, measured: Mapping[Region, OptionCost], *, lower_peak: bool = True
    ) -> list[Region]:
        """Candidates that follow from what was measured."""
        ...

    def options(self, measured: Mapping[Region, OptionCost]) -> BlockOptions:
        """The options, from the costs of all candidates that could be compiled."""
        ...
