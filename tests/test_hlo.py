"""The HLO parser, on snippets whose content is known by sight."""

import time

import jax.numpy as jnp
import pytest

from jax_hremat._shared.errors import TargetUnavailableError
from jax_hremat._xla.compile import compile_flat
from jax_hremat._xla.hlo.parse import HloParseError, Shape, in_place_operands, parse_hlo
from jax_hremat._xla.target import get_target

# ruff: noqa: E501 (the lines of HLO text are as long as XLA prints them)
MODULE = """\
HloModule jit_f, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias), {1,2}: (0, {3}, must-alias) }, entry_computation_layout={(f32[4]{0})->f32[4]{0}}

FileNames
1 "/somewhere/a {strange} name.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%update (p0: f32[8,4], p1: f32[1,4], p2: s32[]) -> f32[8,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[1,4]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %dus.1 = f32[8,4]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

ENTRY %main.9 (x: f32[4]) -> (f32[4], /*index=1*/f32[]) {
  %x = f32[4]{0:T(128)S(1)} parameter(0), metadata={op_name="x"}
  %zero.1 = f32[] constant(0)
  %r-1 = f32[] reduce(%x, %zero.1), dimensions={0}, to_apply=%add, metadata={op_name="jit(f)/say \\"hi\\" body=%no {" stack_frame_id=1}, backend_config={"calls=%no":"(((","n":"1"}
  %pair = (f32[4]{0:T(128)}, (s4[3]{0:E(4)}, s4[3]{0}), token[]) custom-call(%x, /*index=1*/%x), custom_call_target="a, (b", output_to_operand_aliasing={{1,0}: (0, {})}, window={size=3x5 stride=2x1 pad=1_1x0_0}
  ROOT %tuple = (f32[4]{0}, f32[]) tuple(%x, %r-1)
}
"""


def test_module_is_read():
    module = parse_hlo(MODULE)
    assert module.name == "jit_f"
    assert module.entry.name == "main.9"
    assert set(module.computations) == {"add", "update", "main.9"}
    assert [i.name for i in module.entry.instructions] == ["x", "zero.1", "r-1", "pair", "tuple"]
    assert module.entry.root.name == "tuple"
    assert [(a.output_index, a.parameter, a.parameter_index) for a in module.output_aliases] == [
        ((0,), 1, ()),
        ((1, 2), 0, (3,)),
    ]


def test_instruction_is_read():
    entry = parse_hlo(MODULE).entry
    reduce = entry["r-1"]
    assert (reduce.opcode, reduce.operands, reduce.called) == ("reduce", ("x", "zero.1"), ("add",))
    assert reduce.op_name == 'jit(f)/say \\"hi\\" body=%no {'
    assert reduce.int_list("dimensions") == (0,)
    assert reduce.attribute("kind") is None
    assert not reduce.is_root and entry.root.is_root
    assert entry["x"].literal == "0" and entry["x"].operands == ()
    assert entry["x"].shape.memory_space == 1


def test_tuple_shapes_attributes_and_sub_byte_types():
    pair = parse_hlo(MODULE).entry["pair"]
    assert pair.operands == ("x", "x")
    assert pair.attribute("custom_call_target") == '"a, (b"'
    assert pair.window("size") == ("3", "5") and pair.window("rhs_dilate") == ()
    packed, unpacked = pair.shape.elements[1].elements
    assert (packed.nbytes, unpacked.nbytes) == (2, 3)
    assert pair.shape.nbytes == 16 + 2 + 3
    assert [leaf.dtype for leaf in pair.shape.leaves] == ["f32", "s4", "s4", "token"]


def test_in_place_operands():
    module = parse_hlo(MODULE)
    update = module.computations["update"].root
    assert in_place_operands(module, update) == ((0, 0, update),)
    pair = module.entry["pair"]
    assert in_place_operands(module, pair) == ((1, 0, pair),)
    assert in_place_operands(module, module.entry["r-1"]) == ()


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("  %y = f32[4]{0} ", "no opcode"),
        ("  %y = q7[4]{0} negate(%x)", "shape"),
        ("  %y = f32[4,a]{0} negate(%x)", "shape"),
        ("  %y = (f32[4]{0}, f32[] tuple(%x", "unbalanced"),
        ("  what is this", "not an instruction"),
    ],
)
def test_unreadable_lines_are_quoted(line, where):
    text = MODULE.replace('  %x = f32[4]{0:T(128)S(1)} parameter(0), metadata={op_name="x"}', line)
    with pytest.raises(HloParseError, match=where) as error:
        parse_hlo(text)
    assert line.strip() in str(error.value)


@pytest.mark.parametrize(
    "text", ["", "not hlo", MODULE.replace("ENTRY ", ""), MODULE.rstrip().rstrip("}")]
)
def test_what_is_no_module_is_refused(text):
    with pytest.raises(HloParseError):
        parse_hlo(text)


def test_sizes():
    assert Shape("bf16", (3, 5), (), 16).nbytes == 30
    assert Shape("pred", (), (), 8).nbytes == 1
    assert Shape("tuple").nbytes == 0 and Shape("tuple").leaves == ()


def test_parsing_is_fast():
    head, _, entry = MODULE.partition("ENTRY")
    reduce = next(line for line in entry.splitlines() if "%r-1 =" in line)
    many = "\n".join(
        reduce.replace("%r-1", f"%r-{n}").replace("(((", "config " * 15) for n in range(2, 11000)
    )
    text = head + "ENTRY" + entry.replace(reduce, reduce + "\n" + many)
    assert len(text) > 3_000_000
    started_s = time.perf_counter()
    parse_hlo(text)
    # Four times what it takes, for a busy machine.
    assert time.perf_counter() - started_s < 3.0


@pytest.mark.parametrize("target", ["cpu", "h200"])
def test_real_text_is_closed(target):
    """Every operand and every called computation of a compiled program is found."""

    def step(x, w):
        return jnp.sort(jnp.tanh(x @ w), axis=0), jnp.cumsum(x, axis=1)

    avals = [jnp.zeros((64, 64), jnp.bfloat16)] * 2
    try:
        module = parse_hlo(compile_flat(step, avals, get_target(target)).hlo_text)
    except TargetUnavailableError as error:
        pytest.skip(str(error))
    assert [p.shape.dims for p in module.entry.parameters] == [(64, 64)] * 2
    assert [leaf.dims for leaf in module.entry.root.shape.leaves] == [(64, 64)] * 2
    for computation in module.computations.values():
        for instruction in computation.instructions:
            assert all(operand in computation for operand in instruction.operands)
            assert all(name in module.computations for name in instruction.called)
