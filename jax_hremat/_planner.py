"""`Workbench`, budget -> `RematPlan`: the fastest plan that was compiled and fits."""

from __future__ import annotations

from types import MappingProxyType

from jax_hremat._bench import Workbench
from jax_hremat._compile import compiler_versions
from jax_hremat._errors import CertificationError, InfeasibleBudgetError
from jax_hremat._fingerprint import fingerprint
from jax_hremat._format import format_bytes
from jax_hremat._plan import Certificate, RematPlan
from jax_hremat._replay import replay
from jax_hremat._report import Decision, block_reports, bottleneck_words
from jax_hremat._rounds import Candidate, Rounds
from jax_hremat._search import Progress
from jax_hremat._units import Budget


def plan_within(
    bench: Workbench,
    budget: Budget,
    *,
    headroom_bytes: int,
    argnums: tuple[int, ...],
    has_aux: bool,
    progress: Progress,
) -> RematPlan:
    """The fastest certified plan for one budget.

    Solve, compile the whole step, compare; on a miss, or with memory left over, correct the
    predicted peak by what was seen and solve again.

    Raises:
        InfeasibleBudgetError: No plan found fits; it carries the smallest that would do.
    """
    budget_bytes = budget.resolve_bytes(bench.baseline.memory.peak_bytes + headroom_bytes)
    limit = budget_bytes - headroom_bytes
    session = Rounds(bench, limit, progress)
    best = session.fastest()
    if best is None:
        floor = session.floor()
        raise InfeasibleBudgetError(
            min_budget_bytes=floor.step.memory.peak_bytes + headroom_bytes,
            budget_bytes=budget_bytes,
            bottleneck=bottleneck_words(
                bench.graph, bench.partition, floor.prediction.peak_block, floor.step
            ),
        )
    return _report(bench, best, session, budget_bytes, headroom_bytes, argnums, has_aux)


def _report(
    bench: Workbench,
    best: Candidate,
    session: Rounds,
    budget_bytes: int,
    headroom_bytes: int,
    argnums: tuple[int, ...],
    has_aux: bool,
) -> RematPlan:
    memory = best.step.memory
    certificate = Certificate(
        peak_bytes=memory.peak_bytes,
        budget_bytes=budget_bytes,
        headroom_bytes=headroom_bytes,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        temp_bytes=memory.temp_bytes,
        target=bench.target.name,
        compiler_options=MappingProxyType(
            {k: str(v) for k, v in bench.target.compiler_options.items()}
        ),
        versions=MappingProxyType(compiler_versions()),
    )
    if not certificate.holds:
        raise CertificationError(
            f"the chosen plan takes {format_bytes(memory.peak_bytes)}, more than the budget of "
            f"{format_bytes(budget_bytes)}; please report this as a bug of jax_hremat"
        )
    return RematPlan(
        root=best.root,
        fingerprint=fingerprint(bench.program, bench.graph),
        argnums=argnums,
        has_aux=has_aux,
        certificate=certificate,
        estimated_step_s=best.step.step_s,
        baseline_step_s=bench.baseline.step_s,
        baseline_peak_bytes=bench.baseline.memory.peak_bytes,
        predicted_peak_bytes=best.prediction.peak_bytes,
        predicted_step_s=session.step_s(best.prediction),
        cost_source="compiled",
        solver_status=best.outcome.status.value,
        solver_gap=best.outcome.gap,
        blocks=block_reports(
            Decision(
                graph=bench.graph,
                partition=bench.partition,
                chain=best.chain,
                selection=best.selection,
                bare=[bench.options[kind].bare for kind in bench.partition.kinds],
                recomputed=replay(bench.program, best.root).recomputed,
            )
        ),
        buffers=best.step.buffers,
        num_compiles=MappingProxyType(
            {"steps": session.num_compiled, "blocks": bench.num_measured}
        ),
        timings_s=MappingProxyType({**bench.timings_s, **session.timings_s}),
    )
