"""`RematPlan` -> Python code that applies it without this library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib import resources
from textwrap import indent
from typing import TYPE_CHECKING

from jax_hremat._plan.block import BlockReport
from jax_hremat._plan.fingerprint import RULES
from jax_hremat._plan.region import Loop, Region
from jax_hremat._shared.errors import UnsupportedProgramError
from jax_hremat._shared.format import format_bytes

if TYPE_CHECKING:
    from jax_hremat._plan.plan import RematPlan

# Operations that are emitted in a way of their own where they are checkpointed.
_SPECIAL = {
    "cond": "a cond, whose condition must be kept",
    "reduce_window_max": "a max-pool, whose gradient is scattered into zeros of its own",
    "reduce_window_min": "a min-pool, whose gradient is scattered into zeros of its own",
}
# Operations that write into arrays, or whose derivatives do.
_WRITING = ("gather", "scatter", "dynamic_slice", "dynamic_update_slice", "scan")
_MAY_TAKE_MORE = """
The library fills the arrays that {what} of checkpointed regions write into, forward or
backward, when they are needed. This code leaves that to XLA, and the step may take more memory."""
_SPECIAL_ANYWHERE = {
    "hremat_detach": "the rule of a `jax.custom_vjp`, which is taken apart",
    "jit": "an inner `jax.jit` with shardings",
    "pjit": "an inner `jax.jit` with shardings",
}
# Values that `_emit/checkpoint.py` keeps in parts.
_IN_PARTS = {
    "c64[": "complex values",
    "c128[": "complex values",
    "f8_": "values of 8 bits",
    "f4_": "values of 4 bits",
}
_HEAD = '''"""A rematerialization plan as code: program {program}, target {target}, jax {jax}.

The compiled step took {peak} of a budget of {budget}; without rematerialization {baseline}.{more}

    step = jax.jit(jax.value_and_grad(planned(loss){arguments}){options})

Written by `jax_hremat.RematPlan.to_code`; it needs JAX and nothing else.{cpu}
"""


def planned(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The function that the plan was made for, with the plan applied.

    The arguments are arrays in any pytrees. Raises `ValueError` where the function traces to other
    operations than it did when the plan was made, or a planned scan's steps have a cond or a pool.
    """
    return applied(fun, regions(), argnums={argnums}, digest="{digest}")


def regions() -> Region:
    """What is under `jax.checkpoint`, as ranges of equations of `jax.make_jaxpr(fun)(*args)` with
    its inner `jit`s inlined."""
{tree}
'''


def plan_code(plan: RematPlan) -> str:
    """The code; see `RematPlan.to_code`."""
    refused = next(_unsaid(plan), None)
    if refused is not None:
        raise UnsupportedProgramError(
            f"`to_code` writes ranges of operations under `jax.checkpoint` and nothing else, and "
            f"this plan also has {refused}. Apply it with `jax_hremat.apply_plan(fun, plan)`, and "
            f"keep it as a file with `plan.save(path)`"
        )
    tree = "\n".join(_call(plan, _whole(plan.root), "return "))
    runner = resources.files("jax_hremat") / "_emit" / "standalone.py"
    # Without the module's own docstring.
    text = runner.read_text(encoding="utf-8").split('"""\n\n', 1)[1]
    imports, _, rest = text.partition("\n\n\n")
    head, _, code = _HEAD.format(
        **_facts(plan),
        argnums=repr(plan.argnums),
        digest=_digest(plan),
        tree=indent(tree, "    "),
    ).partition("\n\n\n")
    return f"{head}\n\n{imports}\n\n\n{code}\n\n{rest}"


def _facts(plan: RematPlan) -> dict[str, str]:
    c = plan.certificate
    options = dict(c.compiler_options)
    differentiated = "" if plan.argnums == (0,) else f", argnums={plan.argnums!r}"
    aux = ", has_aux=True" if plan.has_aux else ""
    cpu = ""
    if c.platform == "cpu":
        cpu = (
            " XLA:CPU before jaxlib\n0.11.1 undoes every `jax.checkpoint` of code outside loops, "
            'unless it is compiled with\n`compiler_options={"xla_disable_hlo_passes": '
            '"cse_barrier_expander"}`.'
        )
    return dict(
        program=plan.fingerprint.digest[:8],
        target=c.target,
        jax=c.versions["jax"],
        peak=format_bytes(c.peak_bytes),
        budget=format_bytes(c.budget_bytes),
        baseline=format_bytes(plan.baseline_peak_bytes),
        more=_more(plan),
        arguments=differentiated + aux,
        options=f", compiler_options={options!r}" if options else "",
        cpu=cpu,
    )


def _more(plan: RematPlan) -> str:
    """What is said of the memory of a step made with this code."""
    names = _primitives(plan)
    regions = [region for _, region in plan.root.walk() if region.checkpointed]
    inside = {name for r in regions for name in names[r.start : r.stop]}
    writing = sorted({kind for kind in _WRITING for name in inside if name.startswith(kind)})
    if not writing:
        return ""
    return _MAY_TAKE_MORE.format(what=" and ".join(", ".join(writing).rsplit(", ", 1)))


def _made_by(plan: RematPlan, operation: int) -> str:
    """The primitive of an operation and the types of its results."""
    signature = plan.fingerprint.signatures[plan.fingerprint.operations[operation]].split(RULES)[0]
    return f"{signature.split('[')[0]} {signature.rpartition('->')[2]}"


def _primitives(plan: RematPlan) -> list[str]:
    names = [signature.split("[")[0] for signature in plan.fingerprint.signatures]
    return [names[i] for i in plan.fingerprint.operations]


def _digest(plan: RematPlan) -> str:
    """A hash of the program's primitives, as the code makes it."""
    return hashlib.sha256(" ".join(_primitives(plan)).encode()).hexdigest()[:16]


def _unsaid(plan: RematPlan) -> Iterator[str]:
    """What the plan has that the code does not say."""
    if plan.opened.checkpoints:
        yield "the function's own checkpoints opened"
    if plan.opened.scan_steps:
        yield f"scans of up to {plan.opened.scan_steps} steps written out"
    if plan.certificate.mesh is not None:
        yield f"a mesh of devices ({plan.certificate.mesh})"
    for short, what in _IN_PARTS.items():
        if any(short in signature for signature in plan.fingerprint.signatures):
            yield f"{what}, which `jax.checkpoint` alone does not keep"
    names = _primitives(plan)
    for _, region in plan.root.walk():
        at = f"at operation {region.start}, in `{_scope(region, plan.blocks)}`"
        if region.loop is not None:
            yield from (f"{what} ({at})" for what in _unsaid_of_steps(region.loop))
        if region.branches:
            yield f"decisions inside the branches of a cond ({at})"
        special = _SPECIAL if region.checkpointed else {}
        for index in range(region.start, region.stop):
            if names[index] in special:
                yield f"{special[names[index]]} (operation {index}, in a region {at})"
    for index, name in enumerate(names):
        if name in _SPECIAL_ANYWHERE:
            yield f"{_SPECIAL_ANYWHERE[name]} (operation {index})"


def _unsaid_of_steps(loop: Loop) -> Iterator[str]:
    """What is not said of the steps of a scan."""
    if loop.segments:
        yield "checkpointed segments of a scan"
    for _, region in loop.body.walk():
        if region.branches:
            yield "decisions inside the branches of a cond in a scan"
        if region.loop is not None:
            yield from _unsaid_of_steps(region.loop)


def _call(plan: RematPlan | None, region: Region, prefix: str = "") -> Iterator[str]:
    """The lines of a call that makes a region; without the plan for steps of a scan, whose
    operations it does not list."""
    inner = list(_inner(region))
    arguments = f"{region.start}, {region.stop}"
    if not region.checkpointed:
        arguments += ", checkpointed=False"
    if region.barrier:
        arguments += ", barrier=True"
    if region.late_arguments:
        arguments += ", late=True"
    if not region.saved and not inner and region.loop is None:
        yield f"{prefix}Region({arguments})"
        return
    yield f"{prefix}Region("
    yield f"    {arguments},"
    if region.saved:
        yield "    keeps=["
        for kept in region.saved:
            yield f"        {kept},  # {_made_by(plan, kept[0])}" if plan else f"        {kept},"
        yield "    ],"
    if inner:
        yield "    inside=["
        for child in inner:
            if plan is not None:
                yield f"        # {_scope(child, plan.blocks)}"
            *lines, last = _call(plan, child)
            yield from (8 * " " + line for line in (*lines, f"{last},"))
        yield "    ],"
    if region.loop is not None:
        *lines, last = _call(None, _whole(region.loop.body), "body=")
        yield from (4 * " " + line for line in (*lines, f"{last},"))
    yield ")"


def _whole(root: Region) -> Region:
    """A plain region: a checkpointed one is called by the one around it."""
    return Region(root.start, root.stop, children=(root,)) if root.checkpointed else root


def _inner(region: Region) -> Iterator[Region]:
    """The regions inside one that change something."""
    for child in region.children:
        if child.checkpointed or child.barrier or child.late_arguments or child.loop is not None:
            yield child
        else:
            yield from _inner(child)


def _scope(region: Region, blocks: Sequence[BlockReport]) -> str:
    """The scopes that a region spans and the line of its first block."""
    own = [b for b in blocks if b.start < region.stop and region.start < b.stop]
    if not own:
        return f"operations {region.start} to {region.stop - 1}"
    first, last = own[0], own[-1]
    if first.scope == last.scope:
        return first.place.with_line
    return ", ".join(filter(None, (f"{first.scope} … {last.scope}", first.place.line)))
