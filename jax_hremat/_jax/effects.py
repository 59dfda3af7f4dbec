"""Effects: what must run exactly once, and what a surrounding transformation must handle."""

from __future__ import annotations

from typing import Any

from jax._src import checkify, core, debugging
from jax._src import effects as effects_lib
from jax._src.state.types import RefEffect

from jax_hremat._jax.jaxprs import inner_equations, open_jaxpr


def ordered_effects(jaxpr: Any) -> tuple[str, ...]:
    """The ordered effects (of an ordered `io_callback` or `debug.print`)."""
    effects = open_jaxpr(jaxpr).effects
    return tuple(sorted(str(e) for e in effects if effects_lib.ordered_effects.contains(e)))


def named_axes(jaxpr: Any) -> frozenset[Any]:
    """Axes of a surrounding `vmap` or `shard_map` that the program communicates over."""
    effects = open_jaxpr(jaxpr).effects
    return frozenset(e.name for e in effects if isinstance(e, core.NamedAxisEffect))


# Effects allowing a recompute: unordered debugging callbacks, as under `jax.checkpoint`; and those
# that only name the axes, or the internal mutable arrays, that an operation works on.
_MAY_RUN_AGAIN = (
    debugging.DebugEffect,
    core.NamedAxisEffect,
    core.InternalMutableArrayEffect,
    RefEffect,
)


# Primitives that declare no effect but read state that is not among their arguments.
_HIDDEN_STATE = frozenset({"rng_uniform"})


def run_once_equation(eqn: Any) -> Any | None:
    """The equation, or the first one inside it at any depth, that must run exactly once because it
    has an effect not in `_MAY_RUN_AGAIN` or reads hidden state. None if it may be recomputed."""
    if not _must_run_once(eqn):
        return None
    inside = next(filter(_must_run_once, inner_equations(eqn)), None)
    return eqn if inside is None else run_once_equation(inside)


def _must_run_once(eqn: Any) -> bool:
    # An effect confined to the inside, as in a kernel, is not an effect of the equation.
    lasting = any(not isinstance(effect, _MAY_RUN_AGAIN) for effect in eqn.effects)
    return lasting or _draws_on_hidden_state(eqn)


def _draws_on_hidden_state(eqn: Any) -> bool:
    inside = inner_equations(eqn)
    return eqn.primitive.name in _HIDDEN_STATE or any(map(_draws_on_hidden_state, inside))


def unchecked_errors(jaxpr: Any) -> tuple[str, ...]:
    """Kinds of errors that are left to a surrounding `checkify`."""
    effects = open_jaxpr(jaxpr).effects
    errors = (e.error_type.__name__ for e in effects if isinstance(e, checkify.ErrorEffect))
    return tuple(sorted(set(errors)))
