"""The tables of live layers as a checkpoint: read by row ranges from the memory they are trained in."""

import contextlib
import functools
import json
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import numpy as np

from tpuembed.backends.table_rows import gather_rows, read_rows
from tpuembed.backends.table_state import TableState
from tpuembed.checkpoint.types import Array, Checkpoint, GatherRows, SavedStamps, TableInfo
from tpuembed.errors import ConfigError
from tpuembed.export.graph.keras_model import check_layers
from tpuembed.export.stream.shard import Source
from tpuembed.layer import TPUEmbedding
from tpuembed.layer.tables import LiveTables
from tpuembed.vocabulary import Vocabulary

__all__ = ["LiveCheckpoint", "embedding_layers", "live_checkpoint", "registered"]

_DOING: Final = "export_saved_model"
_registered: "weakref.WeakValueDictionary[str, LiveCheckpoint]" = weakref.WeakValueDictionary()


def embedding_layers(model: Any) -> list[TPUEmbedding]:
    """Return the `TPUEmbedding` layers of a model, or the layer itself.

    Raises:
        ConfigError: there is no such layer.
    """
    if isinstance(model, TPUEmbedding):
        return [model]
    if not isinstance(model, keras.layers.Layer):
        raise ConfigError(
            f"export_saved_model: model must be a Keras 3 model or a tpuembed.TPUEmbedding, got {type(model).__name__}."
        )
    check_layers(model)
    found = [layer for layer in model._flatten_layers(include_self=False) if isinstance(layer, TPUEmbedding)]
    if not found:
        raise ConfigError(
            f"export_saved_model: model {model.name!r} has no tpuembed.TPUEmbedding layer, so it has no table to export. "
            "Save a model without tables with its own `export`."
        )
    return found


class LiveCheckpoint(Checkpoint):
    """The tables of layers in memory.

    Attributes:
        format: "live".
        path: a label of the model, for messages.
        layer_config: the config of the layer. None if there are several layers.
    """

    format = "live"

    def __init__(self, name: str, layers: Sequence[TPUEmbedding]) -> None:
        """Copy the tables to where they can be read.

        Raises:
            ConfigError: two layers have a table of one name, or the tables cannot be read from here.
        """
        self.path = f"model {name}"
        self.token = secrets.token_hex(8)
        self._live = [layer.live_tables(_DOING) for layer in layers]
        self._states = _states(self._live)
        self._stamps = {name: live.stamps for live in self._live for name in live.states}
        self._tables = {name: _info(name, state) for name, state in sorted(self._states.items())}
        self._vocabularies = {name: its for layer in layers for name, its in layer.vocabularies.items()}
        self.layer_config = layers[0].checkpoint_config() if len(layers) == 1 else None
        for live in self._live:
            live.fetch()

    def _dtype(self, table: str, slot: str | None) -> np.dtype[Any]:  # noqa: ARG002 - all tables have one dtype
        return np.dtype(np.float32)

    def _fill(self, table: str, slot: str | None, start: int, out: Array) -> None:
        state = self._states[table]
        out[...] = read_rows(state.variable if slot is None else state.slots[slot], start, start + len(out))

    @property
    def gather(self) -> GatherRows:
        """See Checkpoint.gather."""
        return lambda table, numbers, out: gather_rows(self._states[table].variable, numbers, out)

    def vocabulary(self, table: str) -> Vocabulary | None:
        """Return the vocabulary of the layer's table itself, no copy."""
        self._check(table, None)
        return self._vocabularies.get(table)

    @property
    def stamps(self) -> Mapping[str, SavedStamps]:
        """See Checkpoint.stamps."""
        return {
            name: SavedStamps(
                self._named(name), self._tables[name].rows, stamps.history(), functools.partial(stamps.read_into, name)
            )
            for name, stamps in self._stamps.items()
            if stamps is not None
        }

    @property
    def _shown(self) -> str:
        return self.path

    def fingerprint(self) -> str:
        """Return a string that changes when a layer is trained, and differs for every LiveCheckpoint."""
        return json.dumps([self.token, *(int(live.updates.numpy()) for live in self._live)])

    def close(self) -> None:
        """Do nothing: the layers own the tables."""


def live_checkpoint(model: Any) -> LiveCheckpoint:
    """Return the tables of a model, or of a layer. A model may come with its inputs' specs, as (model, specs).

    Raises:
        ConfigError: the model has no tables, two tables have one name, or they cannot be read here.
    """
    made = model[0] if isinstance(model, tuple) and model else model
    layers = embedding_layers(made)
    return LiveCheckpoint(made.name, layers)


@contextlib.contextmanager
def registered(checkpoint: LiveCheckpoint) -> Iterator[Source]:
    """Yield the checkpoint as a source for the exporter. It is valid in this process until the block ends."""
    _registered[checkpoint.token] = checkpoint
    try:
        yield Source(
            path=checkpoint.path,
            fingerprint=checkpoint.fingerprint(),
            options=json.dumps({"token": checkpoint.token}),
            opener=f"{__name__}:{_open_registered.__name__}",
            lasts=False,
        )
    finally:
        del _registered[checkpoint.token]


def _open_registered(path: str, token: str) -> LiveCheckpoint:  # noqa: ARG001 - the signature of an opener
    return _registered[token]


def _states(lives: Iterable[LiveTables]) -> dict[str, TableState]:
    owners: dict[str, str] = {}
    states: dict[str, TableState] = {}
    for live in lives:
        for name, state in live.states.items():
            if name in states:
                raise ConfigError(
                    f"export_saved_model: layers {owners[name]!r} and {live.layer!r} both have a table {name!r}. Rename one."
                )
            owners[name], states[name] = live.layer, state
    return states


def _info(name: str, state: TableState) -> TableInfo:
    config = state.config
    return TableInfo(name, config.vocabulary_size, config.dim, np.dtype(np.float32), tuple(state.slots))
