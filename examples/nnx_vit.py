"""Trains a small vision Transformer in Flax NNX, its loss planned by a decorator.

    python examples/nnx_vit.py

The budget is three fifths of what the step takes as it is. The images are noise around one of ten
patterns, to have something to learn.
"""

import jax
import optax
from flax import nnx

import jax_hremat
import jax_hremat.nnx

CLASSES, IMAGE, PATCH, WIDTH, HEADS, DEPTH = 10, 32, 4, 64, 4, 4


class Block(nnx.Module):
    """Attention and a feed-forward layer, each after a norm, with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=HEADS, in_features=WIDTH, decode=False, rngs=rngs
        )
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(jax.nn.gelu(self.up(self.norm2(x)))))


class ViT(nnx.Module):
    """From images (batch, height, width, 3) to logits."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.patches = nnx.Conv(3, WIDTH, (PATCH, PATCH), strides=(PATCH, PATCH), rngs=rngs)
        tokens = (IMAGE // PATCH) ** 2
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (tokens, WIDTH)))
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.patches(images)
        x = x.reshape(x.shape[0], -1, WIDTH) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(axis=1))


def main(
    steps: int = 40, batch: int = 64, config: jax_hremat.PlannerConfig | None = None
) -> tuple[jax_hremat.RematPlan, list[float]]:
    """Trains; the plan and the losses."""

    @jax_hremat.nnx.remat(budget=0.6, config=config)
    def loss_fn(model: ViT, images: jax.Array, labels: jax.Array) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(model(images), labels)
        return losses.mean()

    model = ViT(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    graphdef, state = nnx.split((model, optimizer))

    def step(state: nnx.State, images: jax.Array, labels: jax.Array) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_fn)(model, images, labels)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    # `nnx.jit` would do on a GPU; it takes no compiler options, and a CPU needs one.
    train = jax.jit(step, donate_argnums=0)
    patterns = jax.random.normal(jax.random.key(1), (CLASSES, IMAGE, IMAGE, 3))
    losses = []
    for key in jax.random.split(jax.random.key(2), steps):
        noise_key, label_key = jax.random.split(key)
        labels = jax.random.randint(label_key, (batch,), 0, CLASSES)
        images = patterns[labels] + jax.random.normal(noise_key, (batch, IMAGE, IMAGE, 3))
        state, loss = train(state, images, labels)
        losses.append(float(loss))
    (plan,) = loss_fn.plans
    print(plan)
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {steps} steps")
    return plan, losses


if __name__ == "__main__":
    main()
