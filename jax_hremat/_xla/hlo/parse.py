"""Reads optimised HLO text, as ``compiled.as_text()`` prints it, into plain data.

Only what time and memory estimates need is kept. The tables of file names and stack
frames are skipped; attributes stay text and are looked up on demand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType


class HloParseError(ValueError):
    """The text is not HLO as this parser knows it; the message quotes the line."""


_DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "pred": 8,
        "s1": 1,
        "u1": 1,
        "s2": 2,
        "u2": 2,
        "s4": 4,
        "u4": 4,
        "s8": 8,
        "u8": 8,
        "s16": 16,
        "u16": 16,
        "s32": 32,
        "u32": 32,
        "s64": 64,
        "u64": 64,
        "f4e2m1fn": 4,
        "f8e3m4": 8,
        "f8e4m3": 8,
        "f8e4m3fn": 8,
        "f8e4m3b11fnuz": 8,
        "f8e4m3fnuz": 8,
        "f8e5m2": 8,
        "f8e5m2fnuz": 8,
        "f8e8m0fnu": 8,
        "f16": 16,
        "bf16": 16,
        "f32": 32,
        "f64": 64,
        "c64": 64,
        "c128": 128,
        "token": 0,
        "opaque": 0,
    }
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a value: an array, or a tuple of shapes.

    Attributes:
        dtype: HLO element type such as ``"bf16"``; ``"tuple"`` for a tuple.
        dims: Array dimensions, outermost logical dimension first; for a dynamic one, its bound.
        elements: Shapes of a tuple's elements; empty for an array.
        element_bits: Bits that one element takes in memory; 0 for a tuple.
        memory_space: The layout's memory space; 0 is the device's own, 5 the host's.
    """

    dtype: str
    dims: tuple[int, ...] = ()
    elements: tuple[Shape, ...] = ()
    element_bits: int = 0
    memory_space: int = 0

    @property
    def is_tuple(self) -> bool:
        """Whether this is a tuple shape, the empty one included."""
        return self.dtype == "tuple"

    @property
    def size(self) -> int:
        """Number of elements of an array; for a tuple, of all its arrays together."""
        if self.is_tuple:
            return sum(element.size for element in self.elements)
        return prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Bytes of the data, tuples summed; packed sub-byte arrays are rounded up.

        Unchecked: tiling and padding of the layout, and a tuple's own pointer table.
        """
        if self.is_tuple:
            return sum(element.nbytes for element in self.elements)
        return (prod(self.dims) * self.element_bits + 7) // 8

    @property
    def leaves(self) -> tuple[Shape, ...]:
        """The array shapes of a nested tuple in order; the shape itself if an array."""
        if not self.is_tuple:
            return (self,)
        return tuple(leaf for element in self.elements for leaf in element.leaves)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One HLO instruction.

    Attributes:
        name: Its name, unique in its computation, without the leading ``%``.
        opcode: HLO opcode such as ``"fusion"``.
        shape: Shape of the result.
        operands: Names of the operands, repeats kept. Empty for ``parameter`` and ``constant``.
        called: Names of the computations it calls, in the order printed.
        attributes: Everything printed after the operand list.
        op_name: The traced operation it comes from; ``""`` if unknown.
        is_root: Whether its result is the result of its computation.
        literal: The text between the parentheses of a ``parameter`` or ``constant``.
    """

    name: str
    opcode: str
    shape: Shape
    operands: tuple[str, ...]
    called: tuple[str, ...]
    attributes: str
    op_name: str
    is_root: bool
    literal: str = ""

    def attribute(self, key: str) -> str | None:
        """The text of one attribute, braces kept: ``"{1}"``, ``"kLoop"``; None if absent."""
        start = _find_key(self.attributes, key)
        if start < 0:
            return None
        return self.attributes[start : _value_end(self.attributes, start)]

    def called_as(self, role: str) -> str:
        """The computation called in a role such as ``body``; empty if there is none."""
        return (self.attribute(role) or "").lstrip("%")

    @property
    def library(self) -> str:
        """The function that a custom call calls; empty for any other instruction."""
        if self.opcode != "custom-call":
            return ""
        return (self.attribute("custom_call_target") or "").strip('"')

    def int_list(self, key: str) -> tuple[int, ...]:
        """The integers of an attribute such as ``dimensions={0,2}``; empty if absent."""
        return tuple(int(number) for number in re.findall(r"-?\d+", self.attribute(key) or ""))

    def window(self, key: str) -> tuple[str, ...]:
        """One entry of ``window={...}`` per dimension: ``size`` gives ``("3", "3")``."""
        match = re.search(rf"\b{key}=([^ }}]+)", self.attribute("window") or "")
        return tuple(match.group(1).split("x")) if match else ()


@dataclass(frozen=True, slots=True, eq=False)
class Computation:
    """A list of instructions, in schedule order where the module is scheduled.

    Attributes:
        name: Its name, without the leading ``%``.
        instructions: In the order printed.
        root: The instruction whose result is the computation's.
    """

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction
    _by_name: Mapping[str, Instruction] = field(repr=False)

    def __getitem__(self, name: str) -> Instruction:
        """The instruction with this name.

        Raises:
            KeyError: There is none.
        """
        return self._by_name[name]

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    @property
    def parameters(self) -> tuple[Instruction, ...]:
        """The parameter instructions in order of their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.literal)))


@dataclass(frozen=True, slots=True)
class OutputAlias:
    """An output stored in a parameter's memory, as donation asks for.

    Attributes:
        output_index: Path into the result tuple; ``()`` for a result that is no tuple.
        parameter: Number of the parameter.
        parameter_index: Path into that parameter.
    """

    output_index: tuple[int, ...]
    parameter: int
    parameter_index: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HloModule:
    """A compiled program.

    Attributes:
        name: The module's name, such as ``"jit_loss"``.
        entry: The computation that runs.
        computations: All computations by name, the entry included.
        output_aliases: Outputs that take over a donated parameter's memory.
    """

    name: str
    entry: Computation
    computations: Mapping[str, Computation]
    output_aliases: tuple[OutputAlias, ...]


_NAME = r"[\w.\-$:]+"
_TABLES = frozenset({"FileNames", "FunctionNames", "FileLocations", "StackFrames"})
_HEADER = re.compile(rf"(ENTRY )?%?({_NAME}) (?:\(.*)?\{{(?:\s*#.*)?$")
_LHS = re.compile(rf"\s+(ROOT )?%?({_NAME}) = ")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_PARENTHESES = re.compile(r"[()]|\"(?:[^\"\\]|\\.)*\"")
_BRACES = re.compile(r"[{}]|\"(?:[^\"\\]|\\.)*\"")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPERAND = re.compile(rf"%({_NAME})")
_COMMENT = re.compile(r"/\*.*?\*/")
_ARRAY = re.compile(r"([a-z]\w*)\[([^\]]*)\](\{[^}]*\})?")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_CALLED = re.compile(
    r"\b(?:calls|to_apply|condition|body|select|scatter|comparator|true_computation"
    r"|false_computation|branch_computations|called_computations)=(\{[^}]*\}|%?" + _NAME + ")"
)
_ALIAS = re.compile(r"\{([\d, ]*)\}:\s*\((\d+),\s*\{([\d, ]*)\}")
_NO_OPERANDS = frozenset({"parameter", "constant", "iota", "partition-id", "replica-id"})


def parse_hlo(text: str) -> HloModule:
    """Reads the text of one HLO module.

    Args:
        text: What ``compiled.as_text()`` returns, long form, any backend.

    Returns:
        The module; instructions are in the order printed, which is the schedule if the module
        says ``is_scheduled=true``.

    Raises:
        HloParseError: A line has no known form, or the entry computation is missing.

    Unchecked: that operands exist and that shapes fit their opcodes.
    """
    module_line = ""
    entry: Computation | None = None
    computations: dict[str, Computation] = {}
    lines = iter(text.splitlines())
    for line in lines:
        if not line or line in _TABLES or line[0].isdigit():
            continue
        if line.startswith("HloModule "):
            module_line = line
            continue
        header = _HEADER.match(line)
        if header is None:
            raise HloParseError(f"not a computation's first line: {_quoted(line)}")
        computation = _computation(header.group(2), lines)
        computations[computation.name] = computation
        if header.group(1):
            entry = computation
    if entry is None:
        raise HloParseError(f"no ENTRY computation in module {_quoted(module_line)}")
    name = module_line.split(" ", 1)[1].split(",", 1)[0] if module_line else ""
    return HloModule(name, entry, MappingProxyType(computations), _output_aliases(module_line))


def in_place_operands(
    module: HloModule, instruction: Instruction
) -> tuple[tuple[int, int, Instruction], ...]:
    """The outputs that an instruction writes into an operand's buffer.

    Dynamic-update-slice and scatter write in place, alone or as the root of a fusion over
    one of its parameters; custom calls say so in ``output_to_operand_aliasing``.

    Args:
        module: The module, in which fused computations are looked up.
        instruction: Any instruction of the module.

    Returns:
        Triples of the output's leaf number, the operand's number and the instruction that
        does the writing (the inner one of a fusion).
    """
    if instruction.opcode in ("dynamic-update-slice", "scatter"):
        return ((0, 0, instruction),)
    if instruction.opcode == "custom-call":
        aliasing = instruction.attribute("output_to_operand_aliasing") or ""
        return tuple(
            (leaf_number(instruction.shape, _path(path)), int(operand), instruction)
            for path, operand, _ in _ALIAS.findall(aliasing)
        )
    if instruction.opcode != "fusion":
        return ()
    fused = module.computations[instruction.called[0]]
    outputs = fused.root.operands if fused.root.opcode == "tuple" else (fused.root.name,)
    found = []
    for leaf, name in enumerate(outputs):
        writer = _through_bitcasts(fused, name)
        if writer.opcode not in ("dynamic-update-slice", "scatter"):
            continue
        target = _through_bitcasts(fused, writer.operands[0])
        if target.opcode == "parameter":
            found.append((leaf, int(target.literal), writer))
    return tuple(found)


def leaf_number(shape: Shape, path: tuple[int, ...]) -> int:
    """The place among ``shape.leaves`` where the element at ``path`` begins."""
    if not path:
        return 0
    before = sum(len(element.leaves) for element in shape.elements[: path[0]])
    return before + leaf_number(shape.elements[path[0]], path[1:])


def _through_bitcasts(computation: Computation, name: str) -> Instruction:
    instruction = computation[name]
    while instruction.opcode == "bitcast":
        instruction = computation[instruction.operands[0]]
    return instruction


def _computation(name: str, lines: Iterator[str]) -> Computation:
    instructions: dict[str, Instruction] = {}
    root: Instruction | None = None
    shapes: dict[str, Shape] = {}
    for line in lines:
        if line.startswith("}"):
            break
        if not line.strip():
            continue
        instruction = _instruction(line, shapes)
        instructions[instruction.name] = instruction
        if instruction.is_root:
            root = instruction
    else:
        raise HloParseError(f"computation {name} has no closing brace")
    if not instructions:
        raise HloParseError(f"computation {name} is empty")
    ordered = tuple(instructions.values())
    return Computation(name, ordered, root or ordered[-1], MappingProxyType(instructions))


def _instruction(line: str, shapes: dict[str, Shape]) -> Instruction:
    lhs = _LHS.match(line)
    if lhs is None:
        raise HloParseError(f"not an instruction: {_quoted(line)}")
    shape_start = lhs.end()
    if line.startswith("(", shape_start):
        shape_end = _closing(line, shape_start, _PARENTHESES) + 1
    else:
        shape_end = line.find(" ", shape_start)
    shape_text = line[shape_start:shape_end]
    shape = shapes.get(shape_text)
    if shape is None:
        shape = shapes[shape_text] = _shape(shape_text, line)
    opcode_match = _OPCODE.match(line, shape_end)
    if opcode_match is None:
        raise HloParseError(f"no opcode behind the shape: {_quoted(line)}")
    opcode = opcode_match.group(1)
    open_at = opcode_match.end() - 1
    close_at = _closing(line, open_at, _PARENTHESES)
    inside = line[open_at + 1 : close_at]
    attributes = line[close_at + 1 :].lstrip(", ")
    op_name = ""
    at = attributes.find('op_name="')
    if at >= 0:
        match = _OP_NAME.match(attributes, at)
        op_name = match.group(1) if match else ""
    return Instruction(
        name=lhs.group(2),
        opcode=opcode,
        shape=shape,
        operands=() if opcode in _NO_OPERANDS else _operands(inside),
        called=_called(attributes),
        attributes=attributes,
        op_name=op_name,
        is_root=lhs.group(1) is not None,
        literal=inside if opcode in _NO_OPERANDS else "",
    )


def _operands(text: str) -> tuple[str, ...]:
    if "%" in text:
        return tuple(_OPERAND.findall(text))
    # Without percent signs each operand may follow its shape: the name comes last.
    parts = _COMMENT.sub("", text).split(", ")
    return tuple(part.split()[-1] for part in parts if part.strip())


def _called(attributes: str) -> tuple[str, ...]:
    # Free text (operation names, kernel configurations) follows these two keys.
    stops = (attributes.find(key) for key in ("metadata={", "backend_config="))
    end = min((stop for stop in stops if stop >= 0), default=len(attributes))
    return tuple(
        name for value in _CALLED.findall(attributes, 0, end) for name in re.findall(_NAME, value)
    )


def _shape(text: str, line: str) -> Shape:
    text = _COMMENT.sub("", text).strip()
    if text.startswith("("):
        return Shape("tuple", elements=tuple(_shape(part, line) for part in _split(text[1:-1])))
    match = _ARRAY.fullmatch(text)
    if match is None or match.group(1) not in _DTYPE_BITS:
        raise HloParseError(f"cannot read the shape {text!r} in: {_quoted(line)}")
    dtype, dims_text, layout = match.groups()
    bits = _DTYPE_BITS[dtype]
    if 0 < bits < 8:
        # Unless the layout says that elements are packed, each takes a whole byte.
        packed = re.search(r"E\((\d+)\)", layout or "")
        bits = int(packed.group(1)) if packed else 8
    space = re.search(r"S\((\d+)\)", layout or "")
    try:
        dims = tuple(int(d.strip().lstrip("<=")) for d in dims_text.split(",") if d.strip())
    except ValueError as error:
        raise HloParseError(f"cannot read the shape {text!r} in: {_quoted(line)}") from error
    return Shape(dtype, dims, (), bits, int(space.group(1)) if space else 0)


def _split(text: str) -> list[str]:
    """Splits at the commas outside all brackets."""
    parts, depth, start = [], 0, 0
    for at, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            parts.append(text[start:at])
            start = at + 1
    return [part for part in (*parts, text[start:]) if part.strip()]


def _closing(text: str, open_at: int, brackets: re.Pattern[str]) -> int:
    depth = 0
    for match in brackets.finditer(text, open_at):
        bracket = match.group()
        if bracket in "({":
            depth += 1
        elif bracket in ")}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise HloParseError(f"unbalanced brackets: {_quoted(text)}")


def _find_key(attributes: str, key: str) -> int:
    """Where the value of a top-level attribute starts; -1 if there is none."""
    at = 0
    while at < len(attributes):
        equals = attributes.find("=", at)
        if equals < 0:
            return -1
        if attributes[at:equals].strip(", ") == key:
            return equals + 1
        at = _value_end(attributes, equals + 1)
    return -1


def _value_end(text: str, start: int) -> int:
    if text.startswith("{", start):
        return _closing(text, start, _BRACES) + 1
    quoted = _QUOTED.match(text, start)
    if quoted:
        return quoted.end()
    comma = text.find(", ", start)
    return len(text) if comma < 0 else comma


def _output_aliases(module_line: str) -> tuple[OutputAlias, ...]:
    at = module_line.find("input_output_alias={")
    if at < 0:
        return ()
    start = module_line.index("{", at)
    text = module_line[start + 1 : _closing(module_line, start, _BRACES)]
    return tuple(
        OutputAlias(_path(output), int(parameter), _path(index))
        for output, parameter, index in _ALIAS.findall(text)
    )


def _path(text: str) -> tuple[int, ...]:
    return tuple(int(step) for step in text.split(",") if step.strip())


def _quoted(line: str) -> str:
    return repr(line if len(line) <= 200 else line[:200] + "...")
