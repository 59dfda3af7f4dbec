"""How many candidate options are compiled, and how exactly their costs need to be known."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

# What a candidate frees and adds is known to this part of what the block keeps and of the time of
# its forward.
PRECISION = 1e-2


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """How many candidate options of each kind of block are compiled.

    A kind of block that holds a fair share of the program's residuals gets all of them; a kind that
    holds less gets fewer.

    Attributes:
        max_packings: A run is a range of a block's operations under a checkpoint of its own. The
            most sets of runs, and the most single runs, that are tried each time they are chosen:
            for time, and for the peak of the block's backward. At 0 none are tried.
        max_saved_sets: The most sets of values to keep that are tried for a block that is
            checkpointed as a whole, each time likewise.
        max_segments: The most lengths of checkpointed segments that are tried for a scan.
        fair_share: Share of the program's residual bytes from which a kind gets the maximum.
        max_candidates: The most candidates of the whole program, the plain, checkpointed and
            standard ones of each kind not counted; with very many kinds, each kind gets fewer.
        policies: Whether blocks are also compiled under the standard policies, such as
            `dots_saveable`.
        max_workers: The most compilations at a time.

    Raises:
        ValueError: A limit is negative, or `fair_share` or `max_workers` is not positive.
    """

    max_packings: int = 6
    max_saved_sets: int = 3
    max_segments: int = 5
    fair_share: float = 0.05
    max_candidates: int = 200
    policies: bool = True
    max_workers: int = max(2, min(8, os.cpu_count() or 1))

    def __post_init__(self) -> None:
        counts = self.max_packings, self.max_saved_sets, self.max_segments, self.max_candidates
        if min(counts) < 0 or self.fair_share <= 0 or self.max_workers < 1:
            raise ValueError(
                f"{self}: limits may not be negative, and fair_share and max_workers are positive"
            )

    def for_shares(self, shares: Mapping[int, float]) -> dict[int, SearchConfig]:
        """The limits of each kind of block, given the kind's share of the residuals."""
        parts = {k: min(1.0, math.sqrt(s / self.fair_share)) for k, s in shares.items()}
        most = self.max_packings + self.max_saved_sets
        fewer = min(1.0, self.max_candidates / max(most * sum(parts.values()), 1.0))
        return {kind: self.scaled(part * fewer) for kind, part in parts.items()}

    def scaled(self, part: float) -> SearchConfig:
        """The same limits scaled by a part."""
        return replace(
            self,
            max_packings=round(part * self.max_packings),
            max_saved_sets=round(part * self.max_saved_sets),
            max_segments=round(part * self.max_segments),
        )


@dataclass(frozen=True, slots=True)
class Negligible:
    """What makes no difference to the program's plans, if an option of a block is better by it.

    Attributes:
        kept_bytes: Bytes kept between the block's forward and its backward.
        time_s: Seconds.
    """

    kept_bytes: float = 0.0
    time_s: float = 0.0
