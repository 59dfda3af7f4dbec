"""What can be done about the largest buffers at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jax_hremat._plan.peak import BufferReport
from jax_hremat._plan.place import Place
from jax_hremat._plan.plan import RematPlan

_RECOMPUTED, _LOOP = "(recomputed)", "(loop)"
# What JAX puts around the values that a checkpoint keeps; it has no scope of its own.
_KEPT_BY_NAME = "reduce_precision"


@dataclass(frozen=True)
class Advice:
    """What can be done about buffers.

    Attributes:
        what: What they are.
        is_fixed: Whether they are there under every plan.
        words: What can be done.
    """

    what: str
    is_fixed: bool
    words: str


_PARAMETER = Advice(
    "differentiated argument",
    True,
    "give it a smaller dtype, shard it over devices, or donate it to the step that replaces it",
)
_ARGUMENT = Advice(
    "argument",
    True,
    "take a smaller batch and accumulate gradients, give it a smaller dtype, shard it over "
    "devices, or donate it if the step replaces it",
)
_RESULT = Advice(
    "result",
    True,
    "a gradient is as large as what it is the gradient of: donate the arguments that results may "
    "replace, give both a smaller dtype, or shard both over devices",
)
_CONSTANT = Advice(
    "captured array, or a table that XLA evaluates",
    True,
    "pass arrays that the function captures as arguments: the executable has a copy of each, in "
    "several layouts if need be, beside the array itself",
)
_LOSS = Advice(
    "made at the loss",
    True,
    "there the backward follows the forward at once, and nothing is gained by recomputing: compute "
    "the loss in chunks of the batch or of the sequence, or in a smaller dtype",
)
_RESIDUAL = Advice("residual kept", False, "kept for the backward, where the budget allows it")
_RECOMPUTE = Advice(
    "recomputed",
    False,
    "there only while one backward runs, and a smaller budget may recompute it in smaller parts. "
    "Where the smallest budget does not: split the operation (attention in blocks, a fused "
    "kernel), accumulate gradients over smaller batches, or shard it over devices",
)
_TEMPORARY = Advice(
    "temporary",
    False,
    "a residual or temporary memory of a running operation. Where the smallest budget does not "
    "take it off: accumulate gradients over smaller batches, or shard it over devices",
)


@dataclass(frozen=True)
class Alike:
    """Equal buffers of one maker: one of them, and how many there are."""

    buffer: BufferReport
    count: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.buffer.size_bytes


def advised(plan: RematPlan) -> list[tuple[Advice, list[Alike]]]:
    """The plan's largest buffers by what can be done about them, the largest first."""
    found: dict[Advice, list[Alike]] = {}
    for buffer, count in Counter(plan.buffers).items():
        found.setdefault(_advice(plan, buffer), []).append(Alike(buffer, count))
    return list(found.items())


def rest_bytes(plan: RematPlan) -> int:
    """Bytes of the peak that the plan's list of buffers leaves out."""
    return max(0, plan.certificate.peak_bytes - sum(b.size_bytes for b in plan.buffers))


def _advice(plan: RematPlan, buffer: BufferReport) -> Advice:
    if buffer.kind == "parameter":
        is_differentiated = plan.fingerprint.differentiated_inputs.get(buffer.made_by)
        return _PARAMETER if is_differentiated else _ARGUMENT
    if buffer.kind == "output":
        return _RESULT
    if buffer.kind == "constant":
        return _CONSTANT
    block = _block_of(plan, buffer)
    if block is not None and block == len(plan.blocks) - 1:
        return _LOSS
    if _RECOMPUTED in buffer.made_by:
        return _RECOMPUTE
    is_kept = block is not None and plan.blocks[block].kept_bytes
    return _RESIDUAL if is_kept else _TEMPORARY


def _block_of(plan: RematPlan, buffer: BufferReport) -> int | None:
    """The block that made a buffer, by its scope; for one without a scope, in a program that names
    scopes, the loss if the step has its predicted peak there. None if not known."""
    *path, operation = (p for p in buffer.made_by.split("/") if p not in (_RECOMPUTED, _LOOP))
    if path:
        found = [(_match(path, block.place), -i) for i, block in enumerate(plan.blocks)]
        best, at = max(found, default=(0, 0))
        return -at if best else None
    if operation == _KEPT_BY_NAME or not plan.moments:
        return None
    peak = max(plan.moments, key=lambda m: m.live_bytes)
    last = len(plan.blocks) - 1
    return last if peak.block == last else None


def _match(path: Sequence[str], place: Place) -> int:
    """How much of a path a place names, modules first; 0 if the path is not in it."""
    shared = len(place.modules)
    if tuple(path[:shared]) != place.modules:
        return 0
    inside = path[shared:]
    if not place.parts or not inside:
        return 2 * shared
    return 2 * shared + 1 if inside[0] in place.parts else 0
