"""DenseNet-121: image classification in which a layer sees all those of its block before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, register, with_remat
from benchmarks.zoo.tasks import classification_problem


@dataclass(frozen=True)
class DenseNetConfig:
    """Dimensions of a DenseNet with bottlenecks.

    Attributes:
        image: Height and width of the image.
        blocks: Number of dense layers in each block.
        growth: Channels a dense layer adds; its bottleneck, and the stem, are wider.
        classes: Number of classes.
        dropout: Rate of what each dense layer adds.
        dtype: Type of the activations; parameters and statistics are float32.
    """

    image: int = 224
    blocks: tuple[int, ...] = (6, 12, 24, 16)
    growth: int = 32
    classes: int = 1000
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


class DenseLayer(nn.Module):
    """Adds channels to a block: `(batch, height, width, growth)`, from all it has so far."""

    config: DenseNetConfig
    train: bool = True

    @nn.compact
    def __call__(self, *features: jax.Array) -> jax.Array:
        cfg = self.config
        conv = partial(nn.Conv, use_bias=False, dtype=cfg.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not self.train, dtype=cfg.dtype)
        h = jnp.concatenate(features, axis=-1)
        h = conv(4 * cfg.growth, (1, 1), name="conv_1")(nn.relu(norm(name="norm_1")(h)))
        h = conv(cfg.growth, (3, 3), name="conv_2")(nn.relu(norm(name="norm_2")(h)))
        return nn.Dropout(cfg.dropout, deterministic=not self.train)(h)


class DenseNet(nn.Module):
    """The whole model, from images to float32 logits."""

    config: DenseNetConfig
    layer: type[nn.Module] = DenseLayer
    train: bool = True

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        cfg = self.config
        conv = partial(nn.Conv, use_bias=False, dtype=cfg.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not self.train, dtype=cfg.dtype)
        x = conv(2 * cfg.growth, (7, 7), (2, 2), name="conv_in")(images)
        x = nn.relu(norm(name="norm_in")(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block, layers in enumerate(cfg.blocks):
            if block > 0:
                x = nn.relu(norm(name=f"transition_{block}_norm")(x))
                x = conv(x.shape[-1] // 2, (1, 1), name=f"transition_{block}_conv")(x)
                x = nn.avg_pool(x, (2, 2), strides=(2, 2))
            features = [x]
            for i in range(layers):
                layer = self.layer(cfg, self.train, name=f"block_{block}_{i}")
                features.append(layer(*features))
            x = jnp.concatenate(features, axis=-1)
        x = nn.relu(norm(name="norm_out")(x)).mean(axis=(1, 2))
        return nn.Dense(cfg.classes, dtype=cfg.dtype, name="head")(x).astype(jnp.float32)


def densenet_problem(
    name: str, remat: Remat | None = None, *, batch: int, **config: Any
) -> Problem:
    """Builds image classification with a DenseNet.

    The loss and the data are those of `classification_problem`.

    Args:
        name: The problem's name.
        remat: How to wrap each dense layer, if at all; the concatenation of its inputs is
            part of it.
        batch: Number of images.
        **config: Fields of `DenseNetConfig`.
    """
    cfg = DenseNetConfig(**config)
    model = DenseNet(cfg, with_remat(DenseLayer, remat))

    # The stem, two convolutions in each dense layer, the transitions between, the classifier.
    depth = 1 + 2 * sum(cfg.blocks) + (len(cfg.blocks) - 1) + 1
    description = (
        f"DenseNet-{depth}, growth {cfg.growth}, batch {batch} x {cfg.image} x {cfg.image}, "
        f"{cfg.classes} classes, {jnp.dtype(cfg.dtype).name}, dropout {cfg.dropout}"
    )
    return classification_problem(
        name,
        model,
        DenseNet(cfg, train=False),
        batch=batch,
        image=cfg.image,
        classes=cfg.classes,
        dropout=cfg.dropout,
        description=description,
    )


register(
    "densenet121",
    densenet_problem,
    {
        "full": dict(batch=32),
        "small": dict(image=64, blocks=(2, 3, 4, 3), growth=8, classes=100, batch=4),
        "tiny": dict(image=16, blocks=(2, 2), growth=4, classes=10, batch=4, dtype="float32"),
    },
)
