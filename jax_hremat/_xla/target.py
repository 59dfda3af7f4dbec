"""Targets: the devices that a step can be compiled for, with their compiler and their rates."""

import dataclasses
import difflib
import math
import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import jax
import tomli_w

from jax_hremat._jax.compiling import attached_gpu_target_config
from jax_hremat._shared.errors import TargetUnavailableError, UnknownTargetError
from jax_hremat._shared.files import write_whole
from jax_hremat._shared.frozen import reduce_record

Platform = Literal["cuda", "cpu"]

# GPUs that share a fast interconnect; others are reached over the network.
DEVICES_PER_HOST = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A device to compile for and to estimate times on. Immutable, comparable, picklable.

    Attributes:
        name: What `get_target` calls it, lower case.
        platform: The compiler: "cuda" (XLA:GPU, no GPU needed) or "cpu" (XLA:CPU).
        config_text: XLA's GPU target configuration as a text proto; None for "cpu".
        memory_bytes: Memory of one device that a process can use, in bytes.
        matrix_flops_per_s: Published dense peak of matrix products by HLO element type, in
            operations per second, a multiply-add counting two. "f32" is the TF32 rate where the
            device has one, since XLA's default precision uses it.
        convolution_flops_per_s: The same for convolutions, where their rate is known separately; a
            type that is missing runs at the rate of matrix products.
        vector_flops_per_s: Published f32 peak of all other arithmetic, in operations per second.
        bandwidth_bytes_per_s: Published peak memory bandwidth, in bytes per second.
        link_bytes_per_s: Published peak rate at which a device sends to others of its host, in one
            direction; None where it is unknown, and then collectives are not priced.
        network_bytes_per_s: The same, to other hosts. A host has eight devices.
        host_bytes_per_s: The same, to its host's memory.
        flops_efficiency: Share of the flops peaks that is sustained, in (0, 1].
        bandwidth_efficiency: Share of the bandwidth that is sustained, in (0, 1].
        link_efficiency: Share of the rates to other devices and to the host that is sustained, in
            (0, 1].
        launch_s: Fixed time that each kernel takes besides its work, in seconds: 2e-6 on GPUs,
            which is what a kernel in a stream costs once the host runs ahead; 0 for "cpu", where
            kernels are calls.
        compiler_options: The options that a step must be compiled with for its plan to hold on this
            target, as passed to ``jax.jit(..., compiler_options=...)``.
        source: Where the figures come from.
        device_kinds: The ``jax.Device.device_kind`` texts of attached devices of this kind.
    """

    name: str
    platform: Platform
    config_text: str | None = dataclasses.field(default=None, repr=False)
    memory_bytes: int
    matrix_flops_per_s: Mapping[str, float] = dataclasses.field(hash=False)
    convolution_flops_per_s: Mapping[str, float] = dataclasses.field(
        default_factory=dict, hash=False
    )
    vector_flops_per_s: float
    bandwidth_bytes_per_s: float
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None
    flops_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    link_efficiency: float = 0.8
    launch_s: float
    compiler_options: Mapping[str, str] = dataclasses.field(hash=False)
    source: str
    device_kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("matrix_flops_per_s", "convolution_flops_per_s", "compiler_options"):
            frozen = MappingProxyType(dict(getattr(self, name)))
            object.__setattr__(self, name, frozen)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the target as a TOML file that `get_target` reads; whole or not at all."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain = {k: dict(v) if isinstance(v, Mapping) else v for k, v in fields.items()}
        text = tomli_w.dumps({k: v for k, v in plain.items() if v is not None})
        write_whole(Path(path), text.encode())

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_record(self)


def get_target(spec: str | os.PathLike[str] | Target | None = None) -> Target:
    """Returns the target that a name, a file or the default backend stands for.

    Args:
        spec: A packaged name, case ignored (see `list_targets`); the path of a TOML file with
            the keys of the packaged ones, which must end in ".toml" if it is given as a string; a
            `Target`, returned as it is; or None for JAX's default backend. For None on an
            attached GPU, the rates are the packaged ones of that GPU, the compiler's
            configuration is read from the device, and the memory is the part of it that JAX's
            allocator may use.

    Returns:
        The target. That its configuration compiles is not checked.

    Raises:
        UnknownTargetError: There is no such name or no readable file; a key of the file is missing,
            unknown or of the wrong type (the message names it); or the default backend is of no
            known kind.
    """
    if isinstance(spec, Target):
        return spec
    if spec is None:
        return _default_target()
    if isinstance(spec, os.PathLike) or spec.endswith(".toml"):
        return _target_from_file(Path(spec))
    name = spec.strip().lower()
    if name not in list_targets():
        raise _unknown(f"no target is named {spec!r}", name)
    return _packaged_target(name)


def list_targets() -> tuple[str, ...]:
    """Returns the names of the packaged targets, sorted."""
    files = (entry.name for entry in _packaged_dir().iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def compiler_options(target: str | os.PathLike[str] | Target | None = None) -> dict[str, str]:
    """Returns the options to pass to ``jax.jit(..., compiler_options=...)`` for plans to hold.

    The packaged targets need none, so the dict is empty; a target file of your own may name some.

    Args:
        target: As for `get_target`.

    Raises:
        UnknownTargetError: As for `get_target`.
    """
    return dict(get_target(target).compiler_options)


def attached_device(target: Target) -> Any | None:
    """The first device of JAX's default backend if it is the GPU that a target describes.

    None for a CPU, on which nothing is tried out, and in a job of several processes: all must make
    the same plan, and what is fastest on their devices may differ by a hair.
    """
    device = jax.local_devices()[0]
    if target.platform != "cuda" or device.platform != "gpu" or jax.process_count() > 1:
        return None
    is_described = (
        device.device_kind in target.device_kinds
        or target.config_text == attached_gpu_target_config()
    )
    return device if is_described else None


def attached_bytes() -> int:
    """Returns the memory of the first attached device that JAX's allocator may use, in bytes.

    Raises:
        TargetUnavailableError: The default backend states no limit, as is the case on a CPU.
    """
    device = jax.local_devices()[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise TargetUnavailableError(
            f"budget='device' is the memory of the attached GPU, and JAX's default backend here "
            f"is {device.platform!r}, which names no limit. Give the budget in bytes, such as "
            f"'70GiB', or run where the GPU is"
        )
    return int(stats["bytes_limit"])


def memory_bytes_of(target: Target) -> int:
    """Returns the memory of a target's device, in bytes: what `budget="device"` means.

    Raises:
        TargetUnavailableError: The target is a CPU, whose memory is that of the machine.
    """
    if target.platform == "cpu":
        raise TargetUnavailableError(
            f"budget='device' is the memory of a GPU, and the target is {target.name!r}, which "
            f"names no limit. Give the budget in bytes, such as '70GiB', or name the GPU as target"
        )
    return target.memory_bytes


def attached_target() -> Target:
    """Returns the target of JAX's default backend. For a GPU without a packaged target, the rates
    are placeholders that remain to be measured.

    Raises:
        UnknownTargetError: The default backend is neither a CPU nor a GPU.
    """
    device = jax.local_devices()[0]
    if device.platform not in ("cpu", "gpu"):
        raise _unknown(f"no target is of the attached {device.platform} {device.device_kind!r}")
    if _packaged_for(device.device_kind) is not None or device.platform == "cpu":
        return _default_target()
    return Target(
        name=device.device_kind.lower().replace(" ", "-"),
        platform="cuda",
        config_text=attached_gpu_target_config(),
        memory_bytes=attached_bytes(),
        matrix_flops_per_s={},
        vector_flops_per_s=1.0,
        bandwidth_bytes_per_s=1.0,
        launch_s=0.0,
        compiler_options={},
        source="not measured",
    )


def _default_target() -> Target:
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return _packaged_target("cpu")
    kind = device.device_kind
    match = _packaged_for(kind)
    if match is None:
        reason = f"no packaged target has the rates of the attached {device.platform} {kind!r}"
        raise _unknown(
            f"{reason}; `jax_hremat.calibrate()` measures them",
            kind.lower().removeprefix("nvidia "),
        )
    # The allocator's limit, not the chip's memory: by default JAX leaves a quarter untouched.
    stats = device.memory_stats() or {}
    return dataclasses.replace(
        match,
        config_text=attached_gpu_target_config(),
        memory_bytes=int(stats.get("bytes_limit", match.memory_bytes)),
    )


def _packaged_for(device_kind: str) -> Target | None:
    targets = (_packaged_target(name) for name in list_targets())
    return next((t for t in targets if device_kind in t.device_kinds), None)


def _packaged_dir() -> Traversable:
    return resources.files("jax_hremat") / "targets"


def _packaged_target(name: str) -> Target:
    file = f"{name}.toml"
    return _parse_target(_packaged_dir().joinpath(file).read_text(encoding="utf-8"), file)


def _target_from_file(path: Path) -> Target:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unknown(f"target file {str(path)!r} cannot be read ({error})") from error
    return _parse_target(text, str(path))


def _parse_target(text: str, where: str) -> Target:
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnknownTargetError(f"target file {where!r} is not TOML: {error}") from error
    fields = {field.name: field for field in dataclasses.fields(Target)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise _bad_key(where, key, f"is not a key of a target{hint}")
    for name, field in fields.items():
        optional = (field.default, field.default_factory) != (dataclasses.MISSING,) * 2
        if not optional and name not in table:
            raise _bad_key(where, name, "is missing")
    values = {key: _checked(where, key, value) for key, value in table.items()}
    if (values["platform"] == "cuda") != (values.get("config_text") is not None):
        raise _bad_key(where, "config_text", 'goes with platform "cuda", and only with it')
    return Target(**values)


def _checked(where: str, key: str, value: object) -> Any:
    match key:
        case "platform" if value in get_args(Platform):
            return value
        case "platform":
            raise _bad_key(where, key, f"is {value!r}, not one of {get_args(Platform)}")
        case "name" | "source" | "config_text":
            return _of_type(where, key, value, str, "a text")
        case "memory_bytes":
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise _bad_key(where, key, f"is {value!r}, not a positive integer")
            return value
        case "device_kinds":
            kinds = _of_type(where, key, value, list, "a list of texts")
            return tuple(_of_type(where, key, kind, str, "a list of texts") for kind in kinds)
        case "matrix_flops_per_s" | "convolution_flops_per_s":
            rates = _of_type(where, key, value, dict, "a table of numbers")
            return {k: _number(where, f"{key}.{k}", v) for k, v in rates.items()}
        case "compiler_options":
            options = _of_type(where, key, value, dict, "a table of texts")
            return {k: _of_type(where, f"{key}.{k}", v, str, "a text") for k, v in options.items()}
        case "flops_efficiency" | "bandwidth_efficiency" | "link_efficiency":
            share = _number(where, key, value)
            if share > 1:
                raise _bad_key(where, key, f"is {value!r}, not a share in (0, 1]")
            return share
        case "launch_s" if value == 0:
            return 0.0
        case _:
            return _number(where, key, value)


def _of_type(where: str, key: str, value: object, kind: type, words: str) -> Any:
    if not isinstance(value, kind):
        raise _bad_key(where, key, f"is {value!r}, not {words}")
    return value


def _number(where: str, key: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _bad_key(where, key, f"is {value!r}, not a number")
    if not (math.isfinite(value) and value > 0):
        raise _bad_key(where, key, f"is {value!r}, not positive and finite")
    return float(value)


def _bad_key(where: str, key: str, reason: str) -> UnknownTargetError:
    return UnknownTargetError(f"target file {where!r}: {key!r} {reason}")


def _unknown(reason: str, name: str | None = None) -> UnknownTargetError:
    known = list_targets()
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4) if name else []
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return UnknownTargetError(
        f"{reason}{hint} Known targets are {', '.join(known)}; for another device, give the "
        'path of a ".toml" file with the same keys.'
    )
