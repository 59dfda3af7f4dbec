"""What a benchmark problem is, and how to ask for one by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import flax.linen as nn
import jax
import jax.numpy as jnp

Size = Literal["full", "small", "tiny"]
Remat = Literal["block", "dots_saveable", "dots_with_no_batch_dims_saveable"]

_POLICIES: Mapping[str, Callable[..., bool] | None] = {
    "block": None,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "dots_with_no_batch_dims_saveable": (jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
}


@dataclass(frozen=True)
class Problem:
    """A loss function together with the arguments it is to be differentiated at.

    Attributes:
        name: The name the problem was asked for by.
        loss_fn: Returns a scalar loss, or `(loss, aux)` if `has_aux`.
        args: The arguments of `loss_fn`, as pytrees of `jax.ShapeDtypeStruct`.
        has_aux: Whether `loss_fn` returns an auxiliary output.
        argnums: The position of the differentiated argument.
        description: Batch sizes and model dimensions, in words.
        init: Builds real arguments from a PRNG key.
    """

    name: str
    loss_fn: Callable[..., Any]
    args: tuple[Any, ...]
    has_aux: bool
    argnums: int = 0
    description: str = ""
    init: Callable[[jax.Array], tuple[Any, ...]] | None = field(default=None, repr=False)

    @property
    def value_and_grad(self) -> Callable[..., Any]:
        """`loss_fn` with its gradient, ready for `jax.jit`."""
        return jax.value_and_grad(self.loss_fn, argnums=self.argnums, has_aux=self.has_aux)

    def concrete(self, seed: int = 0) -> tuple[Any, ...]:
        """Returns real arguments: initialised parameters and random data.

        Args:
            seed: Seeds the parameters, the data and any dropout key.
        """
        if self.init is None:
            raise ValueError(f"problem {self.name!r} has no initialiser")
        # Runs once, so compile it quickly rather than well.
        init = jax.jit(self.init, compiler_options={"xla_backend_optimization_level": 0})
        return init(jax.random.key(seed))


class Builder(Protocol):
    """Builds a problem from keyword options: the model's config fields and `batch`."""

    def __call__(self, name: str, remat: Remat | None, **options: Any) -> Problem: ...


_REGISTRY: dict[str, tuple[Builder, Mapping[Size, Mapping[str, Any]]]] = {}


def register(name: str, builder: Builder, sizes: Mapping[Size, Mapping[str, Any]]) -> None:
    """Makes a problem known to `make`.

    Args:
        name: The name to ask for it by.
        builder: Called as `builder(name, remat, **options)`.
        sizes: The options of each size.
    """
    _REGISTRY[name] = (builder, sizes)


def names() -> tuple[str, ...]:
    """Returns the names `make` knows."""
    return tuple(_REGISTRY)


def make(
    name: str,
    size: Size = "full",
    *,
    remat: Remat | None = None,
    dropout: float = 0.0,
    **overrides: Any,
) -> Problem:
    """Builds a problem; nothing is allocated until `Problem.concrete` is called.

    Args:
        name: One of `names()`.
        size: "full" for a realistic training step, "small" for seconds and "tiny" for
            a fraction of a second on a CPU.
        remat: Wraps each of the model's blocks in `flax.linen.remat`: "block" keeps
            nothing inside a block, the others name a `jax.checkpoint_policies` policy.
        dropout: Dropout rate; when positive the batch carries a PRNG key.
        **overrides: `batch`, or fields of the model's config such as `layers` or `dtype`.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown problem {name!r}; known: {', '.join(_REGISTRY)}")
    builder, sizes = _REGISTRY[name]
    if size not in sizes:
        raise ValueError(f"unknown size {size!r}; known: {', '.join(sizes)}")
    options = {**sizes[size], "dropout": dropout, **overrides}
    if "dtype" in options:
        options["dtype"] = jnp.dtype(options["dtype"])
    return builder(name, remat, **options)


def with_remat(
    block: type[nn.Module], remat: Remat | None, *, prevent_cse: bool = True
) -> type[nn.Module]:
    """Returns `block`, checkpointed in `flax.linen.remat` unless `remat` is None.

    Args:
        block: The module to wrap.
        remat: What to keep inside it, as for `make`.
        prevent_cse: Whether to keep the compiler from merging the recompute with the first
            forward; inside a scan it need not be kept from that.
    """
    if remat is None:
        return block
    if remat not in _POLICIES:
        raise ValueError(f"unknown remat {remat!r}; known: {', '.join(_POLICIES)}")
    return nn.remat(block, policy=_POLICIES[remat], prevent_cse=prevent_cse)


def dropout_rngs(batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the `rngs` to apply a model with: the batch's dropout key, if it has one."""
    return {"dropout": batch["dropout_key"]} if "dropout_key" in batch else {}


def shapes_of(init: Callable[[jax.Array], tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns what `init` would build, as `jax.ShapeDtypeStruct`s."""
    return jax.eval_shape(init, jax.eval_shape(lambda: jax.random.key(0)))
