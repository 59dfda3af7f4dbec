"""`PlanningContext` -> the chains whose schedules are plans, shared by all searches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from jax_hremat._planner.context import PlanningContext
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.prediction import Prediction, step_s
from jax_hremat._solve.schedule import Schedules
from jax_hremat._strategies.registry import strategy_of
from jax_hremat._strategies.strategy import Choices


@dataclass(frozen=True)
class StandardPlan:
    """A plan that a user could write by hand."""

    context: PlanningContext
    chain: Chain
    selection: Selection

    @functools.cached_property
    def time_s(self) -> float:
        """Its predicted time."""
        return step_s(self.chain, self.selection)

    @functools.cached_property
    def prediction(self) -> Prediction:
        """Its predicted cost, which takes longer to find."""
        return self.context.predict(self.chain, self.selection)


class Chains:
    """The program as chains of blocks with more or fewer options."""

    def __init__(self, context: PlanningContext) -> None:
        self._context = context
        # By the identity of their chains, which they keep.
        self._schedules: dict[int, Schedules] = {}

    def schedules(self, chain: Chain) -> Schedules:
        """The schedules of one of these chains."""
        if id(chain) not in self._schedules:
            self._schedules[id(chain)] = Schedules(chain)
        return self._schedules[id(chain)]

    @functools.cached_property
    def full(self) -> Chain:
        """The chain with all options."""
        return self._context.chain()

    @functools.cached_property
    def simple(self) -> Chain:
        """The chain with three options for each block: plain, checkpointed, or as a user would
        write it with `jax.checkpoint`. Groups of these are predicted best."""
        chain = self._context.chain(lambda o: (o.plain, o.checkpointed, o.under_policy("block")))
        return self._context.costs.with_nests(chain)

    @functools.cached_property
    def of_strategy(self) -> tuple[Chain, Choices] | None:
        """The chain with the options of the configuration's strategy, and what the strategy may
        choose of it, whatever the budget; None for the library's own."""
        config = self._context.config
        strategy = strategy_of(config.strategy)
        if strategy is None:
            return None
        chain = self._context.chain(strategy.options)
        return chain, strategy.choices(chain, config.solver)

    @functools.cached_property
    def bounding(self) -> Chain:
        """The chain with all options of the strategy, and all groups of the root program."""
        if self.of_strategy is None:
            return self.full
        return self._context.costs.with_nests(self.of_strategy[0])

    @functools.cached_property
    def standard(self) -> Sequence[StandardPlan]:
        """The plans that a user could write by hand."""
        return [StandardPlan(self._context, *plan) for plan in self._context.standard_plans()]
