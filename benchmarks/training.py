"""Whole training steps within budgets: AdamW, donated state, gradients of four microbatches.

    python -m benchmarks.training --models gpt2-small --target h200

writes one JSON file a model below `docs/data/training-<target>/`; `--page` makes
`docs/training-<target>.md` from all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jax_hremat
from benchmarks import command, zoo
from benchmarks.measured import Row, Setting, mib, ms, row_of, setting_of

MICROBATCHES = 4
FRACTIONS = (0.9, 0.6, 0.4)
_OPTIMIZER = optax.adamw(1e-4)


@dataclass(frozen=True)
class Training(Setting):
    """One model's training step; the description is of a microbatch.

    Attributes:
        no_remat: The whole step as it is.
        plans: The whole step at fractions of its peak.
        seconds: Of each planning, in all; what was compiled before is not compiled again.
    """

    no_remat: Row
    plans: Sequence[Row]
    seconds: Sequence[float]


def make_step(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The step around a loss of parameters and a batch."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def add(total: Any, part: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        parts = jax.tree.map(lambda x: x.reshape(MICROBATCHES, -1, *x.shape[1:]), batch)
        grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        grads = jax.tree.map(lambda g: g / MICROBATCHES, grads)
        updates, opt_state = _OPTIMIZER.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), values.mean()

    return step


def step_args(problem: zoo.Problem, count: int) -> tuple[Any, Any]:
    """The step's state, and a batch of so many examples."""
    params, part = problem.args
    assert count % MICROBATCHES == 0, "the step splits its batch into microbatches"
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape[1:]), x.dtype), part)
    return (params, jax.eval_shape(_OPTIMIZER.init, params)), batch


def measure(name: str, target_name: str, size: zoo.Size = "full") -> Training:
    """Fit one model's training step at the fractions."""
    problem = zoo.make(name, size)
    part = jax.tree.leaves(problem.args[1])[0]
    state, batch = step_args(problem, MICROBATCHES * part.shape[0])
    rows, seconds = [], []
    plan = None
    for fraction in FRACTIONS:
        start_s = time.perf_counter()
        fit = jax_hremat.fit_step(make_step, problem.loss_fn, budget=fraction, target=target_name)
        plan = fit(state, batch).plan
        seconds.append(time.perf_counter() - start_s)
        rows.append(row_of(f"{fraction:g}", plan))
    assert plan is not None
    return Training(
        **setting_of(problem, target_name),
        no_remat=Row("no remat", plan.baseline_peak_bytes, plan.baseline_step_s),
        plans=rows,
        seconds=seconds,
    )


def page(target: str, found: Sequence[Mapping[str, Any]]) -> str:
    """The Markdown page made of all measurements of a target."""
    lines = [
        f"# Whole training steps for the target {target}",
        "",
        f"Made by `python -m benchmarks.training --models … --target {target}`, then `--page`, "
        "with `fit_step`: AdamW, the state donated, gradients accumulated over "
        f"{MICROBATCHES} microbatches in a `scan`. Peaks are those of the whole compiled step. "
        "Nothing was run.",
        "",
        command.where(found[0]),
        "",
        "| model | budget MiB | certified peak MiB | predicted (error) | est. step ms "
        "| predicted ms | over no remat |",
        "|---|---|---|---|---|---|---|",
    ]
    for data in found:
        name, base = data["model"], data["no_remat"]
        lines.append(
            f"| {name} | no remat | {mib(base['peak_bytes'])} | | {ms(base['step_s'])} | | |"
        )
        for row in data["plans"]:
            error = row["predicted_peak_bytes"] / row["peak_bytes"] - 1
            lines.append(
                f"| {name} | {mib(row['budget_bytes'])} | {mib(row['peak_bytes'])} "
                f"| {mib(row['predicted_peak_bytes'])} ({error:+.1%}) | {ms(row['step_s'])} "
                f"| {ms(row['predicted_step_s'])} | {row['step_s'] / base['step_s'] - 1:+.1%} |"
            )
    lines += [
        "",
        *(f"- {d['model']}: a microbatch is {d['description']}. {d['date']}." for d in found),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the models named, or make the page."""
    command.run(argv, __doc__, "training-{}", "training-{}.md", measure, page)


if __name__ == "__main__":
    main()
