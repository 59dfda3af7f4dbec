"""From the compiled step of a plain block to what its operations take.

Every operation of the block is traced in a scope of its own (`block_step`), and XLA keeps scopes in
the names of what it makes of them: of `jvp(hremat_op7)/…` in the forward, of
`transpose(jvp(hremat_op7))/…` in the backward. So a buffer has the operation that makes it, and
those whose backward reads it, and a kernel the operation that it computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from jax_hremat._cost.profile import Profile, Residual, operations_in
from jax_hremat._jax.scopes import is_transposed
from jax_hremat._xla.hlo.aliases import Values, label
from jax_hremat._xla.hlo.buffer import Buffer
from jax_hremat._xla.hlo.origin import Reader, maker_names, readers
from jax_hremat._xla.hlo.parse import HloModule
from jax_hremat._xla.hlo.roofline import KernelCost


def attributed(
    module: HloModule,
    mark: int,
    kept: Sequence[Buffer],
    forward: Sequence[KernelCost],
    num_operations: int,
) -> Profile:
    """The profile of a plain block.

    Args:
        module: Its compiled step.
        mark: The position in its schedule at which the backward begins.
        kept: The buffers that are made before and read after the mark.
        forward: The kernels before the mark.
        num_operations: How many operations the block has.

    A kernel or a buffer without a scope, such as a copy of an input in another layout, counts as of
    the first operation that reads it. One that no operation reads, and a kernel without a scope
    inside a loop, are left out.

    Unchecked: what a kernel that computes several operations takes for each of them.
    """
    names = _Names(module)
    residuals = []
    for buffer in kept:
        made_by = names.maker(buffer.name)
        if made_by is not None:
            first = names.first_reader(buffer.name, mark)
            last = names.last_reader(buffer.name, mark)
            residuals.append(
                Residual(
                    buffer.nbytes,
                    made_by,
                    made_by if first is None else first,
                    made_by if last is None else max(made_by, last),
                )
            )
    times_s: defaultdict[int | None, float] = defaultdict(float)
    for kernel in forward:
        # A kernel inside a loop has its own name for a scope, and no buffer here.
        at = next(operations_in([kernel.op_name]), None)
        times_s[names.maker(kernel.name) if at is None else at] += kernel.time_s
    written = map(names.maker, names.results_of([kernel.name for kernel in forward]))
    return Profile(
        residuals=tuple(residuals),
        forward_s=tuple(times_s[p] for p in range(num_operations)),
        written=frozenset(operation for operation in written if operation is not None),
    )


class _Names:
    """The operations that make and read the buffers of a compiled block, by their names."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._values = Values(module, module.entry)
        self._keys = {label(module.entry, key): key for key in self._values.start}

    def results_of(self, instructions: Collection[str]) -> list[str]:
        """The names of the buffers that instructions make."""
        return [name for name, (made_by, _) in self._keys.items() if made_by in instructions]

    def maker(self, name: str) -> int | None:
        """The operation that makes a buffer; None if there is no such buffer, or no operation."""
        if name not in self._keys:
            return None
        made_by = operations_in(maker_names(self._module, self._module.entry, self._keys[name]))
        operation = next(made_by, None)
        return self.first_reader(name, 0) if operation is None else operation

    def first_reader(self, name: str, position: int) -> int | None:
        """The first of the operations that read a buffer from a position of the schedule on."""
        found = (next(operations_in(r.op_names), None) for r in self._readers(name, position))
        return min((operation for operation in found if operation is not None), default=None)

    def last_reader(self, name: str, position: int) -> int | None:
        """The last operation whose backward needs a buffer, by what reads it from a position on,
        and what reads that which operations of the forward make of it there."""
        seen, stack, found = {name}, [name], list[int]()
        while stack:
            for reader in self._readers(stack.pop(), position):
                found += operations_in(reader.op_names)
                if not any(map(is_transposed, reader.op_names)):
                    new = set(self.results_of([reader.name])) - seen
                    seen |= new
                    stack += sorted(new)
        return max(found, default=None)

    def _readers(self, name: str, position: int) -> Iterator[Reader]:
        return readers(self._module, self._values, self._keys[name], position)
