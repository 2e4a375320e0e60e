"""The methods of a layer over its tables, written once for the layers of several frameworks."""

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tpuembed.config.checks import check_count
from tpuembed.layer.core import LayerTables
from tpuembed.layer.tables import LiveTables
from tpuembed.runtime.table_scope import TableSource
from tpuembed.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tpuembed.files import FilePath
    from tpuembed.layer.restore import RestoreReport

__all__ = ["CoreMethods", "RestoresTables"]


class RestoresTables:
    """A layer whose tables are restored from checkpoints of any format: a `HasTables`."""

    name: str

    def restore_tables(
        self,
        path: "str | FilePath",
        tables: Iterable[str] | Mapping[str, str] | None = None,
        slots: bool = True,
        *,
        by: str = "number",
        resize: Mapping[str, str] | bool | None = None,
        lossy: bool = False,
        updates: int | None = None,
        **options: Any,
    ) -> "RestoreReport":
        """Stream tables of the checkpoint at `path` into the tables of this layer, in place.

        Beyond the tables, it needs a few pieces of 16 MiB, and the memory that the checkpoint's format needs to decode a
        chunk. It compares all names, shapes, dtypes and slots before it writes the first row.

        Args:
            path: as `open_checkpoint` takes it.
            tables: names of tables, or {the layer's name: the checkpoint's}. None restores all. Then both must have the
                same tables.
            slots: restore the optimizers' slots too. This includes the layer's count of updates, if every table that the layer
                trains is restored and the checkpoint has a count: a layer's own, or else the steps of its Keras optimizers (such
                as `optimizer/iter` of TFRS). False leaves slots and count unchanged.
            by: "number" restores each row to its number. "name" restores it to the row that the layer's vocabulary gives its
                name, for tables with a vocabulary in layer and checkpoint. See below.
            resize: {table: "grow" or "shrink"} for tables whose vocabulary may differ. The added rows of a grown table get
                initial values, from the table's initializer and its slots' defaults. (An initializer other than the default
                needs the memory of a second table meanwhile.) A shrunk table omits the checkpoint's last rows. By name, True
                lets tables with a vocabulary have different numbers of rows.
            lossy: round float64 to float32. float16 and bfloat16 need no rounding.
            updates: the layer's count of updates after the restore, at which learning-rate schedules go on. None takes the
                checkpoint's. Without one, a warning names the tables that have a schedule.
            options: as `open_checkpoint` takes them.

        By number, names follow their rows: the layer's vocabulary takes the names of the checkpoint's. If it has names
        already, one of both has all names of the other at the same rows, and the larger one stays.

        By name, a name of both is kept: its row and slots move to its new row. A name of the layer alone is new. Its row and
        slots do not change: in a new layer they have initial values. A name of the checkpoint alone is dropped. Rows of buckets
        are kept if both have the same number of buckets, and do not change otherwise. Tables without a vocabulary in both are
        restored by number. `TablePlan.names` of the report has the counts and examples.

        Raises:
            UnknownTableError: `tables` or `resize` name a table that the layer or the checkpoint does not have.
            CheckpointMismatchError: layer and checkpoint differ in tables, shapes, dtypes, slots or counts of updates. By name,
                also if a table has a vocabulary on one side alone, or if the dtypes of names differ. By number, also if a name
                has different rows on the two sides.
            CheckpointCorruptError: the checksum of a table or slot differs from the checkpoint's. A table whose rows are in
                order is already written by then. Restore it from another copy.
            ConfigError: an argument is of the wrong kind, tables cannot be written from here, or the layer's names were replaced
                when another layer was restored, and the checkpoint's would not take their place.
            CheckpointError: as `open_checkpoint` and its reads.
        """
        from tpuembed.layer.restore import RestoreRequest, restore  # here, so that training imports no reader

        if updates is not None:
            check_count("restore_tables: updates", updates, 0)
        return restore(self, path, RestoreRequest.of(tables, slots, resize, lossy, by), options, updates)

    def sources_of(self, names: Iterable[str]) -> Mapping[str, str] | None:  # noqa: ARG002 - for layers that rename tables
        """Return {table: its name in a checkpoint with the tables `names`}; None if layer and checkpoint must have the same."""
        return None

    def live_tables(self, doing: str) -> LiveTables:
        """Return the tables in memory, for `doing`. Raises ConfigError if there are none, or they cannot be written from here."""
        raise NotImplementedError

    def take_names(self, table: str, saved: Vocabulary) -> None:
        """Replace the names of a table whose rows are restored with those of `saved`. `restore_tables` calls it."""
        raise NotImplementedError


class CoreMethods(RestoresTables):
    """What a layer over `core` offers besides calls.

    Attributes:
        core: the layer's tables.
    """

    core: LayerTables

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """Return the variable, float32 [vocabulary_size, dim], of each TableConfig as it was passed.

        In an export there are no variables. Each table is a tensor that the export stores if it is used.
        """
        return {table: self.core.backend.table(name) for table, name in self.core.table_names.items()}

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """Return {table name: the vocabulary of its rows}, for the tables that have one."""
        return self.core.vocabularies

    @property
    def updates(self) -> Any:
        """Return the variable that counts the updates of the layer's tables, int64 []."""
        return self.core.updates

    def take_names(self, table: str, saved: Vocabulary) -> None:
        """See RestoresTables."""
        assert self.core.names is not None, "a layer with tables has the vocabularies of its features"
        self.core.names.take(table, saved)

    @tf.autograph.experimental.do_not_convert
    def names_to_rows(self, features: Any) -> Any:
        """Return `features` with rows in the place of names, int64. Call it in `Dataset.map` if the layer `takes_rows`.

        Args:
            features: the structure of `feature_config`, as `call` takes it.

        Raises:
            ConfigError: the names have another type than the vocabulary, or the layer is part of an export.
        """
        return self.core.names_to_rows(features)

    def looking_up_in(self, source: TableSource) -> contextlib.AbstractContextManager[None]:
        """Make calls take their rows from `source` inside the context. The layer's own tables do not change."""
        return self.core.looking_up_in(source)

    def checkpoint_config(self) -> dict[str, Any]:
        """Return the layer's config for checkpoints: features, tables and their optimizers, as JSON values."""
        return self.core.checkpoint_config()

    def named_variables(self) -> dict[str, Any]:
        """Return {name of a table, or `<table>/<slot>`: its variable, float32 [rows, dim]}."""
        return self.core.named_variables()

    def live_tables(self, doing: str) -> LiveTables:
        """See RestoresTables."""
        return self.core.live(doing)

    def assign_rows(self, table: str, start: int, values: Any, slot: str | None = None) -> None:
        """Overwrite rows [start, start + n) of a table, or of one of its slots, in place, in every replica's copy.

        Args:
            table: its name.
            start: the first row.
            values: [n, dim] of float32, or of float16 or bfloat16, which convert to float32 exactly. NaN and infinity
                are written unchanged.
            slot: the optimizer's name of it: accumulators, momenta, velocities, linears.

        Raises:
            UnknownTableError: there is no such table or slot. (Also a KeyError.)
            RowRangeError: rows are outside the table. (Also an IndexError.)
            ConfigError: the values have another shape or dtype, or the call is in a graph, where nothing would be
                written.
        """
        self.live_tables("assign_rows").assign_rows(table, start, values, slot)

    def update_embedding_table(self, table: Any, embedding_table: Any) -> None:
        """Copy `embedding_table` into a table. Its slots do not change.

        TFRS' layer keeps the given variable, silently ignores an unknown table, and fails off the TPU. This layer keeps
        the table's variable and changes its rows.

        Args:
            table: a TableConfig as it was passed to the layer, one of the same name, or the name itself.
            embedding_table: a variable, tensor or array, float32 [vocabulary_size, dim].

        Raises:
            UnknownTableError: the layer has no such table.
            ConfigError: the shape or dtype differs from the table's.
        """
        passed = (name for config, name in self.core.table_names.items() if config is table)
        name = next(passed, getattr(table, "name", table))
        self.live_tables("update_embedding_table").assign_table(name, embedding_table)

    def restore_saved(self, path: str, tables: Iterable[str]) -> None:
        """Restore `tables` whose keys in the checkpoint are not those of TensorFlow. See `restore.restore_saved`."""
        from tpuembed.layer.restore import restore_saved

        restore_saved(self, path, {table: table for table in tables})

    def _restore_count(self, path: str) -> None:
        from tpuembed.layer.restore import restore_count

        restore_count(self, self.core.backend.states, path)
