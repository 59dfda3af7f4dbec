"""Costs of kinds of blocks that differ in sizes alone, from the compiled costs of two of them.

A DenseNet has a kind of block for each of its layers, since each reads more channels than the one
before. Of such a family the largest kind is searched, and kinds at its ends are compiled under the
options found (`_options/family.py`). So for each option and each figure of its cost, the difference
from the plain option's figure is known at both ends. Of the kinds in between the plain option is
compiled, and the differences are interpolated linearly in the bytes that it keeps.

Beside compiled costs, of DenseNet-121 (whose layers lie on lines), a U-Net and ResNet-50 for the
H200, interpolated times err by 0.0, 0.2 and 0.7 % of the plain option's time in the median, and by
8.9, 4.3 and 3.3 % at most; the worst of kept bytes and the two peaks errs by 0.8, 2.4 and 0.9 % of
the plain option's, and by 39, 22 and 5 % at most.

Unchecked: that XLA fuses all kinds of a family alike. A plan chosen by such costs is compiled as a
whole, like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jax_hremat._cost.option_cost import OptionCost, Phase


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
        max(f + (1 - part) * of_low + part * of_high, 0.0)
        for f, of_low, of_high in zip(
            _figures(plain), _differences(low), _differences(high), strict=True
        )
    ]
    forward_s, backward_s, *sizes_bytes = figures
    kept_bytes, forward_peak_bytes, backward_peak_bytes = map(round, sizes_bytes)
    return replace(
        ends[0].cost,
        forward_s=forward_s,
        backward_s=backward_s,
        kept_bytes=kept_bytes,
        forward_peak_bytes=forward_peak_bytes,
        backward_peak_bytes=backward_peak_bytes,
        # The sizes of single buffers are not known.
        kept_buffers=(),
        forward=Phase(),
        backward=Phase(),
    )


def _differences(end: End) -> list[float]:
    return [a - b for a, b in zip(_figures(end.cost), _figures(end.plain), strict=True)]


def _figures(cost: OptionCost) -> tuple[float, ...]:
    """The figures of a cost that grow with sizes."""
    return (
        cost.forward_s,
        cost.backward_s,
        cost.kept_bytes,
        cost.forward_peak_bytes,
        cost.backward_peak_bytes,
    )
