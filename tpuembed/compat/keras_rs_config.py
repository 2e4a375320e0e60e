"""keras-rs' configs of tables and features."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras

from tpuembed.backends.tf_config import optimizer_to_dict, resolve_optimizer
from tpuembed.config import TableConfig as LayerTable
from tpuembed.config.checks import check_choice, check_count, check_name
from tpuembed.errors import ConfigError

__all__ = ["PLACEMENTS", "FeatureConfig", "TableConfig"]

PLACEMENTS = ("auto", "default_device", "sparsecore")

Shape = tuple[int | None, ...]


def _default_initializer() -> Any:
    """Return a new initializer for each table. With a shared seed, tables of one shape would start as copies of each other."""
    return keras.initializers.VarianceScaling(mode="fan_out")


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table, float32 [vocabulary_size, embedding_dim].

    Attributes:
        name: unique among the tables of a layer.
        vocabulary_size: rows.
        embedding_dim: columns.
        initializer: a Keras initializer or its name.
        optimizer: "sgd", "adagrad", "adam" or "ftrl", a Keras 3 optimizer of these, or another optimizer that
            `TPUEmbedding` takes. None takes the layer's.
        combiner: the reduction of the rows of one example: mean, sum or sqrtn.
        placement: "sparsecore" for the TPU's embedding hardware, "default_device" for the device of the rest of the
            model, "auto" for the first if it exists.
        max_ids_per_partition: the ids of one step that a SparseCore takes from another one's samples.
        max_unique_ids_per_partition: the same, each id counted once.

    Raises:
        ConfigError: a field is not supported. The message names it.

    Source: `keras_rs.layers.TableConfig`. The fields and defaults are its own.
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = dataclasses.field(default_factory=_default_initializer)
    optimizer: Any = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256

    def __post_init__(self) -> None:
        check_name("TableConfig", self.name)
        check_count(f"table {self.name!r}: embedding_dim", self.embedding_dim)
        check_choice(f"table {self.name!r}: placement", self.placement, PLACEMENTS)
        try:
            if self.optimizer is not None:
                resolve_optimizer(self.optimizer)
        except ConfigError as error:
            raise ConfigError(f"table {self.name!r}: {error}") from None
        self.to_layer()

    def __hash__(self) -> int:
        """Hash the fields that are always hashable. Equality compares all fields."""
        return hash((self.name, self.vocabulary_size, self.embedding_dim))

    def to_layer(self) -> LayerTable:
        """Return the same table as tpuembed's config."""
        return LayerTable(
            vocabulary_size=self.vocabulary_size,
            dim=self.embedding_dim,
            name=self.name,
            combiner=self.combiner,
            initializer=self.initializer,
            optimizer=self.optimizer,
            max_ids_per_partition=self.max_ids_per_partition,
            max_unique_ids_per_partition=self.max_unique_ids_per_partition,
        )

    def get_config(self) -> dict[str, Any]:
        """Return the fields, as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields,
            "initializer": keras.saving.serialize_keras_object(self.initializer),
            "optimizer": _optimizer_to_plain(self.optimizer),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "TableConfig":
        """Return the table that `get_config` described."""
        read = keras.saving.deserialize_keras_object
        optimizer = config["optimizer"]
        if isinstance(optimizer, Mapping) and "class_name" in optimizer:
            optimizer = read(dict(optimizer))
        return cls(**{**config, "initializer": read(config["initializer"]), "optimizer": optimizer})


def _optimizer_to_plain(optimizer: Any) -> Any:
    if optimizer is None or isinstance(optimizer, str | Mapping):
        return optimizer
    if isinstance(optimizer, keras.optimizers.Optimizer):
        return keras.saving.serialize_keras_object(optimizer)
    return optimizer_to_dict(resolve_optimizer(optimizer))


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One feature: ids that are looked up in `table`.

    Attributes:
        name: a label.
        table: the TableConfig. Features that share it share its rows.
        input_shape: the shape of the ids, with the batch of all replicas: (batch,) or (batch, ids). For ragged ids, the
            maximum that an example keeps. The rest is cut.
        output_shape: the shape of the activations: (batch, embedding_dim), or (batch, ids, embedding_dim) for ids that
            are not combined.

    Raises:
        ConfigError: the shapes contradict the table or each other.

    Source: `keras_rs.layers.FeatureConfig`. The fields are its own.
    """

    name: str
    table: TableConfig
    input_shape: Shape
    output_shape: Shape

    def __post_init__(self) -> None:
        check_name("FeatureConfig", self.name)
        if not isinstance(self.table, TableConfig):
            raise ConfigError(
                f"feature {self.name!r}: table must be a tpuembed.compat.keras_rs.TableConfig, got {self.table!r}"
            )
        for field in ("input_shape", "output_shape"):
            object.__setattr__(self, field, _shape(f"feature {self.name!r}: {field}", getattr(self, field)))
        given, out, dim = self.input_shape, self.output_shape, self.table.embedding_dim
        if len(given) not in (1, 2):
            raise ConfigError(f"feature {self.name!r}: input_shape must be (batch,) or (batch, ids), got {given}")
        if len(out) < 2 or out[-1] != dim:
            raise ConfigError(
                f"feature {self.name!r}: output_shape {out} must begin with the batch and end with the table's "
                f"embedding_dim, {dim}"
            )
        if not (_agree(out[:-1], given) or self.combined):
            raise ConfigError(
                f"feature {self.name!r}: output_shape is {out}. Ids of input_shape {given} give {(*given[:1], dim)} if combined, "
                f"else {(*given, dim)}. Make output_shape one of them."
            )

    @property
    def combined(self) -> bool:
        """Return True if the ids of an example are combined into one activation."""
        return len(self.input_shape) == 2 and _agree(self.output_shape[:-1], self.input_shape[:1])

    def get_config(self) -> dict[str, Any]:
        """Return the fields, as JSON values."""
        shapes = {"input_shape": list(self.input_shape), "output_shape": list(self.output_shape)}
        return {"name": self.name, "table": self.table.get_config(), **shapes}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "FeatureConfig":
        """Return the feature that `get_config` described."""
        return cls(**{**config, "table": TableConfig.from_config(config["table"])})


def _shape(where: str, value: Any) -> Shape:
    if not isinstance(value, tuple | list):
        raise ConfigError(f"{where} must be a tuple, got {value!r}")
    for size in value:
        if size is not None:
            check_count(where, size)
    return tuple(value)


def _agree(left: Shape, right: Shape) -> bool:
    return len(left) == len(right) and all(a == b or None in (a, b) for a, b in zip(left, right, strict=True))
