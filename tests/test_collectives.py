"""What devices exchange: groups as XLA prints them, bytes by hand, and what runs beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jax_hremat._xla.hlo.collectives import exchange_of, groups_of
from jax_hremat._xla.hlo.parse import Instruction, Shape, parse_hlo
from jax_hremat._xla.hlo.roofline import estimate_step
from jax_hremat._xla.rates import Rates

RATES = Rates(
    flops_per_s={},
    vector_flops_per_s=1e30,
    bytes_per_s=1e3,
    launch_s=0.0,
    link_bytes_per_s=10.0,
    network_bytes_per_s=1.0,
    host_bytes_per_s=5.0,
)


def collective(groups: str, opcode: str = "all-reduce") -> Instruction:
    attributes = f"channel_id=1, {groups}, use_global_device_ids=true, to_apply=%add"
    return Instruction("c", opcode, Shape("f32"), ("x",), (), attributes, "", False)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("source_target_pairs={{0,1},{1,0}}", [(0, 1), (1, 0)]),
        ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b', 'a'}", [(0, 2, 1, 3)]),
        (
            "replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}",
            [(0, 1), (2, 3), (4, 5), (6, 7)],
        ),
        ("replica_groups={}", None),
        ("replica_groups=mesh['a'=4] {'a':(1)2}", None),
        ("replica_groups=something else", None),
    ],
)
def test_groups_as_they_are_printed(text: str, groups: list[tuple[int, ...]] | None) -> None:
    assert groups_of(collective(text)) == groups


@pytest.mark.parametrize(
    ("opcode", "sent_bytes"),
    [
        ("all-gather", 300.0),
        ("reduce-scatter", 75.0),
        ("all-reduce-start", 150.0),
        ("all-to-all", 75.0),
        ("collective-broadcast", 100.0),
    ],
)
def test_bytes_that_leave_a_device_of_four(opcode: str, sent_bytes: float) -> None:
    four = collective("replica_groups=[2,4]<=[8]", opcode)
    found = exchange_of(four, 100.0, devices_per_host=4)
    assert found is not None
    assert (found.sent_bytes, found.across_hosts) == (sent_bytes, False)
    far = exchange_of(four, 100.0, devices_per_host=2)
    assert far is not None
    assert far.across_hosts
    alone = exchange_of(collective("replica_groups=[8,1]<=[8]", opcode), 100.0, 4)
    assert alone is not None
    assert alone.sent_bytes == 0.0


# Between start and done, a kernel that reads and writes 400 bytes: 0.8 s.
BESIDE = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: f32[GIVEN], y: f32[100]) -> (f32[GIVEN], f32[100]) {
  %x = f32[GIVEN] parameter(0)
  %y = f32[100] parameter(1)
  %start = f32[GIVEN] all-reduce-start(%x), replica_groups=GROUPS, to_apply=%add
  %negated = f32[100] negate(%y)
  %done = f32[GIVEN] all-reduce-done(%start)
  ROOT %t = (f32[GIVEN], f32[100]) tuple(%done, %negated)
}
"""


def time_s(given: int, rates: Rates = RATES, groups: str = "{{0,1}}") -> float:
    text = BESIDE.replace("GIVEN", str(given)).replace("GROUPS", groups)
    found = estimate_step(parse_hlo(text), rates)
    assert not found.unknown
    assert found.time_s == pytest.approx(sum(kernel.time_s for kernel in found.kernels))
    return found.time_s


def test_what_is_sent_beside_a_kernel_costs_what_it_takes_longer() -> None:
    # Of two devices each sends as much as it has: 4 bytes an element over ten bytes a second.
    assert time_s(1) == pytest.approx(0.8)
    assert time_s(10) == pytest.approx(4.0)
    assert time_s(10, groups="{{0,8}}") == pytest.approx(40.0)
    assert time_s(10, replace(RATES, launch_s=0.5)) == pytest.approx(0.5 + 4.0)


def test_transfers_are_one_after_another() -> None:
    text = BESIDE.replace("GIVEN", "10").replace("GROUPS", "{{0,1}}")
    second = "  %start2 = f32[10] all-reduce-start(%x), replica_groups={{0,1}}, to_apply=%add\n"
    text = text.replace("  %negated", second + "  %negated")
    wait = "  %done2 = f32[10] all-reduce-done(%start2)\n  ROOT"
    text = text.replace("  ROOT %t", wait + " %t")
    assert estimate_step(parse_hlo(text), RATES).time_s == pytest.approx(8.0)


@pytest.mark.parametrize("trips", [0, 1, 3])
def test_in_a_loop_each_pass_waits(trips: int) -> None:
    loop = """HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: f32[10]) -> f32[10] {
  %p = f32[10] parameter(0)
  %start = f32[10] all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add
  ROOT %done = f32[10] all-reduce-done(%start)
}

%condition (q: f32[10]) -> pred[] {
  %q = f32[10] parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (x: f32[10]) -> f32[10] {
  %x = f32[10] parameter(0)
  ROOT %w = f32[10] while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"TRIPS"}}
}
"""  # noqa: E501
    found = estimate_step(parse_hlo(loop.replace("TRIPS", str(trips))), RATES)
    assert found.time_s == pytest.approx(trips * 4.0)


def test_a_transfer_to_the_host_runs_beside_kernels_too() -> None:
    text = (
        BESIDE.split("ENTRY")[0]
        + """ENTRY %main (x: f32[10]) -> f32[10] {
  %x = f32[10] parameter(0)
  %start = (f32[10]{0:S(5)}, f32[10], u32[]) copy-start(%x)
  ROOT %done = f32[10]{0:S(5)} copy-done(%start)
}
"""
    )
    assert estimate_step(parse_hlo(text), RATES).time_s == pytest.approx(8.0)
    found = estimate_step(parse_hlo(text), replace(RATES, host_bytes_per_s=None))
    assert found.unknown == {"copy between memory spaces": 1}


def test_what_no_rate_is_known_for_is_named() -> None:
    text = BESIDE.replace("GIVEN", "10").replace("GROUPS", "{{0,1}}")
    found = estimate_step(parse_hlo(text), replace(RATES, link_bytes_per_s=None))
    assert found.unknown == {"all-reduce": 1}
    odd = BESIDE.replace("GIVEN", "10").replace("GROUPS", "{}")
    assert estimate_step(parse_hlo(odd), RATES).unknown == {"all-reduce": 1}
