"""A traced call, computed with regions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax_hremat._emit.emit import emit_flat
from jax_hremat._plan.region import Region
from jax_hremat._trace.call import TracedCall


def run_call(
    call: TracedCall, root: Region, watch: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Compute a call with the regions of `root`; change the objects that it was given.

    Args:
        call: The call.
        root: Regions over its program's operations.
        watch: An identity that one of the differentiated inputs goes through.
    """
    flat = emit_flat(call.program, root)
    values = [*call.arguments.values, *call.closed_over]
    # One that gradients are taken of: the others may be dead code where only those are used.
    watched = call.program.differentiated[0]
    values[watched] = watch(values[watched])
    outputs = flat(*values)
    return call.results.put_together(call.arguments, outputs)
