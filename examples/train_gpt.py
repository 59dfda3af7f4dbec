"""Trains a small GPT under a memory budget, and shows what the budget cost.

    python examples/train_gpt.py                   # train on the default device
    python examples/train_gpt.py --budget 300MiB   # the same in fewer bytes
    python examples/train_gpt.py --size gpt2 --budget 0.4 --target h200   # plan only, no GPU needed

The budget is for the whole training step: parameters, optimizer, batch and all that is computed.
The text is the source code of Python's own standard library, one token per byte.
"""

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import jax_hremat


@dataclass(frozen=True)
class Config:
    """Dimensions of the model and of a batch; `dtype` is that of the activations."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    vocab: int = 256
    dtype: Any = jnp.float32


SIZES = {
    "tiny": Config(layers=2, width=64, heads=4, context=64, batch=8),
    "small": Config(layers=6, width=128, heads=4, context=256, batch=8),
    "gpt2": Config(
        layers=12, width=768, heads=12, context=1024, batch=16, vocab=50257, dtype=jnp.bfloat16
    ),
}


@dataclass(frozen=True)
class Result:
    """What a run showed.

    Attributes:
        plan: The plan of the training step.
        peak_bytes: Compiled memory of the training step that ran.
        step_s: Measured seconds of a training step.
        plain_step_s: The same without rematerialization.
        loss_before, loss_after: On held-out text, before and after the training.
    """

    plan: jax_hremat.RematPlan
    peak_bytes: int
    step_s: float
    plain_step_s: float
    loss_before: float
    loss_after: float


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised first."""

    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        heads = (*x.shape[:2], c.heads, c.width // c.heads)
        h = nn.LayerNorm(dtype=c.dtype)(x)
        q, k, v = jnp.split(nn.Dense(3 * c.width, dtype=c.dtype, name="qkv")(h), 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q.reshape(heads), k.reshape(heads))
        causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(causal, scores / heads[-1] ** 0.5, jnp.finfo(c.dtype).min)
        h = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(scores), v.reshape(heads))
        x = x + nn.Dense(c.width, dtype=c.dtype, name="out")(h.reshape(x.shape))
        h = nn.LayerNorm(dtype=c.dtype)(x)
        h = nn.gelu(nn.Dense(4 * c.width, dtype=c.dtype, name="up")(h))
        return x + nn.Dense(c.width, dtype=c.dtype, name="down")(h)


class GPT(nn.Module):
    """A decoder-only Transformer, from tokens to logits."""

    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        c = self.config
        init = nn.initializers.normal(0.02)
        embed = nn.Embed(c.vocab, c.width, dtype=c.dtype, embedding_init=init, name="tokens")
        x = embed(tokens) + self.param("positions", init, (c.context, c.width)).astype(c.dtype)
        for i in range(c.layers):
            x = Block(c, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(dtype=c.dtype)(x)).astype(jnp.float32)


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes of the standard library's modules: nine files of ten, and the tenths."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    train, held_out = (
        np.frombuffer(b"\n".join(f.read_bytes() for f in part), np.uint8)
        for part in ([f for i, f in enumerate(files) if i % 10], files[::10])
    )
    return train, held_out


def sample(text: np.ndarray, config: Config, rng: np.random.Generator) -> np.ndarray:
    """Returns a batch of random windows, one token longer than the context."""
    starts = rng.integers(len(text) - config.context, size=config.batch)
    return text[starts[:, None] + np.arange(config.context + 1)].astype(np.int32)


def main(
    *,
    size: str = "small",
    steps: int = 60,
    budget: int | float | str = 0.5,
    target: str | None = None,
    config: jax_hremat.PlannerConfig | None = None,
    report: str | Path | None = "train_gpt.html",
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> Result | None:
    """Plans the training step, trains with it, and compares it with no rematerialization.

    Args:
        size: A key of `SIZES`.
        steps: Training steps.
        budget: Bytes, a text such as "300MiB", or a share of what the training step takes without
            rematerialization.
        target: Plan for this device and stop there; None plans for the default one and trains.
        config: How hard the planner tries; None for its own default.
        report: Where to write the page that explains the plan; None for nowhere.
        learning_rate: The highest; it rises for a tenth of the steps, then falls to zero.
        seed: Seeds the parameters and the batches.

    Returns:
        What the run showed; None if only a plan was made.
    """
    console = Console()
    dims = SIZES[size]
    model = GPT(dims)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    optimizer = optax.adamw(schedule)

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        logits = model.apply({"params": params}, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def make_step(loss_fn: Callable[..., jax.Array]) -> Callable[..., Any]:
        def train_step(params: Any, opt_state: Any, batch: jax.Array) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        return train_step

    def init(key: jax.Array) -> Any:
        params = model.init(key, jnp.zeros((1, dims.context), jnp.int32))["params"]
        return params, optimizer.init(params)

    # Planning looks at shapes only: nothing is allocated, whatever the size of the model.
    shapes = jax.eval_shape(init, jax.random.key(seed))
    batch_shape = jax.ShapeDtypeStruct((dims.batch, dims.context + 1), jnp.int32)
    train_step, plan = jax_hremat.fit_step(
        make_step, loss_fn, budget=budget, donate_argnums=(0, 1), target=target, config=config
    )(*shapes, batch_shape)
    print(plan)
    if report is not None:
        jax_hremat.report(plan, report)
        explained = f"\nThe page {report} explains the plan; open it in a browser."
    else:
        explained = ""
    if target is not None:
        console.print(explained, soft_wrap=True)
        return None

    train_text, held_out_text = read_text()
    rng = np.random.default_rng(seed)
    held_out = [sample(held_out_text, dims, rng) for _ in range(4)]
    eval_loss = jax.jit(loss_fn)

    def held_out_loss(params: Any) -> float:
        return statistics.fmean(float(eval_loss(params, batch)) for batch in held_out)

    params, opt_state = jax.jit(init)(jax.random.key(seed))
    batch = sample(train_text, dims, rng)
    with console.status("timing the step, with the plan and without"):
        plain_step = jax.jit(make_step(loss_fn), donate_argnums=(0, 1))
        step_s, plain_step_s = time_steps([train_step, plain_step], params, opt_state, batch)

    loss_before = held_out_loss(params)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps, loss=loss_before)
        for _ in range(steps):
            batch = sample(train_text, dims, rng)
            params, opt_state, loss = train_step(params, opt_state, batch)
            progress.update(bar, advance=1, loss=float(loss))

    peak_bytes = compiled_bytes(train_step, params, opt_state, batch)
    result = Result(plan, peak_bytes, step_s, plain_step_s, loss_before, held_out_loss(params))
    console.print(result_table(result))
    console.print(plan.memory_chart(), markup=False, highlight=False)
    console.print(explained, soft_wrap=True)
    return result


def time_steps(
    steps: list[Callable[..., Any]], params: Any, opt_state: Any, batch: jax.Array, repeats: int = 5
) -> list[float]:
    """Returns the median time of each step in seconds, taking turns so that load hits all alike."""
    seconds: list[list[float]] = [[] for _ in steps]
    for _ in range(repeats + 1):
        for step, times in zip(steps, seconds, strict=True):
            # A copy, since the step takes its arguments' memory.
            state = jax.block_until_ready(jax.tree.map(jnp.copy, (params, opt_state)))
            start_s = time.perf_counter()
            jax.block_until_ready(step(*state, batch))
            times.append(time.perf_counter() - start_s)
    return [statistics.median(times[1:]) for times in seconds]  # The first one compiles.


def compiled_bytes(step: Any, *args: Any) -> int:
    """Returns the memory of a jitted step as XLA states it: what it takes and returns, and what it
    works with."""
    memory = step.lower(*args).compile().memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        + memory.temp_size_in_bytes
        - memory.alias_size_in_bytes
    )


def result_table(result: Result) -> Table:
    """Returns the comparison with no rematerialization, for printing."""
    plan = result.plan
    table = Table("the training step", "with the plan", "no remat")
    table.add_row("budget", mebibytes(plan.certificate.budget_bytes), "")
    table.add_row(
        "compiled memory", mebibytes(result.peak_bytes), mebibytes(plan.baseline_peak_bytes)
    )
    measured = result.step_s / result.plain_step_s - 1
    table.add_row(
        "measured time",
        f"{result.step_s * 1e3:.0f} ms ({measured:+.1%})",
        f"{result.plain_step_s * 1e3:.0f} ms",
    )
    table.add_row("estimated added time", f"{plan.slowdown - 1:+.1%}", "")
    losses = f"{result.loss_before:.3f} → {result.loss_after:.3f}"
    table.add_row("loss on held-out text", losses, "")
    if abs(measured - (plan.slowdown - 1)) > 0.05:
        table.caption = (
            "measured and estimated added time differ: the estimate assumes the target's rates "
            "and nothing else running; jax_hremat.calibrate() measures the rates of this device"
        )
    return table


def mebibytes(count_bytes: int) -> str:
    """Returns bytes as people read them."""
    return f"{count_bytes / 2**20:.1f} MiB"


def _budget(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--budget",
        type=_budget,
        default=0.5,
        help="bytes (300MiB), or a share of the step's memory without remat (default: 0.5)",
    )
    parser.add_argument(
        "--target", choices=jax_hremat.list_targets(), help="plan for this device, do not train"
    )
    parser.add_argument(
        "--report", default="train_gpt.html", help="the page to write (default: train_gpt.html)"
    )
    options = parser.parse_args()
    if options.target is not None:
        # Without a GPU, JAX's CUDA compiler starts only when no GPU is asked for.
        jax.config.update("jax_platforms", "cpu")
    try:
        main(**vars(options))
    except jax_hremat.HRematError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
