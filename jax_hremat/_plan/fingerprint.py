"""The program that a plan is for, and the first place where another program differs from it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Precedes, in a signature, the hash of what the operation's derivative rules do.
RULES = " differentiated as "


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The program a plan is for: inputs, operations and wiring; not the names of scopes.

    Attributes:
        inputs: Path, dtype and shape of each flat input; a `*` marks the differentiated ones.
        signatures: Distinct operation signatures, in order of first use.
        operations: For each operation, the position of its signature in `signatures`.
        digests: For each operation, a short hash of its wiring and literal values.
        outputs: Which values are returned, as one text.
    """

    inputs: tuple[str, ...]
    signatures: tuple[str, ...]
    operations: tuple[int, ...]
    digests: tuple[str, ...]
    outputs: str

    @property
    def digest(self) -> str:
        """One hash for the whole program."""
        parts = ("\n".join(p) for p in (self.inputs, self.signatures, self.digests))
        order = ",".join(map(str, self.operations))
        whole = "\0".join((*parts, order, self.outputs))
        return hashlib.sha256(whole.encode()).hexdigest()[:32]

    @property
    def differentiated_inputs(self) -> dict[str, bool]:
        """The paths of the inputs, and whether each is differentiated."""
        return {_path(text): text.endswith("*") for text in self.inputs}

    def first_difference(self, other: Fingerprint) -> str | None:
        """Where `other` first departs from this program, in words; None if they are equal."""
        if len(self.inputs) != len(other.inputs):
            counts = f"{len(self.inputs)} inputs became {len(other.inputs)}"
            before, now = ({_path(text) for text in p.inputs} for p in (self, other))
            new = [text for text in other.inputs if _path(text) not in before]
            gone = [text for text in self.inputs if _path(text) not in now]
            changes = (
                f"{some[0]} is {word}" for some, word in ((new, "new"), (gone, "gone")) if some
            )
            return ": ".join((counts, *changes))
        for mine, theirs in zip(self.inputs, other.inputs, strict=True):
            if mine != theirs:
                return f"input {mine} became {theirs}"
        for i, (a, b) in enumerate(zip(self.operations, other.operations, strict=False)):
            mine, theirs = self.signatures[a], other.signatures[b]
            if mine != theirs and mine.split(RULES)[0] == theirs.split(RULES)[0]:
                same = mine.split(RULES)[0]
                return f"operation {i}, {same}, has another derivative rule"
            if mine != theirs:
                return f"operation {i} was {mine} and is {theirs}"
            if self.digests[i] != other.digests[i]:
                return f"operation {i}, {mine}, reads other values or another literal"
        if len(self.operations) != len(other.operations):
            return f"{len(self.operations)} operations became {len(other.operations)}"
        if self.outputs != other.outputs:
            return f"it returned the values {self.outputs} and returns {other.outputs}"
        return None

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "inputs": list(self.inputs),
            "signatures": list(self.signatures),
            "operations": list(self.operations),
            "digests": list(self.digests),
            "outputs": self.outputs,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Fingerprint:
        """The inverse of `to_json`; raises `KeyError` or `TypeError` if the data is malformed."""
        return Fingerprint(
            inputs=tuple(map(str, data["inputs"])),
            signatures=tuple(map(str, data["signatures"])),
            operations=tuple(map(int, data["operations"])),
            digests=tuple(map(str, data["digests"])),
            outputs=str(data["outputs"]),
        )


def _path(text: str) -> str:
    """The path of an input, of its text with type."""
    return text.rsplit(": ", 1)[0]
