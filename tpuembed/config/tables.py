"""The configs of tables and of the features that look up rows in them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tpuembed.config.checks import check_choice, check_count, check_name, check_number, from_mapping
from tpuembed.config.optimizers import Optimizer, optimizer_from
from tpuembed.errors import ConfigError
from tpuembed.vocabulary import Vocabulary

__all__ = [
    "COMBINERS",
    "OUT_OF_VOCABULARY",
    "FeatureConfig",
    "QuantizationConfig",
    "TableConfig",
    "check_out_of_vocabulary",
    "checked_vocabulary",
]

COMBINERS = ("sum", "mean", "sqrtn")
OUT_OF_VOCABULARY = ("error", "zeros")
"""The policies for an id outside its table. A row number is the third policy: that row is looked up instead."""


def check_out_of_vocabulary(where: str, value: object, rows: int | None = None) -> None:
    """Raise ConfigError unless `value` is one of OUT_OF_VOCABULARY or a row number, below `rows` if that is given."""
    if isinstance(value, str):
        if value not in OUT_OF_VOCABULARY:
            choices = ", ".join((*OUT_OF_VOCABULARY, "<row>"))
            raise ConfigError(f"{where}: out_of_vocabulary must be one of {choices}; got {value!r}")
        return
    check_count(f"{where}: out_of_vocabulary", value, 0)
    if rows is not None and value >= rows:  # type: ignore[operator]
        raise ConfigError(
            f"{where}: out_of_vocabulary row {value} is outside the table of {rows} rows. Choose a row below {rows}, or zeros."
        )


def checked_vocabulary(where: str, value: Any, oov_buckets: int | None = None) -> Vocabulary | None:
    """Return the vocabulary that a feature was given.

    Args:
        where: the feature, for messages.
        value: a Vocabulary, a list of names, a mapping of `Vocabulary.from_options`, or None.
        oov_buckets: the feature's own statement, or None.

    Raises:
        ConfigError: `value` is none of them, or `oov_buckets` contradicts it.
    """
    if value is None:
        if oov_buckets is not None:
            raise ConfigError(
                f"{where}: oov_buckets={oov_buckets} without a vocabulary has no meaning. Give a vocabulary."
            )
        return None
    if isinstance(value, Mapping):
        found = Vocabulary.from_options(value, where)
    elif isinstance(value, list | tuple):
        is_text = not value or isinstance(value[0], str | bytes)
        found = Vocabulary(value, dtype="string" if is_text else "int64", oov_buckets=oov_buckets or 0)
    elif isinstance(value, Vocabulary):
        found = value
    else:
        raise ConfigError(f"{where}: vocabulary must be a tpuembed.Vocabulary or a list of names, got {value!r}.")
    if oov_buckets is not None and oov_buckets != found.oov_buckets:
        raise ConfigError(
            f"{where}: oov_buckets is {oov_buckets}, and its vocabulary has {found.oov_buckets}. Give oov_buckets to the "
            "Vocabulary, and leave it out of the feature."
        )
    return found


@dataclasses.dataclass(frozen=True)
class QuantizationConfig:
    """Simulated quantization of activations: `num_buckets` levels between `lower` and `upper`.

    Source: QuantizationConfiguration in tensorflow/core/protobuf/tpu/tpu_embedding_configuration.proto.
    """

    num_buckets: int
    lower: float
    upper: float

    def __post_init__(self) -> None:
        check_count("quantization_config: num_buckets", self.num_buckets, 2)
        check_number("quantization_config: lower", self.lower)
        check_number("quantization_config: upper", self.upper, self.lower, above=True)

    @classmethod
    def parse(cls, value: Any) -> "QuantizationConfig":
        """Return the config for a mapping of its fields, or `value` itself if it is one."""
        return value if isinstance(value, cls) else from_mapping(cls, "quantization_config", value)

    @property
    def quantum(self) -> float:
        """Return the step from one level to the next."""
        return (self.upper - self.lower) / (self.num_buckets - 1)


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """One embedding table: a [vocabulary_size, dim] matrix of float32.

    Attributes:
        vocabulary_size: rows.
        dim: columns.
        name: the key of the table in checkpoints and exports. It is unique among the tables of a layer.
        combiner: how the rows of one sparse or ragged example are reduced: sum, mean or sqrtn.
        initializer: None for a normal distribution cut at two standard deviations of 1/sqrt(dim). Else a Keras
            initializer, its name or its serialized dict, or a callable of `(shape, dtype=...)`.
        optimizer: overrides the layer's for this table. A name, a tpuembed spec, a `tf.tpu.experimental.embedding`
            optimizer or a Keras 3 optimizer.
        quantization_config: simulated quantization of the activations during training, or a mapping of its fields.
        max_ids_per_partition: on SparseCores, the ids of one step that one SparseCore takes from another one's samples
            for this table. None takes TensorFlow's default, 256. A stack of tables takes the sum of its tables' limits.
        max_unique_ids_per_partition: the same, each id counted once.
        out_of_vocabulary: the policy of features without their own: "error", "zeros" or a row, see FeatureConfig.

    Raises:
        ConfigError: a field is of the wrong type or out of range.

    Source: `tf.tpu.experimental.embedding.TableConfig`. The keyword names are its own.
    """

    vocabulary_size: int
    dim: int
    name: str
    combiner: str = "mean"
    initializer: Any = None
    optimizer: Any = None
    quantization_config: QuantizationConfig | None = None
    max_ids_per_partition: int | None = None
    max_unique_ids_per_partition: int | None = None
    out_of_vocabulary: str | int = "error"

    def __post_init__(self) -> None:
        check_name("TableConfig", self.name)
        check_count(f"table {self.name!r}: vocabulary_size", self.vocabulary_size)
        check_out_of_vocabulary(f"table {self.name!r}", self.out_of_vocabulary, self.vocabulary_size)
        check_count(f"table {self.name!r}: dim", self.dim)
        check_choice(f"table {self.name!r}: combiner", self.combiner, COMBINERS)
        for limit in ("max_ids_per_partition", "max_unique_ids_per_partition"):
            if getattr(self, limit) is not None:
                check_count(f"table {self.name!r}: {limit}", getattr(self, limit))
        if isinstance(self.optimizer, str | Mapping):
            try:
                optimizer_from(self.optimizer)
            except ConfigError as error:
                raise ConfigError(f"table {self.name!r}: {error}") from None
        value = self.initializer
        if value is not None and not isinstance(value, str | Mapping) and not callable(value):
            raise ConfigError(f"table {self.name!r}: initializer must be a name, a dict or a callable, got {value!r}")
        if self.quantization_config is not None:
            try:
                object.__setattr__(self, "quantization_config", QuantizationConfig.parse(self.quantization_config))
            except ConfigError as error:
                raise ConfigError(f"table {self.name!r}: {error}") from None

    def __hash__(self) -> int:
        """Hash the fields that are always hashable. Equality compares all fields."""
        return hash((self.name, self.vocabulary_size, self.dim))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values. The layer writes initializers as Keras dicts."""
        out: dict[str, Any] = {"vocabulary_size": int(self.vocabulary_size), "dim": int(self.dim), "name": self.name}
        out["combiner"] = self.combiner
        for field in ("initializer", "optimizer"):
            value = getattr(self, field)
            value = value.to_dict() if isinstance(value, Optimizer) else value
            if value is None:
                continue
            if not isinstance(value, str | Mapping):
                raise ConfigError(
                    f"table {self.name!r}: {field} of type {type(value).__name__} cannot be saved. Give a name or a dict."
                )
            out[field] = value
        if self.quantization_config is not None:
            out["quantization_config"] = dataclasses.asdict(self.quantization_config)
        if self.out_of_vocabulary != "error":
            out["out_of_vocabulary"] = _plain_policy(self.out_of_vocabulary)
        limits = ("max_ids_per_partition", "max_unique_ids_per_partition")
        return out | {limit: getattr(self, limit) for limit in limits if getattr(self, limit) is not None}


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """One feature: ids that are looked up in `table`. Features that share a TableConfig share its rows.

    Attributes:
        table: the TableConfig.
        name: a label for messages. A feature is identified by its place in the nested structure.
        max_sequence_length: 0 combines the rows of an example. Above 0, the rows are kept as a sequence, cut or
            zero-padded to this length (sparse and ragged ids only).
        output_shape: the activation's shape without `dim`, if the input does not give it.
        validate_weights_and_indices: drop negative sparse and ragged ids instead of failing on them.
        out_of_vocabulary: the policy for an id outside the table. "error" fails the step and names the id. "zeros": the
            id counts, its row is zeros, and it trains nothing. A row number: that row is looked up, and trained,
            instead. None takes the table's, and the attribute then holds the table's.
        vocabulary: the names of the table's rows, a Vocabulary, or a list of names. The feature then takes names in the place
            of ids: strings, or int64. A name that is not in the vocabulary has one of its oov_buckets, or follows
            out_of_vocabulary. None for a feature of row numbers.
        oov_buckets: rows for unknown names, if `vocabulary` is a list. A Vocabulary has its own, which this must equal.

    Raises:
        ConfigError: a field is of the wrong type or out of range.

    Source: `tf.tpu.experimental.embedding.FeatureConfig`. The keyword names are its own, `vocabulary` and what follows apart.
    """

    table: TableConfig
    name: str | None = None
    max_sequence_length: int = 0
    output_shape: tuple[int | None, ...] | None = None
    validate_weights_and_indices: bool = True
    out_of_vocabulary: str | int | None = None
    vocabulary: Any = None
    oov_buckets: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.table, TableConfig):
            raise ConfigError(f"FeatureConfig: table must be a tpuembed.TableConfig, got {self.table!r}")
        if self.out_of_vocabulary is None:
            object.__setattr__(self, "out_of_vocabulary", self.table.out_of_vocabulary)
        where = f"feature of table {self.table.name!r}"
        check_out_of_vocabulary(where, self.out_of_vocabulary, self.table.vocabulary_size)
        if self.name is not None:
            check_name("FeatureConfig", self.name)
        check_count("FeatureConfig: max_sequence_length", self.max_sequence_length, 0, 2**31 - 1)
        if not isinstance(self.validate_weights_and_indices, bool):
            raise ConfigError(
                f"FeatureConfig: validate_weights_and_indices must be a bool, got {self.validate_weights_and_indices!r}"
            )
        if self.output_shape is not None:
            try:
                shape = tuple(self.output_shape)
            except TypeError:
                raise ConfigError(
                    f"FeatureConfig: output_shape must be a sequence, got {self.output_shape!r}"
                ) from None
            for size in shape:
                if size is not None:
                    check_count("FeatureConfig: output_shape", size, 1)
            object.__setattr__(self, "output_shape", shape)
        vocabulary = checked_vocabulary(where, self.vocabulary, self.oov_buckets)
        object.__setattr__(self, "vocabulary", vocabulary)
        object.__setattr__(self, "oov_buckets", None if vocabulary is None else vocabulary.oov_buckets)
        if vocabulary is not None and vocabulary.rows > self.table.vocabulary_size:
            raise ConfigError(
                f"{where}: its vocabulary needs {vocabulary.rows} rows, {vocabulary.oov_buckets} of them for unknown names. "
                f"The table has {self.table.vocabulary_size}. Make vocabulary_size larger."
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON values. The table is given by its name."""
        out: dict[str, Any] = {"table": self.table.name}
        for field in dataclasses.fields(self)[1:]:
            value = getattr(self, field.name)
            if field.name not in ("out_of_vocabulary", "vocabulary", "oov_buckets") and value != field.default:
                out[field.name] = list(value) if isinstance(value, tuple) else value
        if self.vocabulary is not None:
            out["vocabulary"] = self.vocabulary.options()
        if self.out_of_vocabulary != self.table.out_of_vocabulary:
            out["out_of_vocabulary"] = _plain_policy(self.out_of_vocabulary)
        return out


def _plain_policy(value: Any) -> str | int:
    """Return an out_of_vocabulary as a JSON value. A row may be a numpy integer."""
    return value if isinstance(value, str) else int(value)
