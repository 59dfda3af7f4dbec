"""A U-Net that predicts the noise in an image, as for diffusion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, dropout_rngs, register, shapes_of, with_remat


@dataclass(frozen=True)
class UNetConfig:
    """Dimensions of a U-Net.

    Attributes:
        image: Height and width of the image.
        channels: Channels at each level; the resolution halves between levels.
        blocks: Residual blocks per level on the way down; one more on the way up.
        heads: Attention heads at the lowest level.
        groups: Groups of each group normalisation.
        dropout: Rate inside the residual blocks.
        dtype: Type of the activations; parameters are float32.
    """

    image: int = 256
    channels: tuple[int, ...] = (64, 128, 256, 512)
    blocks: int = 2
    heads: int = 8
    groups: int = 32
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


def time_features(time: jax.Array, width: int) -> jax.Array:
    """Returns sinusoidal features of times in [0, 1], of shape `(batch, width)`."""
    rates = np.geomspace(1.0, 1e-4, width // 2, dtype=np.float32)
    angles = 1000.0 * time[:, None] * rates
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class ResBlock(nn.Module):
    """Two convolutions with a residual connection, shifted by the time embedding."""

    config: UNetConfig
    channels: int
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        cfg = self.config
        h = nn.silu(nn.GroupNorm(cfg.groups, dtype=cfg.dtype, name="norm_1")(x))
        h = nn.Conv(self.channels, (3, 3), dtype=cfg.dtype, name="conv_1")(h)
        shift = nn.Dense(self.channels, dtype=cfg.dtype, name="time")(nn.silu(time))
        h = h + shift[:, None, None, :]
        h = nn.silu(nn.GroupNorm(cfg.groups, dtype=cfg.dtype, name="norm_2")(h))
        h = nn.Dropout(cfg.dropout, deterministic=not self.train)(h)
        h = nn.Conv(self.channels, (3, 3), dtype=cfg.dtype, name="conv_2")(h)
        if x.shape[-1] != self.channels:
            x = nn.Conv(self.channels, (1, 1), dtype=cfg.dtype, name="skip")(x)
        return x + h


class SpatialAttention(nn.Module):
    """Self-attention between the pixels of a feature map, with a residual connection."""

    config: UNetConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        batch, height, width, channels = x.shape
        head_dim = channels // cfg.heads
        h = nn.GroupNorm(cfg.groups, dtype=cfg.dtype, name="norm")(x)
        h = h.reshape(batch, height * width, channels)
        qkv = nn.DenseGeneral((3, cfg.heads, head_dim), dtype=cfg.dtype, name="qkv")(h)
        query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * head_dim**-0.5
        weights = nn.softmax(scores.astype(jnp.float32), axis=-1).astype(cfg.dtype)
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        h = nn.DenseGeneral(channels, axis=(-2, -1), dtype=cfg.dtype, name="out")(context)
        return x + h.reshape(x.shape)


class UNet(nn.Module):
    """The whole model: the noise in `images`, in float32, given how noisy they are."""

    config: UNetConfig
    block: type[nn.Module] = ResBlock
    train: bool = True

    @nn.compact
    def __call__(self, images: jax.Array, time: jax.Array) -> jax.Array:
        cfg = self.config
        levels = len(cfg.channels)
        embedding = 4 * cfg.channels[0]
        time = time_features(time, cfg.channels[0])
        time = nn.silu(nn.Dense(embedding, dtype=cfg.dtype, name="time_1")(time))
        time = nn.Dense(embedding, dtype=cfg.dtype, name="time_2")(time)

        def block(channels: int, name: str) -> nn.Module:
            return self.block(cfg, channels, self.train, name=name)

        x = nn.Conv(cfg.channels[0], (3, 3), dtype=cfg.dtype, name="conv_in")(images)
        skips = [x]
        for level, channels in enumerate(cfg.channels):
            for i in range(cfg.blocks):
                x = block(channels, f"down_{level}_{i}")(x, time)
                if level == levels - 1:
                    x = SpatialAttention(cfg, name=f"down_{level}_{i}_attention")(x)
                skips.append(x)
            if level < levels - 1:
                x = nn.Conv(
                    channels, (3, 3), strides=(2, 2), dtype=cfg.dtype, name=f"downsample_{level}"
                )(x)
                skips.append(x)

        x = block(cfg.channels[-1], "middle_0")(x, time)
        x = SpatialAttention(cfg, name="middle_attention")(x)
        x = block(cfg.channels[-1], "middle_1")(x, time)

        for level, channels in reversed(list(enumerate(cfg.channels))):
            for i in range(cfg.blocks + 1):
                x = jnp.concatenate([x, skips.pop()], axis=-1)
                x = block(channels, f"up_{level}_{i}")(x, time)
                if level == levels - 1:
                    x = SpatialAttention(cfg, name=f"up_{level}_{i}_attention")(x)
            if level > 0:
                x = x.repeat(2, axis=1).repeat(2, axis=2)
                x = nn.Conv(channels, (3, 3), dtype=cfg.dtype, name=f"upsample_{level}")(x)

        x = nn.silu(nn.GroupNorm(cfg.groups, dtype=cfg.dtype, name="norm_out")(x))
        x = nn.Conv(images.shape[-1], (3, 3), dtype=cfg.dtype, name="conv_out")(x)
        return x.astype(jnp.float32)


def unet_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds denoising of images with a U-Net.

    The loss is called as `loss(params, batch)`, `batch` being a dictionary of `images`,
    `noise`, `time` and, with dropout, `dropout_key`.

    Args:
        name: The problem's name.
        remat: How to wrap each residual block, if at all.
        batch: Number of images.
        **config: Fields of `UNetConfig`.
    """
    cfg = UNetConfig(**config)
    model = UNet(cfg, with_remat(ResBlock, remat))

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        time, noise = batch["time"], batch["noise"]
        angle = 0.5 * jnp.pi * time[:, None, None, None]
        noisy = jnp.cos(angle) * batch["images"] + jnp.sin(angle) * noise
        predicted: Any = model.apply({"params": params}, noisy, time, rngs=dropout_rngs(batch))
        return jnp.mean(jnp.square(predicted - noise))

    def init(key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params_key, image_key, noise_key, time_key, dropout_key = jax.random.split(key, 5)
        shape = (batch, cfg.image, cfg.image, 3)
        data = {
            "images": jax.random.normal(image_key, shape),
            "noise": jax.random.normal(noise_key, shape),
            "time": jax.random.uniform(time_key, (batch,)),
        }
        if cfg.dropout > 0:
            data["dropout_key"] = dropout_key
        params = UNet(cfg, train=False).init(params_key, data["images"], data["time"])["params"]
        return params, data

    description = (
        f"U-Net, channels {'-'.join(map(str, cfg.channels))}, {cfg.blocks} blocks per level, "
        f"batch {batch} x {cfg.image} x {cfg.image}, {jnp.dtype(cfg.dtype).name}, "
        f"dropout {cfg.dropout}"
    )
    return Problem(name, loss_fn, shapes_of(init), False, description=description, init=init)


register(
    "unet",
    unet_problem,
    {
        "full": dict(batch=16),
        "small": dict(image=32, channels=(16, 32, 48, 64), groups=8, heads=4, batch=2),
        "tiny": dict(
            image=8, channels=(4, 8), blocks=1, groups=2, heads=2, batch=2, dtype="float32"
        ),
    },
)
