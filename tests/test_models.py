"""The benchmark models with regions in them: same loss, batch statistics and gradients.

The trees are not planned, they are chosen so that every feature of a plan is in them; the slow
test plans one. Dropout is on and the inputs are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from tracing import emit, loss_call

import jax_hremat
from benchmarks import equality, zoo
from jax_hremat._partition.blocks import (
    Block,
    Partition,
    has_deferrable_input,
    make_block,
    partition_graph,
)
from jax_hremat._partition.cut_points import partition_by_width
from jax_hremat._plan.region import Region
from jax_hremat._trace.call import TracedCall
from jax_hremat._trace.graph import Graph, Operation, build_graph

# The first keeps XLA:CPU from merging a recompute with the first forward; the second is for
# the time the tests take.
COMPILER_OPTIONS = {**jax_hremat.compiler_options("cpu"), "xla_backend_optimization_level": 0}
# Relative to the largest element of each leaf, as `equality.difference` says. A plan moves no
# rounding but XLA's, which fuses in another way.
TOLERANCES = {"float32": 2e-5, "bfloat16": 4 * float(jnp.finfo(jnp.bfloat16).eps)}
# Those that every tree is run on; the others get the one with most in it.
THOROUGHLY = ("gpt2-small", "encdec", "unet", "resnet50")
# All else in the slow tests.
QUICKLY = ("gpt2-small",)
# At the zoo's tiny size a 3 x 3 kernel meets an image of 2 x 2, and XLA leaves out the taps that
# only meet padding.
CONFIGS = {"resnet50": {"image": 32}}


class Ran(NamedTuple):
    """What a compiled step returned, and its flops in matrix products and convolutions."""

    out: Any
    grads: Any
    matrix_flops: float


class Model(NamedTuple):
    """A tiny model, traced and cut into blocks, and its inputs."""

    problem: zoo.Problem
    call: TracedCall
    graph: Graph
    partition: Partition
    args: tuple[Any, ...]

    def run(self, root: Region) -> Ran:
        """The step with the regions of `root`, compiled and run on the same inputs."""
        return run(self.problem, emit(self.call, root), self.args)


def run(problem: zoo.Problem, loss_fn: Any, args: tuple[Any, ...]) -> Ran:
    step = jax.value_and_grad(loss_fn, argnums=problem.argnums, has_aux=problem.has_aux)
    compiled = jax.jit(step, compiler_options=COMPILER_OPTIONS).lower(*args).compile()
    return Ran(*compiled(*args), matrix_flops=equality.matrix_flops(compiled))


@cache
def model(name: str, dtype: str) -> Model:
    problem = zoo.make(name, "tiny", dropout=0.1, dtype=dtype, **CONFIGS.get(name, {}))
    call = loss_call(
        problem.loss_fn, problem.args, argnums=problem.argnums, has_aux=problem.has_aux
    )
    graph = build_graph(call.program)
    partition = partition_graph(graph, partition_by_width)
    return Model(problem, call, graph, partition, problem.concrete(0))


@cache
def original(name: str, dtype: str) -> Ran:
    one = model(name, dtype)
    return run(one.problem, one.problem.loss_fn, one.args)


@cache
def ran(name: str, dtype: str, tree: str) -> Ran:
    one = model(name, dtype)
    return one.run(TREES[tree](one.graph, one.partition))


def is_product(op: Operation) -> bool:
    return op.primitive in ("dot_general", "conv_general_dilated")


def wrap(graph: Graph, block: Block, start: int, stop: int, **options: Any) -> Region:
    """A checkpointed region inside a block, tied where the planner ties it."""
    barrier = has_deferrable_input(graph, block, start, stop)
    return Region(start, stop, checkpointed=True, barrier=barrier, **options)


def whole(graph: Graph, children: list[Region]) -> Region:
    return Region(0, len(graph.operations), children=tuple(children))


def every_block(graph: Graph, partition: Partition) -> Region:
    return whole(graph, [wrap(graph, b, b.start, b.stop) for b in partition.blocks])


def products_saved(graph: Graph, partition: Partition) -> Region:
    """Every block checkpointed; all matrix products and convolutions kept by name."""
    regions = []
    for block in partition.blocks:
        inside = graph.operations[block.start : block.stop]
        saved = tuple((op.id, 0) for op in inside if is_product(op))
        regions.append(wrap(graph, block, block.start, block.stop, saved=saved))
    return whole(graph, regions)


def runs_of(graph: Graph, block: Block) -> list[Region]:
    """Every other stretch between two products of a block, checkpointed."""
    products = [op.id for op in graph.operations[block.start : block.stop] if is_product(op)]
    edges = sorted({block.start, *products, block.stop})
    return [wrap(graph, block, a, b) for a, b in list(pairwise(edges))[::2]]


def pairs_with_runs(graph: Graph, partition: Partition) -> Region:
    """Blocks checkpointed two and two, with checkpointed runs inside."""
    regions = []
    for first in range(0, len(partition.blocks), 2):
        blocks = partition.blocks[first : first + 2]
        group = make_block(graph, blocks[0].start, blocks[-1].stop)
        runs = tuple(r for block in blocks for r in runs_of(graph, block))
        regions.append(wrap(graph, group, group.start, group.stop, children=runs))
    return whole(graph, regions)


TREES = {
    "every_block": every_block,
    "products_saved": products_saved,
    "pairs_with_runs": pairs_with_runs,
}


def in_tree(name: str, *more: str) -> Any:
    """A model and a tree, slow but for few."""
    quick = name in QUICKLY and more[-1] == "pairs_with_runs"
    return pytest.param(name, *more, marks=[] if quick else [pytest.mark.slow])


def thorough(*more: str) -> Iterator[Any]:
    """Each model that every tree is run on, and the tree."""
    return (in_tree(name, *more, tree) for name in THOROUGHLY for tree in TREES)


@pytest.mark.parametrize(
    ("name", "dtype", "tree"),
    [
        *thorough("float32"),
        *(
            in_tree(name, "float32", "pairs_with_runs")
            for name in equality.MODELS
            if name not in THOROUGHLY
        ),
        pytest.param("gpt2-small", "bfloat16", "products_saved", marks=pytest.mark.slow),
        pytest.param("gpt2-small", "bfloat16", "pairs_with_runs", marks=pytest.mark.slow),
    ],
)
def test_step_is_unchanged(name, dtype, tree):
    one, before, step = model(name, dtype), original(name, dtype), ran(name, dtype, tree)
    assert "dropout_key" in one.args[1]
    for actual, expected in ((step.out, before.out), (step.grads, before.grads)):
        found = equality.difference(actual, expected)
        assert found.relative <= TOLERANCES[dtype], found


@pytest.mark.parametrize(("name", "tree"), [*thorough()])
def test_compiled_step_recomputes_what_the_replay_says(name, tree):
    """Equal values show nothing if XLA has merged the recompute with the first forward."""
    one = model(name, "float32")
    added = ran(name, "float32", tree).matrix_flops - original(name, "float32").matrix_flops
    root = TREES[tree](one.graph, one.partition)
    assert added == equality.recomputed_matrix_flops(one.call.program, root)
    assert (added > 0) == (tree != "products_saved")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICKLY else [pytest.mark.slow]) for n in THOROUGHLY]
)
def test_trees_have_everything_a_plan_may_have(name):
    one = model(name, "float32")
    trees = {kind: make(one.graph, one.partition) for kind, make in TREES.items()}
    assert trees["every_block"].num_checkpointed == len(one.partition.blocks) > 1
    assert trees["pairs_with_runs"].depth == 2
    assert any(r.saved for _, r in trees["products_saved"].walk())
    # A memory or a skip connection is what a region is tied for.
    if name in ("encdec", "unet"):
        assert any(r.barrier for tree in trees.values() for _, r in tree.walk())


@pytest.mark.slow
def test_planned_step_is_unchanged():
    found = equality.compare("gpt2-small", "tiny", budget=0.6)
    assert found.feasible
    assert found.executed_peak_bytes == found.peak_bytes <= found.budget_bytes
    assert found.num_checkpoints > 0
    assert found.loss.relative <= TOLERANCES["float32"]
    assert found.gradients.relative <= TOLERANCES["float32"]
    added = found.planned.matrix_flops - found.original.matrix_flops
    assert added == found.recomputed_matrix_flops > 0
