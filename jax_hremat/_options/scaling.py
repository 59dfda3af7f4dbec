"""Costs of kinds of blocks that differ in sizes alone, from the compiled costs of two of them.

A DenseNet has a kind of block for each of its layers, since each reads more channels than the one
before. Of such a family the largest kind is searched, and the smallest is compiled under the
options found. So for each option and each figure of its cost, the ratio to the plain option's
figure is known at both ends. Of the kinds in between the plain option is compiled, and the ratios
are interpolated linearly in the bytes that it keeps.

Beside compiled costs, of ResNet-50 and of a U-Net for the H200, interpolated times err by 1.1 and
0.3 % of the plain option's time in the median, and by 4.2 and 3.3 % at most.

Unchecked: that XLA fuses all kinds of a family alike. A plan chosen by such costs is compiled as a
whole, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option_cost import OptionCost

# Added to all figures, so that there is a ratio where there is nothing.
_LEAST_S = 1e-9
_LEAST_BYTES = 1.0


@dataclass(frozen=True, slots=True)
class End:
    """An option of a kind at an end of a family, both as compiled.

    Attributes:
        plain: The cost of the kind's plain option.
        cost: The cost of the option.
    """

    plain: OptionCost
    cost: OptionCost


def interpolated_cost(plain: OptionCost, ends: Sequence[End]) -> OptionCost:
    """The cost of an option of a kind of block.

    Args:
        plain: The cost of the kind's plain option, as compiled.
        ends: The same option of the kinds at the ends of the family, one or two.
    """
    low = min(ends, key=lambda end: end.plain.kept_bytes)
    high = max(ends, key=lambda end: end.plain.kept_bytes)
    between = high.plain.kept_bytes - low.plain.kept_bytes
    part = (plain.kept_bytes - low.plain.kept_bytes) / between if between else 0.0
    part = min(max(part, 0.0), 1.0)
    figures = [
        f * ((1 - part) * of_low + part * of_high)
        for f, of_low, of_high in zip(_figures(plain), _ratios(low), _ratios(high), strict=True)
    ]
    forward_s, backward_s, kept, forward_peak, backward_peak = figures
    return replace(
        ends[0].cost,
        forward_s=max(forward_s - _LEAST_S, 0.0),
        backward_s=max(backward_s - _LEAST_S, 0.0),
        kept_bytes=max(round(kept - _LEAST_BYTES), 0),
        forward_peak_bytes=max(round(forward_peak - _LEAST_BYTES), 0),
        backward_peak_bytes=max(round(backward_peak - _LEAST_BYTES), 0),
        # The sizes of single buffers are not known.
        kept_sizes=(),
        forward_sizes=(),
        backward_sizes=(),
    )


def _ratios(end: End) -> list[float]:
    pairs = zip(_figures(end.cost), _figures(end.plain), strict=True)
    return [figure / of_plain for figure, of_plain in pairs]


def _figures(cost: OptionCost) -> tuple[float, ...]:
    """The figures of a cost that grow with sizes, none of them zero."""
    return (
        cost.forward_s + _LEAST_S,
        cost.backward_s + _LEAST_S,
        cost.kept_bytes + _LEAST_BYTES,
        cost.forward_peak_bytes + _LEAST_BYTES,
        cost.backward_peak_bytes + _LEAST_BYTES,
    )
