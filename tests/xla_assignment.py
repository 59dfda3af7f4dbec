"""What XLA says of its buffers itself, in the files that it writes if it is asked to."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from jax_hremat._xla.target import Target

_ALLOCATION = re.compile(r"allocation \d+: size \d+(?P<kind>.*):")
# But for the tables of pointers of tuples.
_VALUE = re.compile(
    r" value: <\d+ (?P<name>.*) @\d+> \(size=(?P<size>\d+),offset=(?P<offset>\d+)\): (?!\()"
)
_RANGE = re.compile(r"\s*(?P<name>\S+?)(\{\})?:(?P<start>\d+)-(?P<end>\d+)")
_POSITIONS = re.compile(r"HloLiveRange \(max (\d+)\)")


class _Value(NamedTuple):
    start: int
    end: int
    nbytes: int


def written_to(target: Target, directory: Path) -> Target:
    """The target for a program about which XLA writes to a directory, which must exist."""
    asked = {"xla_dump_to": str(directory), "xla_dump_hlo_as_text": True}
    return dataclasses.replace(target, compiler_options={**target.compiler_options, **asked})


def live_temp_bytes(directory: Path) -> list[int]:
    """The bytes in the allocation of temporaries that are alive at each position of the schedule of
    the only program that XLA wrote about to a directory.

    Values in the same place whose lives meet are one buffer: one is written over the other.
    """
    text = _text(directory, "live-range")
    num_positions = int(_POSITIONS.findall(text)[0])
    change = [0] * (num_positions + 1)
    for value in _without_meetings(directory, text):
        change[value.start] += value.nbytes
        change[min(value.end + 1, num_positions)] -= value.nbytes
    return [*accumulate(change[:-1])]


def _without_meetings(directory: Path, ranges: str) -> Iterator[_Value]:
    """The values of the allocation, each of which ends before the next in its place begins."""
    lives = {
        m["name"]: (int(m["start"]), int(m["end"])) for m in map(_RANGE.match, _lines(ranges)) if m
    }
    at: defaultdict[int, list[_Value]] = defaultdict(list)
    inside = False
    for line in _text(directory, "buffer-assignment").splitlines():
        if allocation := _ALLOCATION.match(line):
            inside = "preallocated-temp" in allocation["kind"]
        elif inside and (value := _VALUE.match(line)):
            at[int(value["offset"])].append(
                _Value(*lives[value["name"].removesuffix("{}")], int(value["size"]))
            )
    for values in at.values():
        values.sort()
        for value, following in zip(values, [*values[1:], None], strict=True):
            yield (
                value
                if following is None
                else value._replace(end=min(value.end, following.start - 1))
            )


def _lines(ranges: str) -> list[str]:
    return ranges.partition("BufferLiveRange")[2].splitlines()


def _text(directory: Path, what: str) -> str:
    (path,) = directory.glob(f"*{what}.txt")
    return path.read_text()
