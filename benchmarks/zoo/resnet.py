"""ResNet-50: image classification with batch normalisation."""

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
class ResNetConfig:
    """Dimensions of a bottleneck ResNet.

    Attributes:
        image: Height and width of the image.
        stages: Number of bottleneck blocks in each stage.
        width: Channels of the stem.
        classes: Number of classes.
        dropout: Rate before the classifier.
        dtype: Type of the activations; parameters and statistics are float32.
    """

    image: int = 224
    stages: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


class Bottleneck(nn.Module):
    """A residual block of three convolutions around a narrow middle."""

    config: ResNetConfig
    channels: int
    stride: int = 1
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dtype = self.config.dtype
        conv = partial(nn.Conv, use_bias=False, dtype=dtype)
        norm = partial(nn.BatchNorm, use_running_average=not self.train, dtype=dtype)
        strides = (self.stride, self.stride)
        h = conv(self.channels, (1, 1), name="conv_1")(x)
        h = nn.relu(norm(name="norm_1")(h))
        h = conv(self.channels, (3, 3), strides, name="conv_2")(h)
        h = nn.relu(norm(name="norm_2")(h))
        h = conv(4 * self.channels, (1, 1), name="conv_3")(h)
        h = norm(name="norm_3")(h)
        if x.shape != h.shape:
            x = conv(4 * self.channels, (1, 1), strides, name="conv_skip")(x)
            x = norm(name="norm_skip")(x)
        return nn.relu(x + h)


class ResNet(nn.Module):
    """The whole model, from images to float32 logits."""

    config: ResNetConfig
    block: type[nn.Module] = Bottleneck
    train: bool = True

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        cfg = self.config
        x = nn.Conv(cfg.width, (7, 7), (2, 2), use_bias=False, dtype=cfg.dtype, name="conv_in")(
            images
        )
        x = nn.BatchNorm(use_running_average=not self.train, dtype=cfg.dtype, name="norm_in")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), strides=(2, 2), padding="SAME")
        for stage, blocks in enumerate(cfg.stages):
            for i in range(blocks):
                stride = 2 if stage > 0 and i == 0 else 1
                x = self.block(
                    cfg, cfg.width * 2**stage, stride, self.train, name=f"stage_{stage}_{i}"
                )(x)
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(cfg.dropout, deterministic=not self.train)(x)
        return nn.Dense(cfg.classes, dtype=cfg.dtype, name="head")(x).astype(jnp.float32)


def resnet_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds image classification with a ResNet.

    The loss and the data are those of `classification_problem`.

    Args:
        name: The problem's name.
        remat: How to wrap each bottleneck block, if at all.
        batch: Number of images.
        **config: Fields of `ResNetConfig`.
    """
    cfg = ResNetConfig(**config)
    model = ResNet(cfg, with_remat(Bottleneck, remat))

    depth = 2 + 3 * sum(cfg.stages)
    description = (
        f"ResNet-{depth}, width {cfg.width}, batch {batch} x {cfg.image} x {cfg.image}, "
        f"{cfg.classes} classes, {jnp.dtype(cfg.dtype).name}, dropout {cfg.dropout}"
    )
    return classification_problem(
        name,
        model,
        ResNet(cfg, train=False),
        batch=batch,
        image=cfg.image,
        classes=cfg.classes,
        dropout=cfg.dropout,
        description=description,
    )


register(
    "resnet50",
    resnet_problem,
    {
        "full": dict(batch=128),
        "small": dict(image=64, stages=(2, 2, 2, 2), width=16, classes=100, batch=4),
        "tiny": dict(image=16, stages=(1, 2), width=4, classes=10, batch=4, dtype="float32"),
    },
)
