"""The config of a signature: its features, their tables, and how their rows are combined."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tpuembed.config.checks import check_choice, check_count, check_keys, check_name, did_you_mean, from_mapping
from tpuembed.config.serialization import load_mapping
from tpuembed.config.structure import flatten
from tpuembed.config.tables import (
    COMBINERS,
    FeatureConfig,
    QuantizationConfig,
    check_out_of_vocabulary,
    checked_vocabulary,
)
from tpuembed.errors import ConfigError
from tpuembed.vocabulary import Vocabulary

__all__ = ["INPUTS", "ServingConfig", "ServingFeature", "ServingTable"]

INPUTS = ("id", "ids")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingTable:
    """Values of a table that the checkpoint does not have, or must agree with.

    Attributes:
        vocabulary_size: rows. None takes the checkpoint's.
        dim: columns. None takes the checkpoint's.
        combiner: for features without their own. None takes the checkpoint's, or mean.
        quantization_config: the quantization of its activations in training, or a mapping of its fields. None takes the
            checkpoint's, or no quantization.
    """

    vocabulary_size: int | None = None
    dim: int | None = None
    combiner: str | None = None
    quantization_config: QuantizationConfig | None = None

    def __post_init__(self) -> None:
        for field in ("vocabulary_size", "dim"):
            if getattr(self, field) is not None:
                check_count(f"serving table: {field}", getattr(self, field))
        if self.combiner is not None:
            check_choice("serving table: combiner", self.combiner, COMBINERS)
        if self.quantization_config is not None:
            object.__setattr__(self, "quantization_config", QuantizationConfig.parse(self.quantization_config))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingFeature:
    """One feature of the signature.

    Attributes:
        table: the table's name in the checkpoint.
        input: "id" for int64 [batch], one row each. "ids" for int64 [batch, hot], padded with -1 and combined.
        combiner: sum, mean or sqrtn. None takes the table's. For one row ("id") each of them gives that row.
        weighted: adds a second input `<feature>_weights`, float32 [batch, hot], with weights of the ids.
        max_sequence_length: above 0, the rows are not combined. The output is [batch, max_sequence_length, dim],
            zero-padded.
        out_of_vocabulary: "error" fails the request, "zeros" gives a row of zeros, a row number gives that row. None
            takes the checkpoint's: that of its feature with the same name and table, else that of the table, else
            error.
        vocabulary: the names that the feature takes: a Vocabulary, or a mapping of its options (dtype, oov_buckets, and file for
            a text file of names). None takes those that the checkpoint has for the table. If it has none, or if the layer's
            feature with the same name and table took row numbers, it takes row numbers.
        takes_rows: take row numbers, even if the checkpoint has names for the table.
    """

    table: str
    input: str = "ids"
    combiner: str | None = None
    weighted: bool = False
    max_sequence_length: int = 0
    out_of_vocabulary: str | int | None = None
    vocabulary: Vocabulary | None = None
    takes_rows: bool = False

    def __post_init__(self) -> None:
        check_name("serving feature: table", self.table)
        where = f"serving feature of table {self.table!r}"
        object.__setattr__(self, "vocabulary", checked_vocabulary(where, self.vocabulary))
        check_choice("serving feature: input", self.input, INPUTS)
        if self.combiner is not None:
            check_choice("serving feature: combiner", self.combiner, COMBINERS)
        check_count("serving feature: max_sequence_length", self.max_sequence_length, 0, 2**31 - 1)
        for field in ("weighted", "takes_rows"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"serving feature: {field} must be true or false, got {getattr(self, field)!r}")
        if self.out_of_vocabulary is not None:
            check_out_of_vocabulary("serving feature", self.out_of_vocabulary)
        clashes = {
            "input: id with weighted: true": self.input == "id" and self.weighted,
            "input: id with max_sequence_length": self.input == "id" and self.max_sequence_length > 0,
            "weighted: true with max_sequence_length": self.weighted and self.max_sequence_length > 0,
            "takes_rows: true with a vocabulary": self.takes_rows and self.vocabulary is not None,
        }
        for clash, present in clashes.items():
            if present:
                raise ConfigError(f"serving feature of table {self.table!r}: {clash} has no meaning. Drop one.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """The features of an export's signature, and its tables if the checkpoint does not describe them.

    Raises:
        ConfigError: there is no feature, or two inputs have one name.
    """

    features: Mapping[str, ServingFeature]
    tables: Mapping[str, ServingTable] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.features:
            raise ConfigError("serving_config: features is empty. Name at least one.")
        for name, feature in self.features.items():
            check_name("serving_config: feature", name)
            if feature.weighted and f"{name}_weights" in self.features:
                raise ConfigError(
                    f"serving_config: feature {name + '_weights'!r} has the name of the weights of feature {name!r}. Rename one."
                )

    @classmethod
    def parse(cls, source: Any) -> "ServingConfig":
        """Return the config for a YAML or JSON path, a dict, a nested structure of FeatureConfig, or a ServingConfig.

        Raises:
            ConfigError: a key is unknown (the message names the nearest known one), or a value is out of range.
        """
        if isinstance(source, cls):
            return source
        holds_features = any(isinstance(leaf, FeatureConfig) for _, leaf in flatten(source))
        if not isinstance(source, str | Path | Mapping) or holds_features:
            return cls.from_features(source)
        mapping = load_mapping(source, "serving_config")
        check_keys("serving_config", mapping, ("features", "tables"))
        features = _section(mapping, "features", ServingFeature)
        return cls(features=features, tables=_section(mapping, "tables", ServingTable))

    @classmethod
    def from_features(cls, features: Any) -> "ServingConfig":
        """Return the config for a nested structure of FeatureConfig. The path of a feature, joined with "/", is its name."""
        served: dict[str, ServingFeature] = {}
        tables: dict[str, ServingTable] = {}
        for path, feature in flatten(features):
            if not isinstance(feature, FeatureConfig):
                raise ConfigError(f"serving_config: feature {path!r}: expected a FeatureConfig, got {feature!r}")
            table = feature.table
            name = path or feature.name or table.name
            served[name] = ServingFeature(
                table=table.name,
                max_sequence_length=feature.max_sequence_length,
                out_of_vocabulary=feature.out_of_vocabulary,
                vocabulary=feature.vocabulary,
            )
            tables[table.name] = ServingTable(
                vocabulary_size=table.vocabulary_size,
                dim=table.dim,
                combiner=table.combiner,
                quantization_config=table.quantization_config,
            )
        return cls(features=served, tables=tables)

    def only_tables(self, names: Iterable[str]) -> "ServingConfig":
        """Return the part of this config whose features look up in the tables `names`."""
        keep = set(names)
        features = {name: feature for name, feature in self.features.items() if feature.table in keep}
        if not features:
            raise ConfigError(
                f"serving_config: no feature uses {', '.join(sorted(keep))}. Add one, or choose other tables."
            )
        return ServingConfig(features=features, tables={k: v for k, v in self.tables.items() if k in keep})

    def only_features(self, names: Iterable[str]) -> "ServingConfig":
        """Return the part of this config with the features `names`. Raises ConfigError if there is no such feature."""
        names = list(names)
        for name in names:
            if name not in self.features:
                raise ConfigError(f"serving_config: has no feature {name!r}; {did_you_mean(name, self.features)}")
        features = {name: feature for name, feature in self.features.items() if name in names}
        used = {feature.table for feature in features.values()}
        return ServingConfig(features=features, tables={k: v for k, v in self.tables.items() if k in used})


def _section(mapping: Mapping[str, Any], key: str, cls: Any) -> dict[str, Any]:
    section = mapping.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"serving_config: {key} must be a mapping, got {section!r}")
    for name in section:
        if not isinstance(name, str):  # YAML reads 1, on and null as other types than text
            raise ConfigError(f"serving_config: {key}: {name!r} is not text. Put the name in quotes.")
    where = f"serving_config: {key}"
    return {name: from_mapping(cls, f"{where}: {name}", fields, begins_all=True) for name, fields in section.items()}
