"""Trip counts of loops in a jaxpr, where they follow from known scalars."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from jax_hremat._jax.jaxprs import Literal, open_jaxpr

# A scalar of a jaxpr: one number, an array with one for each grid point, or None if unknown.
Known = Any

_FUNCTIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "neg": operator.neg,
        "max": np.maximum,
        "min": np.minimum,
        "sign": np.sign,
        "lt": operator.lt,
        "le": operator.le,
        "gt": operator.gt,
        "ge": operator.ge,
        "eq": operator.eq,
        "ne": operator.ne,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "not": np.logical_not,
        # Rounds towards zero, unlike Python's `//`.
        "div": lambda a, b: np.trunc(np.true_divide(a, b)).astype(np.int64),
        "rem": np.fmod,
        "select_n": lambda which, *cases: np.choose(np.asarray(which, np.int64), cases),
        "convert_element_type": lambda a: a,
        "copy": lambda a: a,
        "stop_gradient": lambda a: a,
        "squeeze": lambda a: a,
        "reshape": lambda a: a,
        "multiple_of": lambda a: a,
    }
)


def scalar_result(eqn: Any, inputs: Sequence[Known]) -> Known:
    """The result of an equation on integer scalars, if all its inputs are known; else None."""
    function = _FUNCTIONS.get(eqn.primitive.name)
    out = eqn.outvars[0].aval
    if function is None or out.shape or out.dtype.kind not in "biu":
        return None
    return None if any(known is None for known in inputs) else function(*inputs)


def while_trips(eqn: Any, scalars: Sequence[Known]) -> Known:
    """How often a `while` runs its body. None unless the loop counts one carried scalar up to a
    known bound by a constant, as `fori_loop` does.

    Args:
        eqn: The `while`.
        scalars: What is known about each of its inputs.
    """
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carried = list(scalars[num_cond + num_body :])
    test = open_jaxpr(eqn.params["cond_jaxpr"])
    if len(test.eqns) != 1 or test.eqns[0].primitive.name != "lt":
        return None
    known = dict(zip(test.invars, [*scalars[:num_cond], *carried], strict=True))
    index, bound = test.eqns[0].invars
    if index not in test.invars[num_cond:]:
        return None
    number = test.invars[num_cond:].index(index)
    last = bound.val if isinstance(bound, Literal) else known[bound]
    step = _step(open_jaxpr(eqn.params["body_jaxpr"]), num_body, number)
    first = carried[number]
    if first is None or last is None or step is None or step <= 0:
        return None
    # A carried bound must not change.
    if not isinstance(bound, Literal) and bound in test.invars[num_cond:]:
        if not _stays(eqn, num_body, test.invars[num_cond:].index(bound)):
            return None
    return np.maximum(0, np.ceil((np.asarray(last) - first) / step))


def _step(body: Any, num_consts: int, number: int) -> Known:
    """The constant that the loop adds to a carried scalar; None if there is none."""
    made = body.outvars[number]
    carried = body.invars[num_consts + number]
    for eqn in body.eqns:
        if made in eqn.outvars and eqn.primitive.name == "add":
            literals = [v.val for v in eqn.invars if isinstance(v, Literal)]
            if len(literals) == 1 and any(v is carried for v in eqn.invars):
                return int(literals[0])
    return None


def _stays(eqn: Any, num_consts: int, number: int) -> bool:
    body = open_jaxpr(eqn.params["body_jaxpr"])
    return body.outvars[number] is body.invars[num_consts + number]
