"""The timeline: valid in the Trace Event Format, and its numbers those of the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from written_plans import MIB, written_plan

import jax_hremat
from jax_hremat import RematPlan, UnsupportedConfigError

# What events of each phase must have, by the Trace Event Format.
REQUIRED = {
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "X": {"name": str, "cat": str, "ts": float, "dur": float, "pid": int, "tid": int, "args": dict},
    "C": {"name": str, "ts": float, "pid": int, "args": dict},
}


def timed(plan: RematPlan) -> RematPlan:
    """With moments of 1, 2 and 3 ms forward, and as long again backward but for the recompute."""
    seconds = (1e-3, 2e-3, 3e-3, 3e-3, 4e-3, 1e-3)
    return dataclasses.replace(
        plan,
        moments=tuple(
            dataclasses.replace(m, duration_s=s) for m, s in zip(plan.moments, seconds, strict=True)
        ),
        baseline_moments=tuple(
            dataclasses.replace(m, duration_s=1e-3) for m in plan.baseline_moments
        ),
    )


def events_of(plan: RematPlan, path: Path) -> list[dict[str, Any]]:
    plan.to_perfetto(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    assert data["displayTimeUnit"] in ("ms", "ns")
    assert data["otherData"]["compiled peak (bytes)"] == plan.certificate.peak_bytes
    return data["traceEvents"]


def check(events: list[dict[str, Any]]) -> None:
    for event in events:
        required = REQUIRED[event["ph"]]
        assert {*required} <= {*event}, event
        for key, kind in required.items():
            assert isinstance(event[key], kind), event
        if event["ph"] == "C":
            assert all(isinstance(v, int) and v >= 0 for v in event["args"].values())
    assert {e["ph"] for e in events} == {*REQUIRED}
    for pid in (1, 2):
        ends: list[float] = []
        # Events of one track are inside each other or after each other.
        spans = [e for e in events if e["ph"] == "X" and e["pid"] == pid]
        for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= event["ts"] + 1e-6:
                ends.pop()
            assert event["dur"] >= 0
            assert not ends or event["ts"] + event["dur"] <= ends[-1] + 1e-6
            ends.append(event["ts"] + event["dur"])


def test_the_file_is_in_the_format_and_has_the_plan_s_numbers(tmp_path: Path) -> None:
    plan = timed(written_plan())
    events = events_of(plan, tmp_path / "trace.json")
    check(events)
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(named.values()) == [
        "with the plan (predicted)",
        "without rematerialization (predicted)",
    ]
    spans = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [(e["cat"], e["ts"], e["dur"]) for e in spans] == [
        ("forward", 0, 1000),
        ("forward", 1000, 2000),
        ("forward", 3000, 3000),
        ("backward", 6000, 3000),
        ("backward", 9000, 4000),
        ("recompute", 9000, 2000),
        ("backward", 13000, 1000),
    ]
    assert spans[4]["args"]["decision"] == "checkpointed, keeps 1 value"
    memory = [e for e in events if e["name"] == "memory"]
    of_plan = [e["args"]["bytes"] // MIB for e in memory if e["pid"] == 1]
    assert of_plan == [20, 30, 30, 40, 30, 20, 10]
    assert [e["args"]["bytes"] // MIB for e in memory if e["pid"] == 2][:3] == [20, 40, 70]


def test_the_parts_add_up_to_the_whole(tmp_path: Path) -> None:
    events = events_of(timed(written_plan()), tmp_path / "trace.json")
    found: dict[tuple[int, float], dict[str, int]] = {}
    for event in events:
        if event["ph"] == "C":
            at = found.setdefault((event["pid"], event["ts"]), {})
            at[event["name"]] = event["args"]["bytes"]
    whole = [counters for counters in found.values() if len(counters) > 2]
    assert len(whole) == 12
    for counters in whole:
        budget, memory = counters.pop("budget"), counters.pop("memory")
        assert budget == 50 * MIB
        assert sum(counters.values()) == memory


def test_a_plan_without_predictions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfigError, match="certify"):
        written_plan(moments=(), baseline_moments=()).to_perfetto(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_timeline_of_a_real_plan_is_longer_by_the_predicted_time(tmp_path: Path) -> None:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        for w_in, w_out in params:
            x = x + jax.nn.gelu(x @ w_in) @ w_out
        return jnp.mean(x**2)

    params = [(jnp.ones((16, 64)), jnp.ones((64, 16)))] * 4
    search = jax_hremat.SearchConfig(max_packings=1, max_saved_sets=1)
    config = jax_hremat.PlannerConfig(search=search, max_rounds=1, cost="analytic")
    plan = jax_hremat.plan_remat(loss, budget=0.5, target="cpu", config=config)(
        params, jax.ShapeDtypeStruct((1024, 16), jnp.float32)
    )
    events = events_of(plan, tmp_path / "trace.json")
    check(events)
    assert any(e.get("cat") == "recompute" for e in events)
    ends_us = {
        pid: max(e["ts"] + e["dur"] for e in events if e["ph"] == "X" and e["pid"] == pid)
        for pid in (1, 2)
    }
    # The prediction of the step is its time without the plan and what the blocks add to it.
    added_s = plan.predicted_step_s - plan.baseline_step_s
    assert 0 < added_s == pytest.approx(1e-6 * (ends_us[1] - ends_us[2]))
