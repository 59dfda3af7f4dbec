"""DenseNet-121: image classification in which a layer sees all those of its block before it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, dropout_rngs, register, shapes_of, with_remat


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

    The loss is called as `loss(params, batch, batch_stats)` and returns the updated
    statistics beside it; `batch` is a dictionary of `images`, `labels` and, with
    dropout, `dropout_key`.

    Args:
        name: The problem's name.
        remat: How to wrap each dense layer, if at all; the concatenation of its inputs is
            part of it.
        batch: Number of images.
        **config: Fields of `DenseNetConfig`.
    """
    cfg = DenseNetConfig(**config)
    model = DenseNet(cfg, with_remat(DenseLayer, remat))

    def loss_fn(params: Any, batch: dict[str, jax.Array], batch_stats: Any) -> tuple[Any, Any]:
        logits, updated = model.apply(
            {"params": params, "batch_stats": batch_stats},
            batch["images"],
            mutable=["batch_stats"],
            rngs=dropout_rngs(batch),
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean(), updated["batch_stats"]

    def init(key: jax.Array) -> tuple[Any, dict[str, jax.Array], Any]:
        params_key, image_key, label_key, dropout_key = jax.random.split(key, 4)
        data = {
            "images": jax.random.normal(image_key, (batch, cfg.image, cfg.image, 3)),
            "labels": jax.random.randint(label_key, (batch,), 0, cfg.classes),
        }
        if cfg.dropout > 0:
            data["dropout_key"] = dropout_key
        variables = DenseNet(cfg, train=False).init(params_key, data["images"])
        return variables["params"], data, variables["batch_stats"]

    # The stem, two convolutions in each dense layer, the transitions between, the classifier.
    depth = 1 + 2 * sum(cfg.blocks) + (len(cfg.blocks) - 1) + 1
    description = (
        f"DenseNet-{depth}, growth {cfg.growth}, batch {batch} x {cfg.image} x {cfg.image}, "
        f"{cfg.classes} classes, {jnp.dtype(cfg.dtype).name}, dropout {cfg.dropout}"
    )
    return Problem(name, loss_fn, shapes_of(init), True, description=description, init=init)


register(
    "densenet121",
    densenet_problem,
    {
        "full": dict(batch=32),
        "small": dict(image=64, blocks=(2, 3, 4, 3), growth=8, classes=100, batch=4),
        "tiny": dict(image=16, blocks=(2, 2), growth=4, classes=10, batch=4, dtype="float32"),
    },
)
