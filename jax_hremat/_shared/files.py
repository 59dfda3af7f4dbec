"""Atomic writing of files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write or replace a file atomically: a reader, or a kill, sees all of it or nothing.

    The data is first written in a temporary folder beside it, so that the file gets the permissions
    of any new file.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(data)
        os.replace(whole, path)
