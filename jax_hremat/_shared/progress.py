"""The type of the callbacks that report progress."""

from __future__ import annotations

from collections.abc import Callable

# Called as `progress(stage, done, total)`.
Progress = Callable[[str, int, int], None]
