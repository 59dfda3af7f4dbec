"""GPT-2: a decoder-only Transformer language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, register, with_remat
from benchmarks.zoo.tasks import next_token_problem

_init = nn.initializers.normal(0.02)


@dataclass(frozen=True)
class GPTConfig:
    """Dimensions of a GPT-2 model.

    Attributes:
        layers: Number of Transformer blocks.
        width: Size of the residual stream.
        heads: Number of attention heads.
        context: Sequence length.
        vocab: Vocabulary size.
        dropout: Rate for the embedding, the attention probabilities and the residuals.
        dtype: Type of the activations; parameters are float32.
        tied: Whether the output head shares the token embedding.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocab: int = 50257
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16
    tied: bool = True


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a token sees itself and those before it."""

    config: GPTConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        length, head_dim = x.shape[1], cfg.width // cfg.heads
        qkv = nn.Dense(3 * cfg.width, dtype=cfg.dtype, kernel_init=_init, name="qkv")(x)
        query, key, value = (
            part.reshape(*part.shape[:2], cfg.heads, head_dim)
            for part in jnp.split(qkv, 3, axis=-1)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / jnp.sqrt(head_dim).astype(cfg.dtype)
        causal = jnp.tril(jnp.ones((length, length), dtype=bool))
        scores = jnp.where(causal, scores.astype(jnp.float32), jnp.finfo(jnp.float32).min)
        weights = nn.softmax(scores, axis=-1).astype(cfg.dtype)
        weights = nn.Dropout(cfg.dropout, deterministic=not self.train)(weights)
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape)
        return nn.Dense(cfg.width, dtype=cfg.dtype, kernel_init=_init, name="out")(context)


class MLP(nn.Module):
    """The position-wise feed-forward layer."""

    config: GPTConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        hidden = nn.Dense(4 * cfg.width, dtype=cfg.dtype, kernel_init=_init, name="up")(x)
        return nn.Dense(cfg.width, dtype=cfg.dtype, kernel_init=_init, name="down")(nn.gelu(hidden))


class Block(nn.Module):
    """A pre-norm Transformer block."""

    config: GPTConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_attention")(x)
        h = CausalSelfAttention(cfg, self.train, name="attention")(h)
        x = x + dropout(h)
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_mlp")(x)
        h = MLP(cfg, name="mlp")(h)
        return x + dropout(h)


class GPT(nn.Module):
    """GPT-2, from tokens to float32 logits."""

    config: GPTConfig
    block: type[nn.Module] = Block
    train: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        embed = nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype, embedding_init=_init, name="tokens")
        positions = self.param("positions", _init, (cfg.context, cfg.width))
        x = embed(tokens) + positions[: tokens.shape[1]].astype(cfg.dtype)
        x = nn.Dropout(cfg.dropout, deterministic=not self.train)(x)
        for i in range(cfg.layers):
            x = self.block(cfg, self.train, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=cfg.dtype, name="norm")(x)
        if cfg.tied:
            logits = embed.attend(x)
        else:
            head = nn.Dense(
                cfg.vocab, use_bias=False, dtype=cfg.dtype, kernel_init=_init, name="head"
            )
            logits = head(x)
        return logits.astype(jnp.float32)


def gpt_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds next-token prediction with a GPT-2 model.

    The loss and the data are those of `next_token_problem`.

    Args:
        name: The problem's name.
        remat: How to wrap each Transformer block, if at all.
        batch: Number of sequences.
        **config: Fields of `GPTConfig`.
    """
    cfg = GPTConfig(**config)
    model = GPT(cfg, with_remat(Block, remat))

    description = (
        f"GPT-2, {cfg.layers} layers, width {cfg.width}, {cfg.heads} heads, "
        f"batch {batch} x {cfg.context}, vocabulary {cfg.vocab}, {jnp.dtype(cfg.dtype).name}, "
        f"dropout {cfg.dropout}"
    )
    return next_token_problem(
        name,
        model,
        GPT(cfg, train=False),
        batch=batch,
        context=cfg.context,
        vocab=cfg.vocab,
        dropout=cfg.dropout,
        description=description,
    )


_TINY = dict(layers=2, width=32, heads=4, context=16, vocab=64, batch=2, dtype="float32")
_SMALL = dict(layers=4, width=128, heads=4, context=128, vocab=512, batch=4)

register(
    "gpt2-small",
    gpt_problem,
    {
        "full": dict(layers=12, width=768, heads=12, context=1024, vocab=50257, batch=16),
        "small": _SMALL,
        "tiny": _TINY,
    },
)
register(
    "gpt2-6",
    gpt_problem,
    {
        "full": dict(layers=6, width=768, heads=12, context=1024, vocab=2048, batch=16),
        "small": {**_SMALL, "layers": 6},
        "tiny": {**_TINY, "layers": 6},
    },
)
# What someone tries first.
register(
    "gpt2-2",
    gpt_problem,
    {
        "full": dict(layers=2, width=64, heads=4, context=64, vocab=256, batch=8, dtype="float32"),
        "small": _TINY,
        "tiny": _TINY,
    },
)
# Deep stacks of narrow layers: most of the memory is what passes between them.
_DEEP = dict(width=256, heads=4, context=256, vocab=2048, batch=64)

register(
    "gpt2-48",
    gpt_problem,
    {
        "full": {**_DEEP, "layers": 48},
        "small": {**_SMALL, "layers": 8},
        "tiny": {**_TINY, "layers": 3},
    },
)
register(
    "gpt2-96",
    gpt_problem,
    {
        "full": {**_DEEP, "layers": 96},
        "small": {**_SMALL, "layers": 16},
        "tiny": {**_TINY, "layers": 4},
    },
)
# As deep, with layers of a usual width and few tokens.
register(
    "gpt2-96-wide",
    gpt_problem,
    {
        "full": dict(layers=96, width=768, heads=12, context=512, vocab=50257, batch=2),
        "small": {**_SMALL, "layers": 16},
        "tiny": {**_TINY, "layers": 4},
    },
)
