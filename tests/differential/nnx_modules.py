"""Flax NNX: whatever state a call changes is changed, wherever it lies."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from programs import peak_bytes_of

import jax_hremat
import jax_hremat.nnx
from differential.program import Outcome, Uses, Wrap, normal, program, rows

WIDTH = 8
Call = tuple[tuple[Any, ...], dict[str, Any]]


def state_of(tree: Any) -> Any:
    """All variables by path and type, as a plain pytree."""
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(tree)):
        is_variable = isinstance(leaf, nnx.Variable)
        key = "/".join((*map(str, path), type(leaf).__name__ if is_variable else ""))
        found[key] = leaf.get_value() if is_variable else leaf
    return found


def plain(tree: Any) -> Any:
    """Values of gradients: states as dictionaries."""

    def pure(leaf: Any) -> Any:
        return state_of(leaf) if isinstance(leaf, nnx.State) else leaf

    return jax.tree.map(pure, tree, is_leaf=lambda leaf: isinstance(leaf, nnx.State))


def trained(
    make: Callable[[Wrap], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]],
    *,
    argnums: Any = 0,
    has_aux: bool = False,
    jit: bool = True,
    steps: int = 2,
    certified: bool = True,
    planner: Any = jax_hremat.nnx.remat,
    **options: Any,
) -> Uses:
    """Steps of `nnx.value_and_grad` as a user writes them, and all state after them.

    Args:
        make: Returns the loss, planned as it likes, and new arguments.
        certified: Whether the budget is of the loss's own step.
    """

    def use(wrap: Wrap) -> Any:
        fun, args, kwargs = make(wrap)

        def step(args: Any, kwargs: Any) -> Any:
            grad = nnx.value_and_grad(fun, argnums=argnums, has_aux=has_aux)
            out, grads = grad(*args, **kwargs)
            return out, plain(grads)

        jitted = nnx.jit(step) if jit else step
        peak_bytes = None
        if certified and wrap.made:
            # `nnx.value_and_grad` passes what it can by position.
            given = inspect.signature(fun).bind(*args, **kwargs).args
            peak_bytes = peak_of(fun, given, {}, wrap, argnums, has_aux)
        outs = [jitted(args, kwargs) for _ in range(steps)]
        return Outcome((outs, state_of((args, kwargs))), peak_bytes)

    return Uses(use, planner, tolerance=1e-4, **options)


def peak_of(fun: Any, args: Any, kwargs: Any, wrap: Wrap, argnums: Any, has_aux: bool) -> int:
    """The loss with its gradients and the state that it changes, compiled by itself."""
    positions = (argnums,) if isinstance(argnums, int) else argnums

    def chosen(path: Any, _: Any) -> bool:
        return path[0] == 0 and path[1] in positions

    graphdef, params, rest = nnx.split((args, kwargs), nnx.All(nnx.Param, chosen), ...)

    def pure(params: Any, rest: Any) -> Any:
        now = nnx.merge(graphdef, params, rest, copy=True)
        out = fun(*now[0], **now[1])
        value, aux = out if has_aux else (out, None)
        after = nnx.split(now, nnx.All(nnx.Param, chosen), ...)[1:]
        pairs = zip(jax.tree.leaves(after), jax.tree.leaves((params, rest)), strict=True)
        return value, (aux, [one for one, before in pairs if one is not before])

    step = wrap.jit(jax.value_and_grad(pure, has_aux=True))
    return peak_bytes_of(step.lower(params, rest).compile())


class Block(nnx.Module):
    """Batch statistics, and dropout with keys of its own."""

    def __init__(self, rngs: nnx.Rngs, rate: float = 0.2) -> None:
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(4 * WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> Any:
        h = self.dropout(nnx.gelu(self.norm(self.up(x))), rngs=rngs)
        return x + self.down(h)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, block: Any = Block, count: int = 2) -> None:
        self.blocks = nnx.List([block(rngs) for _ in range(count)])

    def __call__(self, x: Any, rngs: nnx.Rngs | None = None) -> Any:
        for block in self.blocks:
            x = block(x, rngs) if rngs is not None else block(x)
        return x


def square(model: Any, x: Any) -> Any:
    return (model(x) ** 2).mean()


@program()
def keys_in_the_module() -> Uses:
    return trained(lambda wrap: (wrap(square), (Model(nnx.Rngs(0)), rows()), {}))


@program()
def keys_as_an_argument() -> Uses:
    def loss(model: Any, x: Any, rngs: nnx.Rngs) -> Any:
        return (model(x, rngs) ** 2).mean()

    return trained(lambda wrap: (wrap(loss), (Model(nnx.Rngs(0)), rows(), nnx.Rngs(dropout=3)), {}))


@program()
def keys_as_a_keyword() -> Uses:
    def loss(model: Any, x: Any, rngs: nnx.Rngs) -> Any:
        return (model(x, rngs) ** 2).mean()

    return trained(
        lambda wrap: (wrap(loss), (Model(nnx.Rngs(0)), rows()), {"rngs": nnx.Rngs(dropout=3)})
    )


@program()
def keys_as_a_keyword_of_a_class() -> Uses:
    def make(wrap: Wrap) -> Any:
        def loss(model: Any, x: Any, rngs: nnx.Rngs) -> Any:
            return (model(x, rngs=rngs) ** 2).mean()

        return loss, (wrap(Block)(nnx.Rngs(0)), rows(), nnx.Rngs(dropout=3)), {}

    return trained(make, certified=False)


@program()
def class_in_a_model() -> Uses:
    def make(wrap: Wrap) -> Any:
        return square, (Model(nnx.Rngs(0), wrap(Block)), rows()), {}

    return trained(make, certified=False)


@program()
def several_outputs() -> Uses:
    def loss(model: Any, x: Any) -> Any:
        y = model(x)
        return (y**2).mean(), {"most": y.max(), "none": None, "name": "y"}

    def make(wrap: Wrap) -> Any:
        return wrap(loss, has_aux=True), (Model(nnx.Rngs(0)), rows()), {}

    return trained(make, has_aux=True, jit=False, certified=False)


@program()
def metrics_updated_in_the_loss() -> Uses:
    def loss(model: Any, metrics: Any, x: Any) -> Any:
        y = model(x)
        metrics.update(loss=(y**2).mean(), values=y)
        return (y**2).mean()

    def make(wrap: Wrap) -> Any:
        metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), spread=nnx.metrics.Welford())
        return wrap(loss), (Model(nnx.Rngs(0)), metrics, rows()), {}

    return trained(make)


@program()
def a_variable_as_an_argument() -> Uses:
    class Count(nnx.Variable):
        pass

    def loss(model: Any, count: Any, x: Any) -> Any:
        count[...] += 1.0
        return square(model, x) * count[...]

    def make(wrap: Wrap) -> Any:
        return wrap(loss), (Model(nnx.Rngs(0)), Count(jnp.float32(0)), rows()), {}

    return trained(make)


@program()
def modules_in_a_list() -> Uses:
    def loss(model: Any, others: Any, x: Any) -> Any:
        for other in others:
            x = other(x)
        return square(model, x)

    def make(wrap: Wrap) -> Any:
        others = [Block(nnx.Rngs(1)), Block(nnx.Rngs(2))]
        return wrap(loss), (Block(nnx.Rngs(0)), others, rows()), {}

    return trained(make)


@program()
def modules_in_a_dictionary_differentiated() -> Uses:
    def loss(models: Any, x: Any) -> Any:
        return square(models["b"], models["a"](x))

    def make(wrap: Wrap) -> Any:
        models = {"a": Block(nnx.Rngs(1)), "b": Block(nnx.Rngs(2))}
        return wrap(loss), (models, rows()), {}

    return trained(make)


@program()
def a_module_as_a_keyword() -> Uses:
    def loss(model: Any, x: Any, teacher: Any) -> Any:
        return ((model(x) - teacher(x)) ** 2).mean()

    def make(wrap: Wrap) -> Any:
        return wrap(loss), (Block(nnx.Rngs(0)), rows()), {"teacher": Block(nnx.Rngs(7))}

    return trained(make)


@program()
def a_module_in_a_closure() -> Uses:
    def use(wrap: Wrap) -> Any:
        model, teacher = Block(nnx.Rngs(0), rate=0.0), Block(nnx.Rngs(7))
        teacher.eval()

        def loss(model: Any, x: Any) -> Any:
            return ((model(x) - teacher(x)) ** 2).mean()

        planned, seen = wrap(loss), []
        for _ in range(2):
            seen.append(plain(nnx.value_and_grad(planned)(model, rows())))
            average = jax.tree.map(
                lambda a, b: 0.5 * (a + b),
                nnx.state(teacher, nnx.Param),
                nnx.state(model, nnx.Param),
            )
            nnx.update(teacher, average)
        return seen, state_of(model), state_of(teacher)

    return Uses(use, jax_hremat.nnx.remat, tolerance=1e-4)


@program()
def a_module_shared_by_two() -> Uses:
    class Two(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = Block(rngs)
            self.second = self.first
            self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
            self.head.kernel = self.first.down.bias and self.head.kernel

        def __call__(self, x: Any) -> Any:
            return self.head(self.second(self.first(x)))

    return trained(lambda wrap: (wrap(square), (Two(nnx.Rngs(0)), rows()), {}))


@program()
def a_part_shared_by_two_arguments() -> Uses:
    def loss(model: Any, other: Any, x: Any) -> Any:
        return ((model(x) * other(jnp.sin(x))) ** 2).mean()

    def make(wrap: Wrap) -> Any:
        model, other = Block(nnx.Rngs(0)), Block(nnx.Rngs(5))
        other.norm = model.norm
        return wrap(loss, argnums=(0, 1)), (model, other, rows()), {}

    return trained(make, argnums=(0, 1))


@program()
def two_modules_differentiated() -> Uses:
    def loss(model: Any, x: Any, other: Any) -> Any:
        return ((model(x) - other(x)) ** 2).mean()

    def make(wrap: Wrap) -> Any:
        args = (Block(nnx.Rngs(0)), rows(), Block(nnx.Rngs(1)))
        return wrap(loss, argnums=(0, 2)), args, {}

    return trained(make, argnums=(0, 2))


@program()
def a_parameter_set_in_the_call() -> Uses:
    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.block = Block(rngs)
            self.scale = nnx.Param(jnp.full(WIDTH, 1.5))

        def __call__(self, x: Any) -> Any:
            self.scale[...] = jnp.clip(self.scale[...], 0.0, 1.0)
            return self.block(x) * self.scale

    return trained(lambda wrap: (wrap(square), (Scaled(nnx.Rngs(0)), rows()), {}))


@program()
def planned_by_the_function_for_arrays() -> Uses:
    def make(wrap: Wrap) -> Any:
        return wrap(square), (Model(nnx.Rngs(0)), rows()), {}

    return trained(make, planner=jax_hremat.hremat)


@program()
def scanned_layers() -> Uses:
    class Layers(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            @nnx.split_rngs(splits=4)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> Any:
                return Block(rngs)

            self.layers = make(rngs)

        def __call__(self, x: Any) -> Any:
            @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
            def forward(layer: Any, x: Any) -> Any:
                return layer(x)

            return forward(self.layers, x)

    return trained(lambda wrap: (wrap(square), (Layers(nnx.Rngs(0)), rows()), {}))


@program()
def mapped_experts() -> Uses:
    class Experts(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def make(rngs: nnx.Rngs) -> Any:
                return Block(rngs)

            self.experts = make(rngs)

        def __call__(self, x: Any) -> Any:
            return nnx.vmap(lambda expert, x: expert(x), in_axes=(0, None))(self.experts, x).sum(0)

    return trained(lambda wrap: (wrap(square), (Experts(nnx.Rngs(0)), rows(32)), {}))


@program()
def rematerialized_by_hand() -> Uses:
    class Remat(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

        def __call__(self, x: Any) -> Any:
            for block in self.blocks:
                x = nnx.remat(lambda block, x: block(x))(block, x)
            return x

    # `nnx.remat` hands all state back, keys that nothing has changed among it.
    return trained(lambda wrap: (wrap(square), (Remat(nnx.Rngs(0)), rows()), {}), certified=False)


@program()
def in_evaluation() -> Uses:
    def make(wrap: Wrap) -> Any:
        model = Model(nnx.Rngs(0))
        model.eval()
        return wrap(square), (model, rows()), {}

    return trained(make)


@program()
def training_then_evaluation() -> Uses:
    def use(wrap: Wrap) -> Any:
        model, loss, seen = Model(nnx.Rngs(0)), wrap(square), []
        for mode in (model.train, model.eval, model.train):
            mode()
            seen.append(loss(model, rows()))
        return seen, state_of(model)

    return Uses(use, jax_hremat.nnx.remat, tolerance=1e-4)


@program()
def with_an_optimizer() -> Uses:
    def use(wrap: Wrap) -> Any:
        model, loss = Model(nnx.Rngs(0)), wrap(square)
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> Any:
            value, grads = nnx.value_and_grad(loss)(model, x)
            optimizer.update(model, grads)
            return value

        values = [step(model, optimizer, rows()) for _ in range(3)]
        return values, state_of(model), state_of(optimizer)

    return Uses(use, jax_hremat.nnx.remat, tolerance=5e-3)


@program()
def some_parameters_frozen() -> Uses:
    def use(wrap: Wrap) -> Any:
        model = Model(nnx.Rngs(0))
        wrt = nnx.All(nnx.Param, nnx.PathContains("down"))
        loss = wrap(square, wrt=wrt)
        grad = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))
        return plain(grad(model, rows())), state_of(model)

    return Uses(use, jax_hremat.nnx.remat, tolerance=1e-4)


@program()
def low_rank_adapters() -> Uses:
    def use(wrap: Wrap) -> Any:
        rngs = nnx.Rngs(0)
        model = nnx.Sequential(
            nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            nnx.LoRA(WIDTH, 2, WIDTH, base_module=Block(rngs), rngs=rngs),
        )
        loss = wrap(square, wrt=nnx.LoRAParam)
        grad = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
        return plain(grad(model, rows())), state_of(model)

    return Uses(use, jax_hremat.nnx.remat, tolerance=1e-4)


@program()
def recurrent_cells() -> Uses:
    class Recurrent(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.RNN(nnx.LSTMCell(WIDTH, WIDTH, rngs=rngs))
            self.second = nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=rngs))

        def __call__(self, x: Any) -> Any:
            return self.second(self.first(x))

    def make(wrap: Wrap) -> Any:
        return wrap(square), (Recurrent(nnx.Rngs(0)), normal(4, 8, WIDTH)), {}

    return trained(make)


@program()
def attention_with_keys_and_a_mask() -> Uses:
    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(11, WIDTH, rngs=rngs)
            self.attend = nnx.MultiHeadAttention(
                2, WIDTH, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs
            )
            self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

        def __call__(self, tokens: Any) -> Any:
            x = self.embed(tokens)
            x = x + self.attend(self.norm(x), mask=nnx.make_causal_mask(tokens))
            return self.embed.attend(x)

    def make(wrap: Wrap) -> Any:
        tokens = jnp.arange(24).reshape(2, 12) % 11
        return wrap(square), (Attention(nnx.Rngs(0)), tokens), {}

    return trained(make)


@program()
def intermediate_values_sown() -> Uses:
    class Sowing(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.block = Block(rngs)

        def __call__(self, x: Any) -> Any:
            x = self.block(x)
            self.sow(nnx.Intermediate, "mean", x.mean())
            return x

    def loss(model: Sowing, x: Any) -> Any:
        out, sown = nnx.capture(model, nnx.Intermediate)(x)
        return (out * out).mean(), plain(sown)

    return trained(
        lambda wrap: (wrap(loss, has_aux=True), (Sowing(nnx.Rngs(0)), rows()), {}),
        has_aux=True,
        jit=False,
        steps=1,
        certified=False,
    )


@program()
def split_and_merged_by_hand() -> Uses:
    """The functional interface: a loss of a state."""

    def use(wrap: Wrap) -> Any:
        graphdef, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

        def loss(params: Any, rest: Any, x: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            value = square(model, x)
            return value, nnx.split(model, nnx.Param, ...)[2]

        step = wrap.jit(jax.value_and_grad(wrap(loss, has_aux=True), has_aux=True))
        (value, rest), grads = step(params, rest, rows())
        return value, state_of(rest), state_of(grads)

    return Uses(use, jax_hremat.hremat, tolerance=1e-4)
