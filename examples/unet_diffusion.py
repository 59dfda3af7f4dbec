"""Trains a small U-Net to take the noise out of images, its loss planned by a decorator.

    python examples/unet_diffusion.py

The skips from the way down to the way up are what makes a U-Net dear: they live from the first
layers to the last. Images are discs of random place and size.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_hremat

IMAGE, CHANNELS = 32, (16, 32)


class ResBlock(nn.Module):
    """Two convolutions around a residual connection, told how noisy the image is."""

    channels: int

    @nn.compact
    def __call__(self, x: jax.Array, noise: jax.Array) -> jax.Array:
        h = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(x)))
        h = h + nn.Dense(self.channels)(noise)[:, None, None]
        h = nn.Conv(self.channels, (3, 3))(nn.silu(nn.GroupNorm(8)(h)))
        return nn.Conv(self.channels, (1, 1))(x) + h


class UNet(nn.Module):
    """The noise in images (batch, height, width, 1), given its strength (batch,)."""

    @nn.compact
    def __call__(self, images: jax.Array, strength: jax.Array) -> jax.Array:
        rates = jnp.geomspace(1.0, 100.0, 16)
        noise = nn.silu(nn.Dense(64)(jnp.sin(strength[:, None] * rates)))
        x = nn.Conv(CHANNELS[0], (3, 3))(images)
        skips = []
        for channels in CHANNELS:
            x = ResBlock(channels)(x, noise)
            skips.append(x)
            x = nn.avg_pool(x, (2, 2), (2, 2))
        x = ResBlock(CHANNELS[-1])(x, noise)
        for channels, skip in zip(reversed(CHANNELS), reversed(skips), strict=True):
            x = x.repeat(2, axis=1).repeat(2, axis=2)
            x = ResBlock(channels)(jnp.concatenate([x, skip], axis=-1), noise)
        return nn.Conv(1, (3, 3))(x)


def discs(key: jax.Array, batch: int) -> jax.Array:
    """White discs on black."""
    place, size = jax.random.split(key)
    centre = jax.random.uniform(place, (batch, 2, 1, 1), minval=8.0, maxval=IMAGE - 8.0)
    radius = jax.random.uniform(size, (batch, 1, 1), minval=3.0, maxval=8.0)
    grid = jnp.stack(jnp.meshgrid(jnp.arange(IMAGE), jnp.arange(IMAGE), indexing="ij"))
    inside = jnp.sum((grid - centre) ** 2, axis=1) < radius**2
    return 2.0 * inside[..., None] - 1.0


def main(
    steps: int = 40,
    batch: int = 16,
    budget: float | str = 0.6,
    config: jax_hremat.PlannerConfig | None = None,
) -> tuple[jax_hremat.RematPlan, list[float]]:
    """Trains; the plan and the losses."""
    model, optimizer = UNet(), optax.adam(2e-3)

    @jax_hremat.hremat(budget=budget, config=config)
    def loss_fn(params: dict, images: jax.Array, key: jax.Array) -> jax.Array:
        noise_key, strength_key = jax.random.split(key)
        strength = jax.random.uniform(strength_key, images.shape[:1], minval=0.1, maxval=1.4)
        noise = jax.random.normal(noise_key, images.shape)
        angle = strength[:, None, None, None]
        noisy = jnp.cos(angle) * images + jnp.sin(angle) * noise
        return jnp.mean((model.apply({"params": params}, noisy, strength) - noise) ** 2)

    def step(params: dict, state: optax.OptState, key: jax.Array) -> tuple:
        image_key, noise_key = jax.random.split(key)
        loss, grads = jax.value_and_grad(loss_fn)(params, discs(image_key, batch), noise_key)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    image = jnp.zeros((1, IMAGE, IMAGE, 1))
    params = model.init(jax.random.key(0), image, jnp.zeros(1))["params"]
    state = optimizer.init(params)
    train = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for key in jax.random.split(jax.random.key(1), steps):
        params, state, loss = train(params, state, key)
        losses.append(float(loss))
    (plan,) = loss_fn.plans
    print(plan)
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    return plan, losses


if __name__ == "__main__":
    main()
