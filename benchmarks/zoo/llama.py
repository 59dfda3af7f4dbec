"""A Llama-style decoder-only language model, its layers unrolled or scanned over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, register, with_remat
from benchmarks.zoo.tasks import next_token_problem

_init = nn.initializers.normal(0.02)

# Cosines and sines, each of shape `(length, 1, head_dim / 2)`.
Rotation = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class LlamaConfig:
    """Dimensions of a Llama-style model.

    Attributes:
        layers: Number of Transformer layers.
        width: Size of the residual stream.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values; a divisor of `heads`.
        ff: Size of the hidden feed-forward layer.
        context: Sequence length.
        vocab: Vocabulary size.
        dropout: Rate for the embedding, the attention probabilities and the residuals.
        dtype: Type of the activations; parameters are float32.
        scan: Whether the layers are one loop over stacked parameters.
    """

    layers: int = 32
    width: int = 2048
    heads: int = 16
    kv_heads: int = 4
    ff: int = 5632
    context: int = 1024
    vocab: int = 32000
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16
    scan: bool = False


def rotation_of(length: int, head_dim: int) -> Rotation:
    """Returns the rotary embedding's rotation at each of the first `length` positions."""
    rates = 10000.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))
    angles = (np.arange(length)[:, None] * rates)[:, None, :]
    return jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates the pairs of a head's two halves, of `x` `(batch, length, heads, head_dim)`."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which several heads of queries share one of keys and values."""

    config: LlamaConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        cfg = self.config
        batch, length, _ = x.shape
        head_dim = cfg.width // cfg.heads

        def project(name: str, heads: int) -> jax.Array:
            dense = nn.DenseGeneral(
                (heads, head_dim), use_bias=False, dtype=cfg.dtype, kernel_init=_init, name=name
            )
            return dense(x)

        query = rotate(project("query", cfg.heads), rotation) * head_dim**-0.5
        query = query.reshape(batch, length, cfg.kv_heads, cfg.heads // cfg.kv_heads, head_dim)
        key = rotate(project("key", cfg.kv_heads), rotation)
        value = project("value", cfg.kv_heads)
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key).astype(jnp.float32)
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        scores = jnp.where(causal, scores, jnp.finfo(jnp.float32).min)
        weights = nn.softmax(scores, axis=-1).astype(cfg.dtype)
        weights = nn.Dropout(cfg.dropout, deterministic=not self.train)(weights)
        context = jnp.einsum("bhgqk,bkhd->bqhgd", weights, value).reshape(x.shape)
        out = nn.Dense(cfg.width, use_bias=False, dtype=cfg.dtype, kernel_init=_init, name="out")
        return out(context)


class SwiGLU(nn.Module):
    """The position-wise feed-forward layer, gated."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config

        def dense(features: int, name: str) -> nn.Module:
            return nn.Dense(features, use_bias=False, dtype=cfg.dtype, kernel_init=_init, name=name)

        hidden = nn.silu(dense(cfg.ff, "gate")(x)) * dense(cfg.ff, "up")(x)
        return dense(cfg.width, "down")(hidden)


class Layer(nn.Module):
    """Attention and feed-forward, both pre-norm residual."""

    config: LlamaConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, rotation: Rotation) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        h = nn.RMSNorm(dtype=cfg.dtype, name="norm_attention")(x)
        x = x + dropout(GroupedQueryAttention(cfg, self.train, name="attention")(h, rotation))
        h = nn.RMSNorm(dtype=cfg.dtype, name="norm_ff")(x)
        return x + dropout(SwiGLU(cfg, name="ff")(h))


class Llama(nn.Module):
    """The whole model, from tokens to float32 logits.

    The parameters of the layers are `layer_0` and so on, or, scanned, `layers`, with the
    layer as the first axis of each.
    """

    config: LlamaConfig
    layer: type[nn.Module] = Layer
    train: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        x = nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype, embedding_init=_init, name="tokens")(
            tokens
        )
        x = nn.Dropout(cfg.dropout, deterministic=not self.train)(x)
        rotation = rotation_of(tokens.shape[1], cfg.width // cfg.heads)
        if cfg.scan:
            # Typed as if `in_axes` were a number only.
            lift: Any = nn.scan
            scan = lift(
                lambda layer, x, rotation: (layer(x, rotation), None),
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,
                length=cfg.layers,
            )
            x, _ = scan(self.layer(cfg, self.train, name="layers"), x, rotation)
        else:
            for i in range(cfg.layers):
                x = self.layer(cfg, self.train, name=f"layer_{i}")(x, rotation)
        x = nn.RMSNorm(dtype=cfg.dtype, name="norm")(x)
        head = nn.Dense(cfg.vocab, use_bias=False, dtype=cfg.dtype, kernel_init=_init, name="head")
        return head(x).astype(jnp.float32)


def llama_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds next-token prediction with a Llama-style model.

    The loss and the data are those of `next_token_problem`.

    Args:
        name: The problem's name.
        remat: How to wrap each Transformer layer, if at all.
        batch: Number of sequences.
        **config: Fields of `LlamaConfig`.
    """
    cfg = LlamaConfig(**config)
    model = Llama(cfg, with_remat(Layer, remat, prevent_cse=not cfg.scan))

    description = (
        f"Llama, {cfg.layers} {'scanned' if cfg.scan else 'unrolled'} layers, width {cfg.width}, "
        f"{cfg.heads} heads, {cfg.kv_heads} of keys and values, feed-forward {cfg.ff}, "
        f"batch {batch} x {cfg.context}, vocabulary {cfg.vocab}, {jnp.dtype(cfg.dtype).name}, "
        f"dropout {cfg.dropout}"
    )
    return next_token_problem(
        name,
        model,
        Llama(cfg, train=False),
        batch=batch,
        context=cfg.context,
        vocab=cfg.vocab,
        dropout=cfg.dropout,
        description=description,
    )


_FULL = dict(batch=4)
_SMALL = dict(layers=4, width=128, heads=4, kv_heads=2, ff=352, context=128, vocab=512, batch=4)
_TINY = dict(
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    ff=48,
    context=16,
    vocab=64,
    batch=2,
    dtype="float32",
)

register("llama", llama_problem, {"full": _FULL, "small": _SMALL, "tiny": _TINY})
register(
    "llama-scan",
    llama_problem,
    {
        "full": {**_FULL, "scan": True},
        "small": {**_SMALL, "scan": True},
        "tiny": {**_TINY, "scan": True},
    },
)
