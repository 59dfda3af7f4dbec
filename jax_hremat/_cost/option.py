"""The options of a block, each a complete way to run it and its cost; Pareto pruning."""

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
        cost: The cost of the block under this option.
        origin: How the block is run: plain, checkpointed, with some runs of its operations
            checkpointed ("runs"), checkpointed with values kept by name ("names"), or, for a scan
            or a cond, with its body or its branches run differently ("loop", "branches").
        outputs_s: Where values are kept by name: seconds to recompute from them what the block's
            outputs are made of, beyond what the block's own backward makes recomputed. A group that
            keeps these values spends them, because its next blocks read the outputs.
        outputs_bytes: Bytes of the named values that are kept only for that.
        at_end: The cost where the block is the last of a group, if it is known and another one
            (`ending`).
    """

    region: Region
    cost: OptionCost
    origin: Origin
    outputs_s: float = 0.0
    outputs_bytes: int = 0
    at_end: OptionCost | None = None

    @property
    def ending(self) -> OptionCost:
        """The cost where the block is the last of a group. Nothing reads the outputs of its
        forward in the group's recompute, so XLA makes one of that and the backward, as it does of
        a block under a checkpoint of its own."""
        return self.cost if self.at_end is None else self.at_end

    def dominates(self, other: Option) -> bool:
        """Whether this option is at least as good as `other` in every respect that matters to a
        plan. Times are compared in whole nanoseconds: a recompute that XLA fuses into the kernel
        that reads it may cost a part of one."""
        a, b = self.cost, other.cost
        return (
            round(a.time_s, 9) <= round(b.time_s, 9)
            and a.kept_bytes <= b.kept_bytes
            and a.forward_peak_bytes <= b.forward_peak_bytes
            and a.backward_peak_bytes <= b.backward_peak_bytes
            and set(a.kept_inputs) <= set(b.kept_inputs)
            and set(a.kept_outputs) <= set(b.kept_outputs)
        )


def pareto(options: Iterable[Option]) -> tuple[Option, ...]:
    """The options that no other dominates, fastest first. Of equal ones, that is kept of which XLA
    may make least ahead of its backward, then the first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: o.cost.unbound_bytes):
        if any(k.dominates(option) for k in kept):
            continue
        kept = [k for k in kept if not option.dominates(k)]
        kept.append(option)
    return tuple(sorted(kept, key=lambda o: (o.cost.time_s, o.cost.kept_bytes)))
