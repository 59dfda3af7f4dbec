"""LSTMs, each layer a loop over time: a language model, and a classifier of whole sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, dropout_rngs, register, shapes_of, with_remat
from benchmarks.zoo.tasks import next_token_problem

# What a cell remembers, `(batch, width)` in float32, and what it puts out, in the model's type.
Carry = tuple[jax.Array, jax.Array]


@dataclass(frozen=True)
class LSTMConfig:
    """Dimensions of an LSTM language model.

    Attributes:
        layers: Number of LSTM layers.
        width: Size of the embedding and of each layer's state.
        context: Sequence length.
        vocab: Vocabulary size.
        dropout: Rate for the embedding and for what each layer puts out.
        dtype: Type of the activations; parameters and what a cell remembers are float32.
    """

    layers: int = 2
    width: int = 512
    context: int = 2048
    vocab: int = 4096
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


class Cell(nn.Module):
    """One step of an LSTM layer, on an input of shape `(batch, width)`."""

    config: LSTMConfig

    @nn.compact
    def __call__(self, carry: Carry, x: jax.Array) -> tuple[Carry, jax.Array]:
        cfg = self.config
        memory, out = carry
        gates = nn.Dense(4 * cfg.width, dtype=cfg.dtype, name="input")(x)
        recurrent = nn.Dense(
            4 * cfg.width,
            use_bias=False,
            dtype=cfg.dtype,
            kernel_init=nn.initializers.orthogonal(),
            name="recurrent",
        )
        gates = (gates + recurrent(out)).astype(jnp.float32)
        write, keep, read, new = jnp.split(gates, 4, axis=-1)
        # A cell remembers, to begin with: hence the one.
        memory = nn.sigmoid(keep + 1.0) * memory + nn.sigmoid(write) * jnp.tanh(new)
        out = (nn.sigmoid(read) * jnp.tanh(memory)).astype(cfg.dtype)
        return (memory, out), out


class LSTM(nn.Module):
    """The whole model, from tokens to float32 logits."""

    config: LSTMConfig
    cell: type[nn.Module] = Cell
    train: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        scan = nn.scan(
            lambda cell, carry, x: cell(carry, x),
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        x = dropout(nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype, name="tokens")(tokens))
        shape = (tokens.shape[0], cfg.width)
        for i in range(cfg.layers):
            start = jnp.zeros(shape, jnp.float32), jnp.zeros(shape, cfg.dtype)
            _, x = scan(self.cell(cfg, name=f"layer_{i}"), start, x)
            x = dropout(x)
        return nn.Dense(cfg.vocab, dtype=cfg.dtype, name="head")(x).astype(jnp.float32)


class Reader(nn.Module):
    """One step of all layers, on a token of each sequence; nothing is put out."""

    config: LSTMConfig
    train: bool = True

    @nn.compact
    def __call__(self, carry: tuple[Carry, ...], token: jax.Array) -> tuple[Any, None]:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        x = dropout(nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype, name="tokens")(token))
        after = []
        for i, state in enumerate(carry):
            state, x = Cell(cfg, name=f"layer_{i}")(state, x)
            after.append(state)
            x = dropout(x)
        return tuple(after), None


class LSTMClassifier(nn.Module):
    """From tokens to float32 logits of the whole sequence, by its last state.

    Of a step nothing outlives the next one but for the backward, so memory need not grow with the
    number of steps.
    """

    config: LSTMConfig
    reader: type[nn.Module] = Reader
    train: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        scan = nn.scan(
            lambda reader, carry, token: reader(carry, token),
            variable_broadcast="params",
            split_rngs={"params": False, "dropout": True},
            in_axes=1,
        )
        shape = (tokens.shape[0], cfg.width)
        start = (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, cfg.dtype))
        reader = self.reader(cfg, self.train, name="reader")
        carry, _ = scan(reader, (start,) * cfg.layers, tokens)
        out = carry[-1][1]
        return nn.Dense(cfg.vocab, dtype=cfg.dtype, name="head")(out).astype(jnp.float32)


def lstm_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds next-token prediction with an LSTM.

    The loss and the data are those of `next_token_problem`.

    Args:
        name: The problem's name.
        remat: How to wrap each layer's cell, if at all.
        batch: Number of sequences.
        **config: Fields of `LSTMConfig`.
    """
    cfg = LSTMConfig(**config)
    model = LSTM(cfg, with_remat(Cell, remat, prevent_cse=False))

    description = (
        f"LSTM, {cfg.layers} layers, width {cfg.width}, batch {batch} x {cfg.context}, "
        f"vocabulary {cfg.vocab}, {jnp.dtype(cfg.dtype).name}, dropout {cfg.dropout}"
    )
    return next_token_problem(
        name,
        model,
        LSTM(cfg, train=False),
        batch=batch,
        context=cfg.context,
        vocab=cfg.vocab,
        dropout=cfg.dropout,
        description=description,
    )


def last_state_problem(
    name: str, remat: Remat | None = None, *, batch: int, **config: Any
) -> Problem:
    """Builds the prediction of one label for a whole sequence, with an LSTM.

    The loss is called as `loss(params, batch)`, `batch` being a dictionary of `tokens` (int32 of
    batch x context), `labels` (int32 of batch) and, with dropout, `dropout_key`.

    Args:
        name: The problem's name.
        remat: How to wrap each step, if at all.
        batch: Number of sequences.
        **config: Fields of `LSTMConfig`.
    """
    cfg = LSTMConfig(**config)
    model = LSTMClassifier(cfg, with_remat(Reader, remat, prevent_cse=False))

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["tokens"], rngs=dropout_rngs(batch))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return losses.mean()

    def init(key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params_key, tokens_key, labels_key, dropout_key = jax.random.split(key, 4)
        data = {
            "tokens": jax.random.randint(tokens_key, (batch, cfg.context), 0, cfg.vocab),
            "labels": jax.random.randint(labels_key, (batch,), 0, cfg.vocab),
        }
        if cfg.dropout > 0:
            data["dropout_key"] = dropout_key
        plain = LSTMClassifier(cfg, train=False)
        return plain.init(params_key, data["tokens"])["params"], data

    description = (
        f"LSTM over whole sequences, {cfg.layers} layers, width {cfg.width}, batch {batch} x "
        f"{cfg.context}, vocabulary {cfg.vocab}, {jnp.dtype(cfg.dtype).name}, dropout "
        f"{cfg.dropout}"
    )
    return Problem(name, loss_fn, shapes_of(init), False, description=description, init=init)


register(
    "lstm",
    lstm_problem,
    {
        "full": dict(batch=32),
        "small": dict(width=128, context=128, vocab=512, batch=8),
        "tiny": dict(width=16, context=24, vocab=64, batch=2, dtype="float32"),
    },
)
register(
    "lstm-last",
    last_state_problem,
    {
        "full": dict(batch=32, vocab=256),
        "small": dict(width=128, context=128, vocab=64, batch=8),
        "tiny": dict(width=16, context=24, vocab=64, batch=2, dtype="float32"),
    },
)
