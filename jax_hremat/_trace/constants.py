"""Values that depend on no argument, such as a causal mask made of two iotas.

`jax.checkpoint` puts a barrier before what a recomputation reads of the first run. A value made of
constants alone reads nothing, so XLA merges every copy of it, in all layers and both passes, into
one. Where it is fused into its readers, it takes no memory. Where it has to be an array, because it
is kept under a name or is an input of a checkpointed region, that one array is alive from the first
layer's forward to its backward, whatever the other layers do. So such values are never kept,
and a region makes its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jax_hremat._jax.jaxprs import variables
from jax_hremat._primitives.elementwise import FUSIBLE


def constant_makers(jaxpr: Any) -> Mapping[Any, int]:
    """The variables of an open jaxpr that operations which XLA fuses make of literals alone, each
    with the position of the equation that makes it.

    What is made of captured arrays is not among them: a part of the program emitted by itself is
    not given these arrays.
    """
    makers: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        inputs = variables(eqn.invars)
        if eqn.primitive.name in FUSIBLE and not eqn.effects and all(v in makers for v in inputs):
            makers.update(dict.fromkeys(eqn.outvars, index))
    return makers
