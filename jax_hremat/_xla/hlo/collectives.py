"""How many bytes a collective of a compiled step sends between devices."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from jax_hremat._xla.hlo.parse import Instruction

# Bytes that one device in a group of n sends, for each byte of its operand, if the devices send
# round a ring (Thakur, Rabenseifner and Gropp, 2005, section 4); what NCCL calls bus bandwidth.
_SENT: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "all-gather": lambda n: n - 1.0,
        "reduce-scatter": lambda n: (n - 1.0) / n,
        "all-reduce": lambda n: 2.0 * (n - 1.0) / n,
        "all-to-all": lambda n: (n - 1.0) / n,
        "collective-broadcast": lambda n: 1.0,
        "collective-permute": lambda n: 1.0,
    }
)
COLLECTIVES = frozenset(_SENT)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The data that one device sends in one collective.

    Attributes:
        sent_bytes: How many bytes it sends.
        across_hosts: Whether some of the devices that exchange data are on different hosts.
    """

    sent_bytes: float
    across_hosts: bool


def exchange_of(
    instruction: Instruction, given_bytes: float, devices_per_host: int
) -> Exchange | None:
    """The data that one device sends in a collective.

    Args:
        instruction: A collective, or the start of an asynchronous one.
        given_bytes: Bytes of its operands.
        devices_per_host: Devices `0 … n − 1` are on the first host, and so on.

    Returns:
        The exchange, or None if the text gives the groups in an unknown form.
    """
    groups = groups_of(instruction)
    if groups is None:
        return None
    size = max(len(group) for group in groups)
    opcode = instruction.opcode.removesuffix("-start")
    return Exchange(
        sent_bytes=given_bytes * _SENT[opcode](size) if size > 1 else 0.0,
        across_hosts=any(len({d // devices_per_host for d in group}) > 1 for group in groups),
    )


_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_LISTS = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]+\})\}")
_ARRAY = re.compile(rf"replica_groups=\[([\d,]+)\]<={_ORDER}")
_MESH = re.compile(rf"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\({_ORDER}\))? \{{([^}}]*)\}}")


def groups_of(instruction: Instruction) -> list[tuple[int, ...]] | None:
    """The groups of devices that exchange data with each other; None if the text is not understood.

    XLA prints one of three forms: lists, `{{0,1},{2,3}}`; an array of the devices, in order or
    transposed, with one row for each group, `[4,2]<=[2,4]T(1,0)`; or axes of a mesh, whose devices
    are in order or transposed, `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}`.
    """
    text = instruction.attributes
    if lists := _LISTS.search(text):
        return [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", lists[1])]
    if array := _ARRAY.search(text):
        return _rows(_devices(array[2], array[3]).reshape(_numbers(array[1])))
    if mesh := _MESH.search(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh[1])}
        chosen = [axis.strip(" '") for axis in mesh[4].split(",")]
        if sizes.keys() >= {*chosen}:
            every = str(math.prod(sizes.values()))
            return _along(_devices(mesh[2] or every, mesh[3]), sizes, chosen)
    return None


def _devices(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(_numbers(order)) if order else devices


def _along(
    devices: np.ndarray, sizes: Mapping[str, int], chosen: Sequence[str]
) -> list[tuple[int, ...]]:
    """The groups along some of a mesh's axes."""
    names = [*(name for name in sizes if name not in chosen), *chosen]
    axes = [list(sizes).index(name) for name in names]
    together = math.prod(sizes[name] for name in chosen)
    mesh = devices.reshape(tuple(sizes.values()))
    return _rows(mesh.transpose(axes).reshape(-1, together))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _rows(devices: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(int(d) for d in row) for row in devices]
