"""Options: the complete ways to run one block, with their measured cost; Pareto pruning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._plan.region import Region

Origin = Literal["plain", "checkpointed", "runs", "names", "loop", "branches"]


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block.

    Attributes:
        region: The block's region, its operations counted from 0.
        cost: What it costs.
        origin: What it is: the block plain, checkpointed, with checkpointed runs, checkpointed with values kept
            by name, or a scan or the branches of a cond in other modes.
    """

    region: Region
    cost: OptionCost
    origin: Origin

    def dominates(self, other: Option) -> bool:
        """Whether it is at least as good in every respect that a plan can notice."""
        a, b = self.cost, other.cost
        return (
            a.time_s <= b.time_s
            and a.kept_bytes <= b.kept_bytes
            and a.forward_peak_bytes <= b.forward_peak_bytes
            and a.backward_peak_bytes <= b.backward_peak_bytes
            and set(a.kept_inputs) <= set(b.kept_inputs)
            and set(a.kept_outputs) <= set(b.kept_outputs)
        )


def pareto(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other dominates, fastest first; of equals the first is kept."""
    kept: list[Option] = []
    for option in options:
        if any(k.dominates(option) for k in kept):
            continue
        kept = [k for k in kept if not option.dominates(k)]
        kept.append(option)
    return tuple(sorted(kept, key=lambda o: (o.cost.time_s, o.cost.kept_bytes)))
