"""Tracebacks of the user's own code, without the frames of the command around it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType


def users_traceback(error: BaseException, around: Sequence[ModuleType]) -> str | None:
    """The traceback, starting at the first frame of the user's code.

    Args:
        error: The exception, as it was caught.
        around: Packages whose frames precede the user's.

    Returns:
        The text; None if no frame is the user's, so that the fault is not the user's either.
    """
    folders = [Path(m.__file__).parent for m in around if m.__file__ is not None]
    tb = error.__traceback__
    while tb is not None and _is_within(tb, folders):
        tb = tb.tb_next
    if tb is None:
        return None
    return "".join(traceback.format_exception(type(error), error, tb, chain=False)).rstrip()


def _is_within(tb: TracebackType, folders: Sequence[Path]) -> bool:
    file = tb.tb_frame.f_code.co_filename
    return file.startswith("<frozen ") or any(Path(file).is_relative_to(f) for f in folders)
