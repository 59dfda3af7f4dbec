"""The proof that a plan stays within its budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._shared.frozen import reduce_record


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the compiler reported for the planned step.

    Attributes:
        peak_bytes: Arguments + outputs + temporaries + constants − aliases of the compiled step.
        budget_bytes: The budget that was asked for.
        headroom_bytes: Subtracted from the budget before planning, for library workspaces and the
            allocator; `peak_bytes + headroom_bytes ≤ budget_bytes`.
        argument_bytes: Of the peak, the arguments.
        output_bytes: Of the peak, the results.
        temp_bytes: Of the peak, everything in between.
        target: What the step was compiled for.
        compiler_options: Options the step was compiled with; compile it with the same.
        versions: Versions of JAX, jaxlib and the compiler plugin.
        mesh: The devices over which the arguments are sharded, where there are several. All bytes
            are those of one device.
        platform: The platform of the target, "cpu" or "cuda"; None for a plan saved before the
            platform was recorded.
        constant_bytes: Of the peak, constants of the executable: arrays that the function captures,
            as XLA lays them out, and tables that XLA evaluates. In plans saved before they were
            counted, 0.
        device_bytes: Memory of one device of the target; None where it is not known, as for a CPU.
        attached: Whether the step was compiled on the attached GPU, where XLA autotunes. If not,
            other kernels may be chosen where it runs, and need more memory.

    Unchecked: workspaces that cuBLAS and cuDNN choose at run time, fragmentation of the
    allocator's pool, and arrays alive outside the step, captured ones among them; that autotuning
    in another process picks the same kernels.
    """

    peak_bytes: int
    budget_bytes: int
    headroom_bytes: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    target: str
    compiler_options: Mapping[str, str]
    versions: Mapping[str, str]
    mesh: DeviceMesh | None = None
    platform: str | None = None
    constant_bytes: int = 0
    device_bytes: int | None = None
    attached: bool = False

    @property
    def exceeds_device(self) -> bool:
        """Whether the budget is more than one device is known to have."""
        return self.device_bytes is not None and self.budget_bytes > self.device_bytes

    @property
    def holds(self) -> bool:
        """Whether the compiled peak and the headroom are within the budget."""
        return self.peak_bytes + self.headroom_bytes <= self.budget_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_record(self)
