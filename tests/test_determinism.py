"""A plan depends on the question alone: not on the process, its hash seed, the number of workers,
what was planned before, or how busy the machine is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PLAN = """
import dataclasses, sys
import jax
import jax_hremat
from benchmarks import zoo

name, budget, workers, *before = sys.argv[1:]

def plan(name, budget):
    problem = zoo.make(name, "tiny")
    config = jax_hremat.PlannerConfig()
    search = dataclasses.replace(config.search, max_workers=int(workers))
    make = jax_hremat.plan_remat(
        problem.loss_fn, budget=budget, target="cpu", has_aux=problem.has_aux,
        argnums=problem.argnums, config=dataclasses.replace(config, search=search),
    )
    return make(*problem.args)

for other in before:
    plan(other, 0.9)
sys.stdout.write(plan(name, float(budget)).to_json())
"""


def planned(name: str, budget: float, workers: int, seed: int, *before: str) -> str:
    """The file of a plan that another process makes, after plans of the models `before`."""
    done = subprocess.run(
        [sys.executable, "-c", PLAN, name, str(budget), str(workers), *before],
        env={
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def busy_machine(processes: int) -> Iterator[None]:
    """While inside, so many processes compute for nothing."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "budget", "before"),
    [
        ("gpt2-6", 0.75, "lstm"),
        ("llama-scan", 0.75, "gpt2-6"),
        ("moe", 0.9, "llama-scan"),
        ("resnet50", 0.9, "moe"),
    ],
)
def test_a_plan_depends_on_the_question_alone(name: str, budget: float, before: str) -> None:
    plan = planned(name, budget, 2, 0)
    assert '"checkpointed": true' in plan
    assert planned(name, budget, 1, 1) == plan, "one worker"
    assert planned(name, budget, 2, 2, before, name) == plan, "after other plans"
    with busy_machine(8):
        assert planned(name, budget, 2, 3) == plan, "on a busy machine"
