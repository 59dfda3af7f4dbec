"""Capuchin's greedy choice: what frees the most bytes for each second that it costs."""

from __future__ import annotations

from collections.abc import Iterator

from jax_hremat._solve.backend import SolverConfig
from jax_hremat._solve.chain import Chain, Selection
from jax_hremat._solve.prediction import predict
from jax_hremat._strategies.segments import weights_bytes
from jax_hremat._strategies.strategy import Choices, Curve, Strategy


class Greedy(Strategy):
    """One block more is checkpointed at a time: that which saves most memory for each second."""

    name = "greedy"
    summary = "checkpoint the block that frees the most bytes a second, again and again"
    source = (
        "Peng et al.: Capuchin: Tensor-based GPU Memory Management for Deep Learning (ASPLOS "
        "2020), section 4.4: memory saved per second of recomputation"
    )
    leaves_out = (
        "swapping; measured access times (a block counts only if it is held at the moment of the "
        "peak); tensors are dropped block by block"
    )

    def choices(self, chain: Chain, solver: SolverConfig) -> Choices:
        return Curve(chain, _steps(chain))


def _steps(chain: Chain) -> Iterator[Selection]:
    """The plain selection, and one block more checkpointed in each that follows."""
    held = weights_bytes(chain)
    worth = {
        block: held[block] / max(options[-1].cost.time_s - options[0].cost.time_s, 1e-12)
        for block, options in enumerate(chain.options)
        if len(options) > 1
    }
    options = [0] * len(chain)
    while True:
        selection = Selection(tuple(options))
        yield selection
        at_peak = predict(chain, selection).peak.block
        # What is held at the peak is that of the blocks before it, and its own.
        waiting = [b for b in worth if not options[b]]
        if not waiting:
            return
        best = max(waiting, key=lambda b: (b <= at_peak, worth[b], -b))
        options[best] = len(chain.options[best]) - 1
