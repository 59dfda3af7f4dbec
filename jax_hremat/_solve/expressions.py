"""Many linear expressions at once, over named vectors of variables with indices of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jax_hremat._solve.modelling import cp, sp

Index = tuple[int, ...]
# A factor, the name of a vector of variables, and an index into it.
Term = tuple[float, str, Index]


@dataclass(frozen=True, slots=True)
class Vector:
    """Variables with indices.

    Attributes:
        variable: The variables, as one vector.
        places: The place of each index in the vector; what has no place is zero.
    """

    variable: cp.Variable
    places: Mapping[Index, int]

    @staticmethod
    def of(name: str, indices: Iterable[Index], *, binary: bool) -> Vector:
        """Variables between 0 and 1 for these indices."""
        places = {index: place for place, index in enumerate(indices)}
        kind: dict[str, Any] = {"boolean": True} if binary else {"bounds": [0, 1]}
        return Vector(cp.Variable(max(1, len(places)), name=name, **kind), places)


def linear(vectors: Mapping[str, Vector], rows: Iterable[Iterable[Term]]) -> Any:
    """One expression for each row, the sum of its terms; terms of indices without a place are
    zero. At least one term has a place."""
    entries: dict[str, list[tuple[int, int, float]]] = {name: [] for name in vectors}
    count = 0
    for row in rows:
        for factor, name, index in row:
            place = vectors[name].places.get(index)
            if place is not None:
                entries[name].append((count, place, factor))
        count += 1
    parts = []
    for name, some in entries.items():
        if some:
            at, places, factors = zip(*some, strict=True)
            variable = vectors[name].variable
            matrix = sp.csr_array((factors, (at, places)), shape=(count, variable.size))
            parts.append(matrix @ variable)
    return sum(parts[1:], parts[0])
