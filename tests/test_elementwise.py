"""What JAX's elementwise functions are made of is known: that it is fused, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.scipy import special

from jax_hremat._jax.jaxprs import inner_jaxprs, open_jaxpr
from jax_hremat._primitives.elementwise import ELEMENT_FLOPS, FUSIBLE, MOVES

FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **{
        name: getattr(jax.nn, name)
        for name in """celu elu gelu hard_sigmoid hard_silu hard_tanh leaky_relu log_sigmoid mish
        relu relu6 selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid squareplus
        tanh""".split()
    },
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    **{
        name: getattr(jnp, name)
        for name in """abs arccos arcsin arctan cbrt cos cosh exp exp2 expm1 i0 log log10 log1p log2
        reciprocal sin sinc sinh sqrt square tan""".split()
    },
    "clipped": lambda x: jnp.clip(x, 0.1, 0.6),
    "power": lambda x: x**1.5 + x**3,
    "larger": lambda x: jnp.maximum(x, 0.3 * x * x),
    **{
        name: getattr(special, name)
        for name in "entr erf erfc erfinv expit gammaln i0e i1e log_ndtr logit ndtr ndtri".split()
    },
}


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations that contain no others."""
    for eqn in jaxpr.eqns:
        bodies = [*inner_jaxprs(eqn)]
        for body in bodies:
            yield from equations(open_jaxpr(body))
        if not bodies:
            yield eqn


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_elementwise_function_and_its_derivative_are_fused_and_have_a_cost(name: str) -> None:
    def both(x: jax.Array) -> Any:
        value, pull = jax.vjp(FUNCTIONS[name], x)
        return pull(value)

    found = [*equations(jax.make_jaxpr(both)(jnp.linspace(0.1, 0.9, 8)).jaxpr)]
    assert found
    # A barrier does nothing, and XLA drops it before it fuses.
    names = {eqn.primitive.name for eqn in found} - {"optimization_barrier"}
    assert names <= FUSIBLE
    assert names <= MOVES | ELEMENT_FLOPS.keys()
