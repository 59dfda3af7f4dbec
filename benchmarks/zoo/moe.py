"""A decoder-only language model whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from benchmarks.zoo.base import Problem, Remat, register, with_remat
from benchmarks.zoo.gpt import CausalSelfAttention
from benchmarks.zoo.tasks import LOSSES, next_token_problem

_init = nn.initializers.normal(0.02)
_PER_TOKEN = 2


@dataclass(frozen=True)
class MoEConfig:
    """Dimensions of a mixture-of-experts language model.

    Attributes:
        layers: Number of Transformer blocks.
        width: Size of the residual stream.
        heads: Number of attention heads.
        experts: Number of experts in each block; a token goes to two of them.
        capacity: Tokens an expert takes of a sequence, over what it would take were all equally
            liked; those beyond pass it by.
        balance: Weight of the loss that spreads the tokens over the experts.
        context: Sequence length.
        vocab: Vocabulary size.
        dropout: Rate for the embedding, the attention probabilities and the residuals.
        dtype: Type of the activations; parameters, gates and router are float32.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    experts: int = 8
    capacity: float = 1.25
    balance: float = 0.01
    context: int = 1024
    vocab: int = 32000
    dropout: float = 0.0
    dtype: DTypeLike = jnp.bfloat16


class Experts(nn.Module):
    """Two experts for each token, as many tokens for each expert as it has room for.

    The routing is that of GShard (Lepikhin et al. 2021, section 2.2), with both experts always
    taken and the tokens moved by gather and scatter instead of one-hot products; the balancing
    loss, sown as `losses`, is that of the Switch Transformer (Fedus et al. 2022, equation 4), of
    each token's first expert.
    """

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        length = x.shape[1]
        room = math.ceil(cfg.capacity * _PER_TOKEN * length / cfg.experts)
        router = nn.Dense(cfg.experts, use_bias=False, kernel_init=_init, name="router")
        chances = nn.softmax(router(x.astype(jnp.float32)))
        gates, chosen = jax.lax.top_k(chances, _PER_TOKEN)
        gates = gates / gates.sum(axis=-1, keepdims=True)
        first = jax.nn.one_hot(chosen[..., 0], cfg.experts)
        liking = (first.mean(axis=1) * chances.mean(axis=1)).sum(axis=-1)
        self.sow(LOSSES, "balance", cfg.balance * cfg.experts * liking.mean())

        up = self.param("up", _init, (cfg.experts, cfg.width, 4 * cfg.width)).astype(cfg.dtype)
        down = self.param("down", _init, (cfg.experts, 4 * cfg.width, cfg.width)).astype(cfg.dtype)

        def of_sequence(x: jax.Array, gates: jax.Array, chosen: jax.Array) -> jax.Array:
            # All first choices come before the second ones, so they find room first.
            expert = chosen.T.reshape(-1)
            before = jnp.cumsum(jax.nn.one_hot(expert, cfg.experts, dtype=jnp.int32), axis=0)
            seat = jnp.take_along_axis(before, expert[:, None], axis=1)[:, 0] - 1
            tokens = jnp.tile(x, (_PER_TOKEN, 1))
            seats = jnp.zeros((cfg.experts, room, cfg.width), x.dtype)
            seats = seats.at[expert, seat].set(tokens, mode="drop")
            hidden = nn.gelu(jnp.einsum("ecd,edf->ecf", seats, up))
            out = jnp.einsum("ecf,efd->ecd", hidden, down)
            back = out.at[expert, seat].get(mode="fill", fill_value=0)
            back = back.reshape(_PER_TOKEN, length, cfg.width)
            return jnp.einsum("kld,lk->ld", back, gates.astype(x.dtype))

        return jax.vmap(of_sequence)(x, gates, chosen)


class Block(nn.Module):
    """Attention and experts, both pre-norm residual."""

    config: MoEConfig
    train: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        dropout = nn.Dropout(cfg.dropout, deterministic=not self.train)
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_attention")(x)
        x = x + dropout(CausalSelfAttention(cfg, self.train, name="attention")(h))
        h = nn.LayerNorm(dtype=cfg.dtype, name="norm_experts")(x)
        return x + dropout(Experts(cfg, name="experts")(h))


class MoE(nn.Module):
    """The whole model, from tokens to float32 logits."""

    config: MoEConfig
    block: type[nn.Module] = Block
    train: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        cfg = self.config
        embed = nn.Embed(cfg.vocab, cfg.width, dtype=cfg.dtype, embedding_init=_init, name="tokens")
        positions = self.param("positions", _init, (cfg.context, cfg.width))
        x = embed(tokens) + positions[: tokens.shape[1]].astype(cfg.dtype)
        x = nn.Dropout(cfg.dropout, deterministic=not self.train)(x)
        for i in range(cfg.layers):
            x = self.block(cfg, self.train, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=cfg.dtype, name="norm")(x)
        return embed.attend(x).astype(jnp.float32)


def moe_problem(name: str, remat: Remat | None = None, *, batch: int, **config: Any) -> Problem:
    """Builds next-token prediction with a mixture-of-experts model.

    The loss and the data are those of `next_token_problem`; the blocks' balancing losses are part
    of the loss.

    Args:
        name: The problem's name.
        remat: How to wrap each Transformer block, if at all.
        batch: Number of sequences.
        **config: Fields of `MoEConfig`.
    """
    cfg = MoEConfig(**config)
    description = (
        f"mixture of experts, {cfg.layers} layers, width {cfg.width}, {cfg.heads} heads, "
        f"{cfg.experts} experts, {_PER_TOKEN} a token, room for {cfg.capacity} of an equal share, "
        f"batch {batch} x {cfg.context}, vocabulary {cfg.vocab}, {jnp.dtype(cfg.dtype).name}, "
        f"dropout {cfg.dropout}"
    )
    return next_token_problem(
        name,
        MoE(cfg, with_remat(Block, remat)),
        MoE(cfg, train=False),
        batch=batch,
        context=cfg.context,
        vocab=cfg.vocab,
        dropout=cfg.dropout,
        description=description,
    )


_SMALL = dict(layers=4, width=128, heads=4, experts=4, context=128, vocab=512, batch=4)
_TINY = dict(layers=2, width=32, heads=4, experts=4, context=16, vocab=64, batch=2, dtype="float32")

register("moe", moe_problem, {"full": dict(batch=8), "small": _SMALL, "tiny": _TINY})
