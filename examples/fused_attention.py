"""A scanned Llama with cuDNN's fused attention, planned for an H200 on a machine without one.

pip install "jax_hremat[gpu-aot-cudnn]"
python examples/fused_attention.py
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

import jax_hremat

HEAD_DIM = 64


def norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype)


def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    h = norm(x)
    q, k, v = (
        (h @ w[name]).reshape(*x.shape[:2], -1, HEAD_DIM) for name in ("query", "key", "value")
    )
    # One call of a kernel; what it keeps for its backward is its output and a float a row.
    context = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
    x = x + context.reshape(x.shape) @ w["out"]
    h = norm(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
    logits = (norm(x) @ params["embed"].T).astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - chosen).mean()


def shapes(layers: int, width: int, batch: int, context: int) -> tuple[dict[str, Any], Any]:
    """The arguments, of which planning takes no more than the shapes."""
    sizes = {name: (width, width) for name in ("query", "key", "value", "out")}
    sizes |= {"gate": (width, 3 * width), "up": (width, 3 * width), "down": (3 * width, width)}
    weights = {
        name: jax.ShapeDtypeStruct((layers, *size), jnp.bfloat16) for name, size in sizes.items()
    }
    embed = jax.ShapeDtypeStruct((8192, width), jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((batch, context + 1), jnp.int32)
    return {"embed": embed, "layers": weights}, tokens


def main(
    layers: int = 8,
    width: int = 1024,
    batch: int = 8,
    context: int = 2048,
    budget: float = 0.5,
    config: jax_hremat.PlannerConfig | None = None,
) -> jax_hremat.RematPlan:
    """Plans the step for the H200, and prints the plan.

    Args:
        layers: Number of layers.
        width: Size of the residual stream.
        batch: Sequences.
        context: Their length.
        budget: A part of the peak without rematerialization.
        config: How hard the planner tries.
    """
    plan = jax_hremat.plan_remat(loss_fn, budget=budget, target="h200", config=config)(
        *shapes(layers, width, batch, context)
    )
    print(plan)
    return plan


if __name__ == "__main__":
    # Without a GPU, JAX's plugin starts only if it is told that none is wanted.
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--budget", type=float, default=0.5)
    # A few options of each block, so that planning takes a minute.
    few = jax_hremat.SearchConfig(max_packings=1, max_saved_sets=2, max_segments=1)
    main(**vars(parser.parse_args()), config=jax_hremat.PlannerConfig(search=few, max_rounds=1))
