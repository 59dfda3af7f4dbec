"""What files of graphs and schedules have in common, with errors that name the place."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_hremat._shared.errors import GraphFormatError


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise GraphFormatError(f"{path}: it is no text in UTF-8") from error


def read_file(
    text: str, where: str, kind: str, version: int, known: Sequence[str], needed: Sequence[str]
) -> Mapping[str, Any]:
    """The fields of a file of this kind and version."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise GraphFormatError(f"{where}: it is no JSON: {error}") from error
    head = ("format", "format_version")
    fields = read_object(data, where, (*head, *known), (*head, *needed))
    if fields["format"] != kind:
        raise GraphFormatError(f'{where}: its "format" is {fields["format"]!r}, not {kind!r}')
    if fields["format_version"] != version:
        raise GraphFormatError(
            f"{where}: it has the format version {fields['format_version']!r}; this version of "
            f"jax_hremat reads version {version}"
        )
    return fields


def read_object(
    value: Any, place: str, known: Sequence[str], needed: Sequence[str]
) -> Mapping[str, Any]:
    """A JSON object with these keys."""
    if not isinstance(value, dict):
        raise GraphFormatError(f"{place}: it is {_kind(value)}, not an object")
    unknown = [key for key in value if key not in known]
    if unknown:
        raise GraphFormatError(f"{place}: unknown key {unknown[0]!r}; known are {', '.join(known)}")
    for key in needed:
        if key not in value:
            raise GraphFormatError(f"{place}: the key {key!r} is missing")
    return value


def read_list(value: Any, place: str) -> list[Any]:
    """A JSON list."""
    if not isinstance(value, list):
        raise GraphFormatError(f"{place}: it is {_kind(value)}, not a list")
    return value


def read_bytes(value: Any, place: str) -> int:
    """A whole number of bytes."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise GraphFormatError(f"{place}: it is {value!r}, not a whole number of bytes")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
