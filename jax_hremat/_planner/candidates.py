"""`PlanningContext` -> compiled whole plans, shared by the searches for all budgets."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence

from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.region import Region
from jax_hremat._planner.candidate import WORTH_A_BARRIER, Candidate
from jax_hremat._planner.chains import Chains
from jax_hremat._planner.context import PlanningContext, uniform
from jax_hremat._planner.corrections import Corrections
from jax_hremat._planner.cost_table import timed
from jax_hremat._shared.progress import Progress
from jax_hremat._solve.assumed_reuse import AssumedReuse, reuse_shown_by
from jax_hremat._solve.backend import Outcome, SolverConfig, Status
from jax_hremat._solve.chain import Chain, Schedule, Selection
from jax_hremat._solve.prediction import Prediction
from jax_hremat._solve.regions import Barriers, selection_region
from jax_hremat._solve.with_reuse import fastest_with_reuse
from jax_hremat._trace.fingerprint import fingerprint

# The price of a few bytes is that of this part of the peak, in proportion.
_PRICED = 0.01

NO_SOLVE = Outcome(Status.NOT_SOLVED, 0.0, 0.0)


class Candidates:
    """Every whole plan of one program compiled so far.

    Attributes:
        context: The program and its costs.
        chains: The program as chains of blocks.
        plain: The plan that checkpoints nothing.
    """

    def __init__(
        self, context: PlanningContext, progress: Progress, chains: Chains | None = None
    ) -> None:
        self.context = context
        self.chains = chains or Chains(context)
        self._progress = progress
        self._timings_s = {"solve": 0.0, "certify": 0.0}
        self._found: dict[Region, Candidate] = {}
        # By the identity of their chains too, which `chains` keeps.
        self._solved: dict[tuple[int, int, SolverConfig, bool], Schedule] = {}
        plain = uniform(context.chain(lambda o: (o.plain,)))
        # With these barriers alone it is the baseline, which is compiled already.
        self.plain = self.add(*plain, NO_SOLVE, Barriers.CHECKPOINTED)

    def anew(self) -> Candidates:
        """Candidates of the same program of which only the plan without checkpoints is compiled."""

        def progress(stage: str, done: int, total: int) -> None:
            self._progress(f"smallest budget: {stage}", done, total)

        return Candidates(self.context, progress, self.chains)

    def learn(self, other: Candidates) -> None:
        """Add the plans that other candidates of the same program contain."""
        self._found = {**other._found, **self._found}
        for stage, spent_s in other.timings_s.items():
            self._timings_s[stage] += spent_s

    @property
    def timings_s(self) -> Mapping[str, float]:
        """Seconds spent in the solver and in compiling whole steps."""
        return dict(self._timings_s)

    @property
    def num_compiled(self) -> int:
        return len(self._found)

    @property
    def least(self) -> Candidate:
        """The plan of least compiled peak; of equal ones the fastest."""
        return min(self._usable, key=lambda c: (c.peak_bytes, c.step_s))

    @property
    def _usable(self) -> Sequence[Candidate]:
        """The plans under which no kernels may read what they have overwritten, but for the
        program's own."""
        plain = self.plain.step
        return [c for c in self._found.values() if not c.step.overwrites_more_than(plain)]

    @property
    def compiled(self) -> Sequence[Candidate]:
        """All plans, in the order in which they were compiled."""
        return tuple(self._found.values())

    @property
    def corrections(self) -> Corrections:
        """What they tell about the peaks of others."""
        return Corrections(self.compiled, self.context.fixed_bytes)

    def step_s(self, prediction: Prediction) -> float:
        """A predicted time as a time of the whole step."""
        return self.whole_step_s(prediction.time_s)

    def whole_step_s(self, predicted_s: float) -> float:
        """The baseline's time, plus the difference to the predicted time of the plain plan."""
        added_s = predicted_s - self.plain.prediction.time_s
        return self.context.baseline.step_s + self.context.step.calls * added_s

    def within(self, peak_bytes: int) -> list[Candidate]:
        """The plans whose compiled peak is at most `peak_bytes`, fastest first, then by peak."""
        fitting = [c for c in self._usable if c.peak_bytes <= peak_bytes]
        return sorted(fitting, key=lambda c: (c.step_s, c.peak_bytes))

    def fastest_within(self, peak_bytes: int) -> Candidate | None:
        """The first of them; None if there is none."""
        return next(iter(self.within(peak_bytes)), None)

    def add(
        self,
        chain: Chain,
        selection: Selection,
        outcome: Outcome,
        barriers: Barriers = Barriers.USUAL,
    ) -> Candidate:
        """The plan of a selection, compiled unless it already was."""
        root = self._root(chain, selection, barriers)
        if root not in self._found:
            self._progress("whole steps compiled", self.num_compiled, 0)
            with timed(self._timings_s, "certify"):
                emitted, step = self.context.compile_step.without_overwriting(root)
            prediction = self.context.predict(chain, selection)
            self._found[root] = Candidate(
                chain, selection, emitted, barriers, prediction, step, outcome
            )
        return self._found[root]

    def known(self, chain: Chain, selection: Selection, barriers: Barriers) -> Candidate | None:
        """The plan of a selection, if it was compiled."""
        return self._found.get(self._root(chain, selection, barriers))

    def _root(self, chain: Chain, selection: Selection, barriers: Barriers) -> Region:
        waiting_bytes = int(WORTH_A_BARRIER * self.context.baseline.memory.peak_bytes)
        return selection_region(self.context.costs.graph, chain, selection, barriers, waiting_bytes)

    def solve(
        self,
        chain: Chain,
        peak_bytes: int,
        solver: SolverConfig,
        *,
        groups: bool = True,
    ) -> Schedule:
        """The fastest schedule found whose predicted peak is at most `peak_bytes`."""
        question = id(chain), peak_bytes, solver, groups
        if question not in self._solved:
            schedules, results = self.chains.schedules(chain), self.context.results
            with self._solving():
                self._solved[question] = fastest_with_reuse(
                    schedules, peak_bytes, results, solver, groups=groups
                )
        return self._solved[question]

    def price_s(self, peak_bytes: int, lower_bytes: int) -> float:
        """The seconds by which the fastest step within a predicted peak gets longer if options are
        to lower the peak by so many bytes; infinite if none can. Of both steps only bounds are
        found, with as much output-buffer reuse as the plan of the nearest peak shows to be worth
        something. Times rise in steps, so a few bytes are a part of more."""
        reused = self._reused_near(peak_bytes)
        priced_bytes = max(lower_bytes, int(_PRICED * peak_bytes))
        lower_s = self._bound_step_s(peak_bytes - priced_bytes, reused)
        if math.isinf(lower_s):
            return math.inf
        return lower_bytes / priced_bytes * (lower_s - self._bound_step_s(peak_bytes, reused))

    def bound_step_s(self, peak_bytes: int) -> float:
        """A step time that no selection with a predicted peak of at most `peak_bytes` is predicted
        to undercut; infinite if there is none. It is found in a fraction of the time of `solve`."""
        return self._bound_step_s(peak_bytes, self._reused_near(peak_bytes))

    def _bound_step_s(self, peak_bytes: int, reused: AssumedReuse) -> float:
        schedules = self.chains.schedules(self.chains.full)
        with self._solving():
            bound_s = schedules.least_possible_s(peak_bytes, self.context.config.solver, reused)
        return self.whole_step_s(bound_s)

    def _reused_near(self, peak_bytes: int) -> AssumedReuse:
        """What output-buffer reuse is assumed to save at the prices that the plan of the nearest
        predicted peak shows."""
        like = min(self.compiled, key=lambda c: abs(c.prediction.peak_bytes - peak_bytes))
        return reuse_shown_by(like.prediction, self.context.results, len(self.chains.full))

    def least_possible_step_s(self, peak_bytes: int) -> float:
        """A step time that no selection of the strategy's options with a predicted peak of at most
        `peak_bytes` is predicted to undercut, if its groups are those of the root program; infinite
        if there is none."""
        schedule = self.solve(self.chains.bounding, peak_bytes, self.context.config.solver)
        return self.whole_step_s(schedule.bound_s)

    @contextlib.contextmanager
    def _solving(self) -> Iterator[None]:
        self._progress("choosing what to recompute", 0, 0)
        with timed(self._timings_s, "solve"):
            yield

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The program's fingerprint, which all its plans carry."""
        return fingerprint(self.context.program, self.context.costs.graph)

    @functools.cached_property
    def _lowest(self) -> list[tuple[Chain, Selection, Prediction, Outcome]]:
        """The schedules of least peak, lowest predicted peak first: with all options, with and
        without groups, and with the options of `simple`."""
        solver = self.context.config.solver
        found: list[tuple[Chain, Selection, Prediction, Outcome]] = []
        full, simple = self.chains.full, self.chains.simple
        for chain, groups in ((full, True), (full, False), (simple, True)):
            with self._solving():
                schedule = self.chains.schedules(chain).least_peak(solver, groups=groups)
            assert schedule.selection is not None, "without a peak bound a selection exists"
            prediction = self.context.predict(chain, schedule.selection)
            found.append((chain, schedule.selection, prediction, schedule.outcome))
        return sorted(found, key=lambda plan: plan[2].peak_bytes)

    def compile_lowest(self) -> None:
        """Compile the schedules of least peak that are predicted below the least peak so far, with
        all barriers too where they seem delayed."""
        for chain, selection, prediction, outcome in self._lowest:
            if prediction.peak_bytes < self.least.peak_bytes:
                candidate = self.add(chain, selection, outcome)
                if candidate.is_delayed(prediction.peak_bytes):
                    self.add(chain, selection, outcome, Barriers.ALL)
