"""The rates that a device sustains: the figures that the roofline divides by."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._primitives.work import MatrixUnit, Work
from jax_hremat._xla.target import Target


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates that a device sustains: peak figures times the share reached in practice.

    Attributes:
        flops_per_s: Matrix-unit rate by the HLO type of a matmul's operands. A type that is
            missing runs at ``vector_flops_per_s``.
        vector_flops_per_s: Rate of everything that is not a matmul or a convolution.
        bytes_per_s: Memory bandwidth, reads and writes together.
        launch_s: Time that one kernel costs even if it does nothing.
        convolution_flops_per_s: Matrix-unit rate by the HLO type of a convolution's operands. A
            type that is missing runs at the rate of a matmul.
        link_bytes_per_s: Rate at which a device sends to others of its host; None if unknown.
        network_bytes_per_s: Rate at which it sends to other hosts; None if unknown.
        host_bytes_per_s: Rate at which it sends to its host's memory or receives from it; None if
            unknown.
        kernels: What is known about kernels that XLA only calls.
    """

    flops_per_s: Mapping[str, float]
    vector_flops_per_s: float
    bytes_per_s: float
    launch_s: float
    convolution_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    kernels: KernelBook = KernelBook()

    def of(self, unit: MatrixUnit) -> float:
        """The rate of a matrix product or a convolution."""
        rate = self.flops_per_s.get(unit.dtype, self.vector_flops_per_s)
        return self.convolution_flops_per_s.get(unit.dtype, rate) if unit.convolves else rate

    def busy_s(self, work: Work) -> float:
        """Seconds of one kernel without its launch: its arithmetic or its traffic, whichever takes
        longer.

        The time of the kernels that it calls counts as arithmetic; their traffic is part of its
        own.
        """
        matrix_s = sum(flops / self.of(unit) for unit, flops in work.flops)
        vector_s = work.vector_flops / self.vector_flops_per_s
        arithmetic_s = max(matrix_s, vector_s) if work.concurrent else matrix_s + vector_s
        called_s = sum(
            call.times * self.busy_s(self.kernels.work_of(call) or call.work_or_bytes)
            for call in work.calls
        )
        return max(arithmetic_s + called_s, work.bytes / self.bytes_per_s)


def rates(target: Target, kernels: KernelBook | None = None) -> Rates:
    """The rates that the target sustains: its published peaks times its efficiencies."""
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
        kernels=kernels or KernelBook(),
    )
