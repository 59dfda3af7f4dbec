"""Arguments and results that hold Flax NNX objects: flattened, rebuilt, and what a call changed.

Objects are numbered as they are met, those of the arguments first; a result that refers to one of
them says its number, so that references are shared after the call as they were in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from flax.errors import TraceContextError as TraceContextError
from flax.nnx import graphlib

from jax_hremat._shared.errors import UnsupportedProgramError

# The filter of what is differentiated of an object, where nothing else is said.
PARAMETERS = nnx.Param


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A leaf of a tree, or of an object in it.

    Attributes:
        path: Of the leaf, or of the object, in the tree.
        within: Its path in the object; empty for a leaf of the tree.
        value: What is there.
        variable: The NNX variable that holds it, if one does.
    """

    path: tuple[Any, ...]
    within: tuple[Any, ...]
    value: Any
    variable: nnx.Variable[Any] | None

    @property
    def name(self) -> str:
        """The path as text, after the name of the tree."""
        inner = (f".{k}" if str(k).isidentifier() else f"[{k!r}]" for k in self.within)
        return jax.tree_util.keystr(self.path) + "".join(inner)


@dataclass(frozen=True, slots=True)
class Structure:
    """A tree without its leaves; hashable if the static parts of its objects are.

    Attributes:
        tree: The tree down to its leaves and objects.
        parts: For each of them None, or an object's graph and the structures of what it holds.
    """

    tree: Any
    parts: tuple[tuple[Any, tuple[Any, ...]] | None, ...]

    def unflatten(self, values: Iterable[Any], objects: dict[int, Any]) -> Any:
        """The tree of these leaves. New objects are added to `objects`, by number; others are
        those that are there."""
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
    """Whether it is an NNX object: a module, a variable, or another node with references."""
    return graphlib.is_graph_node(value) and not isinstance(value, jax.Ref)


def holds_objects(tree: Any) -> bool:
    """Whether there are NNX objects in a tree."""
    return any(map(is_object, jax.tree.leaves(tree, is_leaf=is_object)))


def flatten(
    tree: Any, known: Mapping[int, Any] | None = None
) -> tuple[Structure, list[Leaf], dict[int, Any]]:
    """A tree's structure, its leaves, and all objects by number, `known` ones with theirs."""
    refs = graphlib.RefMap((value, index) for index, value in (known or {}).items())
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
    """Identities of the variables in a tree that a filter is for; of one that is not in another
    object, whatever the filter, as in `nnx.grad`."""
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
        of: For each changed value, the number of the object, and the attribute; None is a
            variable's value.
        removed: Attributes that are gone.
        metadata: New metadata of variables.
    """

    of: tuple[tuple[int, str | None], ...]
    removed: tuple[tuple[int, str], ...]
    metadata: tuple[tuple[int, Any], ...]

    def apply(self, objects: Mapping[int, Any], values: Sequence[Any]) -> None:
        """Change the caller's objects likewise, to these values.

        Raises:
            flax.errors.TraceContextError: One of them belongs to another trace, as it would in the
                function itself.
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
    """Objects as they were before a call."""

    def __init__(self, objects: Mapping[int, Any]) -> None:
        # What is written to a `Ref` is written, wherever it is.
        self._objects = {i: x for i, x in objects.items() if not isinstance(x, jax.Ref)}
        self._before = {i: _contents(value) for i, value in self._objects.items()}

    def changes(self, returned: frozenset[int] = frozenset()) -> tuple[Changes, list[Any]]:
        """What has changed since, and the values that are there now; of variables `returned`, by
        number, in any case."""
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
    """An attribute's value, with the leaves it had: containers can be changed in place."""

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
    # Which attributes are data is one of them, so that it need not be found out again.
    object.__setattr__(node, name, value)


def _key(key: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return str(key)
