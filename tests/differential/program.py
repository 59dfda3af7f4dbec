"""What a program of the table is: how it is made, planned, run, and what is seen of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import jax
import numpy as np
import optax
from programs import peak_bytes_of

import jax_hremat
from jax_hremat import FittedStep, PlannerConfig, RematPlan, SearchConfig
from jax_hremat._xla.compile import with_quick_code
from jax_hremat._xla.target import Target, get_target

Options = Mapping[str, Any]


@dataclass(frozen=True)
class Setting:
    """How programs are planned and compiled. All but the first are the arguments of a planner."""

    compiler_options: Mapping[str, Any]
    target: Target
    config: PlannerConfig

    @staticmethod
    def make(*, cost: Any = "analytic", cache_dir: Any = None) -> Setting:
        """Few candidates, machine code made quickly: what is compared does not depend on it."""
        target = with_quick_code(get_target("cpu"), "")
        config = PlannerConfig(
            search=SearchConfig(max_packings=1, max_saved_sets=0, max_segments=1),
            max_rounds=0,
            floor_rounds=1,
            cost=cost,
            cache_dir=cache_dir,
        )
        return Setting(dict(target.compiler_options), target, config)

    def planning(self, budget: int | float) -> dict[str, Any]:
        """The planner's keywords."""
        return dict(budget=budget, target=self.target, config=self.config)


@dataclass(frozen=True)
class Outcome:
    """What is seen of a run.

    Attributes:
        seen: A pytree of all that a user could look at: values, gradients, state, effects.
        peak_bytes: Of the step, compiled by itself as a user does; None where the budget is not
            of one such step.
    """

    seen: Any
    peak_bytes: int | None = None


class Case(Protocol):
    """A program with its data."""

    @property
    def tolerance(self) -> float:
        """Relative to the largest value of an array."""
        ...

    def run(self, planned: Any, setting: Setting) -> Outcome:
        """Use the program once; `planned` is what `plan` returned, None for the original.

        Raises:
            InfeasibleBudgetError: It is planned when it is first called, and the budget is small.
        """
        ...

    def plan(self, budget: int | float, setting: Setting) -> Any:
        """Raises: InfeasibleBudgetError."""
        ...

    def plans(self, planned: Any) -> Sequence[RematPlan]:
        """Those that were made for it."""
        ...


@dataclass(frozen=True)
class Program:
    """One row of the table.

    Attributes:
        make: Returns the case, with data of its own.
        name: Says what is peculiar to it.
        quick: Whether it is in the default suite.
        context: Settings of JAX to make, plan and run it in.
        cost: Where costs come from; on a mesh, they are compiled.
    """

    make: Callable[[], Case]
    name: str
    quick: bool = False
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    cost: str = "analytic"


def program(**options: Any) -> Callable[[Callable[[], Case]], Program]:
    """Makes a row of a function that returns a case; the function's name is the program's."""
    return lambda make: Program(make, make.__name__, **options)


def programs_in(*modules: Any) -> dict[str, Program]:
    """The rows of some tables, by area and name."""
    return {
        f"{module.__name__.rpartition('.')[2]}-{row.name}": row
        for module in modules
        for row in vars(module).values()
        if isinstance(row, Program)
    }


@dataclass(frozen=True)
class Loss:
    """A loss function of arrays.

    Attributes:
        fun: The loss.
        args, kwargs: What it is called with.
        argnums, has_aux: As in `jax.grad`.
        tolerance: As of `Case`.
        effects: What the calls have left behind, to be looked at once after each run.
        out_shardings: Of the step, where the arguments lie on a mesh.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    argnums: int | tuple[int, ...] = 0
    has_aux: bool = False
    tolerance: float = 2e-5
    effects: Callable[[], Any] = lambda: None
    out_shardings: Any = None

    def plan(self, budget: int | float, setting: Setting) -> Any:
        how = dict(argnums=self.argnums, has_aux=self.has_aux, **setting.planning(budget))
        plan = jax_hremat.plan_remat(self.fun, **how)(*self.args, **self.kwargs)
        return jax_hremat.apply_plan(self.fun, plan)

    def plans(self, planned: Any) -> Sequence[RematPlan]:
        return planned.plans

    def run(self, planned: Any, setting: Setting) -> Outcome:
        step = jax.jit(
            jax.value_and_grad(planned or self.fun, self.argnums, self.has_aux),
            compiler_options=dict(setting.compiler_options),
            out_shardings=self.out_shardings,
        )
        compiled = step.lower(*self.args, **self.kwargs).compile()
        seen = jax.block_until_ready(compiled(*self.args, **self.kwargs))
        jax.effects_barrier()
        return Outcome((seen, self.effects()), peak_bytes_of(compiled))


class Wrap:
    """A planner, or nothing, to be called on functions and classes.

    Attributes:
        made: What it has planned.
        setting: To compile with.
    """

    def __init__(
        self, setting: Setting, planner: Callable[..., Any] | None = None, budget: float = 0
    ) -> None:
        self.made: list[Any] = []
        self.setting = setting
        self._planner = planner
        self._budget = budget

    def __call__(self, fun: Any, planner: Callable[..., Any] | None = None, **options: Any) -> Any:
        """Plan with the case's planner or another one."""
        if self._planner is None:
            return fun
        options |= self.setting.planning(self._budget)
        self.made.append((planner or self._planner)(fun, **options))
        return self.made[-1]

    def jit(self, fun: Any, **options: Any) -> Any:
        """`jax.jit` as a plan needs it on the CPU."""
        return jax.jit(fun, compiler_options=dict(self.setting.compiler_options), **options)


@dataclass(frozen=True)
class Uses:
    """Anything that a user does with functions or classes that are planned when first called.

    Attributes:
        use: Wraps them with what it is given, and returns a pytree or an `Outcome`.
        planner: What checkpoints.
        effects: As of `Loss`.
    """

    use: Callable[[Wrap], Any]
    planner: Callable[..., Any] = jax_hremat.hremat
    tolerance: float = 2e-5
    effects: Callable[[], Any] = lambda: None

    def plan(self, budget: int | float, setting: Setting) -> Wrap:
        return Wrap(setting, self.planner, budget)

    def plans(self, planned: Wrap) -> Sequence[RematPlan]:
        found: list[RematPlan] = []
        for made in planned.made:
            found += made.hremat_plans() if isinstance(made, type) else made.plans
        return found

    def run(self, planned: Wrap | None, setting: Setting) -> Outcome:
        outcome = self.use(planned or Wrap(setting))
        if not isinstance(outcome, Outcome):
            outcome = Outcome(outcome)
        jax.block_until_ready(outcome.seen)
        jax.effects_barrier()
        return replace(outcome, seen=(outcome.seen, self.effects()))


@dataclass(frozen=True)
class Fitted:
    """A whole training step, run a few times.

    Attributes:
        make_step: From a loss to a step of a state and a batch.
        loss: The loss.
        state: Returns a new state, which the step takes the memory of.
        batch: Every step's.
    """

    make_step: Callable[..., Any]
    loss: Callable[..., Any]
    state: Callable[[], Any]
    batch: Any
    has_aux: bool = False
    donate_argnums: int | tuple[int, ...] = 0
    tolerance: float = 1e-4
    steps: int = 3

    def plan(self, budget: int | float, setting: Setting) -> FittedStep:
        return jax_hremat.fit_step(
            self.make_step,
            self.loss,
            has_aux=self.has_aux,
            donate_argnums=self.donate_argnums,
            **setting.planning(budget),
        )(self.state(), self.batch)

    def plans(self, planned: FittedStep) -> Sequence[RematPlan]:
        return (planned.plan,)

    def run(self, planned: FittedStep | None, setting: Setting) -> Outcome:
        options = dict(setting.compiler_options)
        if planned is None:
            fun = self.make_step(self.loss)
        else:
            fun = self.make_step(jax_hremat.apply_plan(self.loss, planned.plan))
        own = jax.jit(fun, donate_argnums=self.donate_argnums, compiler_options=options)
        compiled = own.lower(self.state(), self.batch).compile()
        step = compiled if planned is None else planned.step
        state, seen = self.state(), []
        for _ in range(self.steps):
            state, out = step(state, self.batch)
            seen.append(out)
        return Outcome((state, seen), peak_bytes_of(compiled))


@dataclass(eq=False)
class Log:
    """What callbacks of a run wrote down. Debugging effects may run again and in any order, so
    that only which values there were is the same."""

    entries: list[Any] = field(default_factory=list)

    def __call__(self, *values: Any) -> None:
        self.entries.append(tuple(np.asarray(v).round(3).tolist() for v in values))

    def taken(self) -> list[str]:
        """Each different entry once; the log is empty after it."""
        found = sorted({repr(entry) for entry in self.entries})
        self.entries.clear()
        return found


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0, scale: float = 0.5) -> jax.Array:
    """Of a normal distribution, the same at each call."""
    values = np.random.default_rng((seed, *shape)).normal(size=shape) * scale
    return jax.numpy.asarray(values, dtype)


# Activations well above weights, so that there is something to recompute.
WIDTH, BATCH = 8, 64


def weights(count: int = 4, width: int = WIDTH, dtype: Any = np.float32) -> jax.Array:
    return normal(count, width, width, dtype=dtype)


def rows(batch: int = BATCH, width: int = WIDTH, dtype: Any = np.float32) -> jax.Array:
    return normal(batch, width, dtype=dtype, seed=1)


def layers(layer: Callable[..., Any]) -> Callable[[Any, Any], jax.Array]:
    """A loss of residual layers `layer(x, w)`."""

    def loss(ws: Any, x: Any) -> jax.Array:
        for w in ws:
            x = x + layer(x, w)
        return (x * x).mean()

    return loss


def layered(layer: Callable[..., Any], **options: Any) -> Loss:
    """The case of such a loss at the usual arguments."""
    return replace(Loss(layers(layer), (list(weights()), rows())), **options)


def adam_state(params: Any, optimizer: optax.GradientTransformation) -> Any:
    """Copies, since steps take the memory."""
    return jax.tree.map(jax.numpy.array, (params, optimizer.init(params)))
