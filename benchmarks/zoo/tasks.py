"""What models are trained for: the loss and the data that several of them share."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import optax

from benchmarks.zoo.base import Problem, dropout_rngs, shapes_of

# The collection of what a language model's modules add to the loss.
LOSSES = "losses"


def next_token_problem(
    name: str,
    model: nn.Module,
    initial: nn.Module,
    *,
    batch: int,
    context: int,
    vocab: int,
    dropout: float,
    description: str,
) -> Problem:
    """Next-token prediction, with the mean cross-entropy as the loss, and what was sown as
    `LOSSES`.

    The loss is called as `loss(params, batch)`, `batch` being a dictionary of `tokens`,
    `labels` (both int32 of batch x context) and, with dropout, `dropout_key`.

    Args:
        name: The problem's name.
        model: From tokens to logits.
        initial: The same model in inference, to initialise the parameters with.
        batch: Number of sequences.
        context: Tokens of each.
        vocab: Number of different tokens.
        dropout: Dropout rate of the model.
        description: The problem in words.
    """

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        logits, sown = model.apply(
            {"params": params}, batch["tokens"], rngs=dropout_rngs(batch), mutable=[LOSSES]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return sum(jax.tree.leaves(sown), start=losses.mean())

    def init(key: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        params_key, data_key, dropout_key = jax.random.split(key, 3)
        text = jax.random.randint(data_key, (batch, context + 1), 0, vocab)
        data = {"tokens": text[:, :-1], "labels": text[:, 1:]}
        if dropout > 0:
            data["dropout_key"] = dropout_key
        return initial.init(params_key, data["tokens"])["params"], data

    return Problem(name, loss_fn, shapes_of(init), False, description=description, init=init)


def classification_problem(
    name: str,
    model: nn.Module,
    initial: nn.Module,
    *,
    batch: int,
    image: int,
    classes: int,
    dropout: float,
    description: str,
    has_statistics: bool = True,
) -> Problem:
    """Image classification, with the mean cross-entropy as the loss.

    The loss is called as `loss(params, batch)`, `batch` being a dictionary of `images` (float32 of
    batch x image x image x 3), `labels` (int32 of batch) and, with dropout, `dropout_key`. With
    batch statistics it is called as `loss(params, batch, batch_stats)` and returns the updated
    statistics beside it.

    Args:
        name: The problem's name.
        model: From images to logits.
        initial: The same model in inference, to initialise the variables with.
        batch: Number of images.
        image: Pixels on each side.
        classes: Number of classes.
        dropout: Dropout rate of the model.
        description: The problem in words.
        has_statistics: Whether the model has a collection `batch_stats`.
    """

    def loss_of(logits: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    def loss_fn(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        rngs = dropout_rngs(batch)
        logits: Any = model.apply({"params": params}, batch["images"], rngs=rngs)
        return loss_of(logits, batch)

    def loss_and_statistics(
        params: Any, batch: dict[str, jax.Array], batch_stats: Any
    ) -> tuple[jax.Array, Any]:
        logits, updated = model.apply(
            {"params": params, "batch_stats": batch_stats},
            batch["images"],
            mutable=["batch_stats"],
            rngs=dropout_rngs(batch),
        )
        return loss_of(logits, batch), updated["batch_stats"]

    def init(key: jax.Array) -> tuple[Any, ...]:
        params_key, image_key, label_key, dropout_key = jax.random.split(key, 4)
        data = {
            "images": jax.random.normal(image_key, (batch, image, image, 3)),
            "labels": jax.random.randint(label_key, (batch,), 0, classes),
        }
        if dropout > 0:
            data["dropout_key"] = dropout_key
        variables = initial.init(params_key, data["images"])
        statistics = (variables["batch_stats"],) if has_statistics else ()
        return variables["params"], data, *statistics

    return Problem(
        name,
        loss_and_statistics if has_statistics else loss_fn,
        shapes_of(init),
        has_statistics,
        description=description,
        init=init,
    )
