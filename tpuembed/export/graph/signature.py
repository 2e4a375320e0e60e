"""Resolves the features to serve, of a serving_config or of the checkpoint's own config, against the checkpoint's
tables.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from tpuembed.config import QuantizationConfig, ServingConfig, ServingFeature, feature_config_from_dict
from tpuembed.config.checks import did_you_mean
from tpuembed.config.structure import flatten
from tpuembed.errors import CheckpointMismatchError, ConfigError, UnknownTableError
from tpuembed.manifest import FeatureEntry
from tpuembed.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tpuembed.checkpoint import Checkpoint, TableInfo

__all__ = [
    "Saved",
    "ServedFeature",
    "check_input_names",
    "check_tables",
    "find_table",
    "quantization_of",
    "served_features",
    "serving_config_of",
    "trained_with_rows",
    "vocabulary_of",
]

# The names that TensorFlow accepts for a placeholder, and so for a signature's input.
_INPUT_NAME = re.compile(r"[A-Za-z0-9.][A-Za-z0-9_.\\/>-]*")

_ROWS_AT_ONCE: Final = 1 << 16
Saved = Callable[[str], Vocabulary | None]
"""Returns the vocabulary that a checkpoint has for a table, or None."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedFeature:
    """One feature of the signature, fully resolved.

    Attributes:
        name: name of its input and output; `<name>_weights` is its second input if it is `weighted`.
        table: the table to look up in, with `rows` rows and `dim` columns.
        spec: how to look up; its combiner and its out_of_vocabulary are never None. A vocabulary in it has the names.
    """

    name: str
    table: str
    rows: int
    dim: int
    spec: ServingFeature

    @property
    def combiner(self) -> str:
        """Return sum, mean or sqrtn."""
        return self.spec.combiner or "mean"

    @property
    def policy(self) -> str | int:
        """Return the handling of ids outside the table: "error", "zeros", or the row to take instead."""
        given = "error" if self.spec.out_of_vocabulary is None else self.spec.out_of_vocabulary
        return given if isinstance(given, str) else int(given)

    @property
    def names(self) -> str:
        """Return "string" or "int64", the type of the names that it takes. Empty if it takes row numbers."""
        return "" if self.spec.vocabulary is None else self.spec.vocabulary.dtype

    @property
    def weights_name(self) -> str:
        """Return the name of the input for its weights, if it is weighted."""
        return f"{self.name}_weights"

    @property
    def entry(self) -> FeatureEntry:
        """Return the feature as the manifest lists it."""
        return FeatureEntry(
            name=self.name,
            table=self.table,
            input=self.spec.input,
            weighted=self.spec.weighted,
            max_sequence_length=self.spec.max_sequence_length,
            out_of_vocabulary=self.policy,
            combiner=self.combiner,
            names=self.names,
        )


def serving_config_of(checkpoint: "Checkpoint", given: Any) -> ServingConfig:
    """Return `given`, parsed, or the features of the layer that wrote `checkpoint`.

    Raises:
        ConfigError: nothing is given, and the checkpoint has no features.
    """
    if given is not None:
        return ServingConfig.parse(given)
    if checkpoint.layer_config is None:
        raise ConfigError(
            f"checkpoint {checkpoint.path}: it does not record which features to serve, because tpuembed's layer "
            "did not write it. Give a serving_config or a model."
        )
    return ServingConfig.from_features(feature_config_from_dict(checkpoint.layer_config))


def served_features(
    config: ServingConfig,
    tables: Mapping[str, "TableInfo"],
    own: Mapping[str, Any] | None,
    saved: Saved = lambda _: None,
) -> tuple[ServedFeature, ...]:
    """Return the features of `config`, each with its table's size, combiner and names.

    Args:
        config: the features to serve.
        tables: the checkpoint's tables.
        own: the checkpoint's `layer_config`, which has combiners and policies, or None.
        saved: returns the vocabulary that the checkpoint has for a table, or None.

    Raises:
        UnknownTableError: a feature's table is not in the checkpoint.
        CheckpointMismatchError: a table's size or width disagrees with the checkpoint.
        ConfigError: a name that TensorFlow does not accept for an input, an out_of_vocabulary row outside its table, or a
            vocabulary that is none of its table.
    """
    check_tables(config, tables)
    combiners = {name: fields.get("combiner") for name, fields in (own or {}).get("tables", {}).items()}
    combiners |= {name: stated.combiner for name, stated in config.tables.items() if stated.combiner}
    # A policy is the feature's own, else that of the layer's feature of its name and table, else the table's.
    by_feature: dict[tuple[str, str], str | int | None] = {}
    by_table: dict[str, str | int] = {}
    if own is not None and '"out_of_vocabulary"' in json.dumps(own):  # it is none of another library
        trained = feature_config_from_dict(own)
        layer = ServingConfig.from_features(trained).features
        by_feature = {(name, spec.table): spec.out_of_vocabulary for name, spec in layer.items()}
        by_table = {leaf.table.name: leaf.table.out_of_vocabulary for _, leaf in flatten(trained)}
    resolved = []
    for name, spec in config.features.items():
        table, policy = find_table(spec.table, tables), spec.out_of_vocabulary
        if policy is None:
            policy = by_feature.get((name, spec.table))
        if policy is None:
            policy = by_table.get(spec.table, "error")
        if not isinstance(policy, str) and policy >= table.rows:
            raise ConfigError(
                f"feature {name!r}: out_of_vocabulary row {policy} is outside table {spec.table!r} of {table.rows} rows. "
                f"Name a row from 0 to {table.rows - 1}, or use zeros or error."
            )
        combiner = spec.combiner or combiners.get(spec.table) or "mean"
        spec = dataclasses.replace(spec, combiner=combiner, out_of_vocabulary=policy)
        resolved.append(ServedFeature(name=name, table=spec.table, rows=table.rows, dim=table.dim, spec=spec))
    features = _with_names(resolved, saved, trained_with_rows(own))
    check_input_names([*config.features, *(feature.weights_name for feature in features if feature.spec.weighted)])
    return features


def trained_with_rows(own: Mapping[str, Any] | None) -> set[tuple[str, str]]:
    """Return name and table of the features that took row numbers in training, if others took names. A name is a path.

    Args:
        own: the checkpoint's `layer_config`, or None.
    """
    if own is None or '"vocabulary"' not in json.dumps(own):
        return set()
    layer = ServingConfig.from_features(feature_config_from_dict(own)).features
    return {(name, spec.table) for name, spec in layer.items() if spec.vocabulary is None}


def quantization_of(
    own: Mapping[str, Any] | None, *stated: Mapping[str, QuantizationConfig | None]
) -> dict[str, QuantizationConfig]:
    """Return the simulated quantization that tables were trained with, by table.

    Args:
        own: the checkpoint's `layer_config`, or None.
        stated: by table, the statements of a serving_config and of a model's layers; None stands for the checkpoint's.

    Raises:
        CheckpointMismatchError: two of them differ.
    """
    tables = (own or {}).get("tables", {})
    fields = {name: config.get("quantization_config") for name, config in tables.items()}
    found = {name: QuantizationConfig.parse(value) for name, value in fields.items() if value is not None}
    for by_table in stated:
        for name, config in by_table.items():
            if config is not None and found.setdefault(name, config) != config:
                raise CheckpointMismatchError(
                    f"table {name!r}: its quantization_config is {config} in the serving_config or model, but "
                    f"{found[name]} in the checkpoint. Leave it out."
                )
    return found


def check_input_names(names: Iterable[str]) -> None:
    """Raise ConfigError for names that TensorFlow does not accept for the inputs of one signature."""
    seen: dict[str, str] = {}
    for name in names:
        if not _INPUT_NAME.fullmatch(name):
            raise ConfigError(
                f"feature {name!r}: TensorFlow allows only letters, digits and _ . / > - in an input's name, "
                "without a leading _. Rename it."
            )
        # TensorFlow makes function arguments and operations of the names. Operations must differ by more than case.
        for form in ("argument " + re.sub(r"\W", "_", name), "operation " + name.lower()):
            if seen.setdefault(form, name) != name:
                raise ConfigError(
                    f"features {seen[form]!r} and {name!r}: TensorFlow cannot distinguish these names of inputs. "
                    "Rename one."
                )


def find_table(name: str, tables: Mapping[str, "TableInfo"]) -> "TableInfo":
    """Return the table `name`. Raises UnknownTableError, which names the nearest table."""
    if name not in tables:
        raise UnknownTableError(f"table {name!r} is not in the checkpoint; {did_you_mean(name, tables)}")
    return tables[name]


def check_tables(config: ServingConfig, tables: Mapping[str, "TableInfo"]) -> None:
    """Raise an error unless the checkpoint has every table that `config` names, with the size that it states."""
    for feature in config.features.values():
        find_table(feature.table, tables)
    for name, stated in config.tables.items():
        table = find_table(name, tables)
        sizes = (("vocabulary_size", stated.vocabulary_size, table.rows), ("dim", stated.dim, table.dim))
        for field, size, found in sizes:
            if size is not None and size != found:
                raise CheckpointMismatchError(
                    f"table {name!r}: {field} is {size} in the serving_config, but {found} in the checkpoint. Correct "
                    "the serving_config."
                )


def _with_names(
    features: Sequence[ServedFeature], saved: Saved, trained_with_rows: Container[tuple[str, str]] = ()
) -> tuple[ServedFeature, ...]:
    """Return `features` with the names of their tables, where they take names. Features of one table share them.

    Args:
        features: what was asked for.
        saved: returns the checkpoint's vocabulary of a table, or None.
        trained_with_rows: name and table of the layer's features that took row numbers.

    Raises:
        ConfigError: a vocabulary is none of its table, two of one table differ, or a list's padding is a name.
    """
    saved = functools.cache(saved)
    found: dict[str, Vocabulary] = {}
    named = {}
    for feature in sorted(features, key=lambda each: not each.spec.vocabulary):  # those with names first
        given, table, where = feature.spec.vocabulary, feature.table, f"feature {feature.name!r}"
        if given is None and not feature.spec.takes_rows and (feature.name, table) not in trained_with_rows:
            given = saved(table)
        if given is None:
            continue
        chosen = vocabulary_of(where, given, table, feature.rows, found.get if table in found else saved)
        found[table] = chosen
        padding = b"" if chosen.dtype == "string" else -1
        if feature.spec.input == "ids" and chosen.has(padding):
            raise ConfigError(
                f"{where}: the vocabulary of table {table!r} has the name {padding!r}, which is the padding of lists. Serve "
                'one name per row with input "id", or train without that name.'
            )
        named[feature.name] = dataclasses.replace(feature, spec=dataclasses.replace(feature.spec, vocabulary=chosen))
    return tuple(named.get(feature.name, feature) for feature in features)


def vocabulary_of(where: str, given: Vocabulary, table: str, rows: int, saved: Saved) -> Vocabulary:
    """Return the vocabulary of a table that a feature looks up in by name.

    Args:
        where: begins the messages of errors.
        given: of the feature. Without names it stands for the checkpoint's.
        table: its name.
        rows: of the table.
        saved: returns the checkpoint's vocabulary of a table, or None.

    Raises:
        ConfigError: there is none, the given one differs from the checkpoint's, or the table has not enough rows for it.
    """
    found = saved(table)
    if found is None and not len(given):
        raise ConfigError(
            f"{where}: its vocabulary has no names, and the checkpoint has none for table {table!r}. Give the names: "
            "Vocabulary.from_file, or file in a serving_config."
        )
    if found is None:
        found = given
    elif unlike := given.unlike(found):
        option, own, its = unlike
        raise ConfigError(
            f"{where}: its vocabulary has {option} {own}, but that of table {table!r} has {its}. Give the one that the table was "
            "trained with."
        )
    elif len(given) and not given.same_names(found):
        row, name, other = _first_difference(given, found)
        raise ConfigError(
            f"{where}: its vocabulary has {len(given)} names, and that of table {table!r} has {len(found)}. Row {row} is {name} in "
            f"the first and {other} in the second. Leave the names out to take those of the checkpoint."
        )
    if not len(found):
        raise ConfigError(
            f"{where}: the vocabulary of table {table!r} in the checkpoint has no names. Train with names, or serve row numbers "
            "with takes_rows: true."
        )
    if found.rows > rows:
        raise ConfigError(
            f"{where}: its vocabulary has {len(found)} names and {found.oov_buckets} buckets, but table {table!r} has "
            f"{rows} rows. Give the vocabulary that the table was trained with."
        )
    return found


def _first_difference(one: Vocabulary, other: Vocabulary) -> tuple[int, str, str]:
    """Return the first row with different names in two vocabularies of the same buckets, and what each has there."""

    def shown(vocabulary: Vocabulary, row: int) -> str:
        name = vocabulary.names([row])[0] if row < vocabulary.rows else None
        return "free" if name is None else repr(name)

    row = common = min(one.rows, other.rows)
    for start in range(one.oov_buckets, common, _ROWS_AT_ONCE):
        rows = range(start, min(start + _ROWS_AT_ONCE, common))
        names, others = one.names(rows), other.names(rows)
        if names != others:
            row = next(row for row, own, its in zip(rows, names, others, strict=True) if own != its)
            break
    return row, shown(one, row), shown(other, row)
