"""The compiler's results for a program, kept on disk to be read instead of compiling again."""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import platformdirs

from jax_hremat._shared.files import write_whole
from jax_hremat._shared.version import __version__

ENVIRONMENT_VARIABLE = "JAX_HREMAT_CACHE_DIR"
_SUFFIX = ".json.gz"
# The most bytes that a folder may hold, and the part of them that is left when it holds more.
_MOST_BYTES = 2**30
_LEFT = 0.8

T = TypeVar("T")

_logger = logging.getLogger("jax_hremat")


@dataclass(frozen=True, slots=True)
class CompileCache:
    """A folder of compiler results, one file for each program, named by a hash of everything that
    the result depends on.

    Several processes may share the folder: a file appears whole or not at all, and two writers of
    one program write the same. A file that cannot be read, for instance because a copy was
    truncated, is reported, removed and made again. `trim` bounds the folder's size.

    Attributes:
        folder: The folder; made on first use.
        is_read_only: Whether nothing is stored.
    """

    folder: Path
    is_read_only: bool = False

    @staticmethod
    def at(folder: str | os.PathLike[str] | None) -> CompileCache | None:
        """The cache in a folder; if `folder` is None, in the one that the environment variable
        `JAX_HREMAT_CACHE_DIR` names, or else in the user's cache folder. An empty name, in either,
        is no cache.

        If the folder cannot be written, a warning is logged, and what is in it is only read; if
        there is none and none can be made, there is no cache.
        """
        named = os.environ.get(ENVIRONMENT_VARIABLE) if folder is None else folder
        if named is not None and not os.fspath(named):
            return None
        path = platformdirs.user_cache_path("jax_hremat") if named is None else Path(named)
        path = path.expanduser()
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and os.access(path, os.W_OK):
            return CompileCache(path)
        _logger.warning(
            "%s cannot be written: what is compiled now is compiled again next time. Set %s "
            "to another folder, or to nothing for no cache",
            path,
            ENVIRONMENT_VARIABLE,
        )
        return CompileCache(path, is_read_only=True) if path.is_dir() else None

    def read(self, key: str, decode: Callable[[Any], T]) -> T | None:
        """The stored result for a program, or None. `decode` makes it from the JSON value; an error
        in `decode` means that the file is damaged."""
        path = self._path(key)
        try:
            value = decode(json.loads(gzip.decompress(path.read_bytes())))
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
            _logger.warning(
                "%s is damaged (%s: %s); it is removed and compiled again",
                path,
                type(error).__name__,
                error,
            )
            if not self.is_read_only:
                path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # The folder may be another user's, to read only.
            os.utime(path)
        return value

    def write(self, key: str, value: Any) -> None:
        """Store a compiler result, as a JSON value."""
        if self.is_read_only:
            return
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(value).encode()
        write_whole(path, gzip.compress(text, compresslevel=3, mtime=0))

    def trim(self, most_bytes: int = _MOST_BYTES) -> None:
        """If all files together exceed `most_bytes`, remove those unused for longest."""
        if self.is_read_only:
            return
        found = []
        for path in self.folder.glob(f"??/*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # Another process may trim at the same time.
                found.append((path.stat(), path))
        size_bytes = sum(stat.st_size for stat, _ in found)
        if size_bytes <= most_bytes:
            return
        for stat, path in sorted(found, key=lambda file: (file[0].st_mtime_ns, file[1])):
            if size_bytes <= _LEFT * most_bytes:
                break
            path.unlink(missing_ok=True)
            size_bytes -= stat.st_size

    def _path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}{_SUFFIX}"


def key_of(parts: Iterable[str]) -> str:
    """One hash of several texts and of the library's version, which decides what is stored."""
    return hashlib.sha256("\0".join((__version__, *parts)).encode()).hexdigest()
