"""Compiled programs kept on disk: read again, safe to share, mended when damaged."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_hremat
from jax_hremat import PlannerConfig, SearchConfig
from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._planner.plan_cache import _decode, best_of
from jax_hremat._shared.units import Budget, Slowdown
from jax_hremat._xla.cache import ENVIRONMENT_VARIABLE, CompileCache
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.target import get_target

CPU = get_target("cpu")
QUICK = SearchConfig(max_packings=1, max_saved_sets=1, max_workers=2)
AVALS = [jax.ShapeDtypeStruct((32, 32), np.float32)] * 2


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tanh(x @ y).sum()


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def forbid_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*_: Any) -> Any:
        raise AssertionError("XLA was asked")

    monkeypatch.setattr("jax_hremat._xla.compile._build", compiled)


def test_a_program_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = CompileCache(tmp_path)
    first = compile_flat(product, AVALS, CPU, cache=cache)
    assert len(files(tmp_path)) == 1
    forbid_xla(monkeypatch)
    again = compile_flat(product, AVALS, CPU, cache=cache)
    assert (again.memory, again.hlo_text) == (first.memory, first.hlo_text)


def test_another_program_target_version_or_flag_is_another_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path)
    options = {**CPU.compiler_options, "xla_cpu_enable_fast_math": True}
    other_target = dataclasses.replace(CPU, compiler_options=options)
    compile_flat(product, AVALS, CPU, cache=cache)
    compile_flat(lambda x, y: product(x, y) + 1, AVALS, CPU, cache=cache)
    compile_flat(product, AVALS, other_target, cache=cache)
    compile_flat(jax.named_scope("elsewhere")(product), AVALS, CPU, cache=cache)
    assert len(files(tmp_path)) == 4
    monkeypatch.setattr("jax_hremat._xla.compile.compiler_versions", lambda: {"jax": "99.0"})
    compile_flat(product, AVALS, CPU, cache=cache)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    compile_flat(product, AVALS, CPU, cache=cache)
    monkeypatch.setattr("jax_hremat._xla.cache.__version__", "99.0")
    compile_flat(product, AVALS, CPU, cache=cache)
    assert len(files(tmp_path)) == 7


@pytest.mark.parametrize("num_lines", [0, 10])
def test_scopes_are_part_of_an_entry_with_and_without_source_lines(
    tmp_path: Path, num_lines: int
) -> None:
    cache = CompileCache(tmp_path)
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", num_lines)
    try:
        for scope in ("somewhere", "elsewhere", "somewhere"):
            compile_flat(jax.named_scope(scope)(product), AVALS, CPU, cache=cache)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    assert len(files(tmp_path)) == 2


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(bytes(data))


def of_another_form(path: Path) -> None:
    path.write_bytes(gzip.compress(json.dumps({"memory": {"size": 1}}).encode()))


def no_object(path: Path) -> None:
    path.write_bytes(gzip.compress(b"[1, 2]"))


@pytest.mark.parametrize("damage", [cut_off, emptied, flipped, of_another_form, no_object])
def test_a_damaged_entry_is_reported_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    cache = CompileCache(tmp_path)
    first = compile_flat(product, AVALS, CPU, cache=cache)
    (path,) = files(tmp_path)
    whole = path.read_bytes()
    damage(path)
    with caplog.at_level(logging.WARNING, logger="jax_hremat"):
        again = compile_flat(product, AVALS, CPU, cache=cache)
    assert str(path) in caplog.text and "damaged" in caplog.text
    assert again.memory == first.memory
    assert files(tmp_path) == [path]
    assert path.read_bytes() == whole


def test_a_killed_writer_leaves_nothing_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = CompileCache(tmp_path)

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", killed)
        with pytest.raises(KeyboardInterrupt):
            cache.write("ab", 1)
    assert cache.read("ab", int) is None
    cache.write("ab", 1)
    assert cache.read("ab", int) == 1


def deep(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = jnp.tanh(jax.nn.gelu(x @ w) @ w.T)
    return (x * x).mean()


ARGS = (jnp.ones((16, 64)), jnp.ones((128, 16)))


def planner(
    folder: Path, budget: float, search: SearchConfig = QUICK, **how: Any
) -> Callable[..., jax_hremat.RematPlan]:
    config = PlannerConfig(search=search, cache_dir=folder, **how)
    return jax_hremat.plan_remat(deep, budget=budget, target="cpu", config=config)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jax_hremat.RematPlan]:
    """A cache folder, and the plan that filled it."""
    folder = tmp_path_factory.mktemp("filled")
    return folder, planner(folder, 0.8)(*ARGS)


@pytest.fixture
def first(filled: tuple[Path, jax_hremat.RematPlan], tmp_path: Path) -> jax_hremat.RematPlan:
    """The plan; what it filled the cache with is in `tmp_path`."""
    folder, plan = filled
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return plan


def test_planning_again_asks_xla_nothing(
    first: jax_hremat.RematPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert files(tmp_path)
    forbid_xla(monkeypatch)
    # Another question, and the same costs and steps.
    again = planner(tmp_path, 0.8, max_rounds=2)(*ARGS)
    assert dataclasses.replace(again, num_compiles=first.num_compiles) == first


def test_the_same_question_is_answered_at_once(
    first: jax_hremat.RematPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared(*_: Any) -> Any:
        raise AssertionError("it was planned again")

    monkeypatch.setattr("jax_hremat._planner.request.prepare", prepared)
    assert planner(tmp_path, 0.8)(*ARGS).to_json() == first.to_json()
    for other in (planner(tmp_path, 0.7), planner(tmp_path, 0.8, cost="analytic")):
        with pytest.raises(AssertionError, match="planned again"):
            other(*ARGS)
    with pytest.raises(AssertionError, match="planned again"):
        planner(tmp_path, 0.8)(ARGS[0], jnp.ones((64, 16)))


def test_an_answer_that_compiles_to_something_else_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = dict(cost="analytic", max_rounds=0)
    first = planner(tmp_path, 0.8, **how)(*ARGS)
    monkeypatch.setattr(
        "jax_hremat._planner.plan_cache._decode",
        lambda value: {
            asked: dataclasses.replace(
                plan, certificate=dataclasses.replace(plan.certificate, peak_bytes=1)
            )
            for asked, plan in _decode(value).items()
        },
    )
    assert planner(tmp_path, 0.8, **how)(*ARGS).certificate == first.certificate


def test_the_same_question_is_known_by_where_it_cuts_and_not_by_the_number_of_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cutting(at: int) -> Callable[[Any], list[int]]:
        return lambda graph: [at]

    def planned(at: int, workers: int = 2) -> jax_hremat.RematPlan:
        search = dataclasses.replace(QUICK, max_workers=workers)
        how = dict(partitioner=cutting(at), cost="analytic", max_rounds=0)
        return planner(tmp_path, 1.0, search, **how)(*ARGS)

    first = planned(4)
    forbid_xla(monkeypatch)
    monkeypatch.setattr("jax_hremat._planner.request.prepare", None)
    assert planned(4).to_json() == planned(4, workers=1).to_json() == first.to_json()
    with pytest.raises(TypeError):
        planned(6)


def test_a_step_is_known_by_what_is_around_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fitted(rate: float) -> jax_hremat.RematPlan:
        config = PlannerConfig(search=QUICK, cache_dir=tmp_path, max_rounds=0, cost="analytic")

        def make_step(loss: Any) -> Any:
            return lambda w, x: w - rate * jax.grad(loss)(w, x)

        fit = jax_hremat.fit_step(make_step, deep, budget=1.0, target="cpu", config=config)
        return fit(*ARGS).plan

    first = fitted(0.1)
    forbid_xla(monkeypatch)
    assert fitted(0.1).to_json() == first.to_json()
    with pytest.raises(AssertionError, match="XLA was asked"):
        fitted(0.2)


@pytest.mark.slow
def test_a_larger_budget_is_never_slower_in_another_call(tmp_path: Path) -> None:
    # Hardly any effort, so that a plan by itself may well be a poor one.
    how = dict(cost="analytic", max_rounds=0)
    plans = [planner(tmp_path, budget, **how)(*ARGS) for budget in (0.7, 0.8, 0.9, 1.0)]
    assert all(plan.certificate.holds for plan in plans)
    times_s = [plan.estimated_step_s for plan in plans]
    assert times_s == sorted(times_s, reverse=True)


@pytest.mark.slow
def test_a_better_plan_known_takes_the_place_of_one_found(tmp_path: Path) -> None:
    plan = planner(tmp_path, 0.8, cost="analytic")(*ARGS)
    peak = plan.certificate.peak_bytes

    def other(peak_bytes: int, step_s: float) -> jax_hremat.RematPlan:
        certificate = dataclasses.replace(plan.certificate, peak_bytes=peak_bytes)
        return dataclasses.replace(plan, certificate=certificate, estimated_step_s=step_s)

    step_s = plan.estimated_step_s
    smaller, faster, too_large = (
        other(peak // 2, 2 * step_s),
        other(peak - 1, step_s / 2),
        other(10 * peak, step_s / 4),
    )
    known = [smaller, faster, too_large]
    best = best_of(plan, known, Budget(bytes=plan.certificate.budget_bytes))
    assert (best.estimated_step_s, best.certificate.peak_bytes) == (step_s / 2, peak - 1)
    assert best.certificate.budget_bytes == plan.certificate.budget_bytes
    slow = Slowdown(2 * step_s / plan.baseline_step_s)
    # What belongs to the budgets that they were made for is left out.
    free = FreeSchedule(peak, step_s, "program")
    known = [dataclasses.replace(p, bound_step_s=step_s, free_schedule=free) for p in known]
    best = best_of(plan, known, slow)
    assert best.bound_step_s is None and best.free_schedule is None
    assert best.certificate.peak_bytes == best.certificate.budget_bytes == peak // 2
    assert best_of(plan, [], slow) == dataclasses.replace(
        plan,
        bound_step_s=None,
        certificate=dataclasses.replace(plan.certificate, budget_bytes=peak),
    )


WRITER = """
import jax, jax.numpy as jnp, sys
from jax_hremat._xla.cache import CompileCache
for i in range(200):
    CompileCache.at(None).write(f"{i % 5:02}", "x" * 100000)
"""


@pytest.mark.slow
def test_two_processes_may_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    writers = [subprocess.Popen([sys.executable, "-c", WRITER]) for _ in range(2)]
    cache = CompileCache.at(None)
    assert cache is not None and cache.folder == tmp_path
    while any(w.poll() is None for w in writers):
        assert cache.read("03", str) in (None, "x" * 100000)
    assert [w.returncode for w in writers] == [0, 0]
    assert [p.name for p in files(tmp_path)] == [f"{i:02}.json.gz" for i in range(5)]


def test_an_empty_name_is_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "")
    assert CompileCache.at(None) is None
    assert CompileCache.at(tmp_path) == CompileCache(tmp_path)
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, str(tmp_path))
    assert CompileCache.at("") is None


@pytest.fixture
def users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, in which there is nothing."""
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(
        "jax_hremat._xla.cache.platformdirs.user_cache_path", lambda name: tmp_path / "cache" / name
    )
    return tmp_path / "cache"


def test_the_default_is_a_folder_of_the_users(users_folder: Path) -> None:
    assert CompileCache.at(None) == CompileCache(users_folder / "jax_hremat")
    plan = jax_hremat.plan_remat(
        deep,
        budget=0.9,
        target="cpu",
        config=PlannerConfig(search=QUICK, cost="analytic", max_rounds=0),
    )
    plan(*ARGS)
    assert files(users_folder)


def test_without_a_folder_that_can_be_written_there_is_a_warning_and_no_cache(
    users_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    users_folder.write_text("a file, and no folder")
    for folder in (None, users_folder / "mine"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="jax_hremat"):
            assert CompileCache.at(folder) is None
        assert str(users_folder) in caplog.text and ENVIRONMENT_VARIABLE in caplog.text


def test_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    CompileCache(tmp_path).write("ab", 1)
    monkeypatch.setattr("jax_hremat._xla.cache.os.access", lambda path, mode: False)
    with caplog.at_level(logging.WARNING, logger="jax_hremat"):
        cache = CompileCache.at(tmp_path)
    assert cache is not None and "cannot be written" in caplog.text
    cache.write("cd", 2)
    cache.trim(most_bytes=0)
    assert cache.read("ab", int) == 1
    assert len(files(tmp_path)) == 1


def test_what_was_not_used_for_longest_is_removed(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path)
    keys = [f"{i:02}" for i in range(10)]
    for age, key in enumerate(keys):
        cache.write(key, key * 1000)
        (path,) = tmp_path.glob(f"{key}/*")
        os.utime(path, (1000 + age, 1000 + age))
    assert cache.read("00", str) == "00" * 1000  # Used now, so it is the newest.
    size_bytes = sum(path.stat().st_size for path in files(tmp_path))
    cache.trim(size_bytes)
    assert len(files(tmp_path)) == 10
    cache.trim(size_bytes // 2)
    left = [path.name.partition(".")[0] for path in files(tmp_path)]
    assert left == ["00", "07", "08", "09"]
    assert sum(path.stat().st_size for path in files(tmp_path)) <= size_bytes // 2


def test_planning_trims_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[Path] = []
    monkeypatch.setattr(CompileCache, "trim", lambda cache: trimmed.append(cache.folder))
    planner(tmp_path, 0.8, cost="analytic", max_rounds=0)(*ARGS)
    assert trimmed == [tmp_path]
