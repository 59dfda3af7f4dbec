"""Packs buffers at fixed offsets into one allocation."""

from __future__ import annotations

_ALIGNMENT_BYTES = 128


def packed_bytes(spans: list[tuple[int, int, int]]) -> int:
    """Bytes of one allocation for spans (start, end, nbytes), placed in the given order, each in
    the tightest gap that it fits into."""
    placed: list[tuple[int, int, int, int]] = []
    total_bytes = 0
    for start, end, nbytes in spans:
        aligned_bytes = -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        taken = sorted((at, to) for at, to, s, e in placed if s <= end and start <= e)
        best: tuple[int, int] | None = None
        free_from = 0
        for at, to in taken:
            gap = at - free_from
            if gap >= aligned_bytes and (best is None or gap < best[0]):
                best = (gap, free_from)
            free_from = max(free_from, to)
        place = free_from if best is None else best[1]
        placed.append((place, place + aligned_bytes, start, end))
        total_bytes = max(total_bytes, place + aligned_bytes)
    return total_bytes
