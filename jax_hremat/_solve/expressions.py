"""Many linear expressions at once, over named vectors of variables with indices of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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
    zero."""
    entries: dict[str, list[tuple[int, int, float]]] = {name: [] for name in vectors}
    count = 0
    for row in rows:
        for factor, name, index in row:
            place = vectors[name].places.get(index)
            if place is not None:
                entries[name].append((count, place, factor))
        count += 1
    total = cp.Constant(np.zeros(count))
    for name, some in entries.items():
        if some:
            at, places, factors = zip(*some, strict=True)
            variable = vectors[name].variable
            total += sp.csr_array((factors, (at, places)), shape=(count, variable.size)) @ variable
    return total


def at_most(
    vectors: Mapping[str, Vector], rows: Iterable[Iterable[Term]], bound: float | np.ndarray
) -> list[Any]:
    """The constraint that the expression of each row is at most the bound; none without rows."""
    rows = list(rows)
    return [linear(vectors, rows) <= bound] if rows else []


def equal(vectors: Mapping[str, Vector], rows: Iterable[Iterable[Term]], value: float) -> list[Any]:
    """The constraint that the expression of each row has the value; none without rows."""
    rows = list(rows)
    return [linear(vectors, rows) == value] if rows else []
