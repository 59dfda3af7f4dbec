"""Trains what a YAML file says, its memory budget in it: a trainer that others configure.

    python examples/train_yaml.py examples/mixer.yaml

An MLP-Mixer in half precision: `flax`'s `TrainState`, a loss scale, gradients accumulated over
microbatches and clipped, the state donated. None of this knows of rematerialization; the section
`remat` of the file is handed to `jax_hremat.fit_step` as it is.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import yaml
from flax.training.train_state import TrainState

import jax_hremat

Batch = tuple[jax.Array, jax.Array]


class Mixer(nn.Module):
    """From patches (batch, patches, width) to logits: mixed over patches, then over channels."""

    layers: int
    width: int
    patches: int
    classes: int
    dtype: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def mlp(y: jax.Array) -> jax.Array:
            hidden = nn.gelu(nn.Dense(4 * y.shape[-1], dtype=self.dtype)(y))
            return nn.Dense(y.shape[-1], dtype=self.dtype)(hidden)

        x = nn.Dense(self.width, dtype=self.dtype)(x)
        for _ in range(self.layers):
            across = mlp(nn.LayerNorm(dtype=self.dtype)(x).swapaxes(1, 2)).swapaxes(1, 2)
            x = x + across
            x = x + mlp(nn.LayerNorm(dtype=self.dtype)(x))
        return nn.Dense(self.classes)(x.mean(axis=1))


NESTED = {"search": jax_hremat.SearchConfig, "solver": jax_hremat.SolverConfig}


def remat_options(section: Mapping[str, Any]) -> dict[str, Any]:
    """The file's section as keywords of `fit_step`."""
    given = section.get("config", {})
    config = {name: NESTED[name](**v) if name in NESTED else v for name, v in given.items()}
    return {**section, "config": jax_hremat.PlannerConfig(**config)}


def main(config: Mapping[str, Any]) -> tuple[jax_hremat.RematPlan | None, list[float]]:
    """Plans if the configuration says so, and trains; the plan and the losses."""
    training, model = config["training"], Mixer(**config["model"])
    scale, microbatches = training["loss_scale"], training["microbatches"]

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        images, labels = batch
        logits = model.apply({"params": params}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_step(loss: Any) -> Any:
        def step(state: TrainState, batch: Batch) -> tuple[TrainState, jax.Array]:
            def add(total: Any, part: Batch) -> tuple[Any, jax.Array]:
                scaled, grads = jax.value_and_grad(lambda p: scale * loss(p, part))(state.params)
                return jax.tree.map(jnp.add, total, grads), scaled / scale

            parts = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)
            zeros = jax.tree.map(jnp.zeros_like, state.params)
            grads, losses = jax.lax.scan(add, zeros, parts)
            grads = jax.tree.map(lambda g: g / (scale * microbatches), grads)
            return state.apply_gradients(grads=grads), losses.mean()

        return step

    def make_state(key: jax.Array) -> TrainState:
        params = model.init(key, images_of(0)[:1])["params"]
        clip = optax.clip_by_global_norm(training["clip"])
        optimizer = optax.chain(clip, optax.adamw(training["learning_rate"]))
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def labels_of(step: int) -> jax.Array:
        return jax.random.randint(
            jax.random.key(step), (training["batch"],), 0, model.classes, jnp.int32
        )

    def images_of(step: int) -> jax.Array:
        """Noise, brighter in the part of the patches that the label names."""
        shape = (training["batch"], model.patches, 16)
        part = jnp.arange(model.patches) * model.classes // model.patches
        bright = (part == labels_of(step)[:, None]).astype(jnp.float32)
        return jax.random.normal(jax.random.key(-1 - step), shape) + bright[..., None]

    state = make_state(jax.random.key(0))
    batch = images_of(0), labels_of(0)
    if "remat" in config:
        fit = jax_hremat.fit_step(make_step, loss_fn, **remat_options(config["remat"]))
        step, plan = fit(state, batch)
        print(plan)
    else:
        step, plan = jax.jit(make_step(loss_fn), donate_argnums=0), None

    losses = []
    for number in range(training["steps"]):
        state, loss = step(state, (images_of(number), labels_of(number)))
        losses.append(float(loss))
    print(f"loss: {losses[0]:.2f} at first, {losses[-1]:.2f} after {training['steps']} steps")
    return plan, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    main(yaml.safe_load(parser.parse_args().file.read_text(encoding="utf-8")))
