"""Compiles the whole step for the target and reads its memory and time: a plan's certificate."""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
import weakref
from dataclasses import dataclass

from jax_hremat._emit.emit import emit_flat
from jax_hremat._emit.step import Step
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.peak import BufferReport
from jax_hremat._plan.region import Region
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._trace.mesh import abstract_mesh
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.compile import MemoryStats, compile_flat, never_run
from jax_hremat._xla.hlo.buffer import Buffer, own_temps
from jax_hremat._xla.hlo.liveness import live_at_peak
from jax_hremat._xla.hlo.overwrites import may_overwrite
from jax_hremat._xla.hlo.parse import Computation, HloModule, Instruction
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target, attached_device

_NUM_BUFFERS = 8


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """The compiled step under one plan.

    Attributes:
        memory: Its memory, on one device.
        fragmentation_bytes: Bytes of the temporaries' allocation that no buffer takes at the peak;
            part of `memory`.
        reused_bytes: Bytes of the temporaries at the peak that are in the memory of results or
            donated arguments.
        step_s: Roofline estimate of its time, in seconds.
        buffers: The largest buffers alive at the peak of its temporaries, largest first; if a loop
            runs at the peak, its buffers are included.
        unknown: Operations that the estimate does not price, with their number.
        unpriced_kernels: Targets of the called kernels among them.
        overwrites: Kernels that may read what they have overwritten, by a fault of XLA.
        attached: Whether it was compiled on the attached device.
        mesh: The devices that the step runs on, where there are several.
    """

    memory: MemoryStats
    fragmentation_bytes: int
    reused_bytes: int
    step_s: float
    buffers: tuple[BufferReport, ...]
    unknown: tuple[tuple[str, int], ...]
    unpriced_kernels: tuple[str, ...] = ()
    overwrites: tuple[str, ...] = ()
    attached: bool = False
    mesh: DeviceMesh | None = None

    def overwrites_more_than(self, plain: CompiledStep) -> bool:
        """Whether there are more such kernels than in the step without checkpoints, which are the
        program's own."""
        return len(self.overwrites) > len(plain.overwrites)


def compile_step(
    step: Step,
    root: Region,
    target: Target,
    cache: CompileCache | None = None,
    kernels: KernelBook | None = None,
    kernel_directory: str | None = None,
) -> CompiledStep:
    """Compile the step around the program with the regions of `root`: on the attached device if the
    target is that of one, and the step runs on one device, since that is where it will be compiled
    again; else for the target's description.

    Args:
        step: The step.
        root: The regions.
        target: What to compile for.
        cache: Earlier results of the compiler.
        kernels: What is known about kernels that XLA only calls.
        kernel_directory: Where the machine code of kernels of earlier steps is.
    """
    device = attached_device(target) if step.mesh is None else None
    compiled = compile_flat(
        step.around(emit_flat(step.program, root)),
        step.avals,
        never_run(target, kernel_directory if device is None else None),
        donate_argnums=step.donated,
        cache=cache,
        mesh=None if step.mesh is None else abstract_mesh(step.mesh),
        device=device,
    )
    module = compiled.module
    roofline = estimate_step(module, rates(target, kernels))
    live = sorted(live_at_peak(module), key=lambda at: (-at[1].nbytes, at[1].name))
    own = [(c, b) for c, b in live if b.inside is None and b.nbytes > 0]
    temps = [b for _, b in live if b.kind == "temp"]
    own_bytes = sum(b.nbytes for b in own_temps(temps))
    return CompiledStep(
        memory=compiled.memory,
        fragmentation_bytes=max(0, compiled.memory.temp_bytes - own_bytes),
        reused_bytes=sum(b.nbytes for b in temps) - own_bytes,
        step_s=roofline.time_s,
        buffers=tuple(
            BufferReport(b.nbytes, _shape_text(c, b), b.kind, _maker(step, module, c, b))
            for c, b in own[:_NUM_BUFFERS]
        ),
        unknown=tuple(sorted(roofline.unknown.items())),
        unpriced_kernels=roofline.unpriced_kernels,
        overwrites=may_overwrite(module),
        attached=device is not None,
        mesh=step.mesh if step.mesh is not None and step.mesh.num_devices > 1 else None,
    )


def _written_by(computation: Computation, buffer: Buffer) -> tuple[Instruction, int]:
    """The instruction that first writes a buffer, and which of its results that is."""
    name, _, leaf = buffer.name.removesuffix("}").partition("{")
    return computation[name], int(leaf or 0)


def _shape_text(computation: Computation, buffer: Buffer) -> str:
    instruction, leaf = _written_by(computation, buffer)
    shape = instruction.shape.leaves[leaf]
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"


def _maker(step: Step, module: HloModule, computation: Computation, buffer: Buffer) -> str:
    """The operation that made a buffer; for an instruction that XLA added without a name, its
    opcode and the operation that its first operand comes from; nothing for an unnamed constant."""
    first, _ = _written_by(computation, buffer)
    instruction = first
    while not (name := _op_name(module, instruction)) and instruction.operands:
        instruction = computation[instruction.operands[0]]
    number = re.fullmatch(r"flat\[(\d+)\]", name)
    if number and int(number[1]) < len(step.input_names):
        maker = step.input_names[int(number[1])]
    else:
        maker = _scope(name) or instruction.opcode
    if instruction is not first:
        return f"{buffer.opcode} of {maker}"
    return maker if name or buffer.kind != "constant" else ""


def _op_name(module: HloModule, instruction: Instruction) -> str:
    """The traced operation that an instruction comes from; if it has none, the last named operation
    in its kernel."""
    called = (module.computations[name] for name in instruction.called)
    inside = (i.op_name for body in called for i in reversed(body.instructions))
    return instruction.op_name or next(filter(None, inside), "")


class StepCompiler:
    """`compile_step` for one step and one target; each plan is compiled once.

    For a GPU, the machine code of a kernel, which most plans share, is made once; it lies in a
    directory that is removed with this object.
    """

    def __init__(
        self,
        step: Step,
        target: Target,
        cache: CompileCache | None = None,
        kernels: KernelBook | None = None,
    ) -> None:
        self._cache = cache
        self._kernels = kernels
        self._step = step
        self._target = target
        self._steps: dict[Region, CompiledStep] = {}

    @functools.cached_property
    def _kernel_directory(self) -> str | None:
        if self._target.platform != "cuda":
            return None
        directory = tempfile.mkdtemp(prefix="jax_hremat_")
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)
        return directory

    def __call__(self, root: Region) -> CompiledStep:
        if root not in self._steps:
            self._steps[root] = compile_step(
                self._step,
                root,
                self._target,
                self._cache,
                self._kernels,
                self._kernel_directory,
            )
        return self._steps[root]

    def without_overwriting(self, root: Region) -> tuple[Region, CompiledStep]:
        """The regions and the compiled step; with barriers at all checkpointed regions, if without
        them kernels may read what they have overwritten. With them, they should not."""
        step = self(root)
        if not step.overwrites:
            return root, step
        return root.with_barriers(), self(root.with_barriers())


def _scope(op_name: str) -> str:
    """The user's scopes in an HLO `op_name`, without the transformations around them, for example
    `(loop)/Model/(recomputed)/layer_0/tanh`."""
    transforms = ("jit(", "jvp(", "transpose(", "vmap(")
    parts = []
    # An instruction merged from several is named after the first: of `a;b`, and of `x/(a:b)`.
    first = re.sub(r"(^|/)\((.*?):.*\)", r"\1\2", op_name.split(";")[0])
    for part in first.split("/"):
        core = part
        while core.startswith(transforms):
            core = core[core.index("(") + 1 :].removesuffix(")")
        core = core.rstrip(")")
        if part.startswith("jit(") or core in ("", "checkpoint", "closed_call"):
            continue
        if core == "body" and parts[-1:] == ["while"]:
            parts[-1] = "(loop)"
        else:
            parts.append("(recomputed)" if core == "rematted_computation" else core)
    return "/".join(parts)
