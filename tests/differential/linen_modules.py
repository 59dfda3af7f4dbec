"""Flax linen: losses of modules, and module classes that are planned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

import jax_hremat.linen
from differential.program import Loss, Uses, Wrap, normal, program, rows

KEYS = {name: jax.random.key(i) for i, name in enumerate(("params", "dropout", "noise"))}


def mean_square(out: Any) -> Any:
    return sum((leaf.astype(jnp.float32) ** 2).mean() for leaf in jax.tree.leaves(out))


def loss_of(module: nn.Module, x: Any, *args: Any, method: Any = None, **kwargs: Any) -> Loss:
    """The loss of a module: its mutable collections come out, and its keys are an argument."""
    variables = dict(module.init(KEYS, x, *args, method=method, **kwargs))
    params = variables.pop("params")

    def loss(params: Any, state: Any, x: Any, keys: Any) -> Any:
        out, state = module.apply(
            {"params": params, **state},
            x,
            *args,
            mutable=["batch_stats", "intermediates", "cache", "counts"],
            rngs=keys,
            method=method,
            **kwargs,
        )
        return mean_square(out), state

    return Loss(loss, (params, variables, x, KEYS), has_aux=True, tolerance=1e-4)


def class_of(
    module_class: type, build: Callable[[Any], nn.Module], x: Any, *args: Any, **kwargs: Any
) -> Uses:
    """A planned class inside a model that `build` makes of it; keys go on where they were."""
    variables = dict(build(module_class).init(KEYS, x, *args, **kwargs))
    params = variables.pop("params")

    def use(wrap: Wrap) -> Any:
        module = build(wrap(module_class))

        def loss(params: Any, state: Any, x: Any) -> Any:
            out, state = module.apply(
                {"params": params, **state},
                x,
                *args,
                rngs=KEYS,
                mutable=["batch_stats", "intermediates"],
                **kwargs,
            )
            return mean_square(out), (state, out)

        step = wrap.jit(jax.value_and_grad(loss, has_aux=True))
        (value, (state, out)), grads = step(params, variables, x)
        again, _ = step(params, {**variables, **state}, x)
        return value, state, out, grads, again

    return Uses(use, jax_hremat.linen.remat, tolerance=1e-4)


class Block(nn.Module):
    """Batch statistics, dropout, a flag and something sown."""

    features: int = 8
    rate: float = 0.2

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        h = nn.BatchNorm(use_running_average=not train)(nn.Dense(4 * self.features)(x))
        h = nn.Dropout(self.rate, deterministic=not train)(nn.gelu(h))
        self.sow("intermediates", "hidden", h.mean())
        return x + nn.Dense(x.shape[-1])(h)


class Stack(nn.Module):
    block: Any = Block
    count: int = 3

    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        for _ in range(self.count):
            x = self.block()(x, train)
        return x


@program()
def blocks_in_training() -> Loss:
    return loss_of(Stack(), rows())


@program()
def blocks_in_evaluation() -> Loss:
    return loss_of(Stack(), rows(), train=False)


@program()
def class_in_training() -> Uses:
    return class_of(Block, lambda block: Stack(block, 2), rows())


@program()
def class_in_evaluation() -> Uses:
    return class_of(Block, lambda block: Stack(block, 2), rows(), train=False)


@program()
def class_alone() -> Uses:
    return class_of(Block, lambda block: block(), rows(), train=True)


@program()
def class_of_the_whole_model() -> Uses:
    return class_of(Stack, lambda stack: stack(), rows())


@program()
def layers_of_many_kinds() -> Loss:
    class Images(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.relu(nn.GroupNorm(2)(nn.Conv(8, (3, 3))(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
            x = nn.LayerNorm()(nn.ConvTranspose(4, (2, 2), (2, 2))(x))
            x = nn.silu(nn.avg_pool(x, (2, 2), (2, 2)))
            return nn.DenseGeneral(5, axis=(1, 2))(x)

    return loss_of(Images(), normal(2, 8, 8, 4))


@program()
def attention_and_embeddings_tied() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens: Any) -> Any:
            table = nn.Embed(11, 8)
            x = table(tokens)
            mask = nn.make_causal_mask(tokens)
            for _ in range(2):
                x = x + nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)(
                    nn.RMSNorm()(x), mask=mask
                )
            return nn.log_softmax(table.attend(x))

    return loss_of(Model(), jnp.arange(48).reshape(4, 12) % 11)


@program()
def decoding_with_a_cache() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            attend = nn.MultiHeadDotProductAttention(2, decode=True)
            return x + attend(x, x)

    module = Model()
    variables = dict(module.init(KEYS, normal(2, 6, 8)))
    params = variables.pop("params")

    def loss(params: Any, cache: Any, x: Any) -> Any:
        total = 0.0
        for i in range(3):
            given = {"params": params, **cache}
            out, cache = module.apply(given, x[:, i : i + 1], mutable=["cache"])
            total = total + mean_square(out)
        return total, cache

    return Loss(loss, (params, variables, normal(2, 6, 8)), has_aux=True, tolerance=1e-4)


@program()
def recurrent_cells() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            lengths = jnp.array([5, 12, 9, 1])
            x = nn.RNN(nn.LSTMCell(8))(x, seq_lengths=lengths)
            x = nn.Bidirectional(nn.RNN(nn.GRUCell(4)), nn.RNN(nn.GRUCell(4)))(x)
            return nn.RNN(nn.OptimizedLSTMCell(6), reverse=True, keep_order=True)(x)

    return loss_of(Model(), normal(4, 12, 8))


@program()
def scanned_layers() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            def body(block: Any, x: Any, _: Any) -> Any:
                return block(x), None

            scanned = nn.scan(
                body,
                variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
                split_rngs={"params": True, "dropout": True},
                length=4,
            )
            return scanned(Block(), x, None)[0]

    return loss_of(Model(), rows())


@program()
def scanned_layers_rematerialized_by_hand() -> Loss:
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x: Any, _: Any) -> Any:
            return x + nn.Dense(8)(nn.gelu(nn.Dense(32)(x))), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            layer = nn.remat(Layer, policy=policy, prevent_cse=False)
            scanned = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True},
                              length=4)  # fmt: skip
            return scanned()(x, None)[0]

    return loss_of(Model(), rows())


@program()
def remat_with_static_arguments() -> Loss:
    return loss_of(Stack(nn.remat(Block, static_argnums=(2,))), rows(), True)


@program()
def class_inside_a_scan() -> Uses:
    def build(block: Any) -> nn.Module:
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                axes = {"params": 0, "batch_stats": 0, "intermediates": 0}
                keys = {"params": True, "dropout": True}
                scanned = nn.scan(
                    lambda block, x, _: (block(x), None),
                    variable_axes=axes,
                    split_rngs=keys,
                    length=3,
                )
                return scanned(block(), x, None)[0]

        return Model()

    return class_of(Block, build, rows())


@program()
def mapped_over_an_axis() -> Loss:
    experts = nn.vmap(
        Block,
        in_axes=(0, None),
        variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
        split_rngs={"params": True, "dropout": True},
    )
    return loss_of(experts(), normal(3, 16, 8), True)


@program()
def class_inside_a_vmap() -> Uses:
    def build(block: Any) -> nn.Module:
        experts = nn.vmap(
            block,
            in_axes=(0, None),
            variable_axes={"params": 0, "batch_stats": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
        )
        return experts()

    return class_of(Block, build, normal(3, 16, 8), True)


@program()
def spectral_and_weight_norms() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = x + jnp.tanh(nn.SpectralNorm(nn.Dense(8))(x, update_stats=True))
            return nn.WeightNorm(nn.Dense(8))(x)

    return loss_of(Model(), rows())


@program()
def several_methods() -> Loss:
    class Coder(nn.Module):
        def setup(self) -> None:
            self.down = nn.Dense(4)
            self.up = nn.Dense(8)

        def encode(self, x: Any) -> Any:
            return nn.tanh(self.down(x))

        def decode(self, z: Any) -> Any:
            return self.up(z)

        def both(self, x: Any) -> Any:
            noise = jax.random.normal(self.make_rng("noise"), (len(x), 4))
            return self.decode(self.encode(x) + noise), self.encode(x)

    return loss_of(Coder(), rows(), method="both")


@program()
def class_with_methods_planned() -> Uses:
    class Coder(nn.Module):
        def setup(self) -> None:
            self.down = nn.Dense(16)
            self.up = nn.Dense(8)

        def encode(self, x: Any) -> Any:
            return nn.gelu(self.down(x)) ** 2

        def decode(self, z: Any) -> Any:
            return jnp.sin(self.up(nn.gelu(z)))

        def __call__(self, x: Any) -> Any:
            return self.decode(self.encode(x))

    params = Coder().init(KEYS, rows())

    def use(wrap: Wrap) -> Any:
        module = wrap(Coder, methods=("encode", "decode"))()

        def loss(params: Any, x: Any) -> Any:
            z = module.apply(params, x, method="encode")
            return mean_square(module.apply(params, z, method="decode")) + mean_square(z)

        return wrap.jit(jax.value_and_grad(loss))(params, rows())

    return Uses(use, jax_hremat.linen.remat)


@program()
def class_shared_by_two_calls() -> Uses:
    def build(block: Any) -> nn.Module:
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                shared = block(rate=0.5)
                return shared(jnp.sin(shared(x)))

        return Model()

    return class_of(Block, build, rows())


@program()
def class_with_keyword_and_none_arguments() -> Uses:
    class Layer(nn.Module):
        act: Callable[[Any], Any] = nn.gelu

        @nn.compact
        def __call__(self, x: Any, mask: Any = None, *, scale: float = 1.0) -> Any:
            y = self.act(nn.Dense(16)(x)) * scale
            y = nn.Dense(8)(y)
            return {"y": y if mask is None else jnp.where(mask, y, 0.0), "none": None}

    def build(layer: Any) -> nn.Module:
        class Model(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                x = layer()(x, scale=0.5)["y"]
                return layer(act=jnp.tanh)(x, mask=x > 0)["y"]

        return Model()

    return class_of(Layer, build, rows())


@program()
def perturbed_and_sown() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for i in range(3):
                x = x + jnp.tanh(nn.Dense(8, name=f"layer_{i}")(x))
                x = self.perturb(f"at_{i}", x)
                self.sow("intermediates", "size", jnp.abs(x).max())
            count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
            count.value += 1
            return x

    module = Model()
    variables = dict(module.init(KEYS, rows()))
    params, shifts = variables["params"], variables["perturbations"]

    def loss(params: Any, shifts: Any, x: Any, counts: Any) -> Any:
        given = {"params": params, "perturbations": shifts, "counts": counts}
        out, state = module.apply(given, x, mutable=["intermediates", "counts"])
        return mean_square(out), state

    args = (params, shifts, rows(), variables["counts"])
    return Loss(loss, args, argnums=(0, 1), has_aux=True, tolerance=1e-4)


@program()
def parameters_shared_through_a_bound_module() -> Loss:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            up, down = nn.Dense(16, name="up"), nn.Dense(8, name="down")
            for _ in range(3):
                x = x + down(nn.gelu(up(x)))
            kernel = self.get_variable("params", "up")["kernel"]
            return x @ kernel @ kernel.T

    return loss_of(Model(), rows())


@program()
def class_decorated() -> Uses:
    def use(wrap: Wrap) -> Any:
        @partial(wrap)
        class Layer(nn.Module):
            features: int = 8

            @nn.compact
            def __call__(self, x: Any) -> Any:
                return x + nn.Dense(self.features)(nn.gelu(nn.Dense(32)(x)))

        model = nn.Sequential([Layer(), nn.LayerNorm(), Layer()])
        params = model.init(KEYS, rows())
        step = wrap.jit(jax.value_and_grad(lambda p, x: mean_square(model.apply(p, x))))
        return params, step(params, rows())

    return Uses(use, jax_hremat.linen.remat, tolerance=1e-4)
