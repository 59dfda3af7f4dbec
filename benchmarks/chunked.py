"""The least peak of GPT-2 small with its loss computed at once and in chunks.

    python -m benchmarks.chunked

prints the table of docs/how-to/chunked-loss.md, for the H200, which need not be attached. Blocks
are priced by their shapes, and one search is made below the first plans, so a peak may be a little
above the least that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jax_hremat
from benchmarks.zoo.gpt import Block, GPTConfig

Loss = Callable[[Any, jax.Array], jax.Array]
GPT2 = GPTConfig()
BATCH = 16
CHUNKS = 16
CONFIG = jax_hremat.PlannerConfig(
    cost="analytic", search=jax_hremat.SearchConfig(max_workers=1), floor_rounds=1
)


class Trunk(nn.Module):
    """From tokens to what the output layer takes."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(
            GPT2.vocab, GPT2.width, dtype=GPT2.dtype, embedding_init=init, name="tokens"
        )
        positions = self.param("positions", init, (GPT2.context, GPT2.width))
        x = embed(tokens) + positions.astype(GPT2.dtype)
        for i in range(GPT2.layers):
            x = Block(GPT2, name=f"block_{i}")(x)
        return nn.LayerNorm(dtype=GPT2.dtype, name="norm")(x)


def cross_entropy(table: jax.Array, hidden: jax.Array, labels: jax.Array) -> jax.Array:
    logits = (hidden @ table.T.astype(hidden.dtype)).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def at_once(params: Any, batch: jax.Array) -> jax.Array:
    hidden: Any = Trunk().apply({"params": params}, batch[:, :-1])
    return cross_entropy(params["tokens"]["embedding"], hidden, batch[:, 1:]).mean()


def in_chunks(checkpoint: bool) -> Loss:
    def loss(params: Any, batch: jax.Array) -> jax.Array:
        hidden: Any = Trunk().apply({"params": params}, batch[:, :-1])
        labels = batch[:, 1:].reshape(CHUNKS, -1)

        def chunk(part: Any) -> jax.Array:
            return cross_entropy(params["tokens"]["embedding"], *part).sum()

        parts = hidden.reshape(CHUNKS, -1, hidden.shape[-1]), labels
        return (
            jax.lax.map(jax.checkpoint(chunk) if checkpoint else chunk, parts).sum() / labels.size
        )

    return loss


def main() -> None:
    """Ask for half a GiB of each loss, which none can do, and read the refusals."""

    def init(key: jax.Array) -> Any:
        return Trunk().init(key, jnp.zeros((1, GPT2.context), jnp.int32))["params"]

    params = jax.eval_shape(init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((BATCH, GPT2.context + 1), jnp.int32)
    losses = {
        "all logits at once": at_once,
        f"in {CHUNKS} chunks": in_chunks(checkpoint=False),
        f"in {CHUNKS} chunks, each under `jax.checkpoint`": in_chunks(checkpoint=True),
    }
    print("| loss | least peak | no rematerialization |\n|---|---|---|")
    for name, loss in losses.items():
        planned = jax_hremat.plan_remat(loss, budget="0.5GiB", target="h200", config=CONFIG)
        try:
            plan = planned(params, batch)
        except jax_hremat.InfeasibleBudgetError as error:
            plan = error.plan
        assert plan is not None
        least, most = plan.certificate.peak_bytes / 2**20, plan.baseline_peak_bytes / 2**20
        print(
            f"| {name} | {least:.0f} MiB, {1e3 * plan.estimated_step_s:.1f} ms "
            f"| {most:.0f} MiB, {1e3 * plan.baseline_step_s:.1f} ms |",
            flush=True,
        )


if __name__ == "__main__":
    main()
