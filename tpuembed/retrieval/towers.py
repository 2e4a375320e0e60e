"""Runs a tower of a checkpoint: its model looks up rows in the checkpoint's files, and no table is in memory."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.checkpoint import Checkpoint
from tpuembed.checkpoint.tools.exports import read_numbers
from tpuembed.config import QuantizationConfig
from tpuembed.errors import ConfigError, ExportError
from tpuembed.export.graph.dense_weights import restore_dense_weights
from tpuembed.export.graph.keras_model import Factory, build_model
from tpuembed.export.graph.signature import quantization_of, trained_with_rows
from tpuembed.export.graph.stacked_tables import StackedTables, TableNames, constant_names
from tpuembed.export.plan.plan import Placement, StackPlan
from tpuembed.export.storage.formats import quantize
from tpuembed.vocabulary import Vocabulary

__all__ = ["Tower", "only_output"]

_MOST_WHOLE_BYTES: Final = 256 << 20


class _CheckpointTables(StackedTables):
    """Tables whose rows are read from a checkpoint when they are looked up."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint.tables(), checkpoint.vocabulary, trained_with_rows(checkpoint.layer_config))
        self._checkpoint = checkpoint
        self._constant_names: dict[str, TableNames] = {}

    def open(self, quantization: Mapping[str, QuantizationConfig]) -> None:
        """Answer lookups from now on. Values are quantized as in training."""
        self.quantization = dict(quantization)
        stacks = []
        for name in self.required:
            info = self._available[name]
            place = Placement(table=name, rows=info.rows, row_offset=0, source_dtype=info.dtype.name)
            size = 4 * info.rows * info.dim
            stacks.append(
                StackPlan(name=name, dim=info.dim, storage="float32", rows=info.rows, size=size, tables=(place,))
            )
        self.bind(stacks, {})

    def gather(self, stack: str, ids: Any) -> Any:
        """Return float32 [*shape, dim] for int64 `ids` of that shape, rows of the table `stack`."""
        info = self._available[stack]
        rows = tf.numpy_function(lambda ids: self._rows(stack, ids), [ids], tf.float32, stateful=False)
        rows.set_shape([*ids.shape, info.dim] if ids.shape.rank is not None else None)
        return rows

    def _rows(self, table: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        numbers, places = np.unique(ids, return_inverse=True)
        rows = read_numbers(self._checkpoint, table, numbers).astype(np.float32)
        if table in self.quantization:
            quantize(rows, self.quantization[table])
        return rows[places.reshape(ids.shape)]

    def read(self, table: str) -> Any:
        """Return all rows of a table that the model reads whole."""
        if not self._places:
            return super().read(table)
        info = self._available[table]
        if 4 * info.rows * info.dim > _MOST_WHOLE_BYTES:
            raise ExportError(
                f"table {table!r}: the tower reads all of its {info.rows} rows, {4 * info.rows * info.dim} bytes. Build the tower "
                "without that part."
            )
        return tf.constant(self._checkpoint.read(table).astype(np.float32))

    def name_arrays(self, table: str, given: Vocabulary | None = None) -> TableNames:
        """Return the index of a table's names."""
        if table not in self._constant_names:
            self._constant_names[table] = constant_names(self.note_names(table, given))
        return self._constant_names[table]


class Tower:
    """A model of a checkpoint with one output, a vector for each row."""

    def __init__(self, checkpoint: Checkpoint, factory: str | Factory) -> None:
        """Build the model, and restore its dense weights by name. Weights of other parts of the saved model are left out.

        Raises:
            TpuEmbedError: the model cannot be built, or does not fit the checkpoint.
        """
        tables = _CheckpointTables(checkpoint)
        self._model = build_model(factory, tables)
        self._model.compare_vocabularies(checkpoint.path, tables.given_names(checkpoint))
        self._model.check_features(checkpoint.path, checkpoint.layer_config, None)
        restore_dense_weights(self._model.model, checkpoint, tables.required, allow_unused_weights=True)
        tables.open(quantization_of(checkpoint.layer_config, tables.quantization))
        self._tables, self._checkpoint = tables, checkpoint

    @property
    def input_names(self) -> frozenset[str]:
        """Return the names of the model's inputs."""
        return frozenset(self._model.input_specs())

    def __call__(self, inputs: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Return the vectors, float32 [batch, dim], of the model's `inputs`. Others are ignored.

        Raises:
            ConfigError: an input is missing, or the model does not make one vector of each row.
        """
        specs, special = self._model.input_specs(), tf.RaggedTensor | tf.SparseTensor
        if missing := sorted(specs.keys() - inputs.keys()):
            raise ConfigError(
                f"inputs: the model takes {missing[0]!r}, which is not among {', '.join(sorted(inputs))}. Add it."
            )
        others = {name: inputs[name] for name in specs if isinstance(inputs[name], special)}
        try:
            plain = {
                name: tf.convert_to_tensor(inputs[name])
                if spec.dtype == tf.string
                else tf.cast(inputs[name], spec.dtype)
                for name, spec in specs.items()
                if name not in others
            }
            outputs = self._model.outputs(self._model.decode(plain, others))
            found: npt.NDArray[np.float32] = only_output(outputs).numpy()
        except tf.errors.InvalidArgumentError as error:
            raise ConfigError(f"the tower failed: {' '.join(error.message.split())}") from None
        return found

    def own_rows(self, count: int) -> dict[str, Any] | None:
        """Return inputs for `count` rows of the table that the model looks up in, if it has one input and one table."""
        specs, tables = self._model.input_specs(), self._tables.required
        if len(specs) != 1 or len(tables) != 1:
            return None
        ((name, spec),), table = specs.items(), tables[0]
        vocabulary = self._tables.vocabularies.get(table)
        rows = self._checkpoint.tables()[table].rows if vocabulary is None else vocabulary.rows
        chosen = np.random.default_rng(1).choice(rows, min(rows, count), replace=False)
        values = list(chosen) if vocabulary is None else [one for one in vocabulary.names(chosen) if one is not None]
        if not values or spec.shape.rank not in (1, 2) or isinstance(values[0], bytes) != (spec.dtype == tf.string):
            return None
        array = np.array(values, object if isinstance(values[0], bytes) else None)  # NULs at the ends of names stay
        return {name: array.reshape([-1, 1] if spec.shape.rank == 2 else [-1])}


def only_output(outputs: Mapping[str, Any]) -> Any:
    """Return the one output of a tower, float32 [batch, dim].

    Raises:
        ConfigError: there are more, or it has another shape.
    """
    if len(outputs) != 1:
        raise ConfigError(
            f"the tower has the outputs {', '.join(sorted(outputs))}, and a vector is one output. Return it alone from the factory."
        )
    ((name, value),) = outputs.items()
    if value.shape.rank != 2 or value.shape[1] is None or not value.dtype.is_floating:
        raise ConfigError(
            f"the tower's output {name!r} is {value.dtype.name} {value.shape}, and a vector is float32 [batch, dim]. Return one "
            "vector for each row."
        )
    return tf.cast(value, tf.float32)
