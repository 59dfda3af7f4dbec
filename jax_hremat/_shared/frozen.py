"""Records with read-only mappings, pickled and copied."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any


def reduce_record(record: Any) -> tuple[Any, ...]:
    """What a dataclass with `MappingProxyType`s in its fields returns from `__reduce__`: they
    cannot be pickled, so they are made again."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    frozen = {k: dict(v) for k, v in fields.items() if isinstance(v, MappingProxyType)}
    return _record_of, (type(record), {**fields, **frozen}, tuple(frozen))


def _record_of(kind: type, fields: dict[str, Any], frozen: tuple[str, ...]) -> Any:
    return kind(**{**fields, **{k: MappingProxyType(fields[k]) for k in frozen}})
