"""What a device sustains: the figures that the roofline divides by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from jax_hremat._compiler.target import Target


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device sustains; peak numbers times the share reached in practice.

    Attributes:
        flops_per_s: Matrix-unit rate by the HLO type of a matmul's operands. A type that is
            missing runs at ``vector_flops_per_s``.
        vector_flops_per_s: Rate of everything that is no matmul or convolution.
        bytes_per_s: Memory bandwidth, reads and writes together.
        launch_s: Time one kernel costs even when it does nothing.
        convolution_flops_per_s: Likewise of a convolution's. A type that is missing runs at the
            rate of a matmul.
        link_bytes_per_s: What a device sends to others of its host; None if it is not known.
        network_bytes_per_s: What it sends to other hosts, likewise.
        host_bytes_per_s: What it sends to its host's memory, or receives from it, likewise.
    """

    flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    convolution_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None

    def of(self, unit: "MatrixUnit") -> float:
        """The rate of what multiplies matrices, or convolves."""
        rate = self.flops_per_s.get(unit.dtype, self.vector_flops_per_s)
        return self.convolution_flops_per_s.get(unit.dtype, rate) if unit.convolves else rate


class MatrixUnit(NamedTuple):
    """What a matmul or a convolution runs on: the HLO type of its operands, and which it is."""

    dtype: str
    convolves: bool


def rates(target: Target) -> Rates:
    """What the target sustains: its published peaks times its efficiencies."""
    share = target.flops_efficiency

    def sustained(peaks: Mapping[str, float]) -> Mapping[str, float]:
        return MappingProxyType({dtype: peak * share for dtype, peak in peaks.items()})

    def reached(peak: float | None) -> float | None:
        return None if peak is None else peak * target.link_efficiency

    return Rates(
        flops_per_s=sustained(target.matrix_flops_per_s),
        vector_flops_per_s=target.vector_flops_per_s * share,
        bytes_per_s=target.bandwidth_bytes_per_s * target.bandwidth_efficiency,
        launch_s=target.launch_s,
        convolution_flops_per_s=sustained(target.convolution_flops_per_s),
        link_bytes_per_s=reached(target.link_bytes_per_s),
        network_bytes_per_s=reached(target.network_bytes_per_s),
        host_bytes_per_s=reached(target.host_bytes_per_s),
    )
