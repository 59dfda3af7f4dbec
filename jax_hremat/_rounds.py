"""One budget: solve, compile the whole step, compare, and solve again."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from jax_hremat._bench import Workbench, timed, uniform
from jax_hremat._certify import CompiledStep
from jax_hremat._chain import Chain, Prediction, Selection, Ties, predict, selection_region
from jax_hremat._region import Region
from jax_hremat._search import Progress
from jax_hremat._solve.backend import Outcome, SolverConfig, Status, out_of_time
from jax_hremat._solve.schedule import fastest_within, least_peak

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
class Candidate:
    """A whole plan, compiled."""

    chain: Chain
    selection: Selection
    root: Region
    prediction: Prediction
    step: CompiledStep
    outcome: Outcome


class Rounds:
    """The rounds of one budget: every plan compiled so far, and the time they took."""

    def __init__(self, bench: Workbench, limit: int, progress: Progress) -> None:
        self._bench = bench
        self._limit = limit
        self._progress = progress
        self._seen = {Region(0, len(bench.graph.operations))}
        self.timings_s = {"solve": 0.0, "certify": 0.0}
        self._bare = uniform(bench.chain(lambda o: (o.bare,)))
        self._base = predict(*self._bare)
        self._chain = bench.chain()
        self._plain = bench.chain(lambda o: (o.bare, o.wrapped, o.written("block")))
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
    ) -> Candidate:
        root = selection_region(self._bench.graph, chain, selection, ties)
        if root not in self._seen:
            self._progress("certifying", len(self._seen) - 1, self._bench.config.max_rounds + 1)
            with timed(self.timings_s, "certify"):
                self._bench.compile_step(root)
            self._seen.add(root)
        prediction = predict(chain, selection)
        step = self._bench.compile_step(root)
        ratio = prediction.peak_bytes / step.memory.peak_bytes
        self._overestimate = max(self._overestimate, ratio)
        return Candidate(chain, selection, root, prediction, step, outcome)

    def close_candidate(
        self, chain: Chain, selection: Selection, outcome: Outcome, ties: Ties, then: Ties
    ) -> Candidate:
        """The candidate; if it misses widely what was predicted to fit, the one that leaves the
        compiler less to put off, if that is lower."""
        candidate = self.candidate(chain, selection, outcome, ties)
        if self.misses_widely(candidate) and candidate.prediction.peak_bytes <= self._limit:
            tied = self.candidate(chain, selection, outcome, then)
            if tied.step.memory.peak_bytes < candidate.step.memory.peak_bytes:
                return tied
        return candidate

    def fits(self, candidate: Candidate) -> bool:
        return candidate.step.memory.peak_bytes <= self._limit

    def misses_widely(self, candidate: Candidate) -> bool:
        return candidate.step.memory.peak_bytes > (1 + _WIDE_MISS) * self._limit

    def fastest(self) -> Candidate | None:
        """The fastest plan that fits, of the solver's and of the standard ones."""
        bare = self.candidate(*self._bare, _NO_SOLVE)
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

    def _solved(self, best: Candidate | None, chain: Chain) -> Candidate | None:
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
            with timed(self.timings_s, "solve"):
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

    def _or_standard(self, best: Candidate | None) -> Candidate | None:
        """The best plan, or a standard one that is faster and fits."""
        for chain, selection in self._bench.standard_plans():
            step_s = self.step_s(predict(chain, selection))
            if best is None or step_s < _TIME_HOPE * best.step.step_s:
                candidate = self._standard(chain, selection, self._limit)
                if candidate is not None and self.fits(candidate):
                    best = _faster(best, candidate)
        return best

    def _standard(self, chain: Chain, selection: Selection, peak_bytes: int) -> Candidate | None:
        """A standard plan, compiled if there is hope that its peak is no higher."""
        hope_bytes = _HOPE * self._overestimate * peak_bytes
        if predict(chain, selection).peak_bytes > hope_bytes:
            return None
        return self.close_candidate(chain, selection, _NO_SOLVE, Ties.NONE, Ties.WRAPPED)

    @functools.cached_property
    def lowest(self) -> list[Candidate]:
        """Plans of little memory, compiled: the solver's with all options, with and without
        groups, and with blocks only bare or wrapped, whose groups are predicted best."""
        solver = replace(self._bench.config.solver, relative_gap=0.01)
        candidates = []
        for chain, groups in ((self._chain, True), (self._chain, False), (self._plain, True)):
            with timed(self.timings_s, "solve"):
                schedule = least_peak(chain, solver, groups=groups)
            assert schedule.selection is not None, "without a peak bound a selection exists"
            candidates.append(self.candidate(chain, schedule.selection, schedule.outcome))
        return candidates

    def floor(self) -> Candidate:
        """A plan of a peak that no plan is found for a hundredth below."""
        least = min(self.lowest, key=_lowest_first)
        while True:
            below = Rounds(
                self._bench, int((1 - _SLACK) * least.step.memory.peak_bytes), self._progress
            )
            below.lowest = self.lowest
            found = below.fastest()
            if found is None:
                return least
            least = found


def _lowest_first(candidate: Candidate) -> tuple[int, float]:
    return candidate.step.memory.peak_bytes, candidate.step.step_s


def _faster(best: Candidate | None, candidate: Candidate) -> Candidate:
    if best is None or candidate.step.step_s < best.step.step_s:
        return candidate
    return best
