"""Several `TPUEmbedding` layers called as one layer. Both libraries place their tables on different hardware."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from tpuembed.backends.checkpoint_keys import children_of, saved_attributes, saved_keys
from tpuembed.backends.tf_config import local
from tpuembed.backends.tpu.tf_tpu import LAYOUTS, saved_layouts
from tpuembed.backends.training import wait_for_lookups
from tpuembed.config.checks import did_you_mean
from tpuembed.config.structure import flatten, flatten_up_to, pack_like
from tpuembed.errors import CheckpointMismatchError, UnknownTableError
from tpuembed.layer.methods import RestoresTables
from tpuembed.layer.restore import restore_saved
from tpuembed.layer.tables import LiveTables
from tpuembed.layer.tpu_embedding import TPUEmbedding, weights_with_gradients
from tpuembed.layer.weight_files import (
    check_tables,
    load_tables,
    save_tables,
    save_vocabularies,
    saved_vocabularies,
)
from tpuembed.runtime.keras_saving import check_built
from tpuembed.vocabulary import Vocabulary, attribute_of

__all__ = ["PartitionedEmbedding", "Places", "place_features"]

Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Places:
    """The place of every feature: the name of one of the layers.

    Attributes:
        structure: the nested structure of configs that the layer was built with.
        places: path of a feature -> the name of its place, in walking order.
    """

    structure: Any
    places: Mapping[str, str]

    def part(self, place: str, leaves: Mapping[str, Any]) -> Leaves:
        """Return the entries of `leaves` (path -> leaf) whose features belong to `place`."""
        return {path: leaf for path, leaf in leaves.items() if self.places[path] == place}

    def pack(self, leaves: Mapping[str, Any]) -> Any:
        """Return `leaves` (path -> leaf) as the nested structure."""
        return pack_like(self.structure, [leaves[path] for path in self.places])

    def unpack(self, structure: Any, what: str) -> Leaves:
        """Return path -> subtree of `structure`. Errors call the structure `what`."""
        return {path: leaf for path, _, leaf in flatten_up_to(self.structure, structure, what)}


def place_features(structure: Any, place: Callable[[Any], str]) -> Places:
    """Return the place of every feature of `structure`, by `place(config)`."""
    return Places(structure, {path: place(config) for path, config in flatten(structure)})


class PartitionedEmbedding(RestoresTables, keras.layers.Layer):
    """A layer of several `TPUEmbedding` layers, one per place. Each has some of the tables.

    Attributes:
        PLACES: all places that a layer of this class may have. A checkpoint of another layer may have other tables in
            them.
    """

    PLACES: tuple[str, ...] = ()

    def _set_parts(self, placement: Places, parts: Mapping[str, TPUEmbedding]) -> None:
        """Set the layers, as place -> layer. Each takes {path: ids} of its features."""
        self._placement = _Placement(placement)
        self._places = tuple(parts)
        for place, layer in parts.items():
            layer.saved_by_another = True
            setattr(self, f"_{place}", layer)  # one attribute each, so that checkpoints have a stable name for it
        self.built = True

    def part(self, place: str) -> TPUEmbedding | None:
        """Return the layer of one place. Returns None if no feature belongs to it."""
        layer: TPUEmbedding | None = getattr(self, f"_{place}", None)
        return layer

    @property
    def _parts(self) -> list[tuple[str, TPUEmbedding]]:
        return [(place, getattr(self, f"_{place}")) for place in self._places]

    def _look_up(self, ids: Leaves, weights: Leaves | None) -> Any:
        """Return the activations, in the structure, of ids and weights by path."""
        placement, found = self._placement.value, {}
        for place, layer in self._parts:
            of_part = None if weights is None else placement.part(place, weights)
            found.update(layer(placement.part(place, ids), of_part))
        if len(self._parts) > 1 and any(layer.trainable for _, layer in self._parts):
            found = dict(zip(found, wait_for_lookups(list(found.values())), strict=True))
        return placement.pack(found)

    def table_variables(self) -> dict[str, Any]:
        """Return {table name: its variable, float32 [vocabulary_size, dim]}."""
        return {
            config.name: variable for _, layer in self._parts for config, variable in layer.embedding_tables.items()
        }

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """Return {table name: the vocabulary of its rows}, for the tables that have one."""
        return {table: names for _, layer in self._parts for table, names in layer.vocabularies.items()}

    def take_names(self, table: str, saved: Vocabulary) -> None:
        """Replace the names of a table whose rows are restored with them. See `TPUEmbedding.take_names`."""
        self._layer_of(table).take_names(table, saved)

    # ---- weight files: by table names, without the places

    def save_own_variables(self, store: Any) -> None:
        """Write tables, slots, count of updates and config of all places into `.weights.h5` and `.keras`."""
        configs = [layer.checkpoint_config() for _, layer in self._parts]
        config = {part: {name: value for c in configs for name, value in c[part].items()} for part in configs[0]}
        save_tables(store, self._named_variables(), max(int(count.numpy()) for count in self._counts()), config)
        for _, layer in self._parts:
            if layer.core.names is not None:
                save_vocabularies(store, layer.vocabularies)

    def load_own_variables(self, store: Any) -> None:
        """Assign the arrays of `save_own_variables`, under any strategy.

        Raises:
            CheckpointMismatchError: the file lacks a table or slot, has others, or has another shape.
        """
        check_built(self.name)
        if variables := self._named_variables():  # none inside an export, which reads the rows from its checkpoint
            check_tables(store, self, variables)  # a file that is refused changes no name
            of_parts = [layer.core.names for _, layer in self._parts if layer.core.names is not None]
            where = f"layer {self.name!r}: the file"
            found = [part.checked(saved_vocabularies(store, part.copies), where) for part in of_parts]
            for part, saved in zip(of_parts, found, strict=True):
                for table, names in saved.items():
                    part.take(table, names)
            _Counts(self._counts()).assign(load_tables(store, variables))
            for _, layer in self._parts:
                layer.core.node.given.note(layer.named_variables())

    def _named_variables(self) -> dict[str, Any]:
        return {name: variable for _, layer in self._parts for name, variable in layer.named_variables().items()}

    def _counts(self) -> tuple[Any, ...]:
        return tuple(layer.updates for _, layer in self._parts)

    # ---- checkpoints

    def live_tables(self, doing: str) -> LiveTables:
        """Return the tables of all places in memory, for `doing`. See `TPUEmbedding.live_tables`."""
        lives = [layer.live_tables(doing) for _, layer in self._parts]
        states = {name: state for live in lives for name, state in live.states.items()}
        return LiveTables(
            self.name,
            states,
            _Counts(self._counts()),
            writing=lambda: _all(live.writing for live in lives),
            fetch=lambda: _each(live.fetch for live in lives),
            nodes=[node for live in lives for node in live.nodes],
        )

    def apply_gradients(self, gradients: Iterable[Any]) -> None:
        """Update the tables of all places once, by `gradients` of `trainable_variables`. See `TPUEmbedding.apply_gradients`."""
        pairs = weights_with_gradients(self.name, self.trainable_variables, list(gradients))
        by_weight = {id(weight): gradient for weight, gradient in pairs}
        shares = [[by_weight[id(weight)] for weight in layer.trainable_variables] for _, layer in self._parts]
        for (_, layer), share in zip(self._parts, shares, strict=True):
            layer.checked_gradients(share)
        for (_, layer), share in zip(self._parts, shares, strict=True):
            layer.apply_gradients(share)

    def assign_rows(self, table: str, start: int, values: Any, slot: str | None = None) -> None:
        """Overwrite rows of a table in place. See `TPUEmbedding.assign_rows`."""
        self._layer_of(table).assign_rows(table, start, values, slot)

    def _layer_of(self, table: str) -> TPUEmbedding:
        layers_by_table = {config.name: layer for _, layer in self._parts for config in layer.embedding_tables}
        if table not in layers_by_table:
            raise UnknownTableError(
                f"layer {self.name!r}: has no table {table!r}; {did_you_mean(str(table), layers_by_table)}"
            )
        return layers_by_table[table]

    def sources_of(self, names: Iterable[str]) -> Mapping[str, str] | None:
        """See RestoresTables: by `_source`, if the checkpoint's `names` are exactly those of the layer's tables."""
        names = set(names)
        sources = {table: self._source(table, names) for table in self.table_variables()}
        return sources if set(sources.values()) == names and len(sources) == len(names) else None

    def _source(self, table: str, names: Iterable[str]) -> str:  # noqa: ARG002 - for layers that rename tables
        """Return the name of `table` in a checkpoint with the tables `names`."""
        return table

    def _checkpoint_adapter(self, path: str) -> None:
        """Restore the tables that the checkpoint has in another place, before TensorFlow restores the other variables.

        Raises:
            CheckpointMismatchError: names of a place are in the checkpoint for some of its tables alone, which TensorFlow cannot
                restore. Nothing has changed then.
        """
        keys = saved_keys(path)
        for place, layer in self._parts:
            node = f"_{place}/_vocabularies"
            lacking = [table for table in layer.vocabularies if not saved_attributes(keys, node, attribute_of(table))]
            places = {key.partition(f"{node}/.ATTRIBUTES/")[0] for key in keys if f"{node}/.ATTRIBUTES/" in key}
            if lacking and len(places) == 1:  # of several layers, TensorFlow alone knows which is this one
                raise CheckpointMismatchError(
                    f"checkpoint {path}: table {lacking[0]!r} has names, and was saved in another part of layer {self.name!r}, "
                    "with another size_threshold. Build the layer with the trained size_threshold, or restore the tables with "
                    "restore_tables."
                )
        saved = {place: children_of(keys, f"_{place}/_tpu_embedding") for place in self.PLACES}
        elsewhere = {place: _missing(layer, saved[place]) for place, layer in self._parts}
        if not any(elsewhere.values()):
            return
        names = set(saved_layouts(path)).union(*saved.values(), self._other_names(keys))
        for place, layer in self._parts:
            sources = {table: self._source(table, names) for table in elsewhere[place]}
            found = {table: source for table, source in sources.items() if source in names}
            if found:
                restore_saved(layer, path, found)

    def _other_names(self, keys: Iterable[str]) -> set[str]:  # noqa: ARG002 - for subclasses
        """Return the tables that the checkpoint with these keys has outside the layer's places."""
        return set()

    def _plain_config(self) -> dict[str, Any]:
        return {key: value for key, value in super().get_config().items() if key != "autocast"}


def _missing(layer: TPUEmbedding, saved: set[str]) -> list[str]:
    """Return the tables of `layer` that the checkpoint lacks in its place. The layer itself finds stacked tables."""
    return [] if LAYOUTS in saved else [config.name for config in layer.embedding_tables if config.name not in saved]


@dataclasses.dataclass(frozen=True)
class _Counts:
    """The counts of updates of all places. A step increments all of them."""

    counts: tuple[Any, ...]

    def assign(self, value: int) -> None:
        """Set every count to `value`."""
        for count in self.counts:
            count.assign(value)

    def numpy(self) -> Any:
        """Return the count."""
        return local(self.counts[0]).numpy()


def _each(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


@contextlib.contextmanager
def _all(contexts: Iterable[Callable[[], contextlib.AbstractContextManager[None]]]) -> Iterator[None]:
    """Enter all contexts."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@dataclasses.dataclass(frozen=True)
class _Placement:
    """A wrapper against Keras' tracking, which would replace dicts and lists with its own classes."""

    value: Places
