"""The sources of block costs: three of them behind one interface."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from jax_hremat._cost.analytic import analytic_cost
from jax_hremat._cost.block_step import block_step
from jax_hremat._cost.compiled import compiled_cost
from jax_hremat._cost.measured import attached_device, measured_cost
from jax_hremat._cost.option_cost import OptionCost
from jax_hremat._partition.blocks import Block
from jax_hremat._plan.region import Region
from jax_hremat._primitives.kernels import KernelBook
from jax_hremat._trace.graph import Graph
from jax_hremat._trace.trace import Program
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.compile import with_quick_code
from jax_hremat._xla.rates import rates
from jax_hremat._xla.target import Target

CostSource = Literal["compiled", "analytic", "measured"]

# Prices a block under one option, given as a region with the block's `start` and `stop`.
Price = Callable[[Block, Region], OptionCost]


@contextmanager
def block_prices(
    source: CostSource,
    program: Program,
    graph: Graph,
    target: Target,
    cache: CompileCache | None,
    kernels: KernelBook | None = None,
) -> Iterator[Price]:
    """A context in which blocks of a program can be priced.

    Args:
        source: "compiled": a roofline over the kernels that XLA makes of a block; "analytic": from
            its equations, without compiling; "measured": times from running it on the attached
            device, memory as for "compiled".
        program: The program.
        graph: Its graph.
        target: The target that the program is planned for.
        cache: Earlier results of the compiler.
        kernels: What is known about kernels that XLA only calls.

    Raises:
        TargetUnavailableError: The source is "measured" and the target's device is not attached.
    """
    if source == "analytic":
        target_rates = rates(target, kernels)
        yield lambda block, region: analytic_cost(
            block_step(program, graph, block, region), target_rates
        )
        return
    device = attached_device(target) if source == "measured" else None
    with tempfile.TemporaryDirectory(prefix="jax_hremat_") as directory:
        quick = with_quick_code(target, directory)

        def price(block: Block, region: Region) -> OptionCost:
            step = block_step(program, graph, block, region)
            cost = compiled_cost(step, quick, cache, kernels)
            return cost if device is None else measured_cost(step, cost, target, device)

        yield price
