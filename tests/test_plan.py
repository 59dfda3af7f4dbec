"""Plans as files and texts, and the fingerprint of the program a plan is for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracing import trace_loss
from written_plans import place

import jax_hremat
from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.certificate import Certificate
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.peak import BufferReport, Moment
from jax_hremat._plan.plan import RematPlan
from jax_hremat._plan.region import Region
from jax_hremat._shared.errors import PlanFormatError
from jax_hremat._trace.fingerprint import fingerprint
from jax_hremat._trace.graph import build_graph

MIB = 2**20
ROOT = Region(
    0,
    6,
    children=(
        Region(0, 4, True, ((1, 0), (2, 1)), (Region(1, 3, checkpointed=True),), barrier=True),
        Region(4, 6, checkpointed=True),
    ),
)
FINGERPRINT = Fingerprint(
    inputs=("args[0]['w']: f32[8,8]*", "args[1]: f32[4,8]"),
    signatures=("sin[](f32[4,8])->f32[4,8]", "reduce_sum[](f32[4,8])->f32[]"),
    operations=(0, 0, 1),
    digests=("01", "02", "03"),
    outputs="5",
)
CERTIFICATE = Certificate(
    peak_bytes=700 * MIB,
    budget_bytes=768 * MIB,
    headroom_bytes=32 * MIB,
    argument_bytes=100 * MIB,
    output_bytes=50 * MIB,
    temp_bytes=550 * MIB,
    target="h200",
    compiler_options=MappingProxyType({"xla_b": "1", "xla_a": "2"}),
    versions=MappingProxyType({"jax": "0.0", "python": "3"}),
)


def block(scope: str, **changes: Any) -> BlockReport:
    plain = BlockReport(
        start=0,
        stop=4,
        place=place(scope, "model.py:12 (attend)"),
        decision="checkpointed, keeps 2 values",
        kept_bytes=3 * MIB,
        plain_bytes=9 * MIB,
        added_s=1.5e-3,
        recomputed=2,
        saved=("attention:dot_general bf16[16,8] (3.00 MiB)",),
    )
    return dataclasses.replace(plain, **changes)


def plan(**changes: Any) -> RematPlan:
    plain = RematPlan(
        root=ROOT,
        fingerprint=FINGERPRINT,
        argnums=(0, 2),
        has_aux=True,
        certificate=CERTIFICATE,
        estimated_step_s=0.11,
        baseline_step_s=0.1,
        baseline_peak_bytes=1000 * MIB,
        predicted_peak_bytes=690 * MIB,
        predicted_gaps_bytes=5 * MIB,
        predicted_step_s=0.1 + 0.2,
        cost_source="compiled",
        solver_status="optimal within the requested gap",
        solver_gap=1e-4,
        blocks=(block("encoder/layer_0"), block("decoder [x]", start=4, stop=6, saved=())),
        moments=(Moment(0, False, 0, MIB, 2 * MIB), Moment(0, True, 3 * MIB, MIB, 4 * MIB)),
        baseline_moments=(Moment(0, False, 0, MIB, MIB), Moment(0, True, 9 * MIB, MIB, MIB)),
        buffers=(BufferReport(500 * MIB, "f32[512,512]", "temp", "decoder/logits"),),
        unpriced=MappingProxyType({"custom-call:sort_of_mine": 2}),
        num_compiles=MappingProxyType({"steps": 3, "blocks": 17}),
        timings_s=MappingProxyType({"trace": 0.1, "solve": 0.2}),
    )
    return dataclasses.replace(plain, **changes)


def test_json_keeps_everything_but_the_timings() -> None:
    made = plan()
    loaded = RematPlan.from_json(made.to_json())
    assert loaded == made
    assert loaded.timings_s == {}
    for field in dataclasses.fields(RematPlan):
        if field.name != "timings_s":
            assert getattr(loaded, field.name) == getattr(made, field.name), field.name
    assert loaded.root.children[0].barrier
    assert json.loads(made.to_json())["version"] == 14


def test_plans_written_before_gaps_were_predicted_have_none() -> None:
    data = json.loads(plan().to_json())
    del data["predicted_gaps_bytes"]
    assert RematPlan.from_json(json.dumps(data)) == plan(predicted_gaps_bytes=0)


def test_equal_plans_have_equal_bytes() -> None:
    versions = MappingProxyType({"python": "3", "jax": "0.0"})
    other_order = dataclasses.replace(CERTIFICATE, versions=versions)
    again = plan(certificate=other_order, timings_s=MappingProxyType({"trace": 99.0}))
    assert again == plan() and hash(again) == hash(plan())
    assert again.to_json() == plan().to_json()
    assert RematPlan.from_json(plan().to_json()).to_json() == plan().to_json()


@pytest.mark.parametrize(
    "changes",
    [
        {"root": Region(0, 6)},
        {"argnums": (0,)},
        {"has_aux": False},
        {"certificate": dataclasses.replace(CERTIFICATE, peak_bytes=1)},
        {"estimated_step_s": 0.12},
        {"solver_gap": 0.0},
        {"bound_step_s": 0.105},
        {"predicted_gaps_bytes": 0},
        {"blocks": ()},
        {"buffers": ()},
        {"num_compiles": MappingProxyType({"steps": 4, "blocks": 17})},
        {"fingerprint": dataclasses.replace(FINGERPRINT, outputs="4")},
    ],
)
def test_different_plans_have_different_bytes(changes: dict[str, Any]) -> None:
    other = plan(**changes)
    assert other != plan()
    assert other.to_json() != plan().to_json()
    assert RematPlan.from_json(other.to_json()) == other


@st.composite
def regions(draw: st.DrawFn, start: int = 0, stop: int = 20, depth: int = 3) -> Region:
    checkpointed = draw(st.booleans())
    saved = draw(st.sets(st.tuples(st.integers(start, stop - 1), st.integers(0, 2)), max_size=3))
    edges = sorted(draw(st.sets(st.integers(start, stop), max_size=6))) if depth else []
    return Region(
        start,
        stop,
        checkpointed,
        tuple(sorted(saved)) if checkpointed else (),
        tuple(
            draw(regions(a, b, depth - 1)) for a, b in zip(edges[::2], edges[1::2], strict=False)
        ),
        barrier=checkpointed and draw(st.booleans()),
    )


@given(regions(), st.floats(0, 1e3), st.text(max_size=20))
def test_any_regions_numbers_and_names_survive(root: Region, time_s: float, scope: str) -> None:
    made = plan(root=root, estimated_step_s=time_s, blocks=(block(scope),))
    assert RematPlan.from_json(made.to_json()) == made


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)
    assert RematPlan.load(path) == plan()
    assert RematPlan.load(str(path)) == plan()
    plan(has_aux=False).save(str(path))
    assert not RematPlan.load(path).has_aux
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize(("owner", "step"), [(os, "replace"), (Path, "write_bytes")])
def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, step: str
) -> None:
    path = tmp_path / "plan.json"
    plan().save(path)

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, step, interrupted)
        with pytest.raises(KeyboardInterrupt):
            plan(has_aux=False).save(path)
    assert RematPlan.load(path) == plan()
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_saved_plan_is_as_readable_as_any_new_file(tmp_path: Path) -> None:
    other, path = tmp_path / "other", tmp_path / "plan.json"
    other.write_text("")
    plan().save(path)
    assert path.stat().st_mode == other.stat().st_mode


def edited(change: Callable[[dict[str, Any]], Any]) -> str:
    data = json.loads(plan().to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON.*make the plan again"),
        (plan().to_json()[:-40], "not JSON.*cut off; make the plan again"),
        ("[1, 2]", "not a plan that `RematPlan.save` wrote"),
        ("{}", "not a plan that `RematPlan.save` wrote"),
        (edited(lambda d: d.update(format="pytorch")), "not a plan that `RematPlan.save` wrote"),
        (edited(lambda d: d.update(version=99)), "version 99;.*reads version 14. Make the plan"),
        (edited(lambda d: d.pop("version")), "version None"),
        (edited(lambda d: d.pop("root")), "damaged plan: KeyError: 'root'. Make it again"),
        (edited(lambda d: d["root"].update(stop=-1)), "damaged plan: ValueError: region"),
        (edited(lambda d: d.update(certificate=None)), "damaged plan: TypeError"),
        (edited(lambda d: d["certificate"].update(extra=1)), "damaged plan.*extra"),
        (edited(lambda d: d["certificate"].update(mesh="data")), "damaged plan: AttributeError"),
        ('{"format": ' + 5000 * "1" + "}", "not JSON"),
        (edited(lambda d: d["fingerprint"].pop("digests")), "damaged plan: KeyError: 'digests'"),
        (edited(lambda d: d["blocks"][0].pop("place")), "damaged plan.*place"),
    ],
)
def test_what_is_no_plan_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my-plan.json"
    path.write_text(text)
    with pytest.raises(PlanFormatError, match=f"(?s)my-plan.json.*{message}"):
        RematPlan.load(path)
    with pytest.raises(PlanFormatError, match=f"(?s)^the text.*{message}"):
        RematPlan.from_json(text)


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RematPlan.load(tmp_path / "nothing.json")
    with pytest.raises(FileNotFoundError):
        plan().save(tmp_path / "nowhere" / "plan.json")


def test_plans_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().has_aux = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        plan().certificate.versions["jax"] = "1"  # type: ignore[index]


@pytest.mark.parametrize(
    ("peak", "headroom", "holds"), [(700, 68, True), (700, 69, False), (768, 0, True)]
)
def test_a_certificate_holds_with_its_headroom(peak: int, headroom: int, holds: bool) -> None:
    certificate = dataclasses.replace(
        CERTIFICATE, peak_bytes=peak * MIB, headroom_bytes=headroom * MIB
    )
    assert certificate.holds == holds


def test_the_text_of_a_plan() -> None:
    text = str(plan())
    for shown in (
        "700.00 MiB",  # The certified peak,
        "768.00 MiB",  # the budget,
        "met, with 36.00 MiB to spare beyond the headroom of 32.00 MiB",
        "arguments 100.00 MiB + results 50.00 MiB",  # what the peak is the sum of,
        "1000.00 MiB",  # the peak without rematerialization,
        "h200",
        "+10.0 %",
        "2 × custom-call:sort_of_mine",  # what the times leave out,
        "encoder/layer_0",  # the blocks,
        "decoder [x]",  # brackets and all,
        "checkpointed, keeps 2 values",
        "attention:dot_general bf16[16,8]",
        "500.00 MiB",  # the buffers left.
        "decoder/logits",
    ):
        assert shown in " ".join(text.split()), shown
    assert max(map(len, text.splitlines())) <= 80
    assert "700" in repr(plan()) or str(700 * MIB) in repr(plan())


def test_equal_blocks_are_shown_once() -> None:
    text = str(plan(blocks=tuple(block(f"layer_{i}") for i in range(9))))
    assert "9 × layer_0 … layer_8" in text
    assert "layer_4" not in text


def figures(text: str, name: str) -> list[str]:
    """What stands to the right of a row's name."""
    (row,) = [x for x in text.splitlines() if x.startswith(name) and "  " in x[len(name) :]]
    return [x for x in re.split(r"\s{2,}", row[len(name) :]) if x]


def test_the_rows_of_the_table_add_up_to_what_the_summary_says() -> None:
    blocks = (*(block(f"layer_{i}") for i in range(4)), block("head", added_s=0.0))
    made = plan(root=Region(0, 6), blocks=blocks)
    text = str(made)
    assert figures(text, "4 × layer_0 … layer_3") == [
        "12.00 MiB",
        "36.00 MiB",
        "+6.00 ms",
    ]
    assert figures(text, "all blocks") == [
        "15.00 MiB",
        "45.00 MiB",
        "+6.00 ms",
    ]
    assert figures(text, "compiled step, beyond its blocks") == ["+4.00 ms"]
    assert figures(text, "compiled step  ") == ["+10.0 ms"]


def test_aliased_results_are_subtracted_from_the_peak() -> None:
    certificate = dataclasses.replace(CERTIFICATE, peak_bytes=680 * MIB)
    text = " ".join(str(plan(certificate=certificate)).split())
    assert "− results in the memory of arguments 20.00 MiB" in text
    assert "in the memory of arguments" not in str(plan())


def test_empty_tables_are_not_printed() -> None:
    text = str(plan(blocks=(), buffers=()))
    assert "block" not in text.split("costs of blocks")[1]
    assert "buffers" not in text
    assert "residuals" in str(plan()) and "Largest buffers" in str(plan())


@given(st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=300))
def test_long_names_stay_within_80_columns(name: str) -> None:
    long = block(
        f"module/{name}", saved=(f"{name} (1.00 MiB)",), decision="checkpointed", runs=(name,)
    )
    buffers = (BufferReport(500 * MIB, f"f32[{name}]", "temp", f"at/{name}"),)
    unpriced = MappingProxyType({f"custom-call:{name}": 1})
    text = str(plan(blocks=(long, block("b", start=4)), buffers=buffers, unpriced=unpriced))
    assert max(map(len, text.splitlines())) <= 80


def test_equal_buffers_are_one_row() -> None:
    one = BufferReport(3 * MIB, "f32[8]", "temp", "layer/mul")
    text = str(plan(buffers=(one, dataclasses.replace(one, text="f32[9]"), one)))
    assert "2 × 3.00 MiB" in text and text.count("layer/mul") == 2


# Fingerprints.


def fingerprint_of(fun: Callable[..., Any], *shapes: tuple[int, ...], argnums: Any = 0) -> Any:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes or [(4, 4)]]
    program = trace_loss(fun, args, argnums=argnums)
    return fingerprint(program, build_graph(program))


def loss(x: jax.Array) -> jax.Array:
    return (jnp.sin(x) * 2.0 + x).sum()


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (lambda x: (jnp.cos(x) * 2.0 + x).sum(), r"operation 0 was sin.* and is cos"),
        (lambda x: (jnp.sin(x) * 3.0 + x).sum(), "operation 1, mul.*another literal"),
        (lambda x: (x + jnp.sin(x) * 2.0).sum(), "operation 2, add.*reads other values"),
        (lambda x: (jnp.sin(x) * 2.0 + x).sum() * 1.0 + 1.0, "4 operations became [56]"),
        (lambda x: (jnp.sin(x) * 2.0 + x)[0, 0], "operation 3 was reduce_sum.* and is "),
    ],
)
def test_the_first_difference_is_named(other: Callable[..., Any], difference: str) -> None:
    found = fingerprint_of(loss).first_difference(fingerprint_of(other))
    assert found is not None
    assert_matches(difference, found)


def test_the_first_difference_of_inputs_and_outputs() -> None:
    mine = fingerprint_of(loss)
    assert_matches(
        r"input args\[0\]: f32\[4,4\]\* became args\[0\]: f32\[4,5\]\*",
        mine.first_difference(fingerprint_of(loss, (4, 5))),
    )
    two = fingerprint_of(lambda x, y: loss(x), (4, 4), (4, 4))
    assert_matches(r"1 inputs became 2: args\[1\]: .* is new", mine.first_difference(two))
    assert_matches(r"2 inputs became 1: args\[1\]: .* is gone", two.first_difference(mine))
    both = fingerprint_of(lambda x, y: loss(x), (4, 4), (4, 4), argnums=(0, 1))
    assert_matches(r"input args\[1\]: .* became .*\*", two.first_difference(both))
    shorter = dataclasses.replace(mine, operations=mine.operations[:-1])
    assert_matches("4 operations became 3", mine.first_difference(shorter))
    returned = dataclasses.replace(mine, outputs="0")
    assert_matches("returned the values .* and returns 0", mine.first_difference(returned))


def assert_matches(pattern: str, text: str | None) -> None:
    with pytest.raises(ValueError, match=pattern):
        raise ValueError(text)


def test_names_of_scopes_are_no_difference() -> None:
    def scoped(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return loss(x)

    mine, other = fingerprint_of(loss), fingerprint_of(scoped)
    assert mine.first_difference(other) is None
    assert mine == other
    assert mine.digest == other.digest


@given(st.data())
def test_equal_fingerprints_and_no_others_have_no_difference(data: st.DataObject) -> None:
    changed = data.draw(st.sampled_from(["inputs", "signatures", "digests", "operations", ""]))
    other = FINGERPRINT
    if changed:
        values = list(getattr(FINGERPRINT, changed))
        at = data.draw(st.integers(0, len(values) - 1))
        values[at] = 1 - values[at] if changed == "operations" else values[at] + "x"
        other = dataclasses.replace(FINGERPRINT, **{changed: tuple(values)})
    assert (FINGERPRINT.first_difference(other) is None) == (other == FINGERPRINT)
    assert (FINGERPRINT.digest == other.digest) == (other == FINGERPRINT)


def test_fingerprints_survive_json() -> None:
    again = Fingerprint.from_json(json.loads(json.dumps(FINGERPRINT.to_json())))
    assert again == FINGERPRINT
    with pytest.raises(KeyError):
        Fingerprint.from_json({"inputs": []})


def test_a_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(PlanFormatError, match="not text"):
        RematPlan.load(path)


LOSS = """
import jax
import jax.numpy as jnp

def loss_fn(w, x):
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

args = jnp.full((8, 8), 0.1), jnp.ones((32, 8))
"""
NO_SOLVER = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cvxpy", "highspy"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""
APPLY = """
import jax_hremat

plan = jax_hremat.RematPlan.load(sys.argv[1])
planned = jax_hremat.apply_plan(loss_fn, plan)
step = jax.jit(jax.value_and_grad(planned), compiler_options=jax_hremat.compiler_options("cpu"))
same = jax.tree.map(jnp.allclose, step(*args), jax.value_and_grad(loss_fn)(*args))
print(plan.root.num_checkpointed, jax.tree.all(same))
"""


def test_a_plan_is_applied_where_there_is_no_solver(tmp_path: Path) -> None:
    scope: dict[str, Any] = {}
    exec(compile(LOSS, "loss.py", "exec"), scope)
    config = jax_hremat.PlannerConfig(cost="analytic", max_rounds=0, partitioner=lambda graph: [2])
    make = jax_hremat.plan_remat(scope["loss_fn"], max_slowdown=3.0, target="cpu", config=config)
    make(*scope["args"]).save(tmp_path / "plan.json")
    script = tmp_path / "elsewhere.py"
    script.write_text(NO_SOLVER + LOSS + APPLY, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, script, tmp_path / "plan.json"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert run.returncode == 0, run.stderr
    num_checkpointed, same = run.stdout.split()
    assert int(num_checkpointed) >= 1
    assert same == "True"


def test_what_is_no_plan_is_refused_where_it_is_given() -> None:
    planner = jax_hremat.plan_remat(lambda w: w.sum(), budget=0.5)
    for other in ("plan.json", planner):
        with pytest.raises(TypeError, match=r"plan_remat\(fun, budget=…\)\(\*args\)"):
            jax_hremat.apply_plan(lambda w: w.sum(), other)  # type: ignore[arg-type]
