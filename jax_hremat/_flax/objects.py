"""Flax NNX objects in arguments and results: flattened, rebuilt, and changed by a call.

Objects are numbered in order of appearance, those of the arguments first. A result refers to an
object by its number, so that references are shared after the call as they were inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from jax_hremat._flax.deferred import errors, graphlib, is_imported, nnx
from jax_hremat._shared.errors import UnsupportedProgramError


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A leaf of a tree, or of an object in it.

    Attributes:
        path: Path of the leaf, or of the object that contains it, in the tree.
        within: Path of the leaf in the object; empty for a leaf of the tree.
        value: The leaf's value.
        variable: The NNX variable that holds it, if one does.
    """

    path: tuple[Any, ...]
    within: tuple[Any, ...]
    value: Any
    variable: nnx.Variable[Any] | None

    @property
    def name(self) -> str:
        """The path as text, to be appended to the name of the tree."""
        inner = (f".{k}" if str(k).isidentifier() else f"[{k!r}]" for k in self.within)
        return jax.tree_util.keystr(self.path) + "".join(inner)


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its leaves; hashable if the static parts of its objects are.

    Attributes:
        tree: The tree down to its leaves and objects.
        parts: For each leaf None; for each object its graph and the structures of its contents.
    """

    tree: Any
    parts: tuple[tuple[Any, tuple[Any, ...]] | None, ...]

    def unflatten(self, values: Iterable[Any], objects: dict[int, Any]) -> Any:
        """The tree with these leaves. New objects are added to `objects`, by number; objects that
        are already in it are reused."""
        rest = iter(values)
        return jax.tree.unflatten(self.tree, [self._part(p, rest, objects) for p in self.parts])

    @staticmethod
    def _part(part: Any, values: Iterator[Any], objects: dict[int, Any]) -> Any:
        if part is None:
            return next(values)
        graph, held = part
        leaves = [
            jax.tree.unflatten(tree, [next(values) for _ in range(tree.num_leaves)])
            for tree in held
        ]
        index_ref = graphlib.IndexMap(objects)
        made = nnx.unflatten(graph, leaves, index_ref=index_ref)
        objects.update(index_ref)
        return made


def is_object(value: Any) -> bool:
    """Whether a value is an NNX object: a module, a variable or another graph node."""
    if not is_imported("nnx"):
        return False
    return graphlib.is_graph_node(value) and not isinstance(value, jax.Ref)


def is_parameter(path: Any, value: Any) -> bool:
    """The default filter for the state of an object that is differentiated: `nnx.Param`."""
    return nnx.filterlib.OfType(nnx.Param)(path, value)


def trace_context_errors() -> tuple[type[Exception], ...]:
    """What Flax raises when an object is changed that belongs to another trace."""
    return (errors.TraceContextError,) if is_imported("errors") else ()


def holds_objects(tree: Any) -> bool:
    """Whether a tree contains NNX objects."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def flatten(
    tree: Any, known: Mapping[int, Any] | None = None
) -> tuple[Structure, list[Leaf], dict[int, Any]]:
    """A tree's structure, its leaves, and all objects by number; `known` ones keep theirs."""
    pairs = ((value, index) for index, value in (known or {}).items())
    refs: Any = graphlib.RefMap(pairs) if is_imported("nnx") else dict(pairs)
    found, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_object)
    parts: list[tuple[Any, tuple[Any, ...]] | None] = []
    leaves: list[Leaf] = []
    for path, value in found:
        if not is_object(value):
            parts.append(None)
            leaves.append(Leaf(path, (), value, None))
            continue
        graph, state = nnx.flatten(value, ref_index=refs, graph=True)
        held = []
        for within, holder in zip(state.paths, state.leaves, strict=True):
            variable = holder if isinstance(holder, nnx.Variable) else None
            below, inner = jax.tree_util.tree_flatten_with_path(holder)
            held.append(inner)
            for keys, leaf in below:
                names = tuple(map(_key, keys if variable is None else keys[1:]))
                leaves.append(Leaf(path, (*within, *names), leaf, variable))
        parts.append((graph, tuple(held)))
    return Structure(treedef, tuple(parts)), leaves, {i: node for node, i in refs.items()}


def variables_of(tree: Any, wrt: Any) -> set[int]:
    """The `id`s of the variables in a tree that match a filter. A variable that is not in another
    object is included whatever the filter, as in `nnx.grad`."""
    if not is_imported("nnx"):
        return set()
    matches = nnx.filterlib.to_predicate(wrt)
    chosen: set[int] = set()
    for value in jax.tree.leaves(tree, is_leaf=is_object):
        if isinstance(value, nnx.Variable):
            chosen.add(id(value))
        elif is_object(value):
            _, state = nnx.flatten(value, graph=True)
            pairs = zip(state.paths, state.leaves, strict=True)
            chosen |= {id(held) for path, held in pairs if matches(path, held)}
    return chosen


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What a call has changed in the objects it was given.

    Attributes:
        of: For each changed value, the number of the object and the name of the attribute; None
            stands for a variable's value.
        removed: Attributes that were removed, by object number and name.
        metadata: New metadata of variables, by number.
    """

    of: tuple[tuple[int, str | None], ...]
    removed: tuple[tuple[int, str], ...]
    metadata: tuple[tuple[int, Any], ...]

    def apply(self, objects: Mapping[int, Any], values: Sequence[Any]) -> None:
        """Make the same changes to the caller's objects, with these values.

        Raises:
            flax.errors.TraceContextError: An object belongs to another trace; the function itself
                would raise the same error.
        """
        for index, attribute in self.removed:
            delattr(objects[index], attribute)
        for (index, attribute), value in zip(self.of, values, strict=True):
            if attribute is None:
                objects[index].set_raw_value(value)
            else:
                _set_attribute(objects[index], attribute, value)
        for index, metadata in self.metadata:
            objects[index].set_metadata(dict(metadata))


class Watch:
    """The contents of objects before a call, to compare with those after it."""

    def __init__(self, objects: Mapping[int, Any]) -> None:
        # Writes to a `Ref` take effect directly, so there is nothing to transfer.
        self._objects = {i: x for i, x in objects.items() if not isinstance(x, jax.Ref)}
        self._before = {i: _contents(value) for i, value in self._objects.items()}

    def changes(self, returned: frozenset[int] = frozenset()) -> tuple[Changes, list[Any]]:
        """What has changed since, and the values now. Variables in `returned`, by number, are
        included even if unchanged."""
        of: list[tuple[int, str | None]] = []
        values: list[Any] = []
        removed: list[tuple[int, str]] = []
        metadata: list[tuple[int, Any]] = []
        for index, value in self._objects.items():
            before, now = self._before[index], _contents(value)
            removed += [(index, name) for name in before.attributes if name not in now.attributes]
            for name, attribute in now.attributes.items():
                again = name is None and index in returned
                if again or not _same(before.attributes.get(name), attribute):
                    of.append((index, name))
                    values.append(attribute.value)
            if before.metadata != now.metadata:
                metadata.append((index, now.metadata))
        return Changes(tuple(of), tuple(removed), tuple(metadata)), values


@dataclass(frozen=True, slots=True, eq=False)
class _Attribute:
    """An attribute's value and a copy of its leaves, since containers can change in place."""

    value: Any
    leaves: list[Any]
    tree: Any


@dataclass(frozen=True, slots=True, eq=False)
class _Contents:
    attributes: dict[Any, _Attribute]
    metadata: dict[str, Any] | None


def _contents(node: Any) -> _Contents:
    if isinstance(node, nnx.Variable):
        return _Contents({None: _attribute(node.get_raw_value())}, dict(node.get_metadata()))
    if not isinstance(node, nnx.Pytree):
        raise UnsupportedProgramError(
            f"an argument holds a `{type(node).__name__}`, a graph node that is no `nnx.Pytree`; "
            f"what a call changes in it is not known. Keep its arrays in an `nnx.Module`"
        )
    attributes = {k: v for k, v in vars(node).items() if k != "_pytree__state"}
    return _Contents({k: _attribute(v) for k, v in attributes.items()}, None)


def _attribute(value: Any) -> _Attribute:
    leaves, tree = jax.tree.flatten(value, is_leaf=is_object)
    return _Attribute(value, leaves, tree)


def _same(before: _Attribute | None, now: _Attribute) -> bool:
    if before is None or before.tree != now.tree:
        return False
    return all(a is b for a, b in zip(before.leaves, now.leaves, strict=True))


def _set_attribute(node: Any, name: str, value: Any) -> None:
    node._check_valid_context(
        lambda: f"Cannot mutate '{type(node).__name__}' from different trace level"
    )
    # Flax records which attributes are data in one of them, which is copied like any other.
    object.__setattr__(node, name, value)


def _key(key: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
