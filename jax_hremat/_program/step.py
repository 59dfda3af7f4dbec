"""What a budget bounds: a function around the planned program, compiled as a whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jax_hremat._compiler.cudnn import with_cudnn
from jax_hremat._program.emit import FlatFunction
from jax_hremat._program.mesh import DeviceMesh, put, shardings_on_one_mesh
from jax_hremat._program.trace import Program, abstract, abstract_leaf, trace_loss
from jax_hremat._shared import compat
from jax_hremat._shared.errors import UnsupportedProgramError

LossFunction = Callable[..., Any]
MakeStep = Callable[[LossFunction], Callable[..., Any]]

_MARK = "hremat_loss"


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A function to compile around any body that computes a program.

    Attributes:
        program: The program that is planned.
        around: From a flat body of the program to the flat function that is compiled.
        avals: Arguments of that function.
        input_names: A readable path for each.
        donated: Positions of those whose memory the results may take over.
        calls: How often it runs the program.
        traced: The jaxpr of a step that is more than the program and its backward.

    Arguments that lie on a mesh of several devices say so in their `sharding`; what is compiled is
    then the program of one of them.
    """

    program: Program
    around: Callable[[FlatFunction], Callable[..., Any]]
    avals: tuple[jax.ShapeDtypeStruct, ...]
    input_names: tuple[str, ...]
    donated: tuple[int, ...] = ()
    calls: int = 1
    traced: Any = None

    @property
    def mesh(self) -> DeviceMesh | None:
        """The devices, where there are several."""
        shardings = (aval.sharding for aval in self.avals if aval.sharding is not None)
        return next(map(DeviceMesh.of, shardings), None)


def own_step(program: Program) -> Step:
    """The program with its backward and nothing else: `Program.step`.

    On a mesh, each gradient lies as its argument does, which is where an optimizer wants it. Where
    it is not known how the arguments lie, the step is that of one device.
    """
    inputs = program.in_avals
    if program.is_placed:
        pairs = zip(inputs, program.shardings, strict=True)
        inputs = tuple(aval.update(sharding=sharding) for aval, sharding in pairs)

    def around(body: FlatFunction) -> Callable[..., Any]:
        step = program.step(body)

        def placed(*flat: Any) -> Any:
            value, aux, gradients = step(*flat)
            lies = [program.shardings[i] for i in program.differentiated]
            return value, aux, [put(g, s) for g, s in zip(gradients, lies, strict=True)]

        return placed if program.is_placed else step

    return Step(
        program=program,
        around=around,
        avals=(*inputs, *program.cotangent_avals),
        input_names=program.input_names,
    )


def training_step(
    make_step: MakeStep,
    loss_fn: LossFunction,
    args: Sequence[Any],
    *,
    argnums: tuple[int, ...],
    has_aux: bool,
    donate_argnums: tuple[int, ...],
    opens_checkpoints: bool = False,
) -> Step:
    """A user's whole training step, around the loss that it differentiates.

    The step is traced once with a loss that notes what it is called with.

    Args:
        make_step: From a loss function to the step.
        loss_fn: The loss.
        args: Arguments of the step, arrays or `ShapeDtypeStruct`s in any pytrees.
        argnums: Arguments of the loss that the step differentiates.
        has_aux: Whether the loss returns `(loss, aux)`.
        donate_argnums: Arguments of the step that are donated.
        opens_checkpoints: As in `trace_loss`.

    Raises:
        UnsupportedProgramError: The step does not call the loss, or with different structures or
            shapes; what `trace_loss` refuses.
    """
    leaves_with_path, in_tree = jax.tree_util.tree_flatten_with_path(tuple(args))
    names = tuple("args" + jax.tree_util.keystr(path) for path, _ in leaves_with_path)
    avals = tuple(abstract_leaf(leaf) for _, leaf in leaves_with_path)
    shardings_on_one_mesh(names, avals)
    calls: list[tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]] = []

    def noting_loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((loss_args, loss_kwargs))
        calls.append((tree, tuple(abstract_leaf(leaf) for leaf in leaves)))
        return _marked(loss_fn(*loss_args, **loss_kwargs), has_aux)

    unplaced = jax.tree.unflatten(in_tree, [abstract(aval) for aval in avals])
    with with_cudnn():
        traced = jax.make_jaxpr(make_step(noting_loss))(*unplaced)
    if not calls:
        raise UnsupportedProgramError(
            "the step that `make_step` returned does not call the loss function it was given, so "
            "there is nothing to plan. Differentiate the argument of `make_step`, not the loss "
            "function itself: `lambda loss_fn: lambda state, batch: … jax.grad(loss_fn) …`"
        )
    if any(call != calls[0] for call in calls):
        found = sorted({", ".join(f"{s.dtype}{list(s.shape)}" for s in c[1]) for c in calls})
        raise UnsupportedProgramError(
            "the step calls the loss function with arguments of different structures or shapes: "
            f"{'; '.join(found)}. One plan is for one of them; make the calls alike"
        )
    tree, shapes = calls[0]
    loss_args, loss_kwargs = jax.tree.unflatten(tree, shapes)
    program = trace_loss(
        loss_fn,
        loss_args,
        loss_kwargs,
        argnums=argnums,
        has_aux=has_aux,
        opens_checkpoints=opens_checkpoints,
    )

    def around(body: FlatFunction) -> Callable[..., Any]:
        def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
            leaves = jax.tree.leaves((loss_args, loss_kwargs))
            return jax.tree.unflatten(program.out_tree, body(*leaves))

        step = make_step(loss)
        return lambda *flat: step(*jax.tree.unflatten(in_tree, flat))

    return Step(
        program=program,
        around=around,
        avals=avals,
        input_names=names,
        donated=tuple(
            i for i, (path, _) in enumerate(leaves_with_path) if path[0].idx in donate_argnums
        ),
        calls=max(1, _count_marks(traced)),
        traced=traced,
    )


def _marked(out: Any, has_aux: bool) -> Any:
    """The loss with an integer zero of a name added: an equation that can be counted, since
    nothing of it is differentiated."""
    loss, *aux = out if has_aux else (out,)
    zero = checkpoint_name(jnp.zeros((), jnp.int32), _MARK)
    loss = loss + zero.astype(loss.dtype)
    return (loss, *aux) if has_aux else loss


def _count_marks(jaxpr: Any) -> int:
    """Runs of the marked equation; those in a `while` count once."""
    total = 0
    for eqn in compat.open_jaxpr(jaxpr).eqns:
        if eqn.primitive.name == "name" and eqn.params["name"] == _MARK:
            total += 1
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(_count_marks, compat.inner_jaxprs(eqn)))
    return total
