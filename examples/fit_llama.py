"""Fits a whole training step: a scanned Llama with AdamW over microbatches, in half the bytes.

    python examples/fit_llama.py                        # train on the default device
    python examples/fit_llama.py --budget 0.4           # in fewer bytes
    python examples/fit_llama.py --size 1b --target h200 --budget 60GiB   # plan only, no GPU needed

The layers are one `nn.scan`; the planner looks inside it. What the budget bounds is the step as it
is jitted below: parameters, optimizer state, accumulated gradients, batch and all.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_hremat


@dataclass(frozen=True)
class Config:
    """Dimensions of the model and of a batch."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ff: int
    context: int
    batch: int
    microbatches: int
    vocab: int
    dtype: Any = jnp.float32


SIZES = {
    "tiny": Config(
        layers=4,
        width=32,
        heads=4,
        kv_heads=2,
        ff=64,
        context=32,
        batch=8,
        microbatches=2,
        vocab=64,
    ),
    "1b": Config(
        layers=24,
        width=2048,
        heads=16,
        kv_heads=4,
        ff=5632,
        context=2048,
        batch=32,
        microbatches=4,
        vocab=32000,
        dtype=jnp.bfloat16,
    ),
}


def rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of `x`, shape (batch, length, heads, head width)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** -(jnp.arange(half) / half)
    angles = (jnp.arange(x.shape[1])[:, None] * rates)[:, None, :]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Layer(nn.Module):
    """Grouped-query attention and SwiGLU, each after an RMS norm."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        cfg = self.config
        head = cfg.width // cfg.heads

        def project(y: jax.Array, heads: int) -> jax.Array:
            return nn.DenseGeneral((heads, head), use_bias=False, dtype=cfg.dtype)(y)

        h = nn.RMSNorm(dtype=cfg.dtype)(x)
        query, key = rotate(project(h, cfg.heads)), rotate(project(h, cfg.kv_heads))
        h = jax.nn.dot_product_attention(query, key, project(h, cfg.kv_heads), is_causal=True)
        x = x + nn.DenseGeneral(cfg.width, axis=(-2, -1), use_bias=False, dtype=cfg.dtype)(h)
        h = nn.RMSNorm(dtype=cfg.dtype)(x)
        gate = nn.silu(nn.Dense(cfg.ff, use_bias=False, dtype=cfg.dtype)(h))
        h = gate * nn.Dense(cfg.ff, use_bias=False, dtype=cfg.dtype)(h)
        return x + nn.Dense(cfg.width, use_bias=False, dtype=cfg.dtype)(h), None


class Llama(nn.Module):
    """From tokens to the next tokens' logits."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        x = nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype)(tokens)
        layers = nn.scan(
            Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=cfg.layers
        )
        x, _ = layers(cfg)(x, None)
        return nn.Dense(cfg.vocab, use_bias=False, dtype=cfg.dtype)(nn.RMSNorm()(x))


def main(
    size: str = "tiny",
    budget: float | str = 0.5,
    target: str | None = None,
    steps: int = 30,
    config: jax_hremat.PlannerConfig | None = None,
) -> tuple[jax_hremat.RematPlan, list[float]]:
    """Plans the step and, unless it is for a named target, trains; the plan and the losses."""
    cfg = SIZES[size]
    model, optimizer = Llama(cfg), optax.adamw(3e-3)

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, tokens[:, :-1]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    def make_step(loss: Any) -> Any:
        def step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
            params, opt_state = state

            def add(total: Any, tokens: jax.Array) -> tuple[Any, jax.Array]:
                value, grads = jax.value_and_grad(loss)(params, tokens)
                return jax.tree.map(jnp.add, total, grads), value

            parts = batch.reshape(cfg.microbatches, -1, batch.shape[-1])
            grads, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
            grads = jax.tree.map(lambda g: g / cfg.microbatches, grads)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), values.mean()

        return step

    def init(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, cfg.context), jnp.int32))["params"]
        return params, optimizer.init(params)

    # Shapes are enough to plan; nothing is allocated.
    state = jax.eval_shape(init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((cfg.batch, cfg.context + 1), jnp.int32)
    fit = jax_hremat.fit_step(make_step, loss_fn, budget=budget, target=target, config=config)
    step, plan = fit(state, batch)
    print(plan)
    if target is not None:
        return plan, []

    state = init(jax.random.key(0))
    # Counting upwards from a random start, to have something to learn.
    starts = jax.random.randint(jax.random.key(1), (steps, cfg.batch, 1), 0, cfg.vocab)
    losses = []
    for start in starts:
        state, loss = step(state, (start + jnp.arange(cfg.context + 1)) % cfg.vocab)
        losses.append(float(loss))
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    return plan, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="tiny", choices=SIZES)
    parser.add_argument("--budget", default="0.5", help='"60GiB", or a fraction of the peak as is')
    parser.add_argument("--target", help="plan for a device that need not be here")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    amount = options.budget
    main(
        options.size,
        float(amount) if amount.replace(".", "", 1).isdigit() else amount,
        options.target,
        options.steps,
    )
