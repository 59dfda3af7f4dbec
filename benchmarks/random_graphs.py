"""Random training steps as graphs: chains, ladders, chains with skips, layered graphs.

Times and sizes are drawn independently, so that some cheap operations make large values. A ladder
is an encoder and a decoder, each step of which also reads its counterpart, as in a U-Net. A layered
graph has layers of one to three operations, each of which reads one or two of the layer before it
and sometimes an older one, in the manner of the random layered graphs of Gagrani et al. (2022).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from jax_hremat._schedules.graph import Forward, Graph, training_graph

_MIB = 2**20
# Forward operations of one of several equal layers, about as many as one of a transformer has.
_PER_LAYER = 12


def random_graph(kind: str, num_forward: int, seed: int) -> Graph:
    """A training step with so many forward operations, a loss among them, and as many backwards.

    Args:
        kind: One of `KINDS`.
        num_forward: At least 2.
        seed: Equal arguments give equal graphs.
    """
    rng = random.Random(f"{kind} {num_forward} {seed}")
    reads = KINDS[kind](rng, num_forward - 1)
    read = {name for names in reads for name in names}
    last = tuple(name for name in map(_name, range(num_forward - 1)) if name not in read)
    forward = [_forward(rng, _name(i), names) for i, names in enumerate(reads)]
    return training_graph([*forward, _loss(rng, last)])


def repeated_layers(num_forward: int, seed: int) -> Graph:
    """The same with equal layers one after the other, each with skips, and a loss.

    Args:
        num_forward: At least 2; the last layer is left out where the number is reached.
        seed: Equal arguments give equal graphs.
    """
    rng = random.Random(f"layers {seed}")
    layer = [_forward(rng, _name(i), reads) for i, reads in enumerate(_skips(rng, _PER_LAYER))]
    forward = []
    for i in range(num_forward - 1):
        start = i - i % _PER_LAYER
        one = layer[i - start]
        reads = [_name(start + int(name[1:])) for name in one.reads]
        if i and i == start:
            reads.append(_name(i - 1))
        forward.append(replace(one, name=_name(i), reads=tuple(reads)))
    read = {name for one in forward for name in one.reads}
    unread = tuple(one.name for one in forward if one.name not in read)
    return training_graph([*forward, _loss(rng, unread)])


def _loss(rng: random.Random, reads: tuple[str, ...]) -> Forward:
    return Forward(
        name="loss",
        time_s=_time_s(rng),
        output_bytes=0,
        backward_time_s=_time_s(rng),
        reads=reads,
    )


def _forward(rng: random.Random, name: str, reads: Sequence[str]) -> Forward:
    time_s = _time_s(rng)
    reads_inputs = rng.random() < 0.75
    return Forward(
        name=name,
        time_s=time_s,
        output_bytes=rng.randint(1, 16) * _MIB,
        backward_time_s=rng.choice((1, 2)) * time_s,
        reads=tuple(reads),
        workspace_bytes=rng.choice((0, 0, 0, 2)) * _MIB,
        backward_reads_inputs=reads_inputs,
        backward_reads_output=not reads_inputs or rng.random() < 0.25,
    )


def _time_s(rng: random.Random) -> float:
    return rng.randint(1, 10) * 1e-3


def _name(i: int) -> str:
    return f"f{i}"


def _chain(rng: random.Random, count: int) -> list[list[str]]:
    return [[_name(i - 1)] if i else [] for i in range(count)]


def _ladder(rng: random.Random, count: int) -> list[list[str]]:
    reads = _chain(rng, count)
    for i in range((count + 1) // 2 + 1, count):
        reads[i].append(_name(count - 1 - i))
    return reads


def _skips(rng: random.Random, count: int) -> list[list[str]]:
    reads = _chain(rng, count)
    for i in range(2, count):
        if rng.random() < 0.4:
            reads[i].append(_name(rng.randrange(max(0, i - 4), i - 1)))
    return reads


def _layered(rng: random.Random, count: int) -> list[list[str]]:
    reads: list[list[str]] = []
    before = range(0)
    while len(reads) < count:
        layer = range(len(reads), min(count, len(reads) + rng.randint(1, 3)))
        older = range(before.start)
        for _ in layer:
            read = rng.sample(before, min(len(before), rng.randint(1, 2)))
            if older and rng.random() < 0.2:
                read.append(rng.choice(older))
            reads.append([_name(i) for i in read])
        before = layer
    return reads


KINDS: Mapping[str, Callable[[random.Random, int], list[list[str]]]] = {
    "chain": _chain,
    "ladder": _ladder,
    "skips": _skips,
    "layered": _layered,
}
