"""An encoder-decoder Transformer, as for translation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, dropout_rngs, register, shapes_of, with_remat

_PAD, _START = 0, 1


@dataclass(frozen=True)
class EncDecConfig:
    """Dimensions of an encoder-decoder Transformer.

    Attributes:
        encoder_layers: Number of encoder layers.
        decoder_layers: Number of decoder layers.
        width: Size of the residual stream.
        heads: Number of attention heads.
        ff: Size of the hidden feed-forward layer.
        source: Source length.
        target: Target length.
        vocab: Vocabulary size, shared by source, target and output head.
        dropout: Rate for the embeddings, the attention probabilities and the residuals.
        dtype: Type of the activations; parameters are float32.
    """

    encoder_layers: int = 6
    decoder_layers: int = 6
    width: int = 512
    heads: int = 8
    ff: int = 2048
    source: int = 512
    target: int = 512
    vocab: int = 32000
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


def sinusoids(length: int, width: int) -> np.ndarray:
    """Returns fixed position encodings of shape `(length, width)`."""
    rates = 10000.0 ** -(np.arange(width // 2) / (width // 2))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


class Attention(nn.Module):
    """Multi-head attention of `x` to `memory`, where `mask` allows."""

    config: EncDecConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: jax.Array) -> jax.Array:
        cfg = self.config
        head_dim = cfg.width // cfg.heads

        def project(name: str, inputs: jax.Array) -> jax.Array:
            return nn.DenseGeneral((cfg.heads, head_dim), dtype=cfg.dtype, name=name)(inputs)

        query = project("query", x) * head_dim**-0.5
        key, value = project("key", memory), project("value", memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key).astype(jnp.float32)
        scores = jnp.where(mask, scores, jnp.finfo(jnp.float32).min)
        weights = nn.softmax(scores, axis=-1).astype(cfg.dtype)
        weights = nn.Dropout(cfg.dropout, deterministic=not self.train)(weights)
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(cfg.width, axis=(-2, -1), dtype=cfg.dtype, name="out")(context)


class FeedForward(nn.Module):
    """The position-wise feed-forward layer."""

    config: EncDecConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        hidden = nn.relu(nn.Dense(cfg.ff, dtype=cfg.dtype, name="up")(x))
        hidden = nn.Dropout(cfg.dropout, deterministic=not self.train)(hidden)
        return nn.Dense(cfg.width, dtype=cfg.dtype, name="down")(hidden)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, both pre-norm residual."""

    config: EncDecConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_self")(x)
        x = x + dropout(Attention(cfg, self.train, name="self")(h, h, mask))
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_ff")(x)
        return x + dropout(FeedForward(cfg, self.train, name="ff")(h))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's memory, and feed-forward."""

    config: EncDecConfig
    train: bool = True

    @nn.compact
    def __call__(
        self, x: jax.Array, memory: jax.Array, self_mask: jax.Array, cross_mask: jax.Array
    ) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_self")(x)
        x = x + dropout(Attention(cfg, self.train, name="self")(h, h, self_mask))
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_cross")(x)
        x = x + dropout(Attention(cfg, self.train, name="cross")(h, memory, cross_mask))
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_ff")(x)
        return x + dropout(FeedForward(cfg, self.train, name="ff")(h))


class EncDec(nn.Module):
    """The whole model, from source and target tokens to float32 logits."""

    config: EncDecConfig
    encoder_layer: type[nn.Module] = EncoderLayer
    decoder_layer: type[nn.Module] = DecoderLayer
    train: bool = True

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        cfg = self.config
        embed = nn.Embed(
            cfg.vocab,
            cfg.width,
            dtype=cfg.dtype,
            embedding_init=nn.initializers.normal(cfg.width**-0.5),
            name="tokens",
        )
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)

        def encode(tokens: jax.Array) -> jax.Array:
            positions = sinusoids(tokens.shape[1], cfg.width).astype(cfg.dtype)
            return dropout(embed(tokens) * cfg.width**0.5 + positions)

        source_mask = (source != _PAD)[:, None, None, :]
        memory = encode(source)
        for i in range(cfg.encoder_layers):
            memory = self.encoder_layer(cfg, self.train, name=f"encoder_{i}")(memory, source_mask)
        memory = nn.LayerNorm(dtype=cfg.dtype, name="encoder_norm")(memory)

        causal = nn.make_causal_mask(target, dtype=bool)
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=_START)
        x = encode(shifted)
        for i in range(cfg.decoder_layers):
            x = self.decoder_layer(cfg, self.train, name=f"decoder_{i}")(
                x, memory, causal, source_mask
            )
        x = nn.LayerNorm(dtype=cfg.dtype, name="decoder_norm")(x)
        return embed.attend(x).astype(jnp.float32)


def encdec_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds translation with an encoder-decoder Transformer.

    The loss is called as `loss(params, batch)`, `batch` being a dictionary of `source`,
    `target` (padded with zeros) and, with dropout, `dropout_key`.

    Args:
        name: The problem's name.
        remat: How to wrap each encoder and decoder layer, if at all.
        batch: Number of sentence pairs.
        **config: Fields of `EncDecConfig`.
    """
    cfg = EncDecConfig(**config)
    model = EncDec(cfg, with_remat(EncoderLayer, remat), with_remat(DecoderLayer, remat))

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        source, target = batch["source"], batch["target"]
        logits: Any = model.apply({"params": params}, source, target, rngs=dropout_rngs(batch))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
        return losses.mean(where=target != _PAD)

    def sentences(key: jax.Array, length: int) -> jax.Array:
        token_key, length_key = jax.random.split(key)
        tokens = jax.random.randint(token_key, (batch, length), _START + 1, cfg.vocab)
        lengths = jax.random.randint(length_key, (batch, 1), length // 2, length + 1)
        return jnp.where(jnp.arange(length) < lengths, tokens, _PAD)

    def init(key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params_key, source_key, target_key, dropout_key = jax.random.split(key, 4)
        source = sentences(source_key, cfg.source)
        target = sentences(target_key, cfg.target)
        data = {"source": source, "target": target}
        if cfg.dropout > 0:
            data["dropout_key"] = dropout_key
        params = EncDec(cfg, train=False).init(params_key, source, target)["params"]
        return params, data

    description = (
        f"Transformer, {cfg.encoder_layers}+{cfg.decoder_layers} layers, width {cfg.width}, "
        f"{cfg.heads} heads, batch {batch} x ({cfg.source} source, {cfg.target} target), "
        f"vocabulary {cfg.vocab}, {jnp.dtype(cfg.dtype).name}, dropout {cfg.dropout}"
    )
    return Problem(name, loss_fn, shapes_of(init), False, description=description, init=init)


_SMALL = dict(
    encoder_layers=3,
    decoder_layers=3,
    width=128,
    heads=4,
    ff=512,
    source=64,
    target=64,
    vocab=512,
    batch=8,
)
_TINY = dict(
    encoder_layers=1,
    decoder_layers=2,
    width=32,
    heads=4,
    ff=64,
    source=12,
    target=8,
    vocab=64,
    batch=2,
    dtype="float32",
)

register("encdec", encdec_problem, {"full": dict(batch=32), "small": _SMALL, "tiny": _TINY})
register(
    "encdec-36",
    encdec_problem,
    {
        "full": dict(encoder_layers=36, decoder_layers=36, batch=8),
        "small": {**_SMALL, "encoder_layers": 6, "decoder_layers": 6},
        "tiny": {**_TINY, "encoder_layers": 2, "decoder_layers": 3},
    },
)
