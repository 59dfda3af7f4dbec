"""Compiles a function for a target, attached or not, and reads how much memory it will take."""

import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.extend.core import jaxpr_as_fun
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from jax_hremat._jax.jaxprs import open_jaxpr
from jax_hremat._jax.meshes import on_mesh, typed_struct, varying_axes
from jax_hremat._jax.trace_context import apart
from jax_hremat._shared.errors import CompilationError, TargetUnavailableError, UnknownTargetError
from jax_hremat._xla.cache import CompileCache, key_of
from jax_hremat._xla.hlo.liveness import constant_bytes
from jax_hremat._xla.hlo.parse import HloModule, parse_hlo
from jax_hremat._xla.target import DEVICES_PER_HOST, Target

# XLA's messages when the assembler or the device library of the CUDA toolkit is missing, or is of a
# release that does not know the target. No error code tells these apart.
_NO_TOOLKIT = ("PTX compilation provider", "libdevice not found", "ptxas too old")
_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
_LOG_LEVEL_OF_JAX = "1"  # What JAX sets if the user has set nothing: warnings and errors.
_INSTALL = 'Install it with: pip install "jax_hremat[gpu-aot]". No GPU and no driver is needed.'
# Options that change how machine code is made, and nothing that this module reads.
_QUICK_CODE = (
    "xla_backend_optimization_level",
    "xla_gpu_enable_command_buffer",
    "xla_gpu_force_compilation_parallelism",
    "xla_gpu_kernel_cache_file",
)
# The scope in a StableHLO location, which is a path, with the location of its source line inside or
# without. A source line has a colon after the path, and the name of a calling function no slash.
_SCOPE = re.compile(r'loc\("([^"]*/[^"]*)"[()]')
_PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cudnn-cu12",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-cudnn-cu13",
)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryStats:
    """Device memory of one run of an executable, in bytes, as XLA assigned it.

    Not counted: code, workspaces that cuBLAS and cuDNN choose at run time, fragmentation, and
    arrays alive outside the executable. A captured array is alive outside it too.

    Attributes:
        argument_bytes: Arguments the function uses; unused ones are dropped, as ``jax.jit`` does.
        output_bytes: Results, those in donated arguments included.
        temp_bytes: Temporaries at their peak, after liveness analysis and packing.
        alias_bytes: Results in the memory of donated arguments; counted in ``argument_bytes`` and
            in ``output_bytes``.
        constant_bytes: Constants of the executable: arrays that the function captures, as XLA lays
            them out, in several layouts if need be, and tables that XLA evaluates.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    constant_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but temporaries, each byte counted once."""
        return self.argument_bytes + self.output_bytes + self.constant_bytes - self.alias_bytes

    @property
    def peak_bytes(self) -> int:
        """Everything together, each byte counted once."""
        return self.fixed_bytes + self.temp_bytes


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A function compiled for a target. It can be inspected, not run.

    Attributes:
        memory: Its memory.
        hlo_text: The optimised HLO module, scheduled.
        module: The same, parsed.
    """

    memory: MemoryStats
    hlo_text: str = dataclasses.field(repr=False)
    module: HloModule = dataclasses.field(repr=False)


def compile_flat(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    *,
    donate_argnums: int | Sequence[int] = (),
    keep_unused: bool = False,
    cache: CompileCache | None = None,
    mesh: AbstractMesh | None = None,
    device: Any | None = None,
) -> Compiled:
    """Compiles ``jax.jit(fun)`` for one device of a target, or for several, without running it.

    Safe to call from several threads, and while another function is being traced. JAX's
    settings are those of the calling thread.

    Args:
        fun: A function of as many positional arrays as there are ``avals``; it returns any pytree
            of arrays.
        avals: The abstract arguments: anything with ``shape`` and ``dtype``, typed PRNG keys
            included. Everything that is part of their types is kept. On a mesh, an aval's
            ``sharding`` says how the argument is sharded; where it is missing, the compiler
            chooses.
        target: The target; for "cuda" no GPU and no driver is needed.
        donate_argnums: Arguments whose memory the results may take over.
        keep_unused: Keep arguments the function does not use, so that parameter ``i`` of the
            executable is argument ``i``.
        cache: Where XLA's result for the same program is looked up first, and stored afterwards.
        mesh: The mesh of the target's devices that the function runs on; the results are then for
            one device. If left out, the mesh on which arguments are sharded, if any is. Along the
            mesh's manual axes the function is the body of a ``shard_map``: what each device does.
        device: The attached device of the target to compile on; for one device only. XLA then tries
            out kernels on it, and the fastest may need more memory than others. Which is fastest
            may differ from process to process, so the cache is not used.

    Returns:
        The memory and the HLO.

    Raises:
        TargetUnavailableError: The target's compiler is not installed, or not completely: for
            "cuda", JAX's plugin and the toolkit's ptxas and libdevice.
        UnknownTargetError: XLA cannot read the target's configuration.
        jax.errors.JaxRuntimeError: XLA cannot compile the function for the target.
    """
    how = {
        "donate_argnums": donate_argnums,
        "keep_unused": keep_unused,
        "compiler_options": dict(target.compiler_options),
    }
    mesh = mesh or next((m for aval in avals if (m := _mesh_of(aval)) is not None), None)
    if device is not None:
        cache = None
    # A program of a part of a step runs it twice, with the same keys.
    with jax.debug_key_reuse(False):
        if mesh is None:
            lowered = _lowered_for_one(fun, avals, target, how, device)
        else:
            lowered = _lowered_on_mesh(fun, avals, target, mesh, how)
    key = _key(lowered, target) if cache else ""
    answer = cache.read(key, _decode) if cache else None
    if answer is None:
        executable = _build(lowered, target)
        answer = (_assigned_bytes(executable), executable.as_text() or "")
        if cache:
            cache.write(key, {"memory": answer[0], "hlo_text": answer[1]})
    assigned_bytes, hlo_text = answer
    module = parse_hlo(hlo_text)
    memory = MemoryStats(**assigned_bytes, constant_bytes=constant_bytes(module))
    return Compiled(memory, hlo_text, module)


def memory_stats(executable: jax.stages.Compiled) -> MemoryStats:
    """The memory of an executable, which may have been compiled elsewhere.

    Raises:
        TargetUnavailableError: XLA gives no memory statistics, as on some platforms.
    """
    module = parse_hlo(executable.as_text() or "")
    return MemoryStats(**_assigned_bytes(executable), constant_bytes=constant_bytes(module))


def _assigned_bytes(executable: jax.stages.Compiled) -> dict[str, int]:
    """What XLA says of the memory of an executable: all but its constants."""
    stats = executable.memory_analysis()
    if stats is None:
        raise TargetUnavailableError(
            "XLA gives no memory statistics for this platform in this version of JAX; plan for "
            'target="cpu" or for a GPU (`jax_hremat.list_targets()`)'
        )
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "output_bytes": stats.output_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "alias_bytes": stats.alias_size_in_bytes,
    }


def _decode(value: Any) -> tuple[dict[str, int], str]:
    """A stored result of the compiler: what it says of the memory, and the HLO text."""
    return {k: int(v) for k, v in dict(value["memory"]).items()}, value["hlo_text"]


def _key(lowered: jax.stages.Lowered, target: Target) -> str:
    """A hash of the program with its scopes and of everything else that XLA's result depends on,
    but not of the source lines from which the program was traced."""
    options = {k: str(v) for k, v in target.compiler_options.items() if k not in _QUICK_CODE}
    decided_by = {
        "platform": target.platform,
        "config": target.config_text,
        "options": options,
        "versions": compiler_versions(),
        "flags": os.environ.get("XLA_FLAGS", ""),
    }
    scopes = sorted(set(_SCOPE.findall(lowered.as_text(debug_info=True))))
    return key_of((json.dumps(decided_by, sort_keys=True), lowered.as_text(), *scopes))


def never_run(target: Target, kernel_directory: str | None = None) -> Target:
    """The target for programs that are compiled to be inspected, not run.

    Compilation skips steps that come after the optimised HLO and its buffer assignment. Only these
    two are read, and they stay the same. For a GPU, kernel launches are not gathered into graphs,
    which takes a time that grows with the square of their number, and the machine code of kernels
    is looked up in `kernel_directory`, and stored there, if one is given. For the CPU, machine code
    is not optimised.
    """
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    if target.platform == "cuda":
        options = {"xla_gpu_enable_command_buffer": ""}
        if kernel_directory is not None:
            options["xla_gpu_kernel_cache_file"] = os.path.join(kernel_directory, "kernels")
    return dataclasses.replace(target, compiler_options={**target.compiler_options, **options})


def with_quick_code(target: Target, kernel_directory: str) -> Target:
    """`never_run` for many small programs, such as blocks, whose cost serves to compare them.

    For a GPU, each program is compiled by one thread, since several are compiled at a time. For the
    CPU, kernels are emitted without MLIR where XLA can (in JAX 0.10), since MLIR takes most of the
    time of compiling a small program; fusion differs a little.
    """
    target = never_run(target, kernel_directory)
    options: dict[str, Any] = {}
    if target.platform == "cuda":
        options = {"xla_gpu_force_compilation_parallelism": 1}
    elif _has_emitters_without_mlir():
        options = {"xla_cpu_use_fusion_emitters": False}
    return dataclasses.replace(target, compiler_options={**target.compiler_options, **options})


@functools.cache
def _has_emitters_without_mlir() -> bool:
    with jax.default_device(_device("cpu", "")):
        nothing = jax.jit(lambda: 0).lower()
    try:
        nothing.compile({"xla_cpu_use_fusion_emitters": False})
    except jax.errors.JaxRuntimeError:  # There is no such option.
        return False
    return True


def compiler_versions() -> dict[str, str]:
    """Returns the versions that a compilation depends on: Python, jax, jaxlib, CUDA plugins.

    Packages that are not installed are left out.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _lowered_for_one(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    how: Mapping[str, Any],
    device: Any | None,
) -> jax.stages.Lowered:
    # As the default device, not as the sharding of each argument: shardings leave operations in the
    # module that a user's own `jax.jit` has not, or the other way round (for a typed key), and with
    # them XLA numbers, schedules and places everything else a little differently.
    with jax.default_device(device or _device(target.platform, target.config_text)):
        return _lower(jax.jit(fun, **how), [_abstract(aval) for aval in avals], target)


def _lowered_on_mesh(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    mesh: AbstractMesh,
    how: Mapping[str, Any],
) -> jax.stages.Lowered:
    devices = _devices(target.platform, target.config_text, mesh)
    # Meshes that the function names are replaced by the mesh of the target's devices.
    jaxpr = on_mesh(jax.make_jaxpr(fun)(*map(typed_struct, avals)), devices)
    whole = _mapped(jaxpr, devices, mesh.manual_axes) if mesh.manual_axes else _whole(jaxpr)
    pairs = zip(avals, whole.varying, strict=True)
    placed = [_on(devices, aval, axes) for aval, axes in pairs]
    return apart(_lowered_for_mesh)(whole.fun, placed, target, devices, how)


def _lowered_for_mesh(
    fun: Callable[..., Any],
    avals: Sequence[Any],
    target: Target,
    devices: Mesh,
    how: Mapping[str, Any],
) -> jax.stages.Lowered:
    with jax.set_mesh(devices):
        return _lower(jax.jit(lambda *flat: fun(*flat), **how), avals, target)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """A function of whole arrays on a mesh.

    Attributes:
        fun: The function.
        varying: For each argument, the mesh axes over which its first dimension is split: those
            along which the argument varies in a ``shard_map``.
    """

    fun: Callable[..., Any]
    varying: Sequence[Sequence[str]]


def _whole(jaxpr: Any) -> _Whole:
    return _Whole(jaxpr_as_fun(jaxpr), [()] * len(open_jaxpr(jaxpr).invars))


def _mapped(jaxpr: Any, devices: Mesh, manual_axes: Sequence[str]) -> _Whole:
    """From the body of a ``shard_map``, which is what each device does, to a function that contains
    the map: values that vary over devices are stacked along an extra first dimension."""
    inner = open_jaxpr(jaxpr)
    atoms = (*inner.constvars, *inner.invars, *(v for eqn in inner.eqns for v in eqn.outvars))
    check_vma = any(varying_axes(v.aval) for v in atoms)

    def varying(atom: Any) -> tuple[str, ...]:
        said = varying_axes(atom.aval) if check_vma else manual_axes
        return tuple(axis for axis in manual_axes if axis in said)

    inputs, outputs = list(map(varying, inner.invars)), list(map(varying, inner.outvars))
    body = jaxpr_as_fun(jaxpr)

    def each(*flat: Any) -> list[Any]:
        results = body(*(x[0] if axes else x for x, axes in zip(flat, inputs, strict=True)))
        return [x[None] if axes else x for x, axes in zip(results, outputs, strict=True)]

    mapped = jax.shard_map(
        each,
        mesh=devices,
        in_specs=tuple(PartitionSpec(axes) if axes else PartitionSpec() for axes in inputs),
        out_specs=[PartitionSpec(axes) if axes else PartitionSpec() for axes in outputs],
        axis_names=set(manual_axes),
        check_vma=check_vma,
    )
    return _Whole(mapped, inputs)


def _mesh_of(aval: Any) -> AbstractMesh | None:
    sharding = getattr(aval, "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    return mesh if isinstance(mesh, AbstractMesh) and not mesh.empty else None


def _on(devices: Mesh, aval: Any, varying: Sequence[str]) -> jax.ShapeDtypeStruct:
    """The abstract value of a whole argument on the devices."""
    spec = None if _mesh_of(aval) is None else aval.sharding.spec
    shape = aval.shape
    if varying:
        spec = PartitionSpec(tuple(varying), *(spec or ()))
        shape = (math.prod(devices.shape[axis] for axis in varying), *shape)
    sharding = None if spec is None else NamedSharding(devices, spec)
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=weak_type, sharding=sharding)


# Cached by the configuration's text: two topologies made from one text are different devices to
# JAX, and every function would be lowered again for each of them.
@functools.cache
def _device(platform_name: str, config_text: str | None) -> Any:
    if platform_name == "cpu":
        return _cpu_devices(1)[0]
    (device,) = _topology(config_text, 1).devices
    return device


@functools.cache
def _devices(platform_name: str, config_text: str | None, mesh: AbstractMesh) -> Mesh:
    """As many devices of the target as the mesh has, in its shape."""
    if platform_name == "cpu":
        devices = _cpu_devices(mesh.size)
    else:
        devices = _topology(config_text, mesh.size).devices
    kinds = (AxisType.Auto if k == AxisType.Manual else k for k in mesh.axis_types)
    return Mesh(np.reshape(devices, mesh.axis_sizes), mesh.axis_names, tuple(kinds))


def _topology(config_text: str | None, num_devices: int) -> Any:
    """A topology of `num_devices` GPUs, `DEVICES_PER_HOST` on each host."""
    hosts = max(1, num_devices // DEVICES_PER_HOST)
    try:
        with _errors_only():
            return topologies.get_topology_desc(
                platform="cuda",
                target_config=config_text,
                topology=f"1x{hosts}x{num_devices // hosts}",
            )
    except NotImplementedError as error:
        raise TargetUnavailableError(_why_no_plugin()) from error
    except jax.errors.JaxRuntimeError as error:
        if "GpuTargetConfigProto" not in str(error):
            raise
        raise UnknownTargetError(
            "'config_text' of the target is not a GPU target configuration that this version "
            f"of XLA reads: {error}"
        ) from error


@contextmanager
def _errors_only() -> Iterator[None]:
    """Has XLA's plugin log errors alone if it is loaded now, unless the user has said what to log.

    It reads the variable when it is loaded. If JAX runs on a GPU it is loaded already; otherwise it
    serves trial compiles alone, and its warnings that a trial exceeds the device are of no use.
    """
    before = os.environ.get(_LOG_LEVEL)
    if before not in (None, _LOG_LEVEL_OF_JAX):
        yield
        return
    os.environ[_LOG_LEVEL] = "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]
        else:
            os.environ[_LOG_LEVEL] = before


def _why_no_plugin() -> str:
    if any(package.endswith("-plugin") for package in compiler_versions()):
        return (
            "JAX's CUDA plugin is installed and did not start, as it does not on a machine "
            "without a GPU unless told that none is wanted. Set the environment variable "
            'JAX_PLATFORMS=cpu, or call jax.config.update("jax_platforms", "cpu") before JAX is '
            "first used."
        )
    return f"JAX's CUDA plugin is not installed, so nothing compiles for a GPU. {_INSTALL}"


def _cpu_devices(count: int) -> list[Any]:
    try:
        devices = jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise TargetUnavailableError(
            "JAX has no CPU backend in this process, so nothing can be compiled for the CPU. "
            'Add "cpu" to JAX_PLATFORMS, or leave it unset.'
        ) from error
    if len(devices) < count:
        raise TargetUnavailableError(
            f"the arguments lie on a mesh of {count} devices, and JAX has {len(devices)} on the "
            f"CPU, where a step is compiled only for devices that are there. Set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX is first used, "
            f"or plan for a GPU, of which none is needed"
        )
    return devices[:count]


def _lower(jitted: Any, avals: Sequence[Any], target: Target) -> jax.stages.Lowered:
    try:
        return jitted.lower(*avals)
    except RuntimeError as error:
        if target.platform != "cuda" or "Unknown backend" not in str(error):
            raise
        raise TargetUnavailableError(
            f"the function calls Python on the host (`jax.debug.print`, `jax.pure_callback`, "
            f"`io_callback`, or a library's check such as `equinox.error_if`), which JAX compiles "
            f"only where the GPU is attached, and target {target.name!r} is not. Take the "
            f"callbacks out for planning, or plan on the GPU"
        ) from error


def _build(lowered: jax.stages.Lowered, target: Target) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        said = str(error).splitlines()[0]
        if target.platform == "cuda" and any(sign in str(error) for sign in _NO_TOOLKIT):
            raise TargetUnavailableError(
                f"the CUDA toolkit's ptxas or libdevice is missing, or does not know target "
                f"{target.name!r}. {_INSTALL} XLA said: {said}"
            ) from error
        raise CompilationError(
            f"XLA could not compile a part of the step, or the step, for target {target.name!r}. "
            f"If it cannot compile the step without a plan either, the fault is XLA's: "
            f"try shapes that are multiples of a larger power of two, or another version of jax. "
            f"XLA said: {said}"
        ) from error


def _abstract(aval: Any) -> jax.ShapeDtypeStruct:
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)
