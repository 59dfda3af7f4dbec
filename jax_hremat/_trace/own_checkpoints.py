"""The `jax.checkpoint`s that the user's program contains before anything is planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from jax_hremat._jax.checkpoints import is_checkpoint, policy_name
from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr
from jax_hremat._jax.scopes import source_line
from jax_hremat._plan.own_checkpoint import OwnCheckpoint


def own_checkpoints(jaxpr: Any) -> tuple[OwnCheckpoint, ...]:
    """The checkpoints of a jaxpr and of all bodies in it, in order of appearance."""
    found: Counter[tuple[str, str]] = Counter()
    for place, times in _places(jaxpr, 1):
        found[place] += times
    return tuple(OwnCheckpoint(source, keeps, n) for (source, keeps), n in found.items())


def _places(jaxpr: Any, times: int) -> Iterator[tuple[tuple[str, str], int]]:
    for eqn in open_jaxpr(jaxpr).eqns:
        if is_checkpoint(eqn):
            policy = eqn.params["policy"]
            keeps = "" if policy is None else policy_name(policy)
            yield (source_line(eqn), keeps), times
        trips = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for body in inner_jaxprs(eqn):
            yield from _places(body, times * trips)
