"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, or replace it, in one step that a reader or a kill sees all or nothing of.

    It is written in a folder of its own beside, so that it gets the permissions of any new file.
    """
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        whole = Path(folder) / path.name
        whole.write_bytes(data)
        os.replace(whole, path)
