"""The compiler's results for a program, kept on disk to be read instead of compiling again."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jax_hremat._shared.files import write_whole
from jax_hremat._shared.version import __version__

ENVIRONMENT_VARIABLE = "JAX_HREMAT_CACHE_DIR"
_SUFFIX = ".json.gz"

T = TypeVar("T")

_logger = logging.getLogger("jax_hremat")


@dataclass(frozen=True, slots=True)
class CompileCache:
    """A folder of compiler results, one file for each program, named by a hash of everything that
    the result depends on.

    Several processes may share the folder: a file appears whole or not at all, and two writers of
    one program write the same. A file that cannot be read, for instance because a copy was
    truncated, is reported, removed and made again.

    Attributes:
        folder: The folder; made on first use.
    """

    folder: Path

    @staticmethod
    def at(folder: str | os.PathLike[str] | None) -> CompileCache | None:
        """The cache in a folder, or in the folder that `JAX_HREMAT_CACHE_DIR` names if `folder` is
        None; None if the variable is unset too."""
        chosen = folder or os.environ.get(ENVIRONMENT_VARIABLE)
        return CompileCache(Path(chosen).expanduser()) if chosen else None

    def read(self, key: str, decode: Callable[[Any], T]) -> T | None:
        """The stored result for a program, or None. `decode` makes it from the JSON value; an error
        in `decode` means that the file is damaged."""
        path = self._path(key)
        try:
            return decode(json.loads(gzip.decompress(path.read_bytes())))
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            _logger.warning(
                "%s is damaged (%s: %s); it is removed and compiled again",
                path,
                type(error).__name__,
                error,
            )
            path.unlink(missing_ok=True)
            return None

    def write(self, key: str, value: Any) -> None:
        """Store a compiler result, as a JSON value."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value).encode()
        write_whole(path, gzip.compress(text, compresslevel=3, mtime=0))

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"


def key_of(parts: Iterable[str]) -> str:
    """One hash of several texts and of the library's version, which decides what is stored."""
    return hashlib.sha256("\0".join((__version__, *parts)).encode()).hexdigest()
