"""A vision Transformer: image classification from patches, without batch statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, register, with_remat
from benchmarks.zoo.tasks import classification_problem


@dataclass(frozen=True)
class ViTConfig:
    """Dimensions of a vision Transformer.

    Attributes:
        image: Height and width of the image; a multiple of `patch`.
        patch: Height and width of a patch.
        layers: Number of Transformer layers.
        width: Size of the residual stream.
        heads: Number of attention heads.
        classes: Number of classes.
        dropout: Rate for the embedding, the attention probabilities and the residuals.
        dtype: Type of the activations; parameters are float32.
    """

    image: int = 224
    patch: int = 16
    layers: int = 12
    width: int = 768
    heads: int = 12
    classes: int = 1000
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


class Layer(nn.Module):
    """Attention and feed-forward, both pre-norm residual."""

    config: ViTConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        attention = nn.MultiHeadDotProductAttention(
            cfg.heads,
            dtype=cfg.dtype,
            dropout_rate=cfg.dropout,
            broadcast_dropout=False,
            deterministic=not self.train,
            name="attention",
        )
        x = x + dropout(attention(nn.LayerNorm(dtype=cfg.dtype, name="norm_attention")(x)))
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_mlp")(x)
        h = nn.gelu(nn.Dense(4 * cfg.width, dtype=cfg.dtype, name="up")(h))
        return x + dropout(nn.Dense(cfg.width, dtype=cfg.dtype, name="down")(h))


class ViT(nn.Module):
    """The whole model, from images to float32 logits."""

    config: ViTConfig
    layer: type[nn.Module] = Layer
    train: bool = True

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        cfg = self.config
        patch = (cfg.patch, cfg.patch)
        x = nn.Conv(cfg.width, patch, strides=patch, dtype=cfg.dtype, name="patches")(images)
        x = x.reshape(x.shape[0], -1, cfg.width)
        positions = self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = x + positions.astype(cfg.dtype)
        x = nn.Dropout(cfg.dropout, deterministic=not self.train)(x)
        for i in range(cfg.layers):
            x = self.layer(cfg, self.train, name=f"layer_{i}")(x)
        x = nn.LayerNorm(dtype=cfg.dtype, name="norm")(x).mean(axis=1)
        return nn.Dense(cfg.classes, dtype=cfg.dtype, name="head")(x).astype(jnp.float32)


def vit_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds image classification with a vision Transformer.

    The loss and the data are those of `classification_problem`.

    Args:
        name: The problem's name.
        remat: How to wrap each Transformer layer, if at all.
        batch: Number of images.
        **config: Fields of `ViTConfig`.
    """
    cfg = ViTConfig(**config)
    description = (
        f"ViT, {cfg.layers} layers, width {cfg.width}, {cfg.heads} heads, "
        f"batch {batch} x {cfg.image} x {cfg.image} in patches of {cfg.patch}, "
        f"{cfg.classes} classes, {jnp.dtype(cfg.dtype).name}, dropout {cfg.dropout}"
    )
    return classification_problem(
        name,
        ViT(cfg, with_remat(Layer, remat)),
        ViT(cfg, train=False),
        batch=batch,
        image=cfg.image,
        classes=cfg.classes,
        dropout=cfg.dropout,
        description=description,
        has_statistics=False,
    )


_SMALL = dict(image=64, patch=8, layers=6, width=128, heads=4, classes=100, batch=8)
_TINY = dict(image=16, patch=4, layers=2, width=32, heads=4, classes=10, batch=4, dtype="float32")

register("vit", vit_problem, {"full": dict(image=256, batch=128), "small": _SMALL, "tiny": _TINY})
