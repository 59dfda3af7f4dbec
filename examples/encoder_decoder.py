"""Trains an encoder-decoder to reverse sequences, its layers planned as modules.

    python examples/encoder_decoder.py

Each layer class is wrapped as one would with `nn.remat`, with a budget in place of a policy. Equal
layers are planned once. Parameters keep their names, so a checkpoint made without the library
loads here, and the other way round.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_hremat.linen

VOCAB, WIDTH, HEADS, DEPTH, LENGTH = 32, 64, 4, 2, 24


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class DecoderLayer(nn.Module):
    """The same, with attention to the encoder's result between the two."""

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), memory)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Translator(nn.Module):
    """From source and target tokens (batch, length) to the next target tokens' logits."""

    encoder_layer: Callable[..., nn.Module] = EncoderLayer
    decoder_layer: Callable[..., nn.Module] = DecoderLayer

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        places = self.param("places", nn.initializers.normal(0.5), (LENGTH, WIDTH))
        memory, x = embed(source) + places, embed(target) + places
        for i in range(DEPTH):
            memory = self.encoder_layer(name=f"encoder_{i}")(memory)
        for i in range(DEPTH):
            x = self.decoder_layer(name=f"decoder_{i}")(x, memory)
        return nn.Dense(VOCAB)(nn.LayerNorm()(x))


def main(
    steps: int = 300,
    batch: int = 32,
    budget: float = 0.7,
    config: jax_hremat.PlannerConfig | None = None,
) -> tuple[tuple[jax_hremat.RematPlan, ...], list[float]]:
    """Trains; the plans of both layers and the losses."""
    planned = [
        jax_hremat.linen.remat(layer, budget=budget, config=config)
        for layer in (EncoderLayer, DecoderLayer)
    ]
    model, optimizer = Translator(*planned), optax.adam(2e-3)

    def loss_fn(params: dict, source: jax.Array) -> jax.Array:
        answer = source[:, ::-1]
        # What the decoder has said so far starts with a zero.
        said = jnp.pad(answer[:, :-1], ((0, 0), (1, 0)))
        logits = model.apply({"params": params}, source, said)
        return optax.softmax_cross_entropy_with_integer_labels(logits, answer).mean()

    def step(params: dict, state: optax.OptState, source: jax.Array) -> tuple:
        loss, grads = jax.value_and_grad(loss_fn)(params, source)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def sources(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (batch, LENGTH), 1, VOCAB)

    # Made without the library: the parameters are the same.
    tokens = sources(jax.random.key(0))
    params = Translator().init(jax.random.key(1), tokens, tokens)["params"]
    state = optimizer.init(params)
    train = jax.jit(step, donate_argnums=(0, 1))
    losses = []
    for key in jax.random.split(jax.random.key(2), steps):
        params, state, loss = train(params, state, sources(key))
        losses.append(float(loss))
    plans = tuple(plan for layer in planned for plan in layer.hremat_plans())
    for plan in plans:
        print(plan)
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    return plans, losses


if __name__ == "__main__":
    main()
