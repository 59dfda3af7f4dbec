"""A Llama with fused attention under policies by hand: estimated, and measured where it can be.

A scan over layers, `jax.nn.dot_product_attention(implementation="cudnn")`, and `jax.checkpoint`
around each step with the policies that people use, those of MaxText among them.

    python -m benchmarks.fused --target h200

compiles every step for the target and writes `docs/data/fused-h200.json` and `docs/fused-h200.md`.
Where a device of that target is attached, the steps are compiled for it as it is and run there,
and the attention alone too; else cuDNN's library must be found for the compiler
(`nvidia-cudnn-cu12` or `-cu13`, its folder in `LD_LIBRARY_PATH`). `--size tiny --target cpu` is a
rehearsal with XLA's own attention.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import jax_hremat
from benchmarks import command
from benchmarks.device import Timed, is_attached, machine, measured_peak_bytes, timed_in_turn
from benchmarks.measured import mib, ms
from jax_hremat._compiler.compile import compile_flat, compiler_versions, memory_stats
from jax_hremat._compiler.rates import rates
from jax_hremat._hlo.parse import parse_hlo
from jax_hremat._hlo.roofline import estimate_step

Policy = Callable[..., Any]

# What cuDNN's attention hands from its forward to its backward is made by one operation of JAX.
_KERNELS = ("dot_product_attention_fwd", "dot_product_attention_fwd_wrapper")
_POLICIES = jax.checkpoint_policies
_QKV = ("query_proj", "key_proj", "value_proj")
_MINIMAL = _POLICIES.dots_with_no_batch_dims_saveable


def _residuals(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps what the attention's backward reads."""
    return primitive.name in _KERNELS


def _names(*names: str) -> Policy:
    return _POLICIES.save_only_these_names(*names)


def _both(first: Policy, second: Policy) -> Policy:
    return _POLICIES.save_from_both_policies(first, second)


# "none" is no checkpoint at all.
BY_HAND: Mapping[str, Policy | None] = {
    "full": _POLICIES.nothing_saveable,
    "save_qkv_proj": _names(*_QKV),
    "save_out_proj": _names("out_proj"),
    "save_dot_except_mlp": _names(*_QKV, "out_proj"),
    "save_dot_with_context_except_mlp": _names(*_QKV, "context", "out_proj"),
    "save_dot_except_mlpwi": _names(*_QKV, "out_proj", "mlpwo"),
    "minimal": _MINIMAL,
    "minimal_with_context": _both(_MINIMAL, _names("context")),
    "attention's residuals": _residuals,
    "the same and q, k, v, out": _both(_residuals, _names(*_QKV, "out_proj")),
    "the same and minimal": _both(_residuals, _MINIMAL),
    "none": None,
}


@dataclass(frozen=True)
class Llama:
    """The model's dimensions.

    Attributes:
        layers: Steps of the scan.
        width: Size of the residual stream.
        heads: Heads of queries.
        kv_heads: Heads of keys and values.
        ff: Size of the hidden feed-forward layer.
        batch: Sequences.
        length: Tokens of each.
        vocab: Size of the vocabulary.
        implementation: Of `jax.nn.dot_product_attention`.
    """

    layers: int = 8
    width: int = 2048
    heads: int = 16
    kv_heads: int = 8
    ff: int = 5632
    batch: int = 8
    length: int = 2048
    vocab: int = 32000
    implementation: Literal["cudnn", "xla"] = "cudnn"

    def __str__(self) -> str:
        return (
            f"Llama, {self.layers} scanned layers, width {self.width}, {self.heads} heads, "
            f"{self.kv_heads} of keys and values, feed-forward {self.ff}, batch {self.batch} x "
            f"{self.length}, vocabulary {self.vocab}, bfloat16 throughout, attention by "
            f"{self.implementation}"
        )

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def attention_flops(self) -> float:
        """Of one layer's forward; half of the products, since a token sees those before it."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.head_width / 2


SIZES = {
    "full": Llama(),
    "tiny": Llama(
        layers=2, width=32, heads=4, kv_heads=2, ff=48, batch=2, length=16, vocab=64,
        implementation="xla",
    ),
}  # fmt: skip


def init(model: Llama, key: jax.Array) -> tuple[Any, jax.Array]:
    """Parameters, those of the layers stacked, and tokens."""
    d, kv = model.width, model.kv_heads * model.head_width
    shapes = {
        "query": (d, d), "key": (d, kv), "value": (d, kv), "out": (d, d),
        "gate": (d, model.ff), "up": (d, model.ff), "down": (model.ff, d),
    }  # fmt: skip
    keys = iter(jax.random.split(key, len(shapes) + 3))

    def normal(*shape: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), shape, jnp.bfloat16)

    layers = {name: normal(model.layers, *shape) for name, shape in shapes.items()}
    layers |= {
        name: jnp.ones((model.layers, d), jnp.bfloat16) for name in ("norm_attention", "norm_ff")
    }
    params = {
        "tokens": normal(model.vocab, d),
        "layers": layers,
        "norm": jnp.ones(d, jnp.bfloat16),
        "head": normal(d, model.vocab),
    }
    return params, jax.random.randint(
        next(keys), (model.batch, model.length + 1), 0, model.vocab, jnp.int32
    )


def attention(model: Llama, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Causal, several heads of queries sharing one of keys and values."""
    return jax.nn.dot_product_attention(
        query, key, value, is_causal=True, implementation=model.implementation
    )


def loss(model: Llama, policy: Policy | None, params: Any, text: jax.Array) -> jax.Array:
    """Mean cross-entropy of the next token, each layer under the policy; None for no checkpoint."""
    tokens, labels = text[:, :-1], text[:, 1:]
    x = params["tokens"][tokens]
    layer = _layer(model)
    step = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=False)
    x, _ = jax.lax.scan(step, x, params["layers"])
    logits = _norm(x, params["norm"]) @ params["head"]
    logits = logits.astype(jnp.float32)
    right = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - right).mean()


def _layer(model: Llama) -> Callable[[jax.Array, Any], tuple[jax.Array, None]]:
    cos, sin = _rotation(model.length, model.head_width)

    def rotate(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate(turned, axis=-1).astype(x.dtype)

    def heads(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, model.head_width)

    def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        h = _norm(x, w["norm_attention"])
        query = checkpoint_name(rotate(heads(h @ w["query"])), "query_proj")
        key = checkpoint_name(rotate(heads(h @ w["key"])), "key_proj")
        value = checkpoint_name(heads(h @ w["value"]), "value_proj")
        context = checkpoint_name(attention(model, query, key, value), "context")
        x = x + checkpoint_name(context.reshape(x.shape) @ w["out"], "out_proj")
        h = _norm(x, w["norm_ff"])
        hidden = jax.nn.silu(h @ w["gate"]) * (h @ w["up"])
        return x + checkpoint_name(hidden @ w["down"], "mlpwo"), None

    return layer


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + 1e-5)).astype(x.dtype) * scale


def _rotation(length: int, head_width: int) -> tuple[np.ndarray, np.ndarray]:
    speeds = 10000.0 ** -(np.arange(head_width // 2) / (head_width // 2))
    angles = (np.arange(length)[:, None] * speeds)[:, None, :]
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


@dataclass(frozen=True)
class Row:
    """One policy.

    Attributes:
        label: Its name.
        peak_bytes: Compiled peak.
        estimated_s: Roofline with the target's rates.
        unknown: What the estimate does not price, and how often it is in the text.
        measured: Runs of the step; None if no device of the target is attached.
        measured_peak_bytes: The device's memory at its peak, likewise.
    """

    label: str
    peak_bytes: int
    estimated_s: float
    unknown: Mapping[str, int]
    measured: Timed | None
    measured_peak_bytes: int | None


@dataclass(frozen=True)
class Alone:
    """The attention of one layer by itself.

    Attributes:
        forward_flops: Those of its products; its backward takes two and a half times as many.
        forward: Runs of the forward.
        both: Runs of forward and backward.
    """

    forward_flops: float
    forward: Timed
    both: Timed


@dataclass(frozen=True)
class Found:
    """All of one target."""

    target: str
    description: str
    versions: Mapping[str, str]
    machine: str
    date: str
    rows: Sequence[Row]
    alone: Alone | None


def measure(model: Llama, target: jax_hremat.Target) -> Found:
    """Compile the step under each policy, and run it if the target is attached."""
    attached = is_attached(target)
    args = init(model, jax.random.key(0)) if attached else None
    return Found(
        target=target.name,
        description=str(model),
        versions=compiler_versions(),
        machine=machine(),
        date=time.strftime("%Y-%m-%d"),
        rows=_estimated(model, target) if args is None else _run(model, target, args),
        alone=None if args is None else _alone(model),
    )


def _step(model: Llama, policy: Policy | None) -> Callable[..., Any]:
    return jax.value_and_grad(lambda params, text: loss(model, policy, params, text))


def _estimated(model: Llama, target: jax_hremat.Target) -> list[Row]:
    shapes, tree = jax.tree.flatten(jax.eval_shape(lambda: init(model, jax.random.key(0))))
    rows = []
    for label, policy in BY_HAND.items():
        step = _step(model, policy)
        compiled = compile_flat(lambda *flat, s=step: s(*tree.unflatten(flat)), shapes, target)
        rows.append(_row(label, compiled.memory.peak_bytes, compiled.hlo_text, target))
    return rows


def _run(model: Llama, target: jax_hremat.Target, args: Sequence[Any]) -> list[Row]:
    """The peaks from the least up, so that each is the highest so far."""
    options = dict(target.compiler_options)
    steps = {
        label: jax.jit(_step(model, policy), compiler_options=options).lower(*args).compile()
        for label, policy in BY_HAND.items()
    }
    by_peak = sorted(steps, key=lambda label: memory_stats(steps[label]).peak_bytes)
    peaks = {label: measured_peak_bytes(steps[label], args) for label in by_peak}
    times = timed_in_turn(list(steps.values()), args)
    return [
        _row(
            label,
            memory_stats(step).peak_bytes,
            step.as_text() or "",
            target,
            timed,
            peaks[label],
        )
        for (label, step), timed in zip(steps.items(), times, strict=True)
    ]


def _row(
    label: str,
    peak_bytes: int,
    hlo_text: str,
    target: jax_hremat.Target,
    measured: Timed | None = None,
    measured_peak: int | None = None,
) -> Row:
    roofline = estimate_step(parse_hlo(hlo_text), rates(target))
    unknown = dict(sorted(roofline.unknown.items()))
    return Row(label, peak_bytes, roofline.time_s, unknown, measured, measured_peak)


def _alone(model: Llama) -> Alone:
    shapes = [(model.heads,), (model.kv_heads,), (model.kv_heads,), (model.heads,)]
    query, key, value, cotangent = (
        jax.random.normal(k, (model.batch, model.length, *heads, model.head_width), jnp.bfloat16)
        for k, heads in zip(jax.random.split(jax.random.key(0), 4), shapes, strict=True)
    )

    def forward(q: Any, k: Any, v: Any, _: Any) -> jax.Array:
        return attention(model, q, k, v)

    def both(q: Any, k: Any, v: Any, cotangent: Any) -> Any:
        out, pullback = jax.vjp(lambda *qkv: attention(model, *qkv), q, k, v)
        return out, pullback(cotangent)

    args = (query, key, value, cotangent)
    executables = [jax.jit(fun).lower(*args).compile() for fun in (forward, both)]
    return Alone(model.attention_flops, *timed_in_turn(executables, args))


def page(data: Mapping[str, Any]) -> str:
    """The Markdown page made of what was found."""
    rows, alone = data["rows"], data["alone"]
    (base,) = [row for row in rows if row["label"] == "none"]
    lines = [
        f"# Fused attention under policies by hand, for the target {data['target']}",
        "",
        f"Made by `python -m benchmarks.fused --target {data['target']}`. {data['description']}. "
        "`jax.checkpoint` around each step of the scan; peaks are compiled ones, times estimated "
        "by roofline, in parentheses over no checkpoint. "
        + (
            "Measured are medians of runs in turn, in parentheses over no checkpoint, and the "
            "device's memory at its peak, arguments included."
            if alone
            else "Nothing was run."
        ),
        "",
        f"{command.where(data)} {data['date']}.",
        "",
        "| policy | peak MiB | measured | estimated ms | measured ms | spread |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        estimated_s, run = row["estimated_s"], row["measured"]
        peak = row["measured_peak_bytes"]
        lines.append(
            f"| {row['label']} | {mib(row['peak_bytes'])} | {'' if peak is None else mib(peak)} "
            f"| {ms(estimated_s)} ({estimated_s / base['estimated_s']:.3f}) "
            + (
                f"| {ms(run['median_s'])} ({run['median_s'] / base['measured']['median_s']:.3f}) "
                f"| {ms(run['spread_s'])} |"
                if run
                else "| | |"
            )
        )
    unknown = sorted({name for row in rows for name in row["unknown"]})
    if unknown:
        lines += ["", f"Not priced in the estimates: {', '.join(f'`{name}`' for name in unknown)}."]
    if alone:
        lines += ["", *_attention_lines(alone)]
    return "\n".join(lines) + "\n"


def _attention_lines(alone: Mapping[str, Any]) -> list[str]:
    forward_s = alone["forward"]["median_s"]
    backward_s = alone["both"]["median_s"] - forward_s
    flops = alone["forward_flops"]
    return [
        f"The attention of one layer alone: forward {ms(forward_s)} ms, "
        f"{flops / forward_s / 1e12:.0f} TFLOP/s by 4·B·H·T·S·D; backward (both less the forward) "
        f"{ms(backward_s)} ms, {2.5 * flops / backward_s / 1e12:.0f} TFLOP/s by 10·B·H·T·S·D; half "
        "of each, since it is causal."
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and make the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", default="h200", help="a name of jax_hremat.list_targets()")
    parser.add_argument("--size", default="full", choices=tuple(SIZES))
    parser.add_argument("--out", type=Path, default=command.DOCS, help="the folder of the page")
    options = parser.parse_args(argv)
    found = asdict(measure(SIZES[options.size], jax_hremat.get_target(options.target)))
    name = f"fused-{options.target}"
    (options.out / "data").mkdir(parents=True, exist_ok=True)
    (options.out / "data" / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (options.out / f"{name}.md").write_text(page(found))


if __name__ == "__main__":
    main()
