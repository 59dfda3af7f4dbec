"""The benchmarks: their pages say what their data say, and each runs from end to end."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import command, equality

# Name of the benchmark, of its page and of its folder of data; the target is at the end of both.
PAGES = {
    "batches": "batches-h200",
    "frontier": "frontier-h200",
    "mesh": "mesh-h200",
    "optimum": "optimum-h200",
    "partitioners": "partitioners-h200",
    "planning": "planning-h200",
    "recurrence": "recurrence-h200",
    "scale": "scale-h200",
    "times": "times-cpu",
    "training": "training-h200",
}
# What of a benchmark is made smaller where it is run only to see that it runs.
SMALLER: dict[str, dict[str, Any]] = {
    "batches": {"BUDGETS": ("1GB",), "SIZES": (8, 16), "MAX_TRIALS": 2},
    "frontier": {"NUM_BUDGETS": 3},
    "optimum": {"NUM_BOUNDS": 2},
    # A tiny step has little that a plan can change.
    "training": {"FRACTIONS": (0.95,)},
    "times": {"NUM_RUNS": 2},
}


def benchmark(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.{name}")


def data_of(name: str) -> list[Any]:
    found = list(command.read(command.DOCS / "data" / name).values())
    assert found
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_the_data_say(name: str) -> None:
    target = PAGES[name].rpartition("-")[2]
    text = (command.DOCS / f"{PAGES[name]}.md").read_text()
    assert text == benchmark(name).page(target, data_of(PAGES[name]))


def test_the_page_of_the_table_says_what_the_data_say() -> None:
    text = (command.DOCS / "measurements-h200.md").read_text()
    assert text == benchmark("table").page("h200", data_of("h200"))


def test_the_page_of_attention_says_what_the_data_say() -> None:
    text = (command.DOCS / "attention-h200.md").read_text()
    assert text == benchmark("attention").page("h200", data_of("attention-h200"))


def test_attention_is_priced_as_its_flops_say() -> None:
    for one in data_of("attention-h200"):
        if "cudnn" in one["description"]:
            for row in one["hand"]:
                by_flops = row["forwards"] * one["forward_s"] + one["layers"] * one["backward_s"]
                assert row["attention_s"] == pytest.approx(by_flops, rel=0.1)


def test_the_page_of_equality_says_what_the_data_say() -> None:
    (data,) = (d for f, d in command.read(command.DOCS / "data").items() if f.stem == "equality")
    assert (command.DOCS / "equality.md").read_text() == equality.page(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["table", *PAGES])
def test_a_benchmark_runs_and_makes_its_page(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = benchmark(name)
    for constant, smaller in SMALLER.get(name, {}).items():
        monkeypatch.setattr(module, constant, smaller)
    model = "lstm-last" if name == "recurrence" else "gpt2-6"
    where = ("--target", "cpu", "--out", str(tmp_path / "data"))
    module.main(["--models", model, "--size", "tiny", *where])
    module.main(["--page", *where])
    (page,) = tmp_path.glob("*.md")
    assert model in page.read_text()
