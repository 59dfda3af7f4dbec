"""`RematPlan`: decisions, the proof that they fit, and what they cost. It holds no JAX object."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.certificate import Certificate
from jax_hremat._plan.chart import memory_chart
from jax_hremat._plan.code import plan_code
from jax_hremat._plan.device_mesh import DeviceMesh
from jax_hremat._plan.fingerprint import Fingerprint
from jax_hremat._plan.free_schedule import FreeSchedule
from jax_hremat._plan.notebook import plan_html
from jax_hremat._plan.openings import NOTHING_OPENED, Openings
from jax_hremat._plan.own_checkpoint import OwnCheckpoint
from jax_hremat._plan.peak import BufferReport, Moment
from jax_hremat._plan.perfetto import trace
from jax_hremat._plan.place import Place
from jax_hremat._plan.region import Loop, Region
from jax_hremat._plan.text import plan_text
from jax_hremat._shared.errors import PlanFormatError
from jax_hremat._shared.files import write_whole
from jax_hremat._shared.frozen import reduce_record

_FORMAT = "jax_hremat.RematPlan"
FORMAT_VERSION = 14


@dataclass(frozen=True, slots=True)
class RematPlan:
    """How the step of one program is run, with the certificate.

    Equality and `save` leave out `timings_s`, which describes the planning rather than the plan.

    Attributes:
        root: The region tree over the program's operations.
        fingerprint: The program the plan is for.
        argnums: Positional arguments that are differentiated.
        has_aux: Whether the function returns `(loss, aux)`.
        certificate: What the compiler reported.
        estimated_step_s: Roofline estimate of the compiled planned step.
        baseline_step_s: The same without rematerialization, with the function's scans as they are.
        baseline_peak_bytes: Compiled peak of that step.
        predicted_peak_bytes: What is predicted to be alive at the peak, before the whole step was
            compiled.
        predicted_gaps_bytes: Bytes of the gaps between buffers that are predicted beside that.
        predicted_step_s: The step time predicted before the whole step was compiled.
        cost_source: Where the costs of blocks come from, as in `PlannerConfig.cost`.
        solver_status: The solver's status for the root integer program.
        solver_gap: Relative gap between its solution and the proven bound.
        bound_step_s: No selection of the priced options is predicted to make a faster step within
            the budget. None where a budget was not what was asked for, or no selection was
            predicted to fit.
        free_schedule: What the strategy's own schedule within the budget would take, where nested
            checkpoints cannot express its schedules, as simulated; the plan is a nest. None for all
            other strategies, where none fits, and where a budget was not what was asked for. Of the
            plan that a refusal carries, the budget is the one refused.
        blocks: What was decided for each block, in program order.
        buffers: The largest buffers at the peak, largest first.
        moments: Predicted memory over the step; empty where costs were not known (`certify`).
        baseline_moments: The same without rematerialization, in the form that is planned.
        unpriced: Operations of the compiled step that the estimates leave out, with their number:
            for example custom calls of unknown cost, and the network time of collectives.
        own_checkpoints: The function's own `jax.checkpoint`s, `nn.remat`s and the like.
        opened: Parts of the function that are planned as if they were written differently. Unless
            its own checkpoints are among them, each of those is one operation, in the step without
            rematerialization too.
        num_compiles: Programs compiled to make the plan: whole steps, including the one that gives
            the shardings on a mesh, and blocks under one option each.
        timings_s: Seconds spent on each stage of planning: trace, partition, cost, solve, certify.
    """

    root: Region
    fingerprint: Fingerprint
    argnums: tuple[int, ...]
    has_aux: bool
    certificate: Certificate
    estimated_step_s: float
    baseline_step_s: float
    baseline_peak_bytes: int
    predicted_peak_bytes: int
    predicted_step_s: float
    cost_source: str
    solver_status: str
    solver_gap: float
    blocks: tuple[BlockReport, ...]
    buffers: tuple[BufferReport, ...]
    moments: tuple[Moment, ...]
    baseline_moments: tuple[Moment, ...]
    unpriced: Mapping[str, int]
    num_compiles: Mapping[str, int]
    own_checkpoints: tuple[OwnCheckpoint, ...] = ()
    opened: Openings = NOTHING_OPENED
    bound_step_s: float | None = None
    free_schedule: FreeSchedule | None = None
    predicted_gaps_bytes: int = 0
    timings_s: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({}), compare=False
    )

    @property
    def slowdown(self) -> float:
        """Estimated step time, divided by that without rematerialization."""
        return self.estimated_step_s / self.baseline_step_s

    def memory_chart(self, width: int = 80, height: int = 12) -> str:
        """Memory over the step as a picture in Unicode characters, for a terminal.

        From left to right: the forward of every block, then the backwards in reverse order, all
        equally wide whatever time they take. Heights are predicted bytes, with arguments, results
        and constants; the peaks in the key below are those of the compiled steps. On a mesh, all
        bytes are those of one device.

        Args:
            width: Columns of the whole picture, at least 64.
            height: About how many lines the vertical axis takes, at least 4.

        Returns:
            The picture, without a newline at its end; one line of text for a plan that `certify`
            made, for which no memory is predicted.
        """
        return memory_chart(self, width, height)

    def to_code(self) -> str:
        """The plan as a Python module that needs JAX and not this library.

        Its function `planned(fun)` is what `apply_plan(fun, plan)` is: `fun` with the plan's
        regions under nested `jax.checkpoint`s, each with a policy by name for what it keeps. A
        region is a range of equations of `jax.make_jaxpr(fun)`, with the scope and source line it
        comes from as a comment. The module can be read, changed, and kept where the library is not
        installed; it recognises the program by its operations, without their shapes.

        Raises:
            UnsupportedProgramError: The plan has what the code does not say: checkpointed segments
                of scans, decisions in the branches of conds, parts of the program that are opened,
                devices of a mesh, complex values, values of 8 bits, and pools or conds under a
                checkpoint. The message names it.
        """
        return plan_code(self)

    def to_perfetto(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted step as a timeline for https://ui.perfetto.dev or chrome://tracing.

        The file is JSON in the Trace Event Format, with two processes: the step with the plan, and
        without rematerialization. Each has a track of blocks, forward and backward, with the
        recompute inside, and counters of memory in bytes. All times are estimates, the seconds of
        each block on its own, and so are all bytes but the compiled peaks in `otherData`. Single
        kernels, and what the step does besides its blocks, are not in a plan. In a group, each
        block's recompute stands before its own backward; in the step all of them come before the
        backward of the group's last block.

        Args:
            path: Where to write; the file appears whole or not at all.

        Raises:
            UnsupportedConfigError: The plan has no predictions: `certify` made it.
            OSError: The file cannot be written.
        """
        write_whole(Path(path), json.dumps(trace(self), indent=1).encode())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json().encode())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> RematPlan:
        """Read a plan that `save` wrote.

        Raises:
            PlanFormatError: The file is not a plan, or is a plan of another version.
            OSError: The file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise PlanFormatError(f"{path} is not a saved plan: it is not text") from error
        return RematPlan.from_json(text, where=str(path))

    def to_json(self) -> str:
        """The plan as JSON text, the same for equal plans."""
        data: dict[str, Any] = {"format": _FORMAT, "version": FORMAT_VERSION}
        for f in dataclasses.fields(self):
            if f.compare:
                data[f.name] = _encode(getattr(self, f.name))
        return json.dumps(data, indent=1) + "\n"

    @staticmethod
    def from_json(text: str, where: str = "the text") -> RematPlan:
        """The inverse of `to_json`.

        Raises:
            PlanFormatError: The text is not a plan, or is a plan of another version.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise PlanFormatError(
                f"{where} is not a saved plan: it is not JSON ({error}). It may have been cut "
                f"off; make the plan again"
            ) from error
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise PlanFormatError(f"{where} is JSON, but not a plan that `RematPlan.save` wrote")
        if data.get("version") != FORMAT_VERSION:
            raise PlanFormatError(
                f"{where} is a plan of format version {data.get('version')}; this version of "
                f"jax_hremat reads version {FORMAT_VERSION}. Make the plan again"
            )
        try:
            return _decode_plan(data)
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise PlanFormatError(
                f"{where} is a damaged plan: {type(error).__name__}: {error}. Make it again"
            ) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return reduce_record(self)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return plan_html(self)

    def __hash__(self) -> int:
        return hash((self.fingerprint.digest, self.root))

    def __repr__(self) -> str:
        c = self.certificate
        device = c.target if c.mesh is None else f"each {c.target} of {c.mesh}"
        return (
            f"RematPlan({self.root.num_checkpointed} checkpoints, peak {c.peak_bytes} of "
            f"{c.budget_bytes} bytes on {device}, {self.slowdown:.3f}x the step, "
            f"program {self.fingerprint.digest[:8]})"
        )


def _encode(value: Any) -> Any:
    if isinstance(value, Fingerprint):
        return value.to_json()
    if isinstance(value, Region):
        return _encode_region(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: value[k] for k in sorted(value)}
    if isinstance(value, tuple):
        return [_encode(v) for v in value]
    return value


def _encode_region(region: Region) -> dict[str, Any]:
    data: dict[str, Any] = {"start": region.start, "stop": region.stop}
    if region.checkpointed:
        data["checkpointed"] = True
    if region.saved:
        data["saved"] = [list(ref) for ref in region.saved]
    if region.barrier:
        data["barrier"] = True
    if region.late_arguments:
        data["late_arguments"] = True
    if region.loop is not None:
        data["loop"] = {
            "body": _encode_region(region.loop.body),
            "segments": list(region.loop.segments),
        }
    if region.branches:
        data["branches"] = [_encode_region(b) for b in region.branches]
    if region.children:
        data["children"] = [_encode_region(c) for c in region.children]
    return data


def _decode_region(data: Mapping[str, Any]) -> Region:
    return Region(
        start=data["start"],
        stop=data["stop"],
        checkpointed=data.get("checkpointed", False),
        saved=tuple((op, k) for op, k in data.get("saved", ())),
        barrier=data.get("barrier", False),
        late_arguments=data.get("late_arguments", False),
        loop=_decode_loop(data["loop"]) if "loop" in data else None,
        branches=tuple(_decode_region(b) for b in data.get("branches", ())),
        children=tuple(_decode_region(c) for c in data.get("children", ())),
    )


def _decode_loop(data: Mapping[str, Any]) -> Loop:
    return Loop(body=_decode_region(data["body"]), segments=tuple(map(int, data["segments"])))


def _decode_plan(data: Mapping[str, Any]) -> RematPlan:
    certificate = dict(data["certificate"])
    for key in ("compiler_options", "versions"):
        certificate[key] = MappingProxyType(dict(certificate[key]))
    if certificate["mesh"] is not None:
        mesh = {key: tuple(value) for key, value in certificate["mesh"].items()}
        axes = tuple((name, int(size)) for name, size in mesh.pop("axes"))
        certificate["mesh"] = DeviceMesh(axes, **mesh)
    blocks = [
        {
            **b,
            "place": Place.from_json(b["place"]),
            "saved": tuple(b["saved"]),
            "runs": tuple(b["runs"]),
        }
        for b in data["blocks"]
    ]
    free = data.get("free_schedule")
    plain = (
        "has_aux estimated_step_s baseline_step_s baseline_peak_bytes predicted_peak_bytes "
        "predicted_step_s cost_source solver_status solver_gap bound_step_s"
    ).split()
    return RematPlan(
        root=_decode_region(data["root"]),
        fingerprint=Fingerprint.from_json(data["fingerprint"]),
        argnums=tuple(data["argnums"]),
        certificate=Certificate(**certificate),
        blocks=tuple(BlockReport(**b) for b in blocks),
        buffers=tuple(BufferReport(**b) for b in data["buffers"]),
        moments=tuple(Moment(**m) for m in data["moments"]),
        baseline_moments=tuple(Moment(**m) for m in data["baseline_moments"]),
        unpriced=MappingProxyType(dict(data["unpriced"])),
        num_compiles=MappingProxyType(dict(data["num_compiles"])),
        own_checkpoints=tuple(OwnCheckpoint(**c) for c in data.get("own_checkpoints", ())),
        opened=Openings(**data.get("opened", {})),
        free_schedule=None if free is None else FreeSchedule(**free),
        predicted_gaps_bytes=data.get("predicted_gaps_bytes", 0),
        **{key: data[key] for key in plain},
    )
