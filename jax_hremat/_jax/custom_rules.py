"""Custom derivative rules: the forward rule of a `custom_vjp` taken out of it, and put back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src import custom_derivatives, linear_util
from jax._src.interpreters import ad as ad_internals
from jax._src.interpreters.ad import CustomVJPException as CustomVJPException
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from jax_hremat._jax.equations import bind_equation, context_of
from jax_hremat._jax.meshes import typed_struct


@dataclass(frozen=True, slots=True)
class ForwardRule:
    """The forward rule of a `custom_vjp` call, for a given set of differentiated inputs.

    Attributes:
        eqn: The call.
        moving: Which of its inputs are differentiated.
        num_consts: The first `num_consts` inputs are values that the function closes over.
        jaxpr: Maps the other inputs to the residuals that are not inputs themselves, followed by
            the outputs.
        consts: The jaxpr's constants.
        sources: For each residual, the position of the input that it equals, or None.
    """

    eqn: Any
    moving: tuple[bool, ...]
    num_consts: int
    jaxpr: Any
    consts: Sequence[Any]
    sources: tuple[int | None, ...]


def is_custom_vjp(eqn: Any) -> bool:
    """Whether the equation is a `jax.custom_vjp` call."""
    return eqn.primitive is jex_core.primitives.custom_vjp_call_p


def num_closed_over(eqn: Any) -> int:
    """How many of the first inputs of a `custom_vjp` call are values the function closes over."""
    return eqn.params["num_consts"] if is_custom_vjp(eqn) else 0


def asks_what_moves(eqn: Any) -> bool:
    """Whether the equation is a custom rule that is told which of its inputs are differentiated
    (`symbolic_zeros`), and may fail if told anything but what JAX itself would tell it."""
    return bool(eqn.params.get("symbolic_zeros", False))


def stops_tangents(eqn: Any, moving: Sequence[bool]) -> bool:
    """Whether the equation is a `jax.custom_jvp` call whose rule says that none of the results has
    a tangent (`SymbolicZero`).

    Args:
        eqn: An equation.
        moving: Which of its inputs are differentiated.
    """
    if eqn.primitive is not jex_core.primitives.custom_jvp_call_p or not any(moving):
        return False
    call = jax.make_jaxpr(lambda *inputs: bind_equation(eqn, inputs))
    closed = call(*(typed_struct(v.aval) for v in eqn.invars))
    _, has_tangent = ad_internals.jvp_jaxpr(closed, list(moving), instantiate=False)
    return not any(has_tangent)


def forward_rule(eqn: Any, moving: Sequence[bool]) -> ForwardRule | None:
    """The forward rule of a `custom_vjp` call; None for anything else.

    Args:
        eqn: An equation.
        moving: Which of its inputs are differentiated.
    """
    if not is_custom_vjp(eqn):
        return None
    num_consts = num_closed_over(eqn)
    jaxpr, consts = eqn.params["fwd_jaxpr_thunk"].call_wrapped(*moving[num_consts:])
    _, _, sources = eqn.params["out_trees"]()
    return ForwardRule(eqn, tuple(moving), num_consts, jaxpr, consts, tuple(sources))


def bind_attached(
    rule: ForwardRule, inputs: Sequence[Any], outputs: Sequence[Any], residuals: Sequence[Any]
) -> list[Any]:
    """A `custom_vjp` call whose forward rule has been evaluated already.

    Where it is differentiated, it returns `outputs`, and the backward rule computes the cotangents
    of `inputs` from `residuals`. It behaves like the original call if values that the function
    closes over are differentiated, or if the rule asks which inputs are (`symbolic_zeros`) and they
    differ from those the rule was evaluated for. Where it is not differentiated, it is the function
    applied to `inputs`.
    """
    params = rule.eqn.primitive.get_bind_params(rule.eqn.params)
    function, forward, backward = params.pop("subfuns")
    trees = params.pop("out_trees")
    made = [*outputs, *residuals]
    # `functions_key` tells these functions apart by what they close over, so that has no values.
    num_outputs, num_made = len(outputs), len(made)
    evaluated_for, num_consts = rule.moving, rule.num_consts
    asks_which = asks_what_moves(rule.eqn)

    def attached(*args: Any) -> list[Any]:
        return function.call_wrapped(*args[num_made:])

    def attached_forward(*pairs: Any) -> list[Any]:
        values, moving = pairs[::2], pairs[2 * num_made + 1 :: 2]
        as_evaluated = moving == evaluated_for or not asks_which
        if as_evaluated and not any(moving[:num_consts]):
            return [*values[num_outputs:num_made], *values[:num_outputs]]
        results = iter(forward.call_wrapped(*pairs[2 * num_made :]))
        sources = trees()[2]
        given = values[num_made:]
        return [*(next(results) if i is None else given[i] for i in sources), *results]

    def attached_trees() -> tuple[Any, Any, list[None]]:
        out_tree, residual_tree, sources = trees()
        return out_tree, residual_tree, [None] * len(sources)

    def wrapped(fun: Callable[..., Any], like: Any) -> Any:
        return linear_util.wrap_init(fun, debug_info=like.debug_info.with_unknown_names())

    subfuns = (
        wrapped(attached, function),
        wrapped(attached_forward, forward),
        # `made` gets no cotangents.
        custom_derivatives._handle_consts_in_bwd(backward, [jax.typeof(x) for x in made]),
    )
    with context_of(rule.eqn):
        return rule.eqn.primitive.bind(
            *made, *inputs, subfuns=subfuns, out_trees=attached_trees, **params
        )


DETACH = "hremat_detach"


_detach_p = jex_core.Primitive(DETACH)
_detach_p.multiple_results = True
_detach_p.def_impl(lambda *values: list(values))
_detach_p.def_abstract_eval(lambda *avals: list(avals))


def detach(*values: Any) -> list[Any]:
    """The values, without the tangents of the innermost differentiation around them.

    `jax.lax.stop_gradient`, in contrast, removes those of every differentiation around it. All
    values form one operation: where one of them is differentiated, all of them are detached.
    """
    return _detach_p.bind(*values)


def _detach_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return list(primals), [ad.Zero(jax.typeof(x).to_tangent_aval()) for x in primals]


ad.primitive_jvps[_detach_p] = _detach_jvp
batching.primitive_batchers[_detach_p] = lambda values, dims: (detach(*values), dims)
mlir.register_lowering(_detach_p, lambda _, *values: values)
