"""Draws the picture of the front page: `python docs/picture.py`.

GPT-2 small for the H200: the plans between the least peak and no rematerialization, and what
`nn.remat` on every layer takes, from the data of docs/frontier-h200.md.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

DATA = Path(__file__).parent / "data" / "frontier-h200" / "gpt2-small.json"
PICTURE = Path(__file__).parent / "_static" / "frontier.svg"

# How the policies are written by hand, and where their words stand, in points from the mark.
BY_HAND = {
    "block": ("nn.remat on every layer", (10, 6)),
    "dots_with_no_batch_dims_saveable": (
        "nn.remat, policy=\ndots_with_no_batch_dims_saveable",
        (10, 3),
    ),
    "dots_saveable": ("nn.remat, policy=dots_saveable", (10, 6)),
}
BLUE, RED, GREY = "#0b62d6", "#b3261e", "#4a5058"


def draw(data: dict[str, Any], path: Path) -> None:
    """Added time over peak memory."""
    base = data["no_remat"]

    def points(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
        added = [100 * (row["step_s"] / base["step_s"] - 1) for row in rows]
        return [row["peak_bytes"] / 2**30 for row in rows], added

    figure = Figure(figsize=(7.4, 4.1), layout="constrained", facecolor="white")
    ax = figure.subplots()
    gib, added = points([*data["plans"], base])
    ax.step(gib, added, where="post", color=BLUE, alpha=0.45)
    ax.plot(*points(data["plans"]), "o", color=BLUE, markersize=5, label="plans of jax_hremat")
    label = "the same layers under nn.remat, by hand"
    for row in data["hand"]:
        if row["label"] in BY_HAND:
            (x,), (y,) = points([row])
            words, shift = BY_HAND[row["label"]]
            ax.plot(x, y, "D", color=RED, markersize=6, label=label)
            ax.annotate(words, (x, y), shift, textcoords="offset points", color=RED, fontsize=9)
            label = "_"
    (x,), (y,) = points([base])
    ax.plot(x, y, "s", color=GREY, markersize=7, label="no rematerialization")
    ax.set_title("GPT-2 small, batch 16 × 1024, compiled for one H200", fontsize=11)
    ax.set_xlabel("peak memory of the compiled step (GiB)")
    ax.set_ylabel("added time per step, estimated (%)")
    ax.set_xlim(0, 22)
    ax.set_ylim(-1.5, 27)
    ax.grid(alpha=0.25)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right", fontsize=9)
    # Without a date and with fixed names inside, equal data make an equal file.
    with rc_context({"svg.hashsalt": "jax_hremat"}):
        figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    draw(json.loads(DATA.read_text()), PICTURE)
