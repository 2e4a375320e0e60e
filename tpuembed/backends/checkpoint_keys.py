"""The keys of a layer's tables in a TensorFlow checkpoint. TensorFlow restores only the keys of the layer's own variables.

`check_taken` uses private names of TensorFlow, because its public status of a restore is with the caller of the restore.
"""

import functools
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.checkpoint.checkpoint import TrackableSaver, _CheckpointRestoreCoordinator

from tpuembed.backends.tf_config import restores_so_far
from tpuembed.backends.tf_tpu import LAYOUTS
from tpuembed.errors import CheckpointMismatchError
from tpuembed.runtime.callers import callers, frames

__all__ = [
    "GivenRows",
    "Restore",
    "check_last_restore",
    "check_taken",
    "children_of",
    "saved_attributes",
    "saved_keys",
    "tables_with_keras_slots",
    "watch_restores",
]

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_OPTIMIZER_SLOT = "/.OPTIMIZER_SLOT/"


def saved_keys(path: str) -> list[str]:
    """Return the keys of the checkpoint at `path`."""
    return list(tf.train.load_checkpoint(path).get_variable_to_shape_map())


def tables_with_keras_slots(keys: Iterable[str], slots: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the tables of {table: its slots} whose slots the checkpoint has under a Keras 2 optimizer, and not under
    the table.

    TensorFlow Recommenders saves slots that way, unless its optimizer is from `tf.tpu.experimental.embedding`.
    """
    keys = list(keys)
    return [table for table, names in slots.items() if names and _has_keras_slots(keys, table, names)]


def _has_keras_slots(keys: list[str], table: str, slots: Iterable[str]) -> bool:
    own = [f"_tpu_embedding/{_escaped(f'{table}/{slot}')}{_VALUE}" for slot in slots]
    of_keras = f"_tpu_embedding/{_escaped(table)}{_OPTIMIZER_SLOT}"
    return any(of_keras in key for key in keys) and not any(key.endswith(name) for key in keys for name in own)


def children_of(keys: Iterable[str], path: str) -> set[str]:
    """Return the names of the checkpoint's children of any object whose path ends with `path`."""
    below = re.compile(rf"(?:^|/){re.escape(path)}/([^/]+)/")
    return {_unescaped(match[1]) for key in keys if (match := below.search(key))}


def saved_attributes(keys: Iterable[str], node: str, attribute: str) -> list[str]:
    """Return the keys of `attribute` of the checkpoint's nodes called `node`."""
    end = f"{node}/.ATTRIBUTES/{attribute}"
    return [key for key in keys if key == end or key.endswith(f"/{end}")]


_TABLES, _SMALL_TABLES = "_tpu_embedding", "_keras_embedding_layers"
"""The nodes whose children are tables: of this layer and TensorFlow Recommenders' layers, and of its small tables."""
_Trackable = tf.__internal__.tracking.Trackable
_known: weakref.WeakKeyDictionary[Any, dict[int, set[str]]] = weakref.WeakKeyDictionary()
"""By restore: the tables below each place in the checkpoint for which it found no object."""


class GivenRows:
    """Which tables of a layer have rows that TensorFlow's restores do not know of: given by the caller, or by `restore_tables`."""

    def __init__(self) -> None:
        self._since: dict[str, int] = {}
        self._sources: dict[str, set[str]] = {}
        self._chosen: set[str] = set()

    def note(self, tables: Iterable[str]) -> None:
        """Note that all rows of `tables` were written now. A restore that begins later may write others over them."""
        self._since.update(dict.fromkeys(tables, restores_so_far()))

    def note_restored(self, path: str, sources: Mapping[str, str], is_chosen: bool) -> None:
        """Note that `sources`, {table: its name in the checkpoint}, were restored from `path`.

        If `is_chosen`, the caller named them. Then no other table of the layer is in that checkpoint, and TensorFlow may restore
        the rest of it before or after.
        """
        self.note(sources)
        self._sources.setdefault(os.path.realpath(path), set()).update(sources.values())
        if is_chosen:
            self._chosen.add(os.path.realpath(path))

    def open_questions(self, path: str, uid: int, left: set[str], missing: list[str]) -> tuple[set[str], list[str]]:
        """Return what is open of a restore: tables of the checkpoint that were left over, and of the layer that have no rows."""
        file = os.path.realpath(path)
        if file in self._chosen:
            return set(), []
        lacking = [table for table in missing if self._since.get(table, -1) < uid]
        return left - self._sources.get(file, set()), lacking


class Restore(NamedTuple):
    """A restore of a checkpoint with tables.

    Attributes:
        path: of the checkpoint.
        uid: its number, which grows from restore to restore.
        tables: the name of each table or slot, by its place in the checkpoint.
        matched: the places that were restored so far.
        objects: what they were restored into, of what is still alive.
    """

    path: str
    uid: int
    tables: dict[int, str]
    matched: set[int]
    objects: Mapping[int, Any]


def watch_restores(kind: type) -> None:
    """Let objects of type `kind` have `last_restore`, the last restore of an object that leads to them.

    TensorFlow tells an object of a restore only if the checkpoint has it at the same place. From `Checkpoint(model)` to
    `Checkpoint(model=model)` no place is the same, and what is left over is with an object that may be gone.
    """
    begin = _CheckpointRestoreCoordinator.__init__

    @functools.wraps(begin)
    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if tables := _tables_in(self.object_graph_proto.nodes):
            restore = Restore(
                self.save_path_string, self.restore_uid, tables, self.matched_proto_ids, self.object_by_proto_id
            )
            for each in self.graph_view.breadth_first_traversal()[0]:
                if isinstance(each, kind):
                    each.last_restore, each.last_uid = restore, self.restore_uid  # type: ignore[attr-defined]

    _CheckpointRestoreCoordinator.__init__ = noted


def check_taken(layer: str, node: Any) -> None:
    """Check that a restore of the model that calls `layer` has not passed over its tables.

    TensorFlow finds objects by the attributes that lead to them. It keeps what it did not find at the object where the search
    ended, for an attribute that may come later, and says nothing.

    Args:
        layer: its name.
        node: its `TablesNode`.

    Raises:
        CheckpointMismatchError: the restore left a table of the checkpoint over, and did not restore one of the layer's.
    """
    check_last_restore(layer, node)
    passed: dict[Any, set[str]] = {}
    for holder, name, position in _without_object():
        restore, number = position.checkpoint, position._proto_id
        known = _known.setdefault(restore, {})
        if number not in known:
            nodes = restore.object_graph_proto.nodes
            known[number] = _without_slots(_tables_in(nodes).values(), {name}) if holder is node else set()
            known[number].update(_tables_below(nodes, number, name))
        passed.setdefault(restore, set()).update(known[number])
    for restore, names in passed.items():
        found = list(restore.object_by_proto_id.values())
        came_later = node.visited_at > restore.restore_uid and not any(one is node for one in found)
        if not names or came_later or restore.restore_uid < node.last_uid:
            continue
        _check_tables(layer, node, restore.save_path_string, restore.restore_uid, names, found)


def check_last_restore(layer: str, node: Any) -> None:
    """Check what `check_taken` does for the last restore that the node was told of. It needs no caller: saving has none."""
    last, restore = node.last_restore, TrackableSaver.restore.__code__
    if last is None or any(frame.f_code is restore for frame in frames()):
        return  # TensorFlow asks for what it saves also to restore it, before it has
    left = (name for place, name in last.tables.items() if place not in last.matched)
    names = _without_slots(last.tables.values(), left)
    _check_tables(layer, node, last.path, last.uid, names, list(last.objects.values()))
    node.last_restore = None


def _check_tables(layer: str, node: Any, path: str, uid: int, left: set[str], found: Sequence[Any]) -> None:
    """Raise CheckpointMismatchError if a restore left tables of the checkpoint over, and not all of the node's got rows.

    Nothing says whether the one is the other's rows under an old name, or the one was dropped and the other is new.
    """
    missing = [name for name, table in node.own_tables().items() if not any(one is table for one in found)]
    left, missing = node.given.open_questions(path, uid, left, missing)
    if left and missing:
        raise CheckpointMismatchError(
            f"layer {layer!r}: tf.train.Checkpoint.restore has not restored its tables {', '.join(missing[:5])} from {path}, where "
            "layers have other places in the model, or tables other names. Tables of the checkpoint: "
            f"{', '.join(sorted(left)[:5])}. Call layer.restore_tables({path!r}), with tables={{NAME: OLD_NAME}} if names differ, "
            "and without those that are new. To start with new tables, build the model again and restore the other layers alone, "
            "at their places in the checkpoint: tf.train.Checkpoint(model=tf.train.Checkpoint(dense=model.dense))."
        )


def _without_object() -> Iterator[tuple[Any, str, Any]]:
    """Yield (object, attribute, place in a checkpoint) of what restores have not found in the objects that call a layer."""
    for caller in callers():
        for each in (caller, *vars(caller).values(), *getattr(caller, "layers", ())):
            if isinstance(each, _Trackable):
                for name, positions in getattr(each, "_deferred_dependencies", {}).items():
                    yield from ((each, name, position) for position in positions)


def _tables_in(nodes: Any) -> dict[int, str]:
    """Return the name of each table and slot in a checkpoint, by its place."""
    children = (child for parent in nodes for child in parent.children)
    return {
        one.node_id: one.local_name
        for child in children
        for one in _children_with_rows(nodes, child.node_id, child.local_name)
    }


def _without_slots(every: Iterable[str], names: Iterable[str]) -> set[str]:
    """Return those of `names` that are tables. A slot is called after a table of `every`."""
    tables = set(every)
    return {name for name in names if name.rpartition("/")[0] not in tables}


def _children_with_rows(nodes: Any, place: int, name: str) -> list[Any]:
    """Return the tables and slots directly below a place to which the attribute `name` leads."""
    if name not in (_TABLES, _SMALL_TABLES):
        return []
    return [
        one
        for one in nodes[place].children
        if name == _SMALL_TABLES or (nodes[one.node_id].attributes and one.local_name != LAYOUTS)
    ]


def _tables_below(nodes: Any, start: int, name: str) -> Iterator[str]:
    """Yield the names of the tables below a place. `name` is the attribute that leads to it."""
    waiting, seen = [(start, name)], set[int]()
    while waiting:
        place, name = waiting.pop()
        if place in seen:
            continue
        seen.add(place)
        waiting += [(child.node_id, child.local_name) for child in nodes[place].children]
        names = {one.local_name for one in _children_with_rows(nodes, place, name)}
        yield from _without_slots(names, names)


def _escaped(name: str) -> str:
    """Return `name` escaped. Source: escape_local_name in tensorflow/python/trackable/trackable_utils.py."""
    return name.replace(".", "..").replace("/", ".S")


def _unescaped(name: str) -> str:
    return re.sub(r"\.(.)", lambda match: {"S": "/", ".": "."}.get(match[1], match[0]), name)
