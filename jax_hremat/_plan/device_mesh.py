"""A mesh of devices, and how an array is split over it, as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# For each dimension of an array, the axes of the mesh that it is split over.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """A mesh of devices of one kind.

    Attributes:
        axes: Name and size of each axis.
        explicit: Names of the axes whose shardings are part of the types of arrays.
        manual: Names of the axes of a `shard_map` around the function: along these, the function
            is what one device does.
    """

    axes: tuple[tuple[str, int], ...]
    explicit: tuple[str, ...] = ()
    manual: tuple[str, ...] = ()

    @property
    def num_devices(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(size for _, size in self.axes)

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.axes)

    def share(self, shape: Sequence[int], spec: Spec) -> float:
        """The fraction of an array held by the device with the largest part, padding included."""
        sizes = dict(self.axes)
        share = 1.0
        for extent, axes in zip(shape, spec, strict=True):
            parts = math.prod(sizes[axis] for axis in axes)
            share *= math.ceil(extent / parts) / extent if extent else 1.0
        return share
