"""A Llama in plain JAX whose attention is a fused kernel, as people train it on GPUs.

The values that MaxText names in a layer have its names here, so that its policies can be written
around a layer by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.gpu import attention as pallas_attention
from jax.sharding import NamedSharding

from benchmarks.zoo.base import Problem, shapes_of
from benchmarks.zoo.llama import rotate, rotation_of

Attention = Literal["cudnn", "pallas", "xla"]
Policy = Callable[..., Any]

# What the backward of a fused attention reads is made by these primitives.
_ATTENTION = frozenset(
    {"dot_product_attention_fwd", "dot_product_attention_fwd_wrapper", "pallas_call"}
)
_POLICIES = jax.checkpoint_policies


def _names(*names: str) -> Policy:
    return _POLICIES.save_only_these_names(*names)


def _attention(primitive: Any, *_: Any, **__: Any) -> bool:
    return primitive.name in _ATTENTION


_QKV = ("query_proj", "key_proj", "value_proj")
_BOTH = _POLICIES.save_from_both_policies

# By hand, around each layer; None keeps nothing. The first six are MaxText's.
HAND: Mapping[str, Policy | None] = MappingProxyType(
    {
        "full": None,
        "save_qkv_proj": _names(*_QKV),
        "save_dot_except_mlp": _names(*_QKV, "out_proj"),
        "save_dot_except_mlpwi": _names(*_QKV, "out_proj", "mlpwo"),
        "minimal": _POLICIES.dots_with_no_batch_dims_saveable,
        "minimal_with_context": _BOTH(
            _POLICIES.dots_with_no_batch_dims_saveable, _names("context")
        ),
        "attention": _attention,
        "attention, q, k, v, out": _BOTH(_attention, _names(*_QKV, "out_proj")),
        "attention, minimal": _BOTH(_attention, _POLICIES.dots_with_no_batch_dims_saveable),
    }
)


@dataclass(frozen=True)
class FusedConfig:
    """Dimensions, and how the attention and the layers are run.

    Attributes:
        layers: Number of layers.
        width: Size of the residual stream.
        heads: Attention heads of queries.
        kv_heads: Heads of keys and values.
        ff: Size of the gated feed-forward layer.
        vocab: Size of the vocabulary.
        batch: Sequences.
        context: Their length.
        attention: Which kernel: cuDNN's, a Pallas kernel, or products that XLA sees.
        scan: Whether the layers are a scan over stacked weights, or unrolled.
        dtype: Of weights and activations.
    """

    layers: int = 8
    width: int = 2048
    heads: int = 16
    kv_heads: int = 8
    ff: int = 5632
    vocab: int = 32000
    batch: int = 8
    context: int = 2048
    attention: Attention = "cudnn"
    scan: bool = True
    dtype: Any = field(default=jnp.bfloat16)

    @property
    def head_dim(self) -> int:
        """Size of a head."""
        return self.width // self.heads


def fused_problem(
    name: str, remat: str | None = None, sharding: NamedSharding | None = None, **options: Any
) -> Problem:
    """Next-token prediction, with a key of `HAND` around each layer, or nothing.

    Args:
        name: The problem's name.
        remat: A key of `HAND`.
        sharding: How activations lie on a mesh, as its users say of each layer's and of queries,
            keys and values, which cuDNN wants alike.
        **options: Fields of `FusedConfig`.
    """
    config = FusedConfig(**options)

    def placed(x: jax.Array) -> jax.Array:
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

    def layer(x: jax.Array, weights: Mapping[str, jax.Array]) -> jax.Array:
        return placed(_layer(config, x, weights, placed))

    if remat is not None:
        layer = jax.checkpoint(layer, policy=HAND[remat], prevent_cse=not config.scan)

    def loss(params: Mapping[str, Any], tokens: jax.Array) -> jax.Array:
        x = placed(params["embed"][tokens[:, :-1]])
        if config.scan:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, params["layers"])
        else:
            for weights in params["layers"]:
                x = layer(x, weights)
        logits = (_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
        return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()

    def init(key: jax.Array) -> tuple[Any, jax.Array]:
        return _weights(config, key), jax.random.randint(
            key, (config.batch, config.context + 1), 0, config.vocab
        )

    return Problem(
        name=name,
        loss_fn=loss,
        args=shapes_of(init),
        has_aux=False,
        init=init,
        description=(
            f"Llama in plain JAX with {config.attention} attention, {config.layers} "
            f"{'scanned' if config.scan else 'unrolled'} layers, width {config.width}, "
            f"{config.heads} heads, {config.kv_heads} of keys and values, feed-forward "
            f"{config.ff}, batch {config.batch} × {config.context}, vocabulary {config.vocab}, "
            f"{jnp.dtype(config.dtype).name}"
        ),
    )


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)
    return wide.astype(x.dtype) * scale


def _layer(
    config: FusedConfig,
    x: jax.Array,
    w: Mapping[str, jax.Array],
    placed: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    batch, length, _ = x.shape
    rotation = rotation_of(length, config.head_dim)

    def project(h: jax.Array, weight: jax.Array, name: str) -> jax.Array:
        heads = (h @ weight).reshape(batch, length, -1, config.head_dim)
        if name != "value_proj":
            heads = rotate(heads, rotation)
        return checkpoint_name(placed(heads), name)

    h = _norm(x, w["norm_attention"])
    query, key, value = (project(h, w[name], f"{name}_proj") for name in ("query", "key", "value"))
    context = checkpoint_name(attend(config, query, key, value), "context")
    x = x + checkpoint_name(context.reshape(x.shape) @ w["out"], "out_proj")
    h = _norm(x, w["norm_ff"])
    gate = checkpoint_name(h @ w["gate"], "mlpwi_0")
    up = checkpoint_name(h @ w["up"], "mlpwi_1")
    return x + checkpoint_name((jax.nn.silu(gate) * up) @ w["down"], "mlpwo")


def attend(config: FusedConfig, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal attention, several heads of queries sharing one of keys and values."""
    if config.attention != "pallas":
        return jax.nn.dot_product_attention(
            query, key, value, is_causal=True, implementation=config.attention
        )
    shared = config.heads // config.kv_heads
    key, value = (jnp.repeat(heads, shared, axis=2) for heads in (key, value))
    return pallas_attention.mha(
        query, key, value, None, sm_scale=config.head_dim**-0.5, causal=True
    )


def _weights(config: FusedConfig, key: jax.Array) -> dict[str, Any]:
    width, of_keys = config.width, config.kv_heads * config.head_dim
    shapes = {
        "query": (width, width),
        "key": (width, of_keys),
        "value": (width, of_keys),
        "out": (width, width),
        "gate": (width, config.ff),
        "up": (width, config.ff),
        "down": (config.ff, width),
    }

    def normal(seed: int, *shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.fold_in(key, seed), shape, config.dtype)

    def layer(seed: int) -> dict[str, jax.Array]:
        weights = {name: normal(8 * seed + i, *s) for i, (name, s) in enumerate(shapes.items())}
        ones = jnp.ones(width, config.dtype)
        return {**weights, "norm_attention": ones, "norm_ff": ones}

    layers: Any = [layer(seed) for seed in range(1, config.layers + 1)]
    if config.scan:
        layers = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    return {
        "embed": normal(1, config.vocab, width),
        "layers": layers,
        "norm": jnp.ones(width, config.dtype),
        "head": normal(2, width, config.vocab),
    }
