"""GPT-2 with mixtures of experts for feed-forward layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks.zoo.base import Problem, Remat, register, with_remat
from benchmarks.zoo.gpt import GPT, CausalSelfAttention, GPTConfig
from benchmarks.zoo.tasks import LOSSES, next_token_problem

_init = nn.initializers.normal(0.02)
_PER_TOKEN = 2


@dataclass(frozen=True)
class MoEConfig(GPTConfig):
    """Dimensions of a mixture-of-experts language model: those of GPT-2, and these.

    Attributes:
        experts: Number of experts in each block; a token goes to two of them.
        capacity: Tokens an expert takes of a sequence, over what it would take were all equally
            liked; those beyond pass it by.
        balance: Weight of the loss that spreads the tokens over the experts.
    """

    vocab: int = 32000
    experts: int = 8
    capacity: float = 1.25
    balance: float = 0.01


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
        GPT(cfg, with_remat(Block, remat)),
        GPT(cfg, Block, train=False),
        batch=batch,
        context=cfg.context,
        vocab=cfg.vocab,
        dropout=cfg.dropout,
        description=description,
    )


_SMALL = dict(layers=4, width=128, heads=4, experts=4, context=128, vocab=512, batch=4)
_TINY = dict(layers=2, width=32, heads=4, experts=4, context=16, vocab=64, batch=2, dtype="float32")

register("moe", moe_problem, {"full": dict(batch=8), "small": _SMALL, "tiny": _TINY})
