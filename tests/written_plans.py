"""A plan written down by hand, with figures that are easy to follow in pictures and exports."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from jax_hremat import Certificate, RematPlan
from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.peak import BufferReport, Moment
from jax_hremat._plan.place import Place
from jax_hremat._plan.region import Region

MIB = 2**20


def written_plan(**changes: Any) -> RematPlan:
    """Three blocks of ten operations, the second checkpointed; arguments and results of 10 MiB.

    Totals in MiB: 20, 30, 30 | 40, 30, 20 with the plan, 20, 40, 70 | 80, 50, 20 without.
    """
    whole = RematPlan(
        root=Region(0, 30, children=(Region(10, 20, checkpointed=True, saved=((12, 0),)),)),
        fingerprint=Fingerprint(
            ("args[0]: f32[8]*",), ("sin[](f32[8])->f32[8]",), (0,) * 30, ("01",) * 30, "0"
        ),
        argnums=(0,),
        has_aux=False,
        certificate=certificate(),
        estimated_step_s=0.011,
        baseline_step_s=0.010,
        baseline_peak_bytes=81 * MIB,
        predicted_peak_bytes=40 * MIB,
        predicted_step_s=0.012,
        cost_source="compiled",
        solver_status="optimal",
        solver_gap=0.0,
        blocks=(
            block(0, "net: embed", kept_bytes=5 * MIB, plain_bytes=5 * MIB),
            block(
                1,
                "net/layer_0",
                decision="checkpointed, keeps 1 value",
                kept_bytes=8 * MIB,
                plain_bytes=30 * MIB,
                added_s=0.002,
                recomputed=7,
                saved=("layer_0:dot_general f32[8,8] (8.00 MiB)",),
            ),
            block(2, "net/layer_1", kept_bytes=20 * MIB, plain_bytes=20 * MIB),
        ),
        buffers=(
            BufferReport(6 * MIB, "f32[8,8]", "parameter", "args[0]"),
            BufferReport(4 * MIB, "f32[8,8]", "temp", "net/layer_1/dot_general"),
        ),
        moments=moments(10, 20, 20, 30, 20, 10),
        baseline_moments=moments(10, 30, 60, 70, 40, 10),
        unpriced=MappingProxyType({}),
        num_compiles=MappingProxyType({"steps": 1}),
    )
    return dataclasses.replace(whole, **changes)


def certificate(**changes: Any) -> Certificate:
    """Of a peak of 41 MiB under a budget of 50."""
    whole = Certificate(
        peak_bytes=41 * MIB,
        budget_bytes=50 * MIB,
        headroom_bytes=0,
        argument_bytes=8 * MIB,
        output_bytes=2 * MIB,
        temp_bytes=31 * MIB,
        target="cpu",
        compiler_options=MappingProxyType({}),
        versions=MappingProxyType({"jax": "0.0"}),
    )
    return dataclasses.replace(whole, **changes)


def place(scope: str, source: str) -> Place:
    """Where a block is, from its text."""
    modules, _, parts = scope.partition(": ")
    return Place(tuple(modules.split("/")), tuple(filter(None, parts.split(", "))), source)


def block(index: int, scope: str, **changes: Any) -> BlockReport:
    """A plain block of ten operations."""
    whole = BlockReport(
        start=10 * index,
        stop=10 * (index + 1),
        place=place(scope, f"net.py:{index} (call)"),
        decision="plain",
        kept_bytes=0,
        plain_bytes=0,
        added_s=0.0,
        recomputed=0,
        saved=(),
    )
    return dataclasses.replace(whole, **changes)


def moments(*live_mib: int) -> tuple[Moment, ...]:
    """Forwards and then backwards, with so many bytes in all, one MiB of them boundary values."""
    count = len(live_mib) // 2
    order = [*range(count), *reversed(range(count))]
    return tuple(
        Moment(b, i >= count, kept_bytes=0, passed_bytes=MIB, working_bytes=(size - 1) * MIB)
        for i, (b, size) in enumerate(zip(order, live_mib, strict=True))
    )
