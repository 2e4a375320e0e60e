"""Several `TPUEmbedding` layers called as one: what both libraries need for tables that live in different places."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from tpuembed.backends.saved_places import children_of, saved_keys
from tpuembed.backends.tf_tpu import LAYOUTS, saved_layouts
from tpuembed.backends.training import found_together
from tpuembed.checkpoint import open_checkpoint
from tpuembed.config.checks import did_you_mean
from tpuembed.config.structure import flatten, flatten_up_to, pack_like
from tpuembed.errors import UnknownTableError
from tpuembed.files import FilePath
from tpuembed.layer import TPUEmbedding
from tpuembed.restore import RestoreReport, restore_saved, restore_tables
from tpuembed.runtime.weight_files import load_tables, save_tables
from tpuembed.table_access import LiveTables

__all__ = ["DividedEmbedding", "Division", "divide"]

Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Division:
    """Which feature goes where.

    Attributes:
        structure: the nested structure of configs that the layer was built with.
        places: path of a feature -> the name of its place, in walking order.
    """

    structure: Any
    places: Mapping[str, str]

    def part(self, place: str, leaves: Mapping[str, Any]) -> Leaves:
        """Those of `leaves`, by path, that belong to `place`."""
        return {path: leaf for path, leaf in leaves.items() if self.places[path] == place}

    def pack(self, leaves: Mapping[str, Any]) -> Any:
        """`leaves`, by path, in the structure."""
        return pack_like(self.structure, [leaves[path] for path in self.places])

    def unpack(self, structure: Any, what: str) -> Leaves:
        """path -> what stands there in `structure`, which errors call `what`."""
        return {path: leaf for path, _, leaf in flatten_up_to(self.structure, structure, what)}


def divide(structure: Any, place: Callable[[Any], str]) -> Division:
    """`place(config)` of every feature of `structure`."""
    return Division(structure, {path: place(config) for path, config in flatten(structure)})


class DividedEmbedding(keras.layers.Layer):
    """A layer of `TPUEmbedding` layers, one per place, each of which has some of the tables.

    Attributes:
        PLACES: all that a layer of this kind may have; a checkpoint of another one has other tables in them.
    """

    PLACES: tuple[str, ...] = ()

    def _set_parts(self, division: Division, parts: Mapping[str, TPUEmbedding]) -> None:
        """`parts`: place -> the layer of its features, which takes {path: ids}."""
        self._division = _Untracked(division)
        self._places = tuple(parts)
        for place, layer in parts.items():
            layer.saved_by_another = True
            setattr(self, f"_{place}", layer)  # an attribute each, so that checkpoints have a stable name for it
        self.built = True

    def part(self, place: str) -> TPUEmbedding | None:
        """The layer of one place; None where no feature belongs to it."""
        layer: TPUEmbedding | None = getattr(self, f"_{place}", None)
        return layer

    @property
    def _parts(self) -> list[tuple[str, TPUEmbedding]]:
        return [(place, getattr(self, f"_{place}")) for place in self._places]

    def _look_up(self, ids: Leaves, weights: Leaves | None) -> Any:
        """Activations, in the structure, of ids and weights by path."""
        division, found = self._division.value, {}
        for place, layer in self._parts:
            of_part = None if weights is None else division.part(place, weights)
            found.update(layer(division.part(place, ids), of_part))
        if len(self._parts) > 1 and any(layer.trainable for _, layer in self._parts):
            found = dict(zip(found, found_together(list(found.values())), strict=True))
        return division.pack(found)

    def _specs(self, ids: Leaves) -> Any:
        """Symbolic activations of symbolic ids by path."""
        division, found = self._division.value, {}
        for place, layer in self._parts:
            found.update(layer.compute_output_spec(division.part(place, ids)))
        return division.pack(found)

    def table_variables(self) -> dict[str, Any]:
        """{table name: its variable, float32 [vocabulary_size, dim]}."""
        return {
            config.name: variable for _, layer in self._parts for config, variable in layer.embedding_tables.items()
        }

    # ---- weight files, by tables alone, and not by their places

    def save_own_variables(self, store: Any) -> None:
        """Into `.weights.h5` and `.keras`: tables, slots, count of updates and config of all places."""
        configs = [layer.checkpoint_config() for _, layer in self._parts]
        config = {part: {name: value for c in configs for name, value in c[part].items()} for part in configs[0]}
        save_tables(store, self._named_variables(), max(int(count.numpy()) for count in self._counts()), config)

    def load_own_variables(self, store: Any) -> None:
        """Assign what `save_own_variables` stored, under whatever strategy.

        Raises:
            CheckpointMismatchError: the file lacks a table or slot, has others, or has another shape.
        """
        if variables := self._named_variables():  # none inside an export, whose checkpoint has the rows
            _Counts(self._counts()).assign(load_tables(store, self.name, variables))

    def _named_variables(self) -> dict[str, Any]:
        return {name: variable for _, layer in self._parts for name, variable in layer.named_variables().items()}

    def _counts(self) -> tuple[Any, ...]:
        return tuple(layer.updates for _, layer in self._parts)

    # ---- checkpoints

    def live_tables(self, doing: str) -> LiveTables:
        """The tables of all places in memory, for `doing`; see `TPUEmbedding.live_tables`."""
        lives = [layer.live_tables(doing) for _, layer in self._parts]
        states = {name: state for live in lives for name, state in live.states.items()}
        return LiveTables(
            self.name,
            states,
            _Counts(self._counts()),
            writing=lambda: _all(live.writing for live in lives),
            fetch=lambda: _each(live.fetch for live in lives),
        )

    def assign_rows(self, table: str, start: int, values: Any, slot: str | None = None) -> None:
        """Overwrite rows of a table in place; see `TPUEmbedding.assign_rows`."""
        self._home(table).assign_rows(table, start, values, slot)

    def _home(self, table: str) -> TPUEmbedding:
        homes = {config.name: layer for _, layer in self._parts for config in layer.embedding_tables}
        if table not in homes:
            raise UnknownTableError(f"layer {self.name!r}: has no table {table!r}; {did_you_mean(str(table), homes)}")
        return homes[table]

    def restore_tables(
        self,
        path: str | FilePath,
        tables: Iterable[str] | Mapping[str, str] | None = None,
        slots: bool = True,
        *,
        resize: Mapping[str, str] | None = None,
        lossy: bool = False,
        **options: Any,
    ) -> RestoreReport:
        """Stream tables of a checkpoint of any format into this layer, wherever it places them; see `tpuembed.restore_tables`."""
        if tables is None:
            with open_checkpoint(path, **options) as checkpoint:
                tables = self._all_of(checkpoint.tables())
        return restore_tables(self, path, tables, slots, resize=resize, lossy=lossy, **options)

    def _all_of(self, names: Iterable[str]) -> Mapping[str, str] | None:
        """{table: its name in a checkpoint that has `names`} where they are the layer's in other words; else None."""
        names = set(names)
        sources = {table: self._source(table, names) for table in self.table_variables()}
        return sources if set(sources.values()) == names and len(sources) == len(names) else None

    def _source(self, table: str, names: Iterable[str]) -> str:  # noqa: ARG002 - for layers whose tables have other names
        """The name of `table` in a checkpoint that has tables of `names`."""
        return table

    def _checkpoint_adapter(self, path: str) -> None:
        """Called before a checkpoint's variables are put into ours: those that it has in another place are restored here."""
        keys = saved_keys(path)
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

    def _other_names(self, keys: Iterable[str]) -> set[str]:  # noqa: ARG002 - for layers that other libraries save otherwise
        """Names of tables that the checkpoint with those keys has in no place of ours."""
        return set()

    def _plain_config(self) -> dict[str, Any]:
        return {key: value for key, value in super().get_config().items() if key != "autocast"}


def _missing(layer: TPUEmbedding, saved: set[str]) -> list[str]:
    """The tables of `layer` that are not among what a checkpoint has in its place. Stacks the layer finds by itself."""
    return [] if LAYOUTS in saved else [config.name for config in layer.embedding_tables if config.name not in saved]


@dataclasses.dataclass(frozen=True)
class _Counts:
    """The counts of updates of all places, which a step counts together."""

    counts: tuple[Any, ...]

    def assign(self, value: int) -> None:
        """All of them are `value`."""
        for count in self.counts:
            count.assign(value)


def _each(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


@contextlib.contextmanager
def _all(contexts: Iterable[Callable[[], contextlib.AbstractContextManager[None]]]) -> Iterator[None]:
    """Inside of all of them."""
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        yield


@dataclasses.dataclass(frozen=True)
class _Untracked:
    """Out of sight of Keras' tracking, which would turn dicts and lists into its own."""

    value: Division
