"""The tables in short of `docs/measurements.md`, made of the frontiers.

    python -m benchmarks.in_short

writes them between the marks that stand in the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.frontier import HAND_POLICIES, least_peak_bytes, ratio_beside
from benchmarks.measured import mib

PAGE = "measurements.md"
DATA = "frontier-h200"
_SLOWDOWNS = (1.05, 1.10, 1.20)
# What the models are called. Those that are one loop are left out: plans make them faster.
_TITLES = {
    "gpt2-small": "GPT-2 small, batch 16 × 1024",
    "gpt2-6": "GPT-2, 6 layers",
    "vit": "ViT-B, 256 tokens",
    "encdec": "encoder–decoder 6 + 6",
    "moe": "mixture of experts, 12 layers",
    "unet": "U-Net at 256²",
    "resnet50": "ResNet-50 with batch norm",
    "densenet121": "DenseNet-121",
    "llama": "Llama, 32 layers, unrolled",
}


def least_peaks(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The lowest peak of each model within some slowdowns, and the lowest of all."""
    versions = _range(data["versions"]["jax"] for data in found.values())
    dates = _range(data["date"] for data in found.values())
    lines = [
        f"Measured with jax {versions}, {dates}.",
        "",
        "| model | no rematerialization | "
        + " | ".join(f"+{100 * (slow - 1):.0f} %" for slow in _SLOWDOWNS)
        + " | least |",
        "|---|" + "---|" * (len(_SLOWDOWNS) + 2),
    ]
    for name, title in _TITLES.items():
        data = found[name]
        whole, least = data["no_remat"], data["plans"][0]
        cells = [f"{mib(whole['peak_bytes'])} MiB"]
        for slowdown in _SLOWDOWNS:
            peak_bytes = least_peak_bytes(data, slowdown)
            part = peak_bytes / whole["peak_bytes"]
            cells.append(f"{mib(peak_bytes)} MiB ({100 * part:.0f} %)")
        added = least["step_s"] / whole["step_s"] - 1
        cells.append(f"{mib(least['peak_bytes'])} MiB ({100 * added:+.0f} %)")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def added_times(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The time that plans add at the peaks of hand-written policies, as a fraction of theirs."""
    lines = [
        "| model | every layer in `nn.remat` | "
        + " | ".join(f"`{name}`" for name in HAND_POLICIES[1:])
        + " |",
        "|---|" + "---|" * len(HAND_POLICIES),
    ]
    for name, title in _TITLES.items():
        data = found[name]
        cells = []
        beside = zip(data["hand"], data["beside"], strict=True)
        for hand, plan in islice(beside, len(HAND_POLICIES)):
            ratio, words = ratio_beside(data, hand, plan)
            cells.append(words if ratio is None else f"{ratio:.2f}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


TABLES = {"least peaks": least_peaks, "added times": added_times}


def written(text: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The text, with each table between its marks."""
    for name, table in TABLES.items():
        begins, ends = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        new = "\n".join((begins, *table(found), "", ends))
        text, count = re.subn(
            f"{re.escape(begins)}.*?{re.escape(ends)}", lambda _, new=new: new, text, flags=re.S
        )
        if count != 1:
            raise SystemExit(f"{PAGE} has {count} places for the table of {name}; it takes one")
    return text


def frontiers(out: Path) -> dict[str, Mapping[str, Any]]:
    """The frontiers by the names of their models."""
    return {data["model"]: data for data in command.read(out / DATA).values()}


def _range(some: Iterable[str]) -> str:
    first, *others = sorted(set(some))
    return f"{first} to {others[-1]}" if others else first


def main() -> None:
    """Write the tables."""
    path = command.DOCS / PAGE
    path.write_text(written(path.read_text(), frontiers(command.DOCS / "data")))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
