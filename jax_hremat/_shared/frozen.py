"""Pickling and copying of records with read-only mappings."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any


def reduce_record(record: Any) -> tuple[Any, ...]:
    """The `__reduce__` of a dataclass with `MappingProxyType` fields: these cannot be pickled, so
    they are saved as dicts and rebuilt."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    frozen = {k: dict(v) for k, v in fields.items() if isinstance(v, MappingProxyType)}
    return _record_of, (type(record), {**fields, **frozen}, tuple(frozen))


def _record_of(kind: type, fields: dict[str, Any], frozen: tuple[str, ...]) -> Any:
    return kind(**{**fields, **{k: MappingProxyType(fields[k]) for k in frozen}})
