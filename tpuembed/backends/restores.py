"""Restores of TensorFlow that have passed over tables of a layer.

`tf.train.Checkpoint.restore` finds objects by the attributes that lead to them. It keeps what it did not find for attributes that
may come later, and says nothing. So a layer whose place or table has another name would go on with the rows that it had.

A restore is open for a layer if it left a table of its file over and a table of the layer got no rows, by it or after it. Nothing
says whether the one is the other under an old name, or the one was dropped and the other is new.

This module uses private names of TensorFlow, because its public status of a restore is with the caller of the restore.
"""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.checkpoint.checkpoint import _CheckpointRestoreCoordinator
from tensorflow.python.checkpoint.restore import CheckpointPosition

from tpuembed.backends.checkpoint_keys import TABLES_NODE
from tpuembed.backends.tf_config import restores_so_far
from tpuembed.backends.tpu.tf_tpu import LAYOUTS, saved_layouts
from tpuembed.config import OPTIMIZERS
from tpuembed.errors import CheckpointMismatchError
from tpuembed.runtime.keras_saving import frames, in_symbolic_scope

__all__ = ["GivenRows", "check_restores", "watch_restores"]

_SMALL_TABLES = "_keras_embedding_layers"
"""The attribute of TensorFlow Recommenders' layers that leads to their small tables."""
_NO_TABLES = (TABLES_NODE, LAYOUTS, "_engine")
"""Children of a node of tables that are none."""
_FUNCTIONS = ("train_function", "test_function", "predict_function")
"""Attributes of a Keras model with what it has traced."""
_SLOTS = {slot for optimizer in OPTIMIZERS.values() for slot in optimizer.slots}


class GivenRows:
    """When the tables of a layer got rows besides TensorFlow's restores, and from which files the caller restored tables."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        self.choices: dict[str, tuple[set[str], int]] = {}
        self._written: dict[str, tuple[int, int]] = {}

    def note(self, tables: Iterable[str]) -> None:
        """Note that all rows of `tables` were written now. A restore that begins later may write others over them."""
        self.since.update(dict.fromkeys(tables, restores_so_far()))

    def note_rows(self, table: str, start: int, stop: int, rows: int) -> None:
        """Note that rows [start, stop) of a table of `rows` rows were written: a table may be written in pieces, from row 0 on.

        Pieces before a restore do not count with those after it.
        """
        newest = max((restore.uid for restore in _restores), default=0)
        done, then = self._written.get(table, (0, newest))
        done = 0 if start == 0 or then != newest else done
        self._written[table] = (stop if start <= done else done, newest)
        if self._written[table][0] == rows:
            self.note([table])

    def note_restored(self, node: Any, path: str, sources: Mapping[str, str], is_chosen: bool) -> None:
        """Note that `sources`, {table of `node`: its name in the checkpoint}, were restored from `path`.

        If `is_chosen`, the caller named them. Then no other table of the layer is in that checkpoint: for a restore that was, or
        else for the next one before the tables are trained.
        """
        self.note(sources)
        file, names = os.path.realpath(path), set(sources.values())
        restores = [restore for restore in _restores if restore.file == file and restore.leads_to(node)]
        for restore in restores:
            restore.taken |= names
            if is_chosen:
                restore.settled.add(node)
        if is_chosen and not restores:
            self.choices[file] = names, node.count()


class _Restore:
    """A restore of a checkpoint with tables.

    Attributes:
        path, file: of the checkpoint, as it was given and as it is.
        uid: its number, which grows from restore to restore.
        taken: tables of the checkpoint that were restored row by row.
        nodes: those that could be reached when it began.
        settled: those for which it is not open any more.
        apart: those that it did not lead to when they were called.
    """

    def __init__(self, coordinator: Any, tables: Mapping[int, set[str]], reached: Iterable[Any], kind: type) -> None:
        """Begin the restore of `coordinator`, for objects `reached`, of which those of type `kind` have tables."""
        self.path: str = coordinator.save_path_string
        self.file, self.uid = os.path.realpath(self.path), coordinator.restore_uid
        self.taken: set[str] = set()
        self.nodes: weakref.WeakSet[Any] = weakref.WeakSet(one for one in reached if isinstance(one, kind))
        self.settled: weakref.WeakSet[Any] = weakref.WeakSet()
        self.apart: weakref.WeakSet[Any] = weakref.WeakSet()
        self._tables, self._matched, self._objects = (
            tables,
            coordinator.matched_proto_ids,
            coordinator.object_by_proto_id,
        )
        self._reached = [weakref.ref(one) for one in reached if not isinstance(one, tf.Variable)]
        self._thread, self._kind = threading.get_ident(), kind

    def left(self) -> set[str]:
        """Return the tables of the checkpoint that were not restored so far."""
        names = (names for place, names in self._tables.items() if place not in self._matched)
        return set[str]().union(*names) - self.taken

    def gave(self, rows: Any) -> bool:
        """Return True if the object `rows` was restored."""
        return any(one is rows for one in list(self._objects.values()))

    def goes_on(self) -> bool:
        """Return True if this restore has not ended: another thread is in it, or this one in any, which may mend it."""
        if next(_restored_by(frames()), None) is not None:
            return True
        if self._thread == threading.get_ident():  # the frame would hold itself, and what its callers have open
            return False
        other = sys._current_frames().get(self._thread)
        return other is not None and self.uid in _restored_by(frames(other))

    def roots(self) -> list[Any]:
        """Return the objects that could be reached when it began, and still exist."""
        return [one for ref in self._reached if (one := ref()) is not None]

    def leads_to(self, node: Any) -> bool:
        """Return True if an attribute of what it restored leads to `node`, perhaps one that came later."""
        return node in self.nodes or any(one is node for one in _reachable(self.roots()))

    def close(self) -> None:
        """Tell each layer which of its tables this restore gave rows."""
        nodes: list[Any] = [one for one in list(self._objects.values()) if isinstance(one, self._kind)]
        for node in nodes:
            for table, rows in node.rows_by_table().items():
                if self.gave(rows):
                    node.given.since[table] = max(self.uid, node.given.since.get(table, -1))


def _restored_by(around: Iterator[Any]) -> Iterator[int]:
    """Yield the number of each restore in the frames `around`."""
    for frame in around:
        if frame.f_code is CheckpointPosition.restore.__code__:
            yield frame.f_locals["self"].restore_uid


_Trackable = tf.__internal__.tracking.Trackable
_lock = threading.Lock()
_restores: list[_Restore] = []
"""Those that left tables over, from old to new."""


def watch_restores(kind: type) -> None:
    """Let `check_restores` know of restores of objects that lead to nodes of type `kind`, or will."""
    begin = _CheckpointRestoreCoordinator.__init__

    @functools.wraps(begin)
    def noted(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if not (tables := _tables_in(self.object_graph_proto.nodes, self.save_path_string)):
            return
        restore = _Restore(self, tables, list(_reachable([self.graph_view.root])), kind)
        for node in restore.nodes:
            choice = node.given.choices.pop(restore.file, None)
            if choice is not None and choice[1] == node.count():
                restore.taken |= choice[0]
                restore.settled.add(node)
        with _lock:
            _sweep()
            _restores.append(restore)
        for model in {model for node in restore.nodes for model in node.traced_by}:
            _check_functions(model, kind)

    _CheckpointRestoreCoordinator.__init__ = noted


def _check_functions(model: Any, kind: type) -> None:
    """Let the functions that `fit`, `evaluate` and `predict` have traced check the layers below `model` when they run next."""
    for name in _FUNCTIONS:
        traced = getattr(model, name, None)
        if traced is not None and not hasattr(traced, "restores_are_checked"):
            setattr(model, name, _Checked(model, name, kind))


class _Checked:
    """A function of a model that checks the layers below it once, and then puts back the one that it stands for."""

    restores_are_checked = True

    def __init__(self, model: Any, name: str, kind: type) -> None:
        self._model, self._name, self._kind, self._function = weakref.ref(model), name, kind, getattr(model, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        model = self._model()
        nodes: list[Any] = [one for one in _reachable([model]) if isinstance(one, self._kind)]
        for node in nodes:
            check_restores(node)
        if getattr(model, self._name) is self:  # it was not compiled again
            setattr(model, self._name, self._function)
        return self._function(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        """Return what the function has, such as `get_concrete_function`."""
        return getattr(self._function, name)


def _reachable(starts: Iterable[Any]) -> Iterator[Any]:
    """Yield objects to which attributes of `starts` lead, for TensorFlow or, inside a keras.Sequential, for Keras."""
    waiting, seen = (
        list(starts),
        dict[int, Any](),
    )  # which holds them, so that none made meanwhile has the id of another
    while waiting:
        one = waiting.pop()
        if id(one) not in seen and isinstance(one, _Trackable):
            seen[id(one)] = one
            yield one
            with contextlib.suppress(Exception):  # whatever an object raises that TensorFlow restores and cannot save
                waiting += one._trackable_children().values()
            if isinstance(one, keras.layers.Layer):
                waiting += one._layers


def _sweep() -> None:
    """Drop restores that left nothing over, or whose objects are gone, or for whose objects a later one asks the same."""
    later: set[int] = set()
    for restore in reversed(list(_restores)):
        objects = {id(one) for one in restore.roots()}
        if not objects - later or not restore.left():
            restore.close()
            _restores.remove(restore)
        else:
            later |= objects


def check_restores(node: Any, *, is_call: bool = False) -> None:
    """Check that no restore is open for the layer of `node`, a `TablesNode`, before its rows are used.

    A layer that is called eagerly apart from what was restored is not looked for again in its next eager calls, for their speed.

    Raises:
        CheckpointMismatchError: one is.
    """
    restores = list(_restores)
    for number, restore in enumerate(restores):
        if node in restore.settled or not (left := restore.left()) or restore.goes_on():
            continue
        missing = [
            table
            for table, rows in node.rows_by_table().items()
            if node.given.since.get(table, -1) < restore.uid and not any(each.gave(rows) for each in restores[number:])
        ]
        if missing and is_call and tf.executing_eagerly() and node in restore.apart:
            continue
        if missing and restore.leads_to(node):
            raise CheckpointMismatchError(
                f"layer {node.layer!r}: tf.train.Checkpoint.restore has not restored its tables {', '.join(missing[:5])} from "
                f"{restore.path}, where layers have other places in the model, or tables other names. Tables of the checkpoint: "
                f"{', '.join(sorted(left)[:5])}. Call layer.restore_tables({restore.path!r}), with tables={{NAME: OLD_NAME}} if "
                "names differ, and without those that are new. To start with new tables, build the model again and restore the "
                "other layers alone, at their places in the checkpoint: "
                "tf.train.Checkpoint(model=tf.train.Checkpoint(dense=model.dense))."
            )
        if not missing:
            restore.settled.add(node)
        elif not in_symbolic_scope():  # afterwards the layer gets its place in a functional model
            restore.apart.add(node)


def _tables_in(nodes: Any, path: str) -> dict[int, set[str]]:
    """Return the names of the tables at each place of a checkpoint that holds any: of several, if it is a stack."""
    found: dict[int, set[str]] = {}
    stacks: dict[str, set[str]] | None = None
    for parent in nodes:
        for child in parent.children:
            if child.local_name not in (TABLES_NODE, _SMALL_TABLES):
                continue
            is_small = child.local_name == _SMALL_TABLES
            below = {one.local_name: one.node_id for one in nodes[child.node_id].children}
            if LAYOUTS in below and stacks is None:
                stacks = {}
                for table, layout in saved_layouts(path).items():
                    stacks.setdefault(layout.stack, set()).add(table)
            for name, place in below.items():
                table, _, slot = name.rpartition("/")
                if name in _NO_TABLES or (table in below and slot in _SLOTS):
                    continue
                if is_small or nodes[place].attributes:
                    found[place] = (stacks or {}).get(name, {name}) if LAYOUTS in below else {name}
    return found
