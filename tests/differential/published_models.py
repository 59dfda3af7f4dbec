"""Models from other packages as their users write them, small and with random weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from differential.program import Loss, Uses, Wrap, normal, program, rows

TOKENS = np.arange(32).reshape(2, 16) * 7 % 30 + 1


def transformers() -> Any:
    """A version that still has Flax models."""
    package = pytest.importorskip("transformers")
    if not hasattr(package, "FlaxBertModel"):
        pytest.skip("this version of transformers has no Flax models")
    return package


def language_model(name: str, config: Any, **given: Any) -> Loss:
    """The cross entropy of the next token, with dropout."""
    model = getattr(transformers(), name)(config, seed=0)

    def loss(params: Any, tokens: Any, key: Any) -> Any:
        out = model(tokens, params=params, dropout_rng=key, train=True, **given)
        logits = getattr(out, "logits", None)
        if logits is None:
            logits = out.last_hidden_state
        targets = jax.nn.one_hot(tokens[:, 1:] % logits.shape[-1], logits.shape[-1])
        return -(jax.nn.log_softmax(logits[:, :-1]) * targets).sum(-1).mean()

    return Loss(loss, (model.params, jnp.asarray(TOKENS), jax.random.key(1)), tolerance=1e-3)


@program()
def transformers_bert() -> Loss:
    config = transformers().BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return language_model("FlaxBertForMaskedLM", config)


@program()
def transformers_gpt2() -> Loss:
    config = transformers().GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16
    )
    return language_model("FlaxGPT2LMHeadModel", config)


@program()
def transformers_llama() -> Loss:
    config = transformers().LlamaConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return language_model("FlaxLlamaForCausalLM", config)


@program()
def transformers_vit() -> Loss:
    package = transformers()
    config = package.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        image_size=16, patch_size=4,
    )  # fmt: skip
    model = package.FlaxViTForImageClassification(config, seed=0, input_shape=(1, 16, 16, 3))

    def loss(params: Any, images: Any, key: Any) -> Any:
        logits = model(images, params=params, dropout_rng=key, train=True).logits
        return -jax.nn.log_softmax(logits)[:, 0].mean()

    args = (model.params, normal(2, 3, 16, 16), jax.random.key(1))
    return Loss(loss, args, tolerance=1e-3)


@program()
def transformers_resnet_with_batch_statistics() -> Loss:
    package = transformers()
    config = package.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = package.FlaxResNetForImageClassification(config, seed=0, input_shape=(1, 32, 32, 3))
    params, stats = model.params["params"], model.params["batch_stats"]

    def loss(params: Any, stats: Any, images: Any) -> Any:
        given = {"params": params, "batch_stats": stats}
        out, stats = model(images, params=given, train=True)
        return -jax.nn.log_softmax(out.logits)[:, 0].mean(), stats

    args = (params, stats, normal(4, 3, 32, 32))
    return Loss(loss, args, has_aux=True, tolerance=1e-3)


@program()
def diffrax_neural_ode() -> Uses:
    """An adaptive solver with checkpoints of its own in a bounded loop."""
    eqx, diffrax = pytest.importorskip("equinox"), pytest.importorskip("diffrax")

    def use(wrap: Wrap) -> Any:
        field = eqx.nn.MLP(4, 4, 16, 2, activation=jnp.tanh, key=jax.random.key(0))
        params, static = eqx.partition(field, eqx.is_inexact_array)

        def loss(params: Any, starts: Any) -> Any:
            model = eqx.combine(params, static)

            def end(y: Any) -> Any:
                solution = diffrax.diffeqsolve(
                    diffrax.ODETerm(lambda t, y, _: model(y)),
                    diffrax.Tsit5(),
                    t0=0.0,
                    t1=1.0,
                    dt0=0.1,
                    y0=y,
                    stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-5),
                    max_steps=64,
                )
                return solution.ys[-1]

            return (jax.vmap(end)(starts) ** 2).mean()

        return wrap.jit(jax.value_and_grad(wrap(loss)))(params, normal(4, 4))

    return Uses(use, tolerance=1e-3)


@program()
def diffrax_fixed_steps() -> Uses:
    diffrax = pytest.importorskip("diffrax")

    def use(wrap: Wrap) -> Any:
        def loss(w: Any, start: Any) -> Any:
            solution = diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, w: jnp.tanh(y @ w)),
                diffrax.Heun(),
                t0=0.0,
                t1=1.0,
                dt0=0.1,
                y0=start,
                args=w,
                adjoint=diffrax.DirectAdjoint(),
                max_steps=16,
            )
            return (solution.ys**2).mean()

        return wrap.jit(jax.value_and_grad(wrap(loss)))(normal(8, 8), rows(16))

    return Uses(use, tolerance=1e-4)


@program()
def lineax_solve() -> Loss:
    lineax = pytest.importorskip("lineax")

    def loss(w: Any, x: Any) -> Any:
        operator = lineax.MatrixLinearOperator(
            w @ w.T + jnp.eye(8), lineax.positive_semidefinite_tag
        )

        def solved(b: Any) -> Any:
            return lineax.linear_solve(operator, b, lineax.Cholesky()).value

        return (jnp.tanh(jax.vmap(solved)(x)) ** 2).mean()

    return Loss(loss, (normal(8, 8), rows()), tolerance=1e-4)


@program()
def jraph_graph_network() -> Loss:
    """With Haiku, as in its examples."""
    jraph, hk = pytest.importorskip("jraph"), pytest.importorskip("haiku")
    graph = jraph.GraphsTuple(
        nodes=normal(12, 8),
        edges=normal(30, 4),
        senders=jnp.arange(30) % 12,
        receivers=jnp.arange(30) * 5 % 12,
        globals=normal(1, 4),
        n_node=jnp.array([12]),
        n_edge=jnp.array([30]),
    )

    def forward(graph: Any) -> Any:
        def update(size: int) -> Any:
            def apply(*inputs: Any) -> Any:
                joined = jnp.concatenate([jnp.asarray(x) for x in inputs], -1)
                return hk.nets.MLP([16, size])(joined)

            return apply

        for _ in range(2):
            graph = jraph.GraphNetwork(update(4), update(8), update(4))(graph)
        return graph.nodes, graph.globals

    model = hk.without_apply_rng(hk.transform(forward))
    params = model.init(jax.random.key(0), graph)

    def loss(params: Any, graph: Any) -> Any:
        nodes, whole = model.apply(params, graph)
        return (nodes**2).mean() + (whole**2).mean()

    return Loss(loss, (params, graph), tolerance=1e-4)


@program()
def e3nn_tensor_products() -> Loss:
    e3nn = pytest.importorskip("e3nn_jax")

    def loss(ws: Any, vectors: Any) -> Any:
        features = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, True)
        total = 0.0
        for w in ws:
            product = e3nn.tensor_product(features, features, filter_ir_out="0e + 1o")
            total = (
                total + jnp.tanh(e3nn.norm(product).array @ w[: product.irreps.num_irreps]).sum()
            )
        return total

    return Loss(loss, (list(normal(2, 16, 8)), normal(16, 3)), tolerance=1e-3)


@program()
def haiku_resnet() -> Loss:
    hk = pytest.importorskip("haiku")

    def forward(images: Any) -> Any:
        net = hk.nets.ResNet(
            (1, 1, 1, 1), 4, resnet_v2=True, bottleneck=False, channels_per_group=(4, 4, 8, 8),
            use_projection=(False, True, True, True), initial_conv_config={"output_channels": 4},
        )  # fmt: skip
        return net(images, is_training=True)

    model = hk.transform_with_state(forward)
    images = normal(2, 32, 32, 3)
    params, state = model.init(jax.random.key(0), images)

    def loss(params: Any, state: Any, images: Any) -> Any:
        logits, state = model.apply(params, state, None, images)
        return -jax.nn.log_softmax(logits)[:, 0].mean(), state

    return Loss(loss, (params, state, images), has_aux=True, tolerance=1e-3)
