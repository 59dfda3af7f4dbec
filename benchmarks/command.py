"""The command line that the benchmarks of models share: measure some, make the page of all."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import zoo

DOCS = Path(__file__).parent.parent / "docs"


def run(
    argv: Sequence[str] | None,
    about: str | None,
    folder: str,
    page_name: str,
    measure: Callable[[str, str, zoo.Size], Any | Iterator[Any]],
    page: Callable[[str, Sequence[Mapping[str, Any]]], str],
    draw: Callable[[str, Mapping[str, Any], Path], None] | None = None,
) -> None:
    """Measure the models named, one JSON file each, and make the page of all files if asked to.

    Args:
        argv: The command's arguments; None for those of the process.
        about: The benchmark's docstring, whose first line is the help's.
        folder: Where the files go, below the folder of data; `{}` stands for the target.
        page_name: The page's file, likewise, beside the folder of data.
        measure: From a model's name, a target's and a size to the dataclass that is written, or to
            an iterator of several, each of which replaces the one before, so that little is lost
            when a long run is stopped.
        page: From the target's name and all files' contents to the page's text.
        draw: From the target's name and one file's contents to a picture beside that file.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=[], choices=zoo.names())
    parser.add_argument("--target", default="h200", help="a name of jax_hremat.list_targets()")
    parser.add_argument("--size", default="full", choices=("full", "small", "tiny"))
    parser.add_argument("--out", type=Path, default=DOCS / "data", help="the folder of data")
    parser.add_argument("--page", action="store_true", help="make the page from all data")
    options = parser.parse_args(argv)
    for model in options.models:
        path = options.out / folder.format(options.target) / f"{model}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        measured = measure(model, options.target, options.size)
        for result in measured if isinstance(measured, Iterator) else [measured]:
            path.write_text(json.dumps(asdict(result), indent=1) + "\n")
            # Over the line of progress.
            print(f"\rwrote {path}".ljust(60))
    if options.page:
        found = read(options.out / folder.format(options.target))
        if not found:
            raise SystemExit(f"no measurements for {options.target}; run with --models first")
        for file, data in found.items():
            if draw is not None:
                draw(options.target, data, file.with_suffix(".svg"))
        path = options.out.parent / page_name.format(options.target)
        path.write_text(page(options.target, list(found.values())))
        print(f"wrote {path}")


def read(folder: Path) -> dict[Path, Any]:
    """The contents of a folder's measurements, by file, in the order of the pages."""
    return {file: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def where(setting: Mapping[str, Any]) -> str:
    """A page's line of versions and machine, from one of its measurements."""
    versions = ", ".join(f"{k} {v}" for k, v in setting["versions"].items())
    return f"Versions: {versions}. Machine: {setting['machine']}."


def models(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The list of a page's models, what they are and when they were measured."""
    return ["", *(f"- {d['model']}: {d['description']}. {d['date']}." for d in found)]
