"""Steps compiled on the attached device, where XLA tries out kernels: a CPU stands for the GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._xla import certify, target
from jax_hremat._xla.compile import Compiled, compile_flat
from jax_hremat._xla.target import attached_device, get_target

QUICK = SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2)
ARGS = (
    [jax.ShapeDtypeStruct((8, 32), np.float32)] * 2,
    jax.ShapeDtypeStruct((256, 8), np.float32),
)
# More than a plan leaves unused of its budget.
WORKSPACE_BYTES = 4000


def mlp(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = x + jax.nn.gelu(x @ w) @ w.T
    return (x * x).mean()


class OnDevice:
    """Compiles on the CPU as if it were attached and gave programs a workspace."""

    def __init__(self, workspace_bytes: int = 0) -> None:
        self.workspace_bytes = workspace_bytes
        self.given: list[dict[str, Any]] = []

    def __call__(self, *args: Any, **options: Any) -> Compiled:
        self.given.append(options)
        found = compile_flat(*args, **options)
        more_bytes = found.memory.temp_bytes + self.workspace_bytes
        return replace(found, memory=replace(found.memory, temp_bytes=more_bytes))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> OnDevice:
    compiled = OnDevice()
    monkeypatch.setattr(certify, "attached_device", lambda _: jax.local_devices()[0])
    monkeypatch.setattr(certify, "compile_flat", compiled)
    return compiled


def planned(budget: float | int, cache: Path | None = None) -> jax_hremat.RematPlan:
    folder = "" if cache is None else str(cache)
    config = PlannerConfig(search=QUICK, cost="analytic", cache_dir=folder, max_rounds=1)
    return jax_hremat.plan_remat(mlp, budget=budget, target="cpu", config=config)(*ARGS)


def test_a_plan_says_that_it_was_compiled_on_the_attached_device(on_device: OnDevice) -> None:
    plan = planned(0.8)
    assert plan.certificate.attached
    assert "compiled for cpu, on the attached device" in str(plan)
    assert jax_hremat.RematPlan.from_json(plan.to_json()) == plan
    assert all(given["device"] is jax.local_devices()[0] for given in on_device.given)


def test_what_is_tried_out_on_the_device_counts_towards_the_budget(on_device: OnDevice) -> None:
    without = planned(0.8)
    budget_bytes = without.certificate.budget_bytes
    on_device.workspace_bytes = WORKSPACE_BYTES
    plan = planned(budget_bytes)
    assert plan.certificate.temp_bytes >= WORKSPACE_BYTES
    assert plan.certificate.peak_bytes <= budget_bytes
    assert plan.baseline_peak_bytes == without.baseline_peak_bytes + WORKSPACE_BYTES


def test_a_stored_plan_is_compiled_again_where_kernels_are_tried_out(
    on_device: OnDevice, tmp_path: Path
) -> None:
    budget_bytes = planned(0.8).certificate.budget_bytes
    plan = planned(budget_bytes, tmp_path)
    left_bytes = budget_bytes - plan.certificate.peak_bytes
    compiled = len(on_device.given)
    assert planned(budget_bytes, tmp_path) == plan
    assert len(on_device.given) == compiled + 1
    # Other kernels are the fastest now: the certificate is that of this compilation, …
    on_device.workspace_bytes = left_bytes
    again = planned(budget_bytes, tmp_path)
    assert again.root == plan.root
    assert again.certificate.peak_bytes == budget_bytes
    # … and if the plan does not fit with them, there is another.
    on_device.workspace_bytes = left_bytes + 1
    other = planned(budget_bytes, tmp_path)
    assert other.root != plan.root
    assert other.certificate.holds


def test_nothing_compiled_on_a_device_is_stored(tmp_path: Path) -> None:
    cache = certify.CompileCache(tmp_path)
    device = jax.local_devices()[0]
    avals = [jax.ShapeDtypeStruct((8,), np.float32)]
    compile_flat(jnp.tanh, avals, get_target("cpu"), cache=cache, device=device)
    assert not list(tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("name", "kind", "config", "is_it"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", "other", True),
        ("h100", "NVIDIA H200", "other", False),
        ("h100", "a GPU of the user's", "its own", True),
        ("cpu", "NVIDIA H100 80GB HBM3", "other", False),
    ],
)
def test_a_target_is_attached_if_the_first_device_is_its_own(
    name: str, kind: str, config: str, is_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = SimpleNamespace(platform="gpu", device_kind=kind)
    described = get_target(name)
    text = described.config_text if config == "its own" else config
    monkeypatch.setattr(target.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(target, "attached_gpu_target_config", lambda: text)
    assert attached_device(described) is (device if is_it else None)


def test_all_processes_of_a_job_make_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    h100 = get_target("h100")
    device = SimpleNamespace(platform="gpu", device_kind=h100.device_kinds[0])
    monkeypatch.setattr(target.jax, "local_devices", lambda: [device])
    assert attached_device(h100) is device
    monkeypatch.setattr(target.jax, "process_count", lambda: 2)
    assert attached_device(h100) is None


def test_no_gpu_is_attached_where_jax_runs_on_the_cpu() -> None:
    assert attached_device(get_target("h100")) is None
