"""One interface for the two kinds of export, lookups and a whole model: its tables, and how to save its graph."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from tpuembed.checkpoint.keras.given_names import check_names_in
from tpuembed.config import QuantizationConfig, ServingConfig
from tpuembed.errors import ConfigError, MissingExtraError
from tpuembed.export.graph.signature import (
    check_tables,
    find_table,
    quantization_of,
    served_features,
    serving_config_of,
)
from tpuembed.export.plan.plan import ExportPlan
from tpuembed.export.report import SavedGraph

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint
    from tpuembed.export.graph.keras_model import KerasModel

__all__ = ["ExportRequest", "LookupRequest", "check_model_config", "make_request"]

_OF_KERAS: Final = "non_trainable_variables"
"""Where `keras.callbacks.OrbaxCheckpoint` saves the tables and slots of layers."""


class ExportRequest(Protocol):
    """An export before it is planned.

    Attributes:
        is_model: it is a whole model, and not lookups only.
        tables: names of the tables that the signatures look up in.
        whole_tables: those tables that a model reads whole.
        index_tables: those that the signatures search as an index.
        dropped_features: features left out because their tables are not exported.
        quantization: by table, for those whose activations were quantized in training.
    """

    is_model: bool
    tables: Sequence[str]
    whole_tables: Sequence[str]
    index_tables: Sequence[str]
    dropped_features: tuple[str, ...]
    quantization: Mapping[str, QuantizationConfig]

    def save_graph(self, plan: ExportPlan, folder: Path) -> SavedGraph:
        """Save the signatures into `folder`, over the stacks of `plan`."""


def make_request(
    checkpoint: "Checkpoint",
    serving_config: Any = None,
    model: Any = None,
    tables: Sequence[str] | None = None,
    features: Sequence[str] | None = None,
    *,
    allow_unused_weights: bool = False,
) -> ExportRequest:
    """Return the export that the arguments describe, checked against `checkpoint`.

    Raises:
        ConfigError, CheckpointMismatchError, UnknownTableError: an argument is wrong or does not fit the checkpoint.
        MissingExtraError: TensorFlow is not installed.
    """
    for what, names in (("tables", tables), ("features", features)):
        _check_names(what, names)
    for name in tables or ():
        find_table(name, checkpoint.tables())
    variables = [name for name in checkpoint.tables() if _OF_KERAS in name.split("/")[:2]]
    if variables and (model is not None or serving_config is None):
        raise ConfigError(
            f"checkpoint {checkpoint.path}: keras.callbacks.OrbaxCheckpoint wrote it, without the features of the layers. "
            "Load the model with keras.models.load_model, or build it and call its load_weights. Then call "
            "tpuembed.export_saved_model(model, MODEL_DIR). For lookups, a serving_config may name the tables as there: "
            f"{', '.join(variables)}."
        )
    if model is None:
        if allow_unused_weights:
            raise ConfigError(
                "allow_unused_weights: supported only for a whole model. Give `model` too, or leave it out."
            )
        return LookupRequest(checkpoint, serving_config, tables, features)
    for what, names in (("tables", tables), ("features", features)):
        if names is not None:
            raise ConfigError(
                f"{what}: a model needs all of its tables and inputs. Leave `{what}` out, or leave `model` out to export "
                "lookups only."
            )
    return _ModelRequest(checkpoint, serving_config, model, allow_unused_weights)


def _check_names(what: str, names: Sequence[str] | None) -> None:
    if isinstance(names, str):
        raise ConfigError(f"{what} must be a list of names, got the text {names!r}. Write [{names!r}].")
    if names is not None and not names:
        raise ConfigError(f"{what} is empty. Name at least one, or leave it out for all.")


class LookupRequest:
    """An export of the features of a serving_config.

    Attributes:
        features: those that are exported, with the names of their tables.
        vocabularies: table -> its names, where a feature takes names.
    """

    is_model = False
    whole_tables: Sequence[str] = ()
    index_tables: Sequence[str] = ()

    def __init__(
        self,
        checkpoint: "Checkpoint",
        serving_config: Any,
        tables: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
    ) -> None:
        config = serving_config_of(checkpoint, serving_config)
        chosen = config if features is None else config.only_features(features)
        kept = chosen if tables is None else chosen.only_tables(tables)
        self._available = checkpoint.tables()
        self.features = served_features(kept, self._available, checkpoint.layer_config, checkpoint.vocabulary)
        self.vocabularies = {
            each.table: each.spec.vocabulary for each in self.features if each.spec.vocabulary is not None
        }
        given = {table: names for table, names in self.vocabularies.items() if table not in checkpoint.vocabularies}
        check_names_in(given, checkpoint.path, "serving_config")
        self.tables: Sequence[str] = list(dict.fromkeys(feature.table for feature in self.features))
        self.dropped_features = tuple(name for name in config.features if name not in kept.features)
        self.quantization: Mapping[str, QuantizationConfig] = quantization_of(
            checkpoint.layer_config, quantization_in(config)
        )
        _check_all_served(tables, self.tables)

    def save_graph(self, plan: ExportPlan, folder: Path) -> SavedGraph:
        """See ExportRequest."""
        _require_tensorflow()
        from tpuembed.export.graph.lookup_model import LookupModel
        from tpuembed.export.graph.saved_model import save_graph
        from tpuembed.export.graph.stacked_tables import StackedTables

        tables = StackedTables(self._available, self.vocabularies.get)
        for table in self.vocabularies:
            tables.note_names(table)
        return save_graph(LookupModel(self.features, tables), tables, plan.stacks, list, folder, plan.layout)


class _ModelRequest:
    """An export of a Keras model. The constructor builds the model in a scope that allocates no tables."""

    is_model = True
    index_tables: Sequence[str] = ()
    dropped_features: tuple[str, ...] = ()

    def __init__(self, checkpoint: "Checkpoint", serving_config: Any, model: Any, allow_unused_weights: bool) -> None:
        _require_tensorflow()
        from tpuembed.export.graph.keras_model import build_model
        from tpuembed.export.graph.stacked_tables import StackedTables

        self._checkpoint, self._allow_unused_weights = checkpoint, allow_unused_weights
        self._sources = StackedTables.of(checkpoint)
        self._model = build_model(model, self._sources)
        self._model.compare_vocabularies(checkpoint.path, self._sources.given_names(checkpoint))
        stated = check_model_config(self._model, checkpoint, serving_config)
        self.quantization: Mapping[str, QuantizationConfig] = quantization_of(
            checkpoint.layer_config, self._sources.quantization, stated
        )
        if not self._sources.required:
            raise ConfigError(
                "model: the factory built no tpuembed.TPUEmbedding layer, so there is no table to export."
            )
        self.tables: Sequence[str] = list(self._sources.required)
        self.whole_tables: Sequence[str] = self._sources.read_whole

    def save_graph(self, plan: ExportPlan, folder: Path) -> SavedGraph:
        """See ExportRequest."""
        from tpuembed.export.graph.dense_weights import restore_dense_weights
        from tpuembed.export.graph.saved_model import save_graph

        def dense() -> list[Any]:
            restore_dense_weights(
                self._model.model, self._checkpoint, self.tables, allow_unused_weights=self._allow_unused_weights
            )
            return self._model.state()

        return save_graph(
            self._model,
            self._sources,
            plan.stacks,
            dense,
            folder,
            plan.layout,
            require_finite=plan.require_finite,
        )


def check_model_config(
    model: "KerasModel", checkpoint: "Checkpoint", serving_config: Any
) -> Mapping[str, QuantizationConfig | None]:
    """Check that a model agrees with the checkpoint and with `serving_config`. Return the quantization that this states by table.

    Raises:
        ConfigError, CheckpointMismatchError, UnknownTableError: they differ.
    """
    config = None if serving_config is None else ServingConfig.parse(serving_config)
    if config is not None:
        check_tables(config, checkpoint.tables())
    model.check_features(checkpoint.path, checkpoint.layer_config, config)
    return {} if config is None else quantization_in(config)


def quantization_in(config: ServingConfig) -> Mapping[str, QuantizationConfig | None]:
    """Return the quantization that `config` states, by table."""
    return {name: table.quantization_config for name, table in config.tables.items()}


def _check_all_served(asked: Sequence[str] | None, served: Sequence[str]) -> None:
    unserved = [name for name in asked or () if name not in served]
    if unserved:
        raise ConfigError(
            f"tables: no feature looks up in {', '.join(unserved)}. Add such a feature to the serving_config, or "
            "leave the table out."
        )


def _require_tensorflow() -> None:
    try:
        import tensorflow  # noqa: F401, ICN001
    except ImportError:
        raise MissingExtraError("an export", "tensorflow", "tf") from None
