"""A training step as a graph of operations with times and sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from jax_hremat._shared.errors import GraphFormatError


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One computation, which makes one value.

    Attributes:
        name: Unique in its graph.
        time_s: Seconds of one computation.
        output_bytes: Size of the value that it makes.
        reads: Operations whose values it reads, as positions in the graph.
        workspace_bytes: Memory that it takes while it runs, besides what it reads and makes.
        backward_of: The forward operation whose backward this is; None for a forward operation,
            and where nothing is known.
    """

    name: str
    time_s: float
    output_bytes: int
    reads: tuple[int, ...] = ()
    workspace_bytes: int = 0
    backward_of: int | None = None


@dataclass(frozen=True, slots=True)
class Graph:
    """Operations in a topological order, each of which may be computed any number of times.

    Attributes:
        operations: Each reads only operations before it.
        results: Operations whose values must be there at the end; if empty, all those that no
            operation reads.
        constant_bytes: Arguments, parameters and whatever else is there all the time.
        readers: For each operation, those that read its value, in order.

    Raises:
        GraphFormatError: The operations are in no topological order, two have one name, a time or
            a size is negative or not finite, or an operation contributes to no result.
    """

    operations: tuple[Operation, ...]
    results: tuple[int, ...] = ()
    constant_bytes: int = 0
    readers: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_operations(self.operations)
        _check_bytes("the graph", "constant_bytes", self.constant_bytes)
        readers: list[list[int]] = [[] for _ in self.operations]
        for i, operation in enumerate(self.operations):
            for j in operation.reads:
                readers[j].append(i)
        results = self.results or tuple(i for i, r in enumerate(readers) if not r)
        object.__setattr__(self, "results", tuple(sorted(set(results))))
        object.__setattr__(self, "readers", tuple(map(tuple, readers)))
        _check_results(self)

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def time_s(self) -> float:
        """Seconds of computing every operation once."""
        return math.fsum(operation.time_s for operation in self.operations)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """A forward operation, and what is known of its backward, for `training_graph`.

    Attributes:
        name: Unique among the forward operations.
        time_s: Seconds of the forward.
        output_bytes: Size of the value that it makes.
        backward_time_s: Seconds of the backward; None if the operation has none.
        reads: Names of the operations whose values it reads.
        workspace_bytes: Further memory that the forward takes while it runs.
        backward_workspace_bytes: The same for the backward.
        backward_reads_inputs: Whether the backward reads what the forward reads.
        backward_reads_output: Whether the backward reads what the forward makes.
        gradient_bytes: Size of what the backward makes: the gradients of all that the forward
            reads, as one value. None for the sum of the sizes of the operations read that have a
            backward.
    """

    name: str
    time_s: float
    output_bytes: int
    backward_time_s: float | None
    reads: tuple[str, ...] = ()
    workspace_bytes: int = 0
    backward_workspace_bytes: int = 0
    backward_reads_inputs: bool = True
    backward_reads_output: bool = False
    gradient_bytes: int | None = None


def training_graph(
    forward: Sequence[Forward], *, results: Sequence[str] = (), constant_bytes: int = 0
) -> Graph:
    """The graph of a whole training step: the forward operations, then their backwards in reverse.

    The backward of an operation is named after it, with `.backward` at the end. It reads the
    gradients that the backwards of the operation's readers make, and adds them up; the backward of
    an operation without readers, a loss, reads none. Gradients of parameters are not values of the
    graph: count their bytes, like those of the parameters, in `constant_bytes`.

    Args:
        forward: In a topological order.
        results: Names of operations whose values must be there at the end, backwards included;
            if there are none, all operations that no other reads.
        constant_bytes: What is there all the time.

    Raises:
        GraphFormatError: A name is not known or not unique, an operation with a backward is read
            only by operations without, or the graph is refused (see `Graph`).
    """
    positions: dict[str, int] = {}
    for i, f in enumerate(forward):
        if f.name in positions:
            raise GraphFormatError(f"two operations have the name {f.name!r}; names must be unique")
        positions[f.name] = i
        for name in f.reads:
            if name not in positions:
                raise GraphFormatError(
                    f"operation {f.name!r} reads {name!r}, which is no operation before it; list "
                    f"the operations in a topological order"
                )
    with_backward = [i for i, f in enumerate(forward) if f.backward_time_s is not None]
    backward = {i: len(forward) + k for k, i in enumerate(reversed(with_backward))}
    readers: dict[int, list[int]] = {i: [] for i in range(len(forward))}
    for i, f in enumerate(forward):
        for name in dict.fromkeys(f.reads):
            readers[positions[name]].append(i)
    operations = [
        Operation(
            name=f.name,
            time_s=f.time_s,
            output_bytes=f.output_bytes,
            reads=tuple(positions[name] for name in dict.fromkeys(f.reads)),
            workspace_bytes=f.workspace_bytes,
        )
        for f in forward
    ]
    for i in backward:
        f = forward[i]
        assert f.backward_time_s is not None
        gradients = [backward[r] for r in readers[i] if r in backward]
        if readers[i] and not gradients:
            raise GraphFormatError(
                f"operation {f.name!r} has a backward, but none of those that read it has, so no "
                f"gradient reaches it; give one of them a backward_time_s, or {f.name!r} none"
            )
        inputs = operations[i].reads
        gradient_bytes = f.gradient_bytes
        if gradient_bytes is None:
            gradient_bytes = sum(operations[j].output_bytes for j in inputs if j in backward)
        reads = [*gradients]
        reads += inputs if f.backward_reads_inputs else ()
        reads += [i] if f.backward_reads_output else ()
        operations.append(
            Operation(
                name=f"{f.name}.backward",
                time_s=f.backward_time_s,
                output_bytes=gradient_bytes,
                reads=tuple(sorted(reads)),
                workspace_bytes=f.backward_workspace_bytes,
                backward_of=i,
            )
        )
    names = {operation.name: i for i, operation in enumerate(operations)}
    for name in results:
        if name not in names:
            raise GraphFormatError(f"the result {name!r} is no operation of the graph")
    return Graph(tuple(operations), tuple(names[name] for name in results), constant_bytes)


def _check_operations(operations: Sequence[Operation]) -> None:
    if not operations:
        raise GraphFormatError("a graph needs at least one operation")
    names: set[str] = set()
    for i, operation in enumerate(operations):
        where = f"operation {operation.name!r}"
        if not operation.name or operation.name in names:
            raise GraphFormatError(
                f"operation {i} has the name {operation.name!r}; give it one that is not empty "
                f"and that no other has"
            )
        names.add(operation.name)
        if not (math.isfinite(operation.time_s) and operation.time_s >= 0):
            raise GraphFormatError(
                f"{where} has time_s={operation.time_s!r}; it must be finite and not negative"
            )
        _check_bytes(where, "output_bytes", operation.output_bytes)
        _check_bytes(where, "workspace_bytes", operation.workspace_bytes)
        _check_positions(where, i, operation, operations)


def _check_positions(
    where: str, i: int, operation: Operation, operations: Sequence[Operation]
) -> None:
    for j in operation.reads:
        if not 0 <= j < i:
            raise GraphFormatError(
                f"{where} is number {i} and reads number {j}; it can read only those before it, so "
                f"put the operations in a topological order"
            )
    if len(set(operation.reads)) < len(operation.reads):
        raise GraphFormatError(f"{where} reads {operation.reads}, one of them twice; list it once")
    of = operation.backward_of
    if of is not None and not (0 <= of < i and operations[of].backward_of is None):
        raise GraphFormatError(
            f"{where} is number {i} and has backward_of={of}, which is no forward operation "
            f"before it"
        )


def _check_bytes(where: str, field_name: str, count: int) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise GraphFormatError(
            f"{where} has {field_name}={count!r}; it must be a whole number, not negative"
        )


def _check_results(graph: Graph) -> None:
    for i in graph.results:
        if not 0 <= i < len(graph):
            raise GraphFormatError(f"result {i} is no operation: there are {len(graph)}")
    wanted = set(graph.results)
    for i in reversed(range(len(graph))):
        if i in wanted:
            wanted.update(graph.operations[i].reads)
        else:
            raise GraphFormatError(
                f"operation {graph.operations[i].name!r} contributes to no result; leave it out, "
                f"or name it, or one of its readers, among the results"
            )
