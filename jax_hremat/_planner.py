"""`Program`, budget -> `RematPlan`: the pipeline from graph to certificate."""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from jax_hremat import _compat
from jax_hremat._cache import CompileCache
from jax_hremat._certify import CompiledStep, StepCompiler
from jax_hremat._chain import (
    Chain,
    Prediction,
    Selection,
    Ties,
    make_chain,
    predict,
    selection_region,
)
from jax_hremat._compile import compiler_versions, with_quick_code
from jax_hremat._cost.compiled import measure_block
from jax_hremat._errors import CertificationError, InfeasibleBudgetError
from jax_hremat._fingerprint import fingerprint
from jax_hremat._format import format_bytes
from jax_hremat._graph import Graph, build_graph
from jax_hremat._loop import loop_bodies
from jax_hremat._modes import BlockOptions, SearchConfig
from jax_hremat._option import Option
from jax_hremat._partition.blocks import Partition, Partitioner, partition_graph
from jax_hremat._partition.valleys import partition_by_width
from jax_hremat._plan import Certificate, RematPlan
from jax_hremat._region import Region
from jax_hremat._replay import replay
from jax_hremat._report import Decision, block_reports, bottleneck_words
from jax_hremat._search import Progress, search_options
from jax_hremat._solve.backend import Outcome, SolverConfig, Status, out_of_time
from jax_hremat._solve.schedule import fastest_within, least_peak
from jax_hremat._standard import grouped_selections
from jax_hremat._target import Target, rates
from jax_hremat._trace import Program
from jax_hremat._units import Budget

# Stop improving a certified plan when this little of the budget is left unused.
_SLACK = 0.01
# Compile another plan only if it promises a step this much shorter.
_WORTH = 0.002
# After a miss, aim lower by this part of the limit, then by twice as much.
_MARGIN = 0.0025
# A plan misses widely if its peak is above the limit by more than this part of it.
_WIDE_MISS = 0.1
# Compile a standard plan as well if its predicted peak, were it as much too high as the worst one
# seen, is at most this many times the limit.
_HOPE = 1.05
# … and its predicted time at most this many times the best one's.
_TIME_HOPE = 1.005
# Part of the solver's time that a round is not worth starting without.
_LEAST_LEFT = 0.3
_NO_SOLVE = Outcome(Status.NOT_SOLVED, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PlannerConfig:
    """How hard the planner tries.

    Attributes:
        search: How many modes of each kind of block are compiled.
        solver: Limits of each mixed-integer program.
        partitioner: Where the program is cut into blocks: `partition_by_width`,
            `partition_by_repeats`, `partition_by_score`, `partition_flat`, or a function of your
            own from a graph to positions of operations.
        max_rounds: Compilations of the whole step in a plan, after the first, to meet the
            budget or to use what is left of it.
        cache_dir: Folder in which to keep what was compiled, so that the next planning of the same
            program for the same target, in any process, need not compile it again; None for that
            of the environment variable `JAX_HREMAT_CACHE_DIR`, or no cache where it is not set.
    """

    search: SearchConfig = field(default_factory=SearchConfig)
    solver: SolverConfig = field(default_factory=SolverConfig)
    partitioner: Partitioner = partition_by_width
    max_rounds: int = 3
    cache_dir: str | os.PathLike[str] | None = None


@dataclass(frozen=True, slots=True)
class Workbench:
    """All that is known of a program before a budget is named; plans for any budget follow.

    Attributes:
        program: The traced program.
        graph: Its operations and values.
        partition: Its blocks.
        options: Options of each kind of block.
        baseline: The step without rematerialization, compiled.
        compile_step: Compiles the whole step in a plan; remembers what it compiled.
        target: What everything was compiled for.
        config: How hard the planner tries.
        timings_s: Seconds spent so far, by stage.
        num_measured: Modes of blocks compiled.
    """

    program: Program
    graph: Graph
    partition: Partition
    options: dict[int, BlockOptions]
    baseline: CompiledStep
    compile_step: StepCompiler
    target: Target
    config: PlannerConfig
    timings_s: dict[str, float]
    num_measured: int

    @property
    def fixed_bytes(self) -> int:
        """Arguments and outputs, which no plan changes."""
        memory = self.baseline.memory
        return memory.argument_bytes + memory.output_bytes - memory.alias_bytes

    def chain(self, choose: Callable[[BlockOptions], Sequence[Option]] | None = None) -> Chain:
        """The program as a chain, of all options or of those chosen for each kind of block."""
        only = None
        if choose is not None:
            only = [
                tuple(dict.fromkeys(choose(self.options[kind]))) for kind in self.partition.kinds
            ]
        return make_chain(self.graph, self.partition, self.options, self.fixed_bytes, only=only)

    def standard_plans(self) -> list[tuple[Chain, Selection]]:
        """What a user could write by hand: nothing, every block under one policy, every layer
        or every few blocks together under `jax.checkpoint`."""
        names = dict.fromkeys(name for o in self.options.values() for name, _ in o.by_hand)
        bare = self.chain(lambda o: (o.bare,))
        chains = [bare] + [
            self.chain(lambda o, name=name: (dict(o.by_hand).get(name, o.bare),)) for name in names
        ]
        grouped = dict.fromkeys(grouped_selections(bare, self.partition.kinds))
        return [_uniform(chain) for chain in chains] + [(bare, s) for s in grouped]


def prepare(
    program: Program, target: Target, config: PlannerConfig, trace_s: float, progress: Progress
) -> Workbench:
    """Everything up to the costs: graph, partition, options of each kind, the baseline."""
    timings = {"trace": trace_s}
    with _timed(timings, "trace"):
        graph = build_graph(program)
    with _timed(timings, "partition"):
        partition = partition_graph(graph, config.partitioner)
        loops = loop_bodies(program, graph)
    everything = Region(0, len(graph.operations))
    with (
        _timed(timings, "cost"),
        tempfile.TemporaryDirectory(prefix="jax_hremat_") as directory,
        ThreadPoolExecutor(1) as pool,
    ):
        cache = CompileCache.at(config.cache_dir)
        compile_whole = StepCompiler(program, target, cache)
        baseline = pool.submit(_compat.in_settings_of_this_thread(compile_whole), everything)
        quick = with_quick_code(target, directory)
        options = search_options(
            graph,
            partition,
            loops,
            lambda block, mode: measure_block(program, graph, block, mode, quick, cache),
            rates(target),
            config.search,
            config.solver,
            progress,
        )
        step = baseline.result()
    return Workbench(
        program=program,
        graph=graph,
        partition=partition,
        options=options,
        baseline=step,
        compile_step=compile_whole,
        target=target,
        config=config,
        timings_s=timings,
        num_measured=sum(o.num_measured for o in options.values()),
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A whole plan, compiled."""

    chain: Chain
    selection: Selection
    root: Region
    prediction: Prediction
    step: CompiledStep
    outcome: Outcome


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
    session = _Session(bench, limit, progress)
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


class _Session:
    """The rounds of one budget: every plan compiled so far, and the time they took."""

    def __init__(self, bench: Workbench, limit: int, progress: Progress) -> None:
        self._bench = bench
        self._limit = limit
        self._progress = progress
        self._seen = {Region(0, len(bench.graph.operations))}
        self.timings_s = {"solve": 0.0, "certify": 0.0}
        self._base = predict(*_uniform(bench.chain(lambda o: (o.bare,))))
        self._chain = bench.chain()
        self._plain = bench.chain(
            lambda o: (
                o.bare,
                o.wrapped,
                *(option for name, option in o.by_hand if name == "block"),
            )
        )
        self._missed = False
        self._undecided = False
        # The worst ratio of a predicted to a compiled peak so far.
        self._overestimate = 1.0

    @property
    def num_compiled(self) -> int:
        return len(self._seen)

    def step_s(self, prediction: Prediction) -> float:
        """A predicted time as a time of the whole step: the baseline's and the difference."""
        return self._bench.baseline.step_s + prediction.time_s - self._base.time_s

    def candidate(
        self, chain: Chain, selection: Selection, outcome: Outcome, ties: Ties = Ties.WRAPPED
    ) -> _Candidate:
        root = selection_region(self._bench.graph, chain, selection, ties)
        if root not in self._seen:
            self._progress("certifying", len(self._seen) - 1, self._bench.config.max_rounds + 1)
            with _timed(self.timings_s, "certify"):
                self._bench.compile_step(root)
            self._seen.add(root)
        prediction = predict(chain, selection)
        step = self._bench.compile_step(root)
        ratio = prediction.peak_bytes / step.memory.peak_bytes
        self._overestimate = max(self._overestimate, ratio)
        return _Candidate(chain, selection, root, prediction, step, outcome)

    def close_candidate(
        self, chain: Chain, selection: Selection, outcome: Outcome, ties: Ties, then: Ties
    ) -> _Candidate:
        """The candidate; if it misses widely what was predicted to fit, the one that leaves the
        compiler less to put off, if that is lower."""
        candidate = self.candidate(chain, selection, outcome, ties)
        if self.misses_widely(candidate) and candidate.prediction.peak_bytes <= self._limit:
            tied = self.candidate(chain, selection, outcome, then)
            if tied.step.memory.peak_bytes < candidate.step.memory.peak_bytes:
                return tied
        return candidate

    def fits(self, candidate: _Candidate) -> bool:
        return candidate.step.memory.peak_bytes <= self._limit

    def misses_widely(self, candidate: _Candidate) -> bool:
        return candidate.step.memory.peak_bytes > (1 + _WIDE_MISS) * self._limit

    def fastest(self) -> _Candidate | None:
        """The fastest plan that fits, of the solver's and of the standard ones."""
        bare = self.candidate(*_uniform(self._bench.chain(lambda o: (o.bare,))), _NO_SOLVE)
        best = bare if self.fits(bare) else None
        best = self._solved(best, self._chain)
        if self._missed:
            # Groups of blocks that are only bare or wrapped are predicted best.
            best = self._solved(best, self._plain)
        best = self._or_standard(best)
        if best is None:
            # Plans near the least peak are predicted worst; the least itself may still fit.
            lowest = [c for c in self.lowest if self.fits(c)]
            best = min(lowest, key=lambda c: c.step.step_s, default=None)
        if best is None and self._undecided:
            raise out_of_time(self._bench.config.solver)
        return best

    def _next_solver(self, chain: Chain) -> SolverConfig | None:
        """The solver's limits for the next round, half of what is left of the time; None if too
        little is left. Plain blocks are solved in what the others leave them."""
        solver = self._bench.config.solver
        left_s = solver.time_limit_s - self.timings_s["solve"]
        least_s = _LEAST_LEFT * solver.time_limit_s
        if left_s >= least_s:
            return replace(solver, time_limit_s=left_s / 2)
        return replace(solver, time_limit_s=least_s / 4) if chain is self._plain else None

    def _solved(self, best: _Candidate | None, chain: Chain) -> _Candidate | None:
        """Solve, compile, compare, and solve again at a predicted peak that makes up for what
        was seen; the fastest plan that fits, if it is faster than `best`."""
        # Most of the prediction's error is the same in every plan of a program, so what it is
        # where nothing is wrapped is made up for at once.
        limit = self._limit + max(0, self._base.peak_bytes - self._bench.baseline.memory.peak_bytes)
        missed_at = limit + 1
        groups, wide_misses = True, 0
        margin = _MARGIN * self._limit
        for _ in range(self._bench.config.max_rounds + 1):
            solver = self._next_solver(chain)
            if solver is None:
                break
            self._progress("solving", 0, 1)
            with _timed(self.timings_s, "solve"):
                schedule = fastest_within(chain, limit, solver, groups=groups)
            self._undecided |= schedule.outcome.status is Status.UNDECIDED
            if schedule.selection is None:
                break
            promise = predict(chain, schedule.selection)
            if best is not None and self.step_s(promise) > (1 - _WORTH) * best.step.step_s:
                break
            candidate = self.close_candidate(
                chain, schedule.selection, schedule.outcome, Ties.WRAPPED, Ties.LOSS_TOO
            )
            excess = candidate.step.memory.peak_bytes - self._limit
            if excess > 0:
                self._missed = True
                missed_at = min(missed_at, promise.peak_bytes)
                if schedule.outcome.status is Status.TIME_LIMIT:
                    # Lower down it is harder still; the time is better spent on fewer options.
                    break
                if self.misses_widely(candidate) and candidate.selection.groups:
                    # The compiler put something off that only these groups let it put off:
                    # other groups of nearly that peak first, then none.
                    groups, wide_misses = wide_misses == 0, wide_misses + 1
                    excess = 0
                # Further down than the miss, or the next plan may miss by a hair.
                limit = promise.peak_bytes - excess - int(margin)
                margin *= 2
            else:
                best = _faster(best, candidate)
                if -excess <= _SLACK * self._limit:
                    break
                limit = min(promise.peak_bytes - excess, missed_at - 1)
        return best

    def _or_standard(self, best: _Candidate | None) -> _Candidate | None:
        """The best plan, or a standard one that is faster and fits."""
        for chain, selection in self._bench.standard_plans():
            step_s = self.step_s(predict(chain, selection))
            if best is None or step_s < _TIME_HOPE * best.step.step_s:
                candidate = self._standard(chain, selection, self._limit)
                if candidate is not None and self.fits(candidate):
                    best = _faster(best, candidate)
        return best

    def _standard(self, chain: Chain, selection: Selection, peak_bytes: int) -> _Candidate | None:
        """A standard plan, compiled if there is hope that its peak is no higher."""
        hope_bytes = _HOPE * self._overestimate * peak_bytes
        if predict(chain, selection).peak_bytes > hope_bytes:
            return None
        return self.close_candidate(chain, selection, _NO_SOLVE, Ties.NONE, Ties.WRAPPED)

    @functools.cached_property
    def lowest(self) -> list[_Candidate]:
        """Plans of little memory, compiled: the solver's with all options, with and without
        groups, and with blocks only bare or wrapped, whose groups are predicted best."""
        solver = replace(self._bench.config.solver, relative_gap=0.01)
        candidates = []
        for chain, groups in ((self._chain, True), (self._chain, False), (self._plain, True)):
            with _timed(self.timings_s, "solve"):
                schedule = least_peak(chain, solver, groups=groups)
            assert schedule.selection is not None, "without a peak bound a selection exists"
            candidates.append(self.candidate(chain, schedule.selection, schedule.outcome))
        return candidates

    def floor(self) -> _Candidate:
        """A plan of a peak that no plan is found for a hundredth below."""
        least = min(self.lowest, key=_lowest_first)
        while True:
            below = _Session(
                self._bench, int((1 - _SLACK) * least.step.memory.peak_bytes), self._progress
            )
            below.lowest = self.lowest
            found = below.fastest()
            if found is None:
                return least
            least = found


def _lowest_first(candidate: _Candidate) -> tuple[int, float]:
    return candidate.step.memory.peak_bytes, candidate.step.step_s


def _faster(best: _Candidate | None, candidate: _Candidate) -> _Candidate:
    if best is None or candidate.step.step_s < best.step.step_s:
        return candidate
    return best


def _uniform(chain: Chain) -> tuple[Chain, Selection]:
    return chain, Selection((0,) * len(chain))


def _report(
    bench: Workbench,
    best: _Candidate,
    session: _Session,
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


@contextmanager
def _timed(timings_s: dict[str, float], stage: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        timings_s[stage] = timings_s.get(stage, 0.0) + time.perf_counter() - start
