"""From the compiled step of a plain block to what its operations take.

Every operation of the block is traced in a scope of its own (`block_step`), and XLA keeps scopes in
the names of what it makes of them: of `jvp(hremat_op7)/…` in the forward, of
`transpose(jvp(hremat_op7))/…` in the backward. So a buffer has the operation that makes it, and
those whose backward reads it, and a kernel the operation that it computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain

from jax_hremat._cost.profile import Profile, Residual, operations_in
from jax_hremat._xla.hlo.aliases import Values, label
from jax_hremat._xla.hlo.buffer import Buffer
from jax_hremat._xla.hlo.origin import maker_names, reader_names
from jax_hremat._xla.hlo.parse import HloModule
from jax_hremat._xla.hlo.roofline import KernelCost


def attributed(
    module: HloModule,
    mark: int,
    kept: Sequence[Buffer],
    forward: Sequence[KernelCost],
    kept_inputs: tuple[int, ...],
    num_operations: int,
) -> Profile:
    """The profile of a plain block.

    Args:
        module: Its compiled step.
        mark: The position in its schedule at which the backward begins.
        kept: The buffers that are made before and read after the mark.
        forward: The kernels before the mark.
        kept_inputs: As in `Profile`.
        num_operations: How many operations the block has.

    A kernel or a buffer without a scope, such as a copy of an input in another layout, counts as of
    the first operation that reads it. One that no operation reads is left out.

    Unchecked: what a kernel that computes several operations takes for each of them.
    """
    values = Values(module, module.entry)
    keys = {label(module.entry, key): key for key in values.start}

    def maker(name: str) -> int | None:
        if name not in keys:
            return None
        made = next(operations_in(maker_names(module, module.entry, keys[name])), None)
        return min(readers(name, 0), default=None) if made is None else made

    def readers(name: str, first_position: int) -> list[int]:
        """The first operation of each kernel that reads a buffer."""
        kernels = reader_names(module, values, keys[name], first_position)
        found = (next(operations_in(names), None) for names in kernels)
        return [operation for operation in found if operation is not None]

    def last_reader(name: str) -> int:
        kernels = reader_names(module, values, keys[name], mark)
        return max(chain.from_iterable(map(operations_in, kernels)), default=0)

    residuals = []
    for buffer in kept:
        made_by = maker(buffer.name)
        if made_by is not None:
            first = min(readers(buffer.name, mark), default=made_by)
            last = max(made_by, last_reader(buffer.name))
            residuals.append(Residual(buffer.nbytes, made_by, first, last))
    times_s: defaultdict[int | None, float] = defaultdict(float)
    for kernel in forward:
        # A kernel inside a loop has its own name for a scope, and no buffer here.
        at = next(operations_in([kernel.op_name]), None)
        times_s[maker(kernel.name) if at is None else at] += kernel.time_s
    return Profile(tuple(residuals), tuple(times_s[p] for p in range(num_operations)), kept_inputs)
