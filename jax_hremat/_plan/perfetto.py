"""`RematPlan` -> the predicted step in the Trace Event Format, which Perfetto and Chrome open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jax_hremat._plan.memory import memory_over_step
from jax_hremat._plan.peak import Moment
from jax_hremat._shared.errors import UnsupportedConfigError

if TYPE_CHECKING:
    from jax_hremat._plan.plan import RematPlan

Event = Mapping[str, Any]
_PLAN, _BASELINE = 1, 2  # Processes.
_BLOCKS = 1  # The track of blocks in each.


def trace(plan: RematPlan) -> Mapping[str, Any]:
    """The trace as JSON values; see `RematPlan.to_perfetto`."""
    memory = memory_over_step(plan)
    if memory is None:
        raise UnsupportedConfigError(
            "this plan has no predicted timeline: `certify` made it from another plan. Make a "
            "plan with `plan_remat` to see one"
        )
    fixed_bytes = memory.fixed_bytes
    c = plan.certificate
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "program": plan.fingerprint.digest,
            "target": c.target,
            "compiled peak (bytes)": c.peak_bytes,
            "compiled peak without the plan (bytes)": plan.baseline_peak_bytes,
            "budget (bytes)": c.budget_bytes,
            "estimated step (s)": plan.estimated_step_s,
            "estimated step without the plan (s)": plan.baseline_step_s,
            "times": "estimates, of each block on its own",
        },
        "traceEvents": [
            *_names(_PLAN, "with the plan (predicted)"),
            *_names(_BASELINE, "without rematerialization (predicted)"),
            *_blocks(plan, _PLAN, plan.moments),
            *_blocks(plan, _BASELINE, plan.baseline_moments),
            *_memory(_PLAN, plan.moments, fixed_bytes, c.budget_bytes),
            *_memory(_BASELINE, plan.baseline_moments, fixed_bytes, c.budget_bytes),
        ],
    }


def _names(pid: int, process: str) -> Iterator[Event]:
    for name, text in (("process_name", process), ("thread_name", "blocks")):
        yield {"ph": "M", "name": name, "pid": pid, "tid": _BLOCKS, "args": {"name": text}}


def _starts_us(moments: Sequence[Moment]) -> list[float]:
    """When each moment starts, and when the last one ends."""
    return list(accumulate((1e6 * m.duration_s for m in moments), initial=0.0))


def _blocks(plan: RematPlan, pid: int, moments: Sequence[Moment]) -> Iterator[Event]:
    for start_us, moment in zip(_starts_us(moments), moments, strict=False):
        block = plan.blocks[moment.block]
        way = "backward" if moment.in_backward else "forward"
        event = {"ph": "X", "ts": start_us, "pid": pid, "tid": _BLOCKS}
        planned = pid == _PLAN
        yield {
            **event,
            "name": f"{block.scope} ({way})",
            "cat": way,
            "dur": 1e6 * moment.duration_s,
            "args": {
                "pass": way,
                "operations": f"{block.start} to {block.stop - 1}",
                "source": block.source,
                "residuals kept (bytes)": block.kept_bytes if planned else block.plain_bytes,
                **({"decision": block.decision} if planned else {}),
            },
        }
        added_s = min(block.added_s, moment.duration_s)
        if planned and moment.in_backward and block.recomputed and added_s > 0:
            yield {
                **event,
                "name": f"recompute of {block.scope}",
                "cat": "recompute",
                "dur": 1e6 * added_s,
                "args": {"operations recomputed": block.recomputed},
            }


def _memory(
    pid: int, moments: Sequence[Moment], fixed_bytes: int, budget_bytes: int
) -> Iterator[Event]:
    *starts_us, end_us = _starts_us(moments)
    for start_us, m in zip(starts_us, moments, strict=True):
        sizes = {
            "memory": fixed_bytes + m.live_bytes,
            "budget": budget_bytes,
            "arguments, results, constants": fixed_bytes - m.reused_bytes,
            "residuals kept": m.kept_bytes,
            "boundary values": m.passed_bytes,
            "temporary memory": m.working_bytes,
        }
        yield from _counters(pid, start_us, sizes)
    yield from _counters(pid, end_us, {"memory": fixed_bytes, "budget": budget_bytes})


def _counters(pid: int, time_us: float, sizes: Mapping[str, int]) -> Iterator[Event]:
    for name, size in sizes.items():
        yield {"ph": "C", "name": name, "ts": time_us, "pid": pid, "args": {"bytes": size}}
