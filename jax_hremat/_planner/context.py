"""`Step` -> `PlanningContext`: everything known about a step before a budget is given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from jax_hremat._cost.kernels import kernel_book
from jax_hremat._cost.option import Option
from jax_hremat._emit.step import Step
from jax_hremat._jax.trace_context import in_settings_of_this_thread
from jax_hremat._options.block_options import BlockOptions
from jax_hremat._plan.region import Region
from jax_hremat._planner.config import PlannerConfig
from jax_hremat._planner.cost_table import CostTable, priced, timed
from jax_hremat._planner.standard import COUNTS, grouped_selections
from jax_hremat._shared.errors import UnsupportedConfigError
from jax_hremat._shared.format import format_bytes
from jax_hremat._shared.progress import Progress
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.output_reuse import Result, gradients_of
from jax_hremat._solve.prediction import Prediction, predict
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._trace.graph import Graph
from jax_hremat._trace.mesh import is_known
from jax_hremat._trace.trace import Program
from jax_hremat._xla.cache import CompileCache
from jax_hremat._xla.certify import CompiledStep, StepCompiler
from jax_hremat._xla.hlo.library_calls import is_host_callback
from jax_hremat._xla.target import Target

_logger = logging.getLogger("jax_hremat")

# Captured arrays are pointed out if they take more than this part of the peak.
_CAPTURED = 0.01


@dataclass(frozen=True, slots=True)
class PlanningContext:
    """Everything known about a program before a budget is given; plans for any budget follow.

    Attributes:
        step: The step whose memory the budget bounds, with the traced program inside.
        costs: The program's blocks and their costs.
        baseline: The step without rematerialization, compiled.
        compile_step: Compiles the whole step under a plan; remembers what it compiled.
        target: The device that everything was compiled for.
        config: How hard the planner tries.
        timings_s: Seconds spent so far, by stage. For the baseline, only the part of its
            compilation after the costs are known.
        results: The gradients, if the step returns them unchanged, so that XLA reuses their memory
            before they are written; else empty.
        surplus_bytes: Compiled peak of the baseline less its peak as predicted without reuse of
            results: memory around the program, such as an accumulated gradient, which is alive in
            every plan. 0 if the compiled peak is lower.
    """

    step: Step
    costs: CostTable
    baseline: CompiledStep
    compile_step: StepCompiler
    target: Target
    config: PlannerConfig
    timings_s: Mapping[str, float]
    results: tuple[Result, ...]
    surplus_bytes: int = 0

    def predict(self, chain: Chain, selection: Selection) -> Prediction:
        """The predicted cost of a selection, output-buffer reuse included."""
        return predict(chain, selection, self.results)

    @property
    def program(self) -> Program:
        """The program that is planned."""
        return self.step.program

    @property
    def fixed_bytes(self) -> int:
        """Arguments, outputs and constants, which no plan changes."""
        return self.baseline.memory.fixed_bytes

    def chain(self, choose: Callable[[BlockOptions], Sequence[Option]] | None = None) -> Chain:
        """The program as a chain, with all options or those chosen for each kind of block."""
        return self.costs.chain(self.fixed_bytes + self.surplus_bytes, choose)

    def standard_plans(self) -> list[tuple[Chain, Selection]]:
        """The plans that a user could write by hand: no checkpoints; every block under one policy;
        only the steps of every scan under one policy; every layer under one policy; one in a few
        layers, or every few consecutive blocks together, under `jax.checkpoint`."""
        names = self.costs.policies
        plain = self.chain(lambda o: (o.plain,))
        plans = [uniform(plain)]
        plans += [
            uniform(self.chain(lambda o, name=name: (o.under_policy(name),))) for name in names
        ]
        if self.costs.has_scans:
            plans += [self.steps_under(name) for name in names]
        plans += [self.layers_under(name) for name in names]
        plans += [self.layers_under("block", every) for every in COUNTS]
        plans += [(plain, selection) for selection in grouped_selections(plain)]
        found: dict[Region, tuple[Chain, Selection]] = {}
        for chain, selection in plans:
            root = selection_region(self.costs.graph, chain, selection, Barriers.NONE)
            found.setdefault(root, (chain, selection))
        return list(found.values())

    def steps_under(self, policy: str) -> tuple[Chain, Selection]:
        """The steps of every scan under a named policy; all other blocks plain."""

        def steps(options: BlockOptions) -> Option:
            under_policy = options.under_policy(policy)
            return under_policy if under_policy.origin == "loop" else options.plain

        return uniform(self.chain(lambda o: (steps(o),)))

    def layers_under(self, policy: str, every: int = 1) -> tuple[Chain, Selection]:
        """Every layer, or one in `every` layers, under a named policy; all other blocks plain."""
        chain = self.chain(lambda o: (o.plain, o.under_policy(policy)))
        return chain, self.costs.layers_under(policy, chain, every)


def prepare(
    step: Step, target: Target, config: PlannerConfig, trace_s: float, progress: Progress
) -> PlanningContext:
    """Find the costs and compile the baseline at the same time.

    With measured costs the baseline is compiled first, and the blocks then one at a time, so that
    nothing else runs during a measurement.
    """
    if step.mesh is None and step.program.shardings:
        _logger.warning(
            "the arguments lie on a mesh of several devices, in a way that is not known while they "
            "are being traced, or of a module's call: planned as for one device that holds them "
            "whole. Plan the loss outside the `jit`, with `plan_remat` or `fit_step`, and apply "
            "the plan in it"
        )
    # Around a larger step, the arguments of the loss lie as those of the step make them lie.
    own = step.traced is None
    if own and step.mesh is not None and not all(map(is_known, step.program.shardings)):
        _logger.warning(
            "it is not known how the arguments lie on the mesh (%s) while they are being traced: "
            "planned as if they lay as the compiler likes, given what the function says of its "
            "own values. Plan the loss outside the `jit`, with `plan_remat` or `fit_step`, and "
            "apply the plan in it",
            step.mesh,
        )
    if step.mesh is not None and step.mesh.num_devices > 1 and config.cost != "compiled":
        raise UnsupportedConfigError(
            f"PlannerConfig(cost={config.cost!r}), and the arguments lie on a mesh of devices "
            f"({step.mesh}): what the devices exchange is known only of what is compiled. Plan "
            f"with cost='compiled'"
        )
    cache = CompileCache.at(config.cache_dir)
    if cache is not None:
        cache.trim()
    timings: dict[str, float] = {}
    with timed(timings, "trace"):
        kernels = kernel_book(step, config.kernel_costs)
    compile_whole = StepCompiler(step, target, cache, kernels)
    everything = Region(0, step.program.num_operations)
    with ThreadPoolExecutor(1) as pool:
        baseline = pool.submit(in_settings_of_this_thread(compile_whole), everything)
        if config.cost == "measured":
            config = replace(config, search=replace(config.search, max_workers=1))
            with timed(timings, "baseline"):
                baseline.result()
        trace_s += timings.pop("trace")
        costs = priced(step, target, config, trace_s, cache, progress, kernels)
        timings |= costs.timings_s
        with timed(timings, "baseline"):
            compiled = baseline.result()
    _warn_of_unpriced(compiled)
    _warn_of_overwrites(compiled)
    _warn_of_captured(costs.graph, compiled)
    context = PlanningContext(
        step=step,
        costs=costs,
        baseline=compiled,
        compile_step=compile_whole,
        target=target,
        config=config,
        timings_s=timings,
        results=() if step.traced is not None else gradients_of(costs.graph, costs.partition),
    )
    # What is above the prediction without any reuse is no error of the reuse that is predicted,
    # which other plans need not share.
    peak_bytes = predict(*uniform(context.chain(lambda o: (o.plain,)))).peak_bytes
    return replace(context, surplus_bytes=max(0, compiled.memory.peak_bytes - peak_bytes))


def _warn_of_unpriced(step: CompiledStep) -> None:
    callbacks = [*filter(is_host_callback, step.unpriced_kernels)]
    kernels = [name for name in step.unpriced_kernels if name not in callbacks]
    if callbacks:
        _logger.warning(
            "nothing is known of how long Python takes that the step calls on the host "
            "(`jax.pure_callback`, `equinox.error_if` and others), so that plans may call it again "
            "too freely. If that matters, say what it costs with PlannerConfig(kernel_costs="
            "{'pure_callback': lambda operands, results: (flops, bytes)})"
        )
    if kernels:
        _logger.warning(
            "nothing is known of what these kernels compute, and they are priced at their bytes "
            "alone, so that plans may run them again too freely: %s. Say what they cost with "
            "PlannerConfig(kernel_costs={%r: lambda operands, results: (flops, bytes)})",
            ", ".join(kernels),
            kernels[0],
        )


def _warn_of_captured(graph: Graph, step: CompiledStep) -> None:
    captured_bytes = sum(v.size_bytes for v in graph.values if v.kind == "constant")
    if captured_bytes > _CAPTURED * step.memory.peak_bytes:
        _logger.warning(
            "the function captures arrays of %s. Its executable has copies of them, which take %s "
            "of the budget, beside the arrays themselves: pass them as arguments",
            format_bytes(captured_bytes),
            format_bytes(step.memory.constant_bytes),
        )


def _warn_of_overwrites(step: CompiledStep) -> None:
    if step.overwrites:
        _logger.warning(
            "without a plan, kernels of this step may read what they have overwritten, by a fault "
            "of XLA before JAX 0.12 that checkpoints in the program can bring about: %s. Its "
            "gradients may be wrong, with a plan and without",
            ", ".join(step.overwrites),
        )


def uniform(chain: Chain) -> tuple[Chain, Selection]:
    return chain, Selection((0,) * len(chain))
