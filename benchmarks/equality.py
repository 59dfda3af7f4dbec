"""Planned steps compared with the original ones: values, gradients, peak and flops, on the CPU.

Each model is planned for the CPU under a byte budget, with dropout on; the plan is applied, and
both steps are run on the same real inputs.

    python -m benchmarks.equality --models gpt2-small lstm --page

writes `docs/data/equality.json` and makes `docs/equality.md` of it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jax_hremat
from benchmarks import zoo
from benchmarks.measured import planner_of, traced
from jax_hremat._plan.region import Region
from jax_hremat._trace.graph import build_graph
from jax_hremat._trace.trace import Program
from jax_hremat._verify.replay import replay
from jax_hremat._xla.compile import compiler_versions, memory_stats
from jax_hremat._xla.hlo.parse import parse_hlo
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import rates

# One of each family.
MODELS = (
    "gpt2-small",
    "encdec",
    "unet",
    "resnet50",
    "llama",
    "llama-scan",
    "lstm",
    "densenet121",
    "vit",
    "moe",
)
DROPOUT = 0.1
# Larger than the zoo's own tiny batches: there, parameters and gradients are most of the peak,
# and no plan can do much about those.
BATCH = 8
# Few options of each block are compiled: the plan need not be good here, only right.
LIGHT = jax_hremat.PlannerConfig(
    search=jax_hremat.SearchConfig(max_packings=1, max_saved_sets=0, max_workers=1),
    max_rounds=2,
)
# Planning runs nothing, so LLVM need not optimise; XLA has assigned all memory before.
_QUICK = {"xla_backend_optimization_level": "0"}
_DOCS = Path(__file__).parent.parent / "docs"
# A leaf is measured by its own largest element, or by this share of the tree's where that is
# larger: the gradient of a key's bias is zero but for rounding, and has no scale of its own.
_LEAST_SCALE = 1e-2


@dataclass(frozen=True)
class Difference:
    """How far two pytrees of the same structure are apart.

    Attributes:
        absolute: Largest difference of two elements.
        relative: Largest over the leaves: the leaf's largest difference over its largest
            element, or over a hundredth of the tree's where that is larger.
        leaf: Path of the leaf that sets `relative`; empty if there is no difference.
    """

    absolute: float
    relative: float
    leaf: str = ""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one step, counted three ways.

    Attributes:
        compiler_flops: XLA's count for the executable, elementwise operations included.
        matrix_flops: Matrix products and convolutions in the executable's optimised HLO.
        replay_flops: The replay's count, before XLA touches the step.
    """

    compiler_flops: float
    matrix_flops: float
    replay_flops: float


@dataclass(frozen=True)
class Comparison:
    """One model, planned and run beside the original.

    Attributes:
        model: Its name in the zoo.
        size: Its size there.
        description: Its dimensions, in words.
        dtype: Type of its activations.
        asked_budget: The fraction of the no-remat peak that was asked for.
        budget_bytes: The budget planned for: the one asked for, or else the least feasible.
        feasible: Whether the budget asked for was.
        peak_bytes: Certified peak of the plan.
        executed_peak_bytes: Peak of the planned executable that was run.
        baseline_peak_bytes: Peak without rematerialization.
        num_checkpoints: `jax.checkpoint` regions in the plan.
        loss: Difference of the losses.
        auxiliary: Difference of the auxiliary outputs, if there are any.
        gradients: Difference of the gradients.
        original: Flops of the original step.
        planned: Flops of the planned step.
        recomputed_matrix_flops: Matrix flops that run again, by the replay.
        plan_s: Seconds of planning.
    """

    model: str
    size: str
    description: str
    dtype: str
    asked_budget: float
    budget_bytes: int
    feasible: bool
    peak_bytes: int
    executed_peak_bytes: int
    baseline_peak_bytes: int
    num_checkpoints: int
    loss: Difference
    auxiliary: Difference | None
    gradients: Difference
    original: Flops
    planned: Flops
    recomputed_matrix_flops: int
    plan_s: float


def compare(
    name: str, size: zoo.Size = "tiny", *, budget: float = 0.6, batch: int = BATCH
) -> Comparison:
    """Plan one model for the CPU, and run the planned step beside the original one."""
    problem = zoo.make(name, size, dropout=DROPOUT, batch=batch)
    args = problem.concrete(0)
    start_s = time.perf_counter()
    plan, feasible = _plan(problem, args, budget)
    plan_s = time.perf_counter() - start_s

    original = _compile(problem, problem.loss_fn, args)
    planned = _compile(problem, jax_hremat.apply_plan(problem.loss_fn, plan), args)
    expected, expected_grads = original(*args)
    out, grads = planned(*args)
    loss, auxiliary = difference(out, expected), None
    if problem.has_aux:
        loss = difference(out[0], expected[0])
        auxiliary = difference(out[1], expected[1])

    program = traced(problem)
    plain = Region(plan.root.start, plan.root.stop)
    return Comparison(
        model=name,
        size=size,
        description=problem.description,
        dtype=_activation_dtype(problem),
        asked_budget=budget,
        budget_bytes=plan.certificate.budget_bytes,
        feasible=feasible,
        peak_bytes=plan.certificate.peak_bytes,
        executed_peak_bytes=memory_stats(planned).peak_bytes,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        num_checkpoints=plan.root.num_checkpointed,
        loss=loss,
        auxiliary=auxiliary,
        gradients=difference(grads, expected_grads),
        original=_flops(original, program, plain),
        planned=_flops(planned, program, plan.root),
        recomputed_matrix_flops=recomputed_matrix_flops(program, plan.root),
        plan_s=plan_s,
    )


def difference(actual: Any, expected: Any) -> Difference:
    """How far `actual` is from `expected`, of the same structure, shapes and dtypes.

    Where either is not finite, infinitely.
    """
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    wanted = jax.tree.leaves(expected)
    least = _LEAST_SCALE * max(_largest(want) for want in wanted)
    absolute, relative, leaf = 0.0, 0.0, ""
    for (path, got), want in zip(jax.tree.leaves_with_path(actual), wanted, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        here = _largest(np.asarray(got, np.float64) - np.asarray(want, np.float64))
        if not np.isfinite(here):
            return Difference(np.inf, np.inf, jax.tree_util.keystr(path))
        absolute = max(absolute, here)
        scaled = here / max(_largest(want), least) if here else 0.0
        if scaled > relative:
            relative, leaf = scaled, jax.tree_util.keystr(path)
    return Difference(absolute, relative, leaf)


def _largest(array: Any) -> float:
    return float(np.abs(np.asarray(array, np.float64)).max(initial=0.0))


def counted_flops(compiled: jax.stages.Compiled) -> float:
    """XLA's own count for an executable."""
    analysis = compiled.cost_analysis()
    assert analysis is not None
    return float(analysis["flops"])


def matrix_flops(compiled: jax.stages.Compiled) -> float:
    """Flops of the matrix products and convolutions in an executable's optimised HLO."""
    module = parse_hlo(compiled.as_text() or "")
    return estimate_step(module, rates(jax_hremat.get_target("cpu"))).flops


def recomputed_matrix_flops(program: Program, root: Region) -> int:
    """Flops of the matrix products and convolutions that a plan runs again, by the replay."""
    operations = build_graph(program).operations
    return sum(
        times * op.flops
        for times, op in zip(replay(program, root).recomputed, operations, strict=True)
        if op.primitive in ("dot_general", "conv_general_dilated")
    )


def _plan(
    problem: zoo.Problem, args: Sequence[Any], budget: float
) -> tuple[jax_hremat.RematPlan, bool]:
    """The plan for a fraction of the no-remat peak, or for the least feasible budget."""
    cpu = jax_hremat.get_target("cpu")
    target = replace(cpu, compiler_options={**cpu.compiler_options, **_QUICK})

    def plan(amount: float | int) -> jax_hremat.RematPlan:
        return planner_of(problem, target, amount, LIGHT)(*args)

    try:
        return plan(budget), True
    except jax_hremat.InfeasibleBudgetError as error:
        return plan(error.min_budget_bytes), False


def _compile(
    problem: zoo.Problem, loss_fn: Callable[..., Any], args: Sequence[Any]
) -> jax.stages.Compiled:
    step = jax.value_and_grad(loss_fn, argnums=problem.argnums, has_aux=problem.has_aux)
    options = jax_hremat.compiler_options("cpu")
    return jax.jit(step, compiler_options=options).lower(*args).compile()


def _flops(compiled: jax.stages.Compiled, program: Program, root: Region) -> Flops:
    return Flops(
        counted_flops(compiled), matrix_flops(compiled), float(replay(program, root).flops)
    )


def _activation_dtype(problem: zoo.Problem) -> str:
    return "bfloat16" if "bfloat16" in problem.description else "float32"


def page(data: Mapping[str, Any]) -> str:
    """The Markdown page of one JSON file."""
    versions = ", ".join(f"{k} {v}" for k, v in data["versions"].items())
    found = data["models"]
    eps = ", ".join(f"{jax.numpy.finfo(t).eps:.1e} for {t}" for t in _dtypes(found))
    lines = [
        "# Planned steps compared with the original",
        "",
        "Made by `python -m benchmarks.equality --page` on "
        f"{data['date']}. Each model is planned with `plan_remat` for the CPU, the plan applied "
        "with `apply_plan`, and both steps are run on the same real inputs, dropout "
        f"{data['dropout']} on, compiled with `compiler_options={data['compiler_options']}`. "
        "While planning, where nothing is run, XLA generates unoptimised code; it assigns "
        "memory before that, and the peaks are compared below.",
        "",
        f"Versions: {versions}.",
        "",
        "## Values and gradients",
        "",
        "Largest differences. Relative ones are over the largest element of the same array, or "
        "over a hundredth of the largest of all gradients where that is larger. The spacing of "
        f"floats at 1 is {eps}.",
        "",
        "| model | loss, abs. | loss, rel. | statistics, rel. | gradients, abs. "
        "| gradients, rel. |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        statistics = f"{row['auxiliary']['relative']:.1e}" if row["auxiliary"] else ""
        lines.append(
            f"| {row['model']} | {row['loss']['absolute']:.1e} | {row['loss']['relative']:.1e} "
            f"| {statistics} | {row['gradients']['absolute']:.1e} "
            f"| {row['gradients']['relative']:.1e} |"
        )
    lines += [
        "",
        "## Certified peak",
        "",
        "Where no plan meets the fraction asked for, the budget is the least that "
        '`InfeasibleBudgetError` names. "Run" is the executable that made the values above, '
        "compiled from `apply_plan`'s function and not from the planner's.",
        "",
        "| model | no remat, bytes | budget, bytes | of no remat | certified, bytes | run, bytes "
        "| checkpoints |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found:
        asked = "" if row["feasible"] else f", {row['asked_budget']:.0%} is infeasible"
        share = row["budget_bytes"] / row["baseline_peak_bytes"]
        lines.append(
            f"| {row['model']} | {row['baseline_peak_bytes']} | {row['budget_bytes']} "
            f"| {share:.1%}{asked} | {row['peak_bytes']} | {row['executed_peak_bytes']} "
            f"| {row['num_checkpoints']} |"
        )
    lines += [
        "",
        "## Flops",
        "",
        "Planned over original, by `cost_analysis()` of the executables and by the replay of "
        "the differentiated program. Both count elementwise operations, XLA what is left after "
        "its simplifications and the replay one for each element, so their totals differ and "
        "their ratios agree roughly. The last columns are the flops that the plan adds in matrix "
        "products and convolutions alone, read off the optimised HLO and counted by the replay. "
        "They are equal unless XLA leaves out taps of a convolution that only meet padding, or the "
        "plan runs steps of a scan again, which the replay does not count.",
        "",
        "| model | original, compiler | planned, compiler | ratio | original, replay "
        "| planned, replay | ratio | matrix flops added, compiler | replay |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        before, after = row["original"], row["planned"]
        cells = [row["model"]]
        for key in ("compiler_flops", "replay_flops"):
            cells += [f"{before[key]:.0f}", f"{after[key]:.0f}", f"{after[key] / before[key]:.3f}"]
        added = after["matrix_flops"] - before["matrix_flops"]
        cells += [f"{added:.0f}", f"{row['recomputed_matrix_flops']}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Models", ""]
    lines += [f"- **{row['model']}** ({row['size']}): {row['description']}." for row in found]
    return "\n".join(lines) + "\n"


def _dtypes(found: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({row["dtype"] for row in found})


def _write(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    data = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": compiler_versions(),
        "compiler_options": jax_hremat.compiler_options("cpu"),
        "dropout": DROPOUT,
        "models": found,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare the models named, or make the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", default=[], choices=zoo.names())
    parser.add_argument("--size", default="tiny", choices=("full", "small", "tiny"))
    parser.add_argument("--budget", type=float, default=0.6, help="fraction of the no-remat peak")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--out", type=Path, default=_DOCS / "data" / "equality.json")
    parser.add_argument("--page", action="store_true", help="make the page from --out")
    options = parser.parse_args(argv)
    if options.models:
        found = []
        for name in options.models:
            result = compare(name, options.size, budget=options.budget, batch=options.batch)
            found.append(asdict(result))
            print(
                f"{name}: gradients within {result.gradients.relative:.1e}, peak "
                f"{result.peak_bytes} of {result.budget_bytes} bytes, {result.plan_s:.0f} s",
                flush=True,
            )
            _write(options.out, found)
        print(f"wrote {options.out}")
    if options.page:
        path = _DOCS / "equality.md"
        path.write_text(page(json.loads(options.out.read_text())))
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
