"""The benchmarks: their pages say what their data say, and each runs from end to end."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import command, device, equality, fused, hierarchy, in_short, strategies
from jax_hremat._xla.compile import memory_stats
from jax_hremat.schedules import Family, Graph

# Name of the benchmark, of its page and of its folder of data; the target is at the end of both.
PAGES = {
    "batches": "batches-h200",
    "compared": "compared-h200",
    "efforts": "efforts-h200",
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
    "efforts": {"BUDGET": 0.95},
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


def test_the_tables_in_short_say_what_the_data_say() -> None:
    text = (command.DOCS / in_short.PAGE).read_text()
    found = in_short.frontiers(command.DOCS / "data")
    assert text == in_short.written(text, found)
    changed = {name: {**data, "plans": data["plans"][1:]} for name, data in found.items()}
    assert text != in_short.written(text, changed)
    with pytest.raises(SystemExit, match="0 places for the table of least peaks"):
        in_short.written("", found)


def test_the_page_of_efforts_for_the_cpu_says_what_the_data_say() -> None:
    text = (command.DOCS / "efforts-cpu.md").read_text()
    assert text == benchmark("efforts").page("cpu", data_of("efforts-cpu"))


def test_the_page_of_the_table_says_what_the_data_say() -> None:
    text = (command.DOCS / "measurements-h200.md").read_text()
    assert text == benchmark("table").page("h200", data_of("h200"))


def test_the_page_of_attention_says_what_the_data_say() -> None:
    text = (command.DOCS / "attention-h200.md").read_text()
    assert text == benchmark("attention").page("h200", data_of("attention-h200"))


def test_the_page_of_strategies_says_what_the_data_say() -> None:
    data = json.loads((command.DOCS / "data" / "strategies" / "random.json").read_text())
    assert (command.DOCS / "strategies.md").read_text() == strategies.page(data)


@pytest.mark.slow
def test_strategies_from_end_to_end(tmp_path: Path) -> None:
    out = tmp_path / "data" / "strategies" / "random.json"
    strategies.main(["--graphs", "2", "--out", str(out), "--page"])
    (first, second) = json.loads(out.read_text())["graphs"]
    assert (first["kind"], second["kind"]) == ("chain", "ladder")
    # What is there is not measured again.
    strategies.main(["--graphs", "1", "--out", str(out)])
    assert json.loads(out.read_text())["graphs"] == [first, second]
    assert (
        "Checkmate finds a schedule for 2 of the 2 graphs"
        in (tmp_path / "strategies.md").read_text()
    )


def test_the_page_of_the_hierarchy_says_what_the_data_say() -> None:
    folder = command.DOCS / "data" / "hierarchy"
    data = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert (command.DOCS / "hierarchy.md").read_text() == hierarchy.page(data)


@pytest.mark.slow
def test_the_hierarchy_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "KINDS": ("chain", "skips"),
        "MEDIUM_SIZE": 8,
        "MEDIUM_SEEDS": (1,),
        "SCALE_SIZES": (8, 16),
    }.items():
        monkeypatch.setattr(hierarchy, name, value)
    # In this process.
    monkeypatch.setattr(
        hierarchy.Worker,
        "ask",
        lambda _, strategy, case, e: hierarchy.ask(strategy, case, e.shares),
    )
    optima = json.loads((command.DOCS / "data" / "strategies" / "random.json").read_text())
    (tmp_path / "optima.json").write_text(json.dumps({"graphs": optima["graphs"][:1]}))
    out = tmp_path / "data" / "hierarchy"
    where = ["--optima", str(tmp_path / "optima.json"), "--out", str(out)]
    hierarchy.main(["--measure", "--page", *where])
    text = (tmp_path / "hierarchy.md").read_text()
    assert "| hrockmate | " in text
    # What is there is not measured again.
    before = {path: path.read_text() for path in out.glob("*.json")}
    monkeypatch.setattr(hierarchy.Worker, "ask", None)
    hierarchy.main(["--measure", "--page", *where])
    assert before == {path: path.read_text() for path in out.glob("*.json")}
    assert text == (tmp_path / "hierarchy.md").read_text()


class Slow(Family):
    """Takes as many seconds as it is told."""

    name = summary = source = leaves_out = "slow"

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s

    def orders(self, graph: Graph) -> Iterator[Sequence[int]]:
        time.sleep(self.takes_s)
        yield range(len(graph))


@pytest.mark.slow
def test_an_answer_that_takes_too_long_is_given_up() -> None:
    case = hierarchy.Case("chain", 8, 1)
    worker = hierarchy.Worker()
    short = hierarchy.Experiment("short", {}, (1.0,), limit_s=2.0)
    given_up = worker.ask(Slow(1000), case, short)
    answer = worker.ask(Slow(0), case, short)
    worker.close()
    assert given_up == hierarchy.Answer([None], None)
    assert answer.times_s == [case.graph().time_s]


def test_a_strategy_stops_where_it_would_take_too_long() -> None:
    slow = hierarchy.Experiment("slow", {"slow": Slow(0)}, (1.0,), limit_s=10.0, grows=True)
    cases = [hierarchy.Case("chain", size, 1) for size in (8, 16, 32)]
    records = [
        {"case": asdict(case), "strategy": "slow", "times_s": [1.0], "took_s": s, "refused": None}
        for case, s in zip(cases, (1.0, 4.0), strict=False)
    ]
    assert not list(hierarchy.measured(slow, cases, records, hierarchy.Worker()))


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


@pytest.mark.slow
def test_fused_attention_is_measured_and_makes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = (None, "minimal", "attention")
    monkeypatch.setattr(fused, "POLICIES", policies)
    fused.main(["--size", "tiny", "--target", "cpu", "--out", str(tmp_path)])
    text = (tmp_path / "fused-cpu.md").read_text()
    assert all(f"| {label} |" in text for label in ("none", *policies[1:]))
    assert "The attention of one layer alone" in text


def test_a_page_of_times_on_a_gpu_has_its_memory_and_both_sorts_of_rates() -> None:
    found = [
        {**data, "pairs": [{**pair, **on_a_gpu(pair)} for pair in data["pairs"]]}
        for data in data_of("times-cpu")
    ]
    text = benchmark("times").page("h200", found)
    assert text.startswith("# Estimated and measured step times on h200")
    # Estimates that are right, half of them, and memory as compiled, a hundredth above that.
    assert "the absolute error of a slowdown: median 0.0%" in text
    assert "| 2.00 |" in text
    assert "arguments included, over the peak that the executable was compiled to: +1.00%" in text


def on_a_gpu(pair: Any) -> dict[str, Any]:
    peak_bytes = pair["peak_bytes"]
    return {
        "certified_bytes": peak_bytes,
        "measured_peak_bytes": 1.01 * peak_bytes,
        "published_s": pair["measured"]["median_s"] / 2,
    }


class Allocator:
    """Stands for a device whose allocator tells what is in use, and the most that ever was."""

    def __init__(self, in_use_bytes: int, peak_bytes: int) -> None:
        self.in_use_bytes, self.peak_bytes = in_use_bytes, peak_bytes

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self.in_use_bytes, "peak_bytes_in_use": self.peak_bytes}

    def take(self, count_bytes: int) -> None:
        self.in_use_bytes += count_bytes
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)

    def run(self, count_bytes: int) -> None:
        self.take(count_bytes)
        self.in_use_bytes -= count_bytes


@pytest.mark.parametrize("before_bytes", [0, 5_000, 10**9])
@pytest.mark.parametrize("share", [0.1, 0.95, 1.0, 3.0])
def test_a_peak_is_measured_whatever_ran_before(
    before_bytes: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    executable = jax.jit(lambda x: jnp.sin(x) + 1).lower(jnp.zeros(1000)).compile()
    compiled = memory_stats(executable)
    alive_bytes = compiled.argument_bytes + compiled.constant_bytes
    taken_bytes = int(share * (compiled.peak_bytes - alive_bytes))
    allocator = Allocator(alive_bytes, alive_bytes + before_bytes)
    # Another array is alive.
    allocator.take(700)

    class Running:
        memory_analysis = staticmethod(executable.memory_analysis)
        as_text = staticmethod(executable.as_text)

        def __call__(self, *_: Any) -> jax.Array:
            allocator.run(taken_bytes)
            return jnp.zeros(())

    monkeypatch.setattr(jax, "local_devices", lambda: [allocator])
    monkeypatch.setattr(device, "_bytes_on_device", allocator.take)
    step: Any = Running()
    assert device.measured_peak_bytes(step, ()) == alive_bytes + taken_bytes


def test_a_cpu_does_not_say_what_it_takes() -> None:
    x = jnp.zeros(10)
    assert device.measured_peak_bytes(jax.jit(jnp.sin).lower(x).compile(), (x,)) is None


def test_runs_are_timed_in_turn() -> None:
    order: list[str] = []

    def step(name: str) -> Any:
        return lambda x: order.append(name) or x

    x = jnp.zeros(())
    first, _ = device.timed_in_turn([step("a"), step("b")], (x,), num_runs=3, long_enough_s=0)
    assert order == ["a", "b"] * 5
    assert first.median_s > 0 and first.spread_s >= 0


def test_the_page_of_plans_run_on_a_gpu_says_what_the_data_say() -> None:
    text = (command.DOCS / "attached-h100.md").read_text()
    assert text == benchmark("attached").page("h100", data_of("attached-h100"))


@pytest.mark.slow
def test_plans_made_without_a_device_are_run_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attached = benchmark("attached")
    monkeypatch.setattr(attached, "DATA", tmp_path / "data")
    monkeypatch.setattr(attached, "FRACTIONS", (0.7,))
    monkeypatch.setattr(attached, "HAND_POLICIES", ("block",))
    options = ["--size", "tiny", "--target", "cpu", "--out", str(tmp_path / "data")]
    with pytest.raises(SystemExit, match="run with --plan first"):
        attached.main(["--models", "lstm", *options])
    attached.main(["--plan", "--models", "lstm", *options])
    attached.main(["--models", "lstm", "--page", *options])
    (data,) = command.read(tmp_path / "data" / "attached-cpu").values()
    first, *others = data["steps"]
    assert first["label"] == "no remat" and first["difference"] == 0
    assert "block" in {step["label"] for step in others} and len(others) > 1
    for step in data["steps"]:
        assert step["peak_bytes"] == step["certified_bytes"], step["label"]
        assert step["difference"] < 1e-5 and step["measured"]["median_s"] > 0
    text = (tmp_path / "attached-cpu.md").read_text()
    assert "over the certified peak: +0.00% to +0.00%" in text


def test_no_step_is_run_where_its_target_is_not_attached() -> None:
    with pytest.raises(SystemExit, match="no h200 is attached"):
        benchmark("attached").measure("lstm", "h200", "tiny")
