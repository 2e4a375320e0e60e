"""The description of one export, made in one form of lookups, of a whole model, of a live model, and of a retrieval."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

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
from tpuembed.export.stream.engines import Engine
from tpuembed.export.stream.shard import Source

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint
    from tpuembed.export.graph.keras_model import KerasModel
    from tpuembed.export.graph.stacked_tables import StackedTables

__all__ = ["ExportRequest", "SaveGraph", "check_model_config", "make_request", "saving"]

SaveGraph = Callable[[ExportPlan, Path], SavedGraph]
"""Saves the signatures over the stacks of a plan into a folder."""

_OF_KERAS: Final = "non_trainable_variables"
"""Where `keras.callbacks.OrbaxCheckpoint` saves the tables and slots of layers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """An export before it is planned.

    Attributes:
        checkpoint: it is read here, and `source` by the engine's tasks.
        source: the same checkpoint, as every process opens it for itself.
        tables: names of the tables that the signatures look up in.
        save_graph: saves the signatures.
        is_model: whether it is a whole model, and not lookups only.
        whole_tables: those tables that a model reads whole.
        index_tables: those that the signatures search as an index.
        dropped_features: features left out because their tables are not exported.
        quantization: by table, for those whose activations were quantized in training.
        engine: runs the tasks. None for the one that the options name.
    """

    checkpoint: "Checkpoint"
    source: Source
    tables: Sequence[str]
    save_graph: SaveGraph
    is_model: bool = False
    whole_tables: Sequence[str] = ()
    index_tables: Sequence[str] = ()
    dropped_features: tuple[str, ...] = ()
    quantization: Mapping[str, QuantizationConfig] = dataclasses.field(default_factory=dict)
    engine: Engine | None = None


def make_request(
    checkpoint: "Checkpoint",
    source: Source,
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
        if isinstance(names, str):
            raise ConfigError(f"{what} must be a list of names, got the text {names!r}. Write [{names!r}].")
        if names is not None and not names:
            raise ConfigError(f"{what} is empty. Name at least one, or leave it out for all.")
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
        return _lookup_request(checkpoint, source, serving_config, tables, features)
    for what, names in (("tables", tables), ("features", features)):
        if names is not None:
            raise ConfigError(
                f"{what}: a model needs all of its tables and inputs. Leave `{what}` out, or leave `model` out to export "
                "lookups only."
            )
    return _model_request(checkpoint, source, serving_config, model, allow_unused_weights)


def _lookup_request(
    checkpoint: "Checkpoint",
    source: Source,
    serving_config: Any,
    tables: Sequence[str] | None,
    features: Sequence[str] | None,
) -> ExportRequest:
    """Return an export of the features of a serving_config."""
    config = serving_config_of(checkpoint, serving_config)
    chosen = config if features is None else config.only_features(features)
    kept = chosen if tables is None else chosen.only_tables(tables)
    available = checkpoint.tables()
    served = served_features(kept, available, checkpoint.layer_config, checkpoint.vocabulary)
    vocabularies = {each.table: each.spec.vocabulary for each in served if each.spec.vocabulary is not None}
    given = {table: names for table, names in vocabularies.items() if table not in checkpoint.vocabularies}
    check_names_in(given, checkpoint.path, "serving_config")
    found = list(dict.fromkeys(feature.table for feature in served))
    unserved = [name for name in tables or () if name not in found]
    if unserved:
        raise ConfigError(
            f"tables: no feature looks up in {', '.join(unserved)}. Add such a feature to the serving_config, or "
            "leave the table out."
        )

    def save_graph(plan: ExportPlan, folder: Path) -> SavedGraph:
        _require_tensorflow()
        from tpuembed.export.graph.lookup_model import LookupModel
        from tpuembed.export.graph.stacked_tables import StackedTables

        stacked = StackedTables(available, vocabularies.get)
        for table in vocabularies:
            stacked.note_names(table)
        return saving(LookupModel(served, stacked), stacked, list)(plan, folder)

    return ExportRequest(
        checkpoint=checkpoint,
        source=source,
        tables=found,
        save_graph=save_graph,
        dropped_features=tuple(name for name in config.features if name not in kept.features),
        quantization=quantization_of(checkpoint.layer_config, _quantization_in(config)),
    )


def _model_request(
    checkpoint: "Checkpoint", source: Source, serving_config: Any, factory: Any, allow_unused_weights: bool
) -> ExportRequest:
    """Return an export of a Keras model, which is built in a scope that allocates no tables."""
    _require_tensorflow()
    from tpuembed.export.graph.dense_weights import restore_dense_weights
    from tpuembed.export.graph.keras_model import build_model
    from tpuembed.export.graph.stacked_tables import StackedTables

    stacked = StackedTables.of(checkpoint)
    model = build_model(factory, stacked)
    model.compare_vocabularies(checkpoint.path, stacked.given_names(checkpoint))
    stated = check_model_config(model, checkpoint, serving_config)
    tables = list(stacked.required)
    if not tables:
        raise ConfigError("model: the factory built no tpuembed.TPUEmbedding layer, so there is no table to export.")

    def dense() -> list[Any]:
        restore_dense_weights(model.model, checkpoint, tables, allow_unused_weights=allow_unused_weights)
        return model.state()

    return ExportRequest(
        checkpoint=checkpoint,
        source=source,
        tables=tables,
        save_graph=saving(model, stacked, dense),
        is_model=True,
        whole_tables=stacked.read_whole,
        quantization=quantization_of(checkpoint.layer_config, stacked.quantization, stated),
    )


def saving(model: Any, tables: "StackedTables", dense: Callable[[], Sequence[Any]]) -> SaveGraph:
    """Return a function that saves the graph of `model` over `tables`. `dense` restores its other weights, and returns them."""

    def save(plan: ExportPlan, folder: Path) -> SavedGraph:
        from tpuembed.export.graph.saved_model import save_graph

        return save_graph(model, tables, plan.stacks, dense, folder, plan.layout, require_finite=plan.require_finite)

    return save


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
    return {} if config is None else _quantization_in(config)


def _quantization_in(config: ServingConfig) -> Mapping[str, QuantizationConfig | None]:
    """Return the quantization that `config` states, by table."""
    return {name: table.quantization_config for name, table in config.tables.items()}


def _require_tensorflow() -> None:
    try:
        import tensorflow  # noqa: F401, ICN001
    except ImportError:
        raise MissingExtraError("an export", "tensorflow", "tf") from None
