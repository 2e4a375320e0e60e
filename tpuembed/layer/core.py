"""The tables of one layer, without a framework: lookup, training, names, writing, saving. The Keras layer is a shell over it."""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from tpuembed.backends import LayerCall, LayerOptions, RowGradients, TakenGradients, choose, train
from tpuembed.backends.deferred import DeferredBackend
from tpuembed.backends.restores import check_restores
from tpuembed.backends.table_state import TablesNode
from tpuembed.backends.tf_config import (
    features_from,
    features_to_dict,
    optimizer_to_dict,
    resolve_optimizer,
    sparse_core_config_from_dict,
    sparse_core_config_to_dict,
)
from tpuembed.config import FeatureConfig, TableConfig, feature_config_from_dict
from tpuembed.config.checks import check_count, did_you_mean
from tpuembed.config.structure import flatten, flatten_up_to, pack_like
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.layer.export_checks import ListFeatures
from tpuembed.layer.stamps import RowStamps
from tpuembed.layer.tables import LiveTables, check_writable
from tpuembed.layer.vocabularies import LayerVocabularies, check_names_can_arrive, shared_vocabularies
from tpuembed.layer.weight_files import (
    check_tables,
    load_stamps,
    load_tables,
    save_stamps,
    save_tables,
    save_vocabularies,
    saved_vocabularies,
)
from tpuembed.lookup import Ids, ids_of
from tpuembed.runtime.keras_saving import in_symbolic_scope
from tpuembed.runtime.table_scope import TableSource
from tpuembed.vocabulary import Vocabulary

__all__ = ["LayerTables"]


class LayerTables:
    """The tables of one layer. A framework's layer creates one, calls it, and hands on what the framework saves.

    Attributes:
        name: of the layer.
        features: the structure of FeatureConfig.
        table_names: TableConfig as the user passed it -> its name.
        options: the layer's arguments for its backend.
        backend: the hardware path, chosen once.
        takes_rows: features with a vocabulary take rows, and no names.
        updates: the variable that counts updates, int64 [].
        names: the names of the tables' rows. None if no feature takes names, and in an export.
        stamps: of the tables' rows. None if they are not tracked.
        node: the checkpoint node with the tables.
        is_trained: whether the layer trains one of its tables.
        rule: how gradients reach the tables that the layer trains. The layer sets it.
        input_shapes: path -> the shape of a feature's ids, if the layer was built with shapes.
        lists: which features took lists.
    """

    def __init__(
        self,
        name: str,
        feature_config: Any,
        optimizer: Any,
        pipeline_execution_with_tensor_core: bool,
        batch_size: int | None,
        embedding_feature: Any,
        sparse_core_embedding_config: Any,
        *,
        size_threshold: int | None,
        track_rows: bool,
        takes_rows: bool,
    ) -> None:
        """Check the arguments, see `TPUEmbedding`, and create the tables. Raises ConfigError for a wrong one."""
        if size_threshold is not None:
            check_count("TPUEmbedding: size_threshold", size_threshold, 0)
        for option, value in (("track_rows", track_rows), ("takes_rows", takes_rows)):
            if not isinstance(value, bool):
                raise ConfigError(f"TPUEmbedding: {option} must be True or False, got {value!r}.")
        self.name = name
        self.features, self.table_names = features_from(feature_config)
        spec = None if optimizer is None else resolve_optimizer(optimizer)
        with tf.init_scope():
            self.updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")
        self.options = LayerOptions(
            features=list(flatten(self.features)),
            optimizer=spec,
            updates=self.updates,
            embedding_feature=embedding_feature,
            pipelining=pipeline_execution_with_tensor_core,
            batch_size=batch_size,
            sparse_core_config=sparse_core_embedding_config,
            size_threshold=size_threshold,
            track_rows=track_rows,
        )
        self.takes_rows = takes_rows
        self.backend = choose(self.options)
        self.input_shapes: dict[str, tuple[int | None, ...]] = {}
        self.lists = ListFeatures(name)
        self.rule: RowGradients | TakenGradients | None = None
        self._given_names = shared_vocabularies(self.options.features)
        self.names: LayerVocabularies | None = None
        self._note_names()
        if self._given_names and not self.backend.is_export:
            check_names_can_arrive(self._given_names, takes_rows)
            capacities = {table.name: table.vocabulary_size for table in self.options.tables}
            self.names = self.backend.names = LayerVocabularies(self._given_names, capacities)
        states = list(self.backend.states.values())
        self.is_trained = any(state.optimizer is not None for state in states)
        self.stamps = RowStamps(self.backend.states, self.updates) if track_rows and states else None
        self.node = self._create_node()

    def _create_node(self) -> TablesNode:
        node = TablesNode(
            self.name,
            self.checkpoint_config(),
            list(self.backend.states.values()),
            self.backend.checkpoint_children(),
            self.backend.layouts(),
            self.updates,
        )
        node.saving = self.check_before_saving
        if self.names is not None:
            node.check_saved = self.names.check_saved
        if self.stamps is not None:
            node.restoring = self.stamps.rewritten
        return node

    # ---- config

    def arguments(self) -> dict[str, Any]:
        """Return the layer's arguments as JSON values. A live learning rate is written as its current value."""
        options = self.options
        return {
            "feature_config": features_to_dict(self.features),
            "optimizer": None if options.optimizer is None else optimizer_to_dict(options.optimizer),
            "pipeline_execution_with_tensor_core": options.pipelining,
            "batch_size": options.batch_size,
            "sparse_core_embedding_config": sparse_core_config_to_dict(options.sparse_core_config),
            "embedding_feature": getattr(options.embedding_feature, "name", options.embedding_feature),
            "size_threshold": options.size_threshold,
            "track_rows": options.track_rows,
            "takes_rows": self.takes_rows,
        }

    @staticmethod
    def arguments_of(config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a layer's config, of which `arguments` is a part, with objects in the place of JSON values."""
        objects = {
            "feature_config": feature_config_from_dict(config["feature_config"]),
            "sparse_core_embedding_config": sparse_core_config_from_dict(config.get("sparse_core_embedding_config")),
        }
        return {**config, **objects}

    def checkpoint_config(self) -> dict[str, Any]:
        """Return the config for checkpoints, so that an export needs no serving_config: features, tables and optimizers."""
        config = features_to_dict(self.features, for_checkpoint=True)
        for name, state in self.backend.states.items():
            config["tables"][name]["optimizer"] = None if state.optimizer is None else state.optimizer.static_dict()
        return config

    def build(self, input_shape: Any) -> None:
        """Check `input_shape`, the shape of each feature's ids or None, and use it in calls."""
        if input_shape is not None:
            leaves = flatten_up_to(self.features, input_shape, "build()'s input_shape")
            self.input_shapes = {path: tuple(tf.TensorShape(shape)) for path, _, shape in leaves}

    # ---- lookup

    def call(self, call: LayerCall, features: Any, weights: Any = None, serving_config: Any = None) -> Any:
        """Return the structure with activations at its leaves. See `TPUEmbedding.call`."""
        structure = self.structure(serving_config)
        check_restores(self.node, is_call=True)
        self.node.traced_by.update(call.models)
        inputs = self._inputs(structure, features, weights, serving_config)
        if serving_config is None and not in_symbolic_scope():  # there, Keras makes dense tensors of ragged inputs
            self.lists.note(inputs)
        if not self.takes_rows:
            inputs = [self._from_names(each) for each in inputs]
        if serving_config is not None or not call.trainable or self.backend.is_export:
            activations = self.backend.lookup(inputs)
        else:
            activations = train(self.backend, inputs, call, self.rule, self.updates)
        return pack_like(structure, [tf.cast(activation, call.compute_dtype) for activation in activations])

    def shapes(self, features: Any, weights: Any, serving_config: Any, trainable: bool) -> tuple[Any, list[Any]]:
        """Return the structure, and the shapes of the activations at its leaves, of symbolic `features`.

        Raises:
            ConfigError: a call with such ids and weights would fail. The message names the feature.
            TrainingError: the layer was built outside the scope of the strategy that the model is built in.
        """
        if serving_config is None and trainable:
            self.backend.check_symbolic_call()
        structure = self.structure(serving_config)
        inputs = self._inputs(structure, features, weights, serving_config)
        for each in inputs:
            each.check_symbolic(takes_names=not self.takes_rows)
        if serving_config is None:
            self.lists.note([each for each in inputs if each.is_of_input()])
        return structure, [(*each.known_shape(), each.config.table.dim) for each in inputs]

    def names_to_rows(self, features: Any) -> Any:
        """Return `features` with rows in the place of names. See `TPUEmbedding.names_to_rows`."""
        inputs = self._inputs(self.features, features, None, None, with_shapes=False)
        if self.backend.is_export:
            raise ConfigError(
                f"layer {self.name!r}: names_to_rows is for input pipelines. An export takes names itself."
            )
        return pack_like(self.features, [self._from_names(each).ids for each in inputs])

    def _inputs(
        self, structure: Any, features: Any, weights: Any, serving_config: Any, *, with_shapes: bool = True
    ) -> list[Ids]:
        """Return every feature with its ids and weights, in walking order."""
        shapes = self.input_shapes if serving_config is None and with_shapes else {}
        leaves = list(flatten_up_to(structure, features, "features"))
        given: list[Any] = [None] * len(leaves)
        if weights is not None:
            remedy = "Give None for a feature without weights"
            given = [leaf for _, _, leaf in flatten_up_to(structure, weights, "weights", remedy)]
        pairs = zip(leaves, given, strict=True)
        return [ids_of(path, config, ids, w, shapes.get(path)) for (path, config, ids), w in pairs]

    def _from_names(self, given: Ids) -> Ids:
        """Return `given` with rows, if the feature takes names."""
        if given.config.vocabulary is None:
            return given
        vocabulary = self.vocabularies[given.table]
        if given.is_combined:
            vocabulary.check_padding(f"feature {given.path!r}")
        return given.from_names(partial(self.backend.rows_of, vocabulary, given.table))

    def structure(self, serving_config: Any) -> Any:
        """Return the features to look up: the layer's own, or `serving_config`'s, after a check that its tables are the layer's."""
        if serving_config is None:
            return self.features
        structure, _ = features_from(serving_config, self.table_names)
        own = {table.name: table for table in self.options.tables}
        for path, feature in flatten(structure):
            _check_served(path, feature.table, own)
            _check_vocabulary(path, feature, self._given_names)
            if feature.vocabulary is None and feature.table.name in self._given_names and not self.takes_rows:
                self.backend.note_numbers(feature.table.name, path)
        return structure

    @contextlib.contextmanager
    def looking_up_in(self, source: TableSource) -> Iterator[None]:
        """Make calls take their rows from `source` inside the context. The layer's own tables do not change."""
        self.check_before_saving()
        own = self.backend
        self.backend = DeferredBackend(self.options.tables, source)
        try:
            self._note_names()
            yield
        finally:
            self.backend = own

    def _note_names(self) -> None:
        """Tell an exporter which tables need names, and which do not, before it makes a graph."""
        vocabularies = self.vocabularies
        if not self.takes_rows:
            for table, vocabulary in vocabularies.items():
                self.backend.note_names(vocabulary, table)
            for path, feature in self.options.features:
                if feature.vocabulary is None and feature.table.name in vocabularies:
                    self.backend.note_numbers(feature.table.name, path)
        for config in self.options.tables:
            if config.name not in vocabularies:
                self.backend.note_numbers(config.name)

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """Return {table name: the vocabulary of its rows}, for the tables that have one."""
        return self._given_names if self.names is None else self.names.current

    # ---- reading and writing tables

    def live(self, doing: str) -> LiveTables:
        """Return the tables in memory, for `doing`.

        Raises:
            ConfigError: the layer holds no tables, or they cannot be written from here.
        """
        backend = self.backend
        check_writable(self.name, doing, backend.states)
        return LiveTables(
            self.name, backend.states, self.updates, backend.writing, self._fetch, self.stamps, [self.node]
        )

    def _fetch(self) -> None:
        check_restores(self.node)
        self.backend.fetch()

    def named_variables(self) -> dict[str, Any]:
        """Return {name of a table, or `<table>/<slot>`: its variable, float32 [rows, dim]}."""
        states = self.backend.states.values()
        return {name: variable for state in states for name, variable in state.named_variables().items()}

    # ---- saving

    def check_before_saving(self) -> None:
        """Raise CheckpointMismatchError if a restore passed over a table. Warn of gradients that were never applied."""
        check_restores(self.node)
        if isinstance(self.rule, RowGradients):
            self.rule.warn_unapplied(f"layer {self.name!r} is saved")

    def save(self, store: Any) -> None:
        """Write tables, slots, count of updates, config, stamps and names into Keras' `store` of the layer, by name."""
        save_tables(store, self.named_variables(), int(self.updates.numpy()), self.checkpoint_config())
        if self.stamps is not None:
            save_stamps(store, self.stamps.arrays(), self.stamps.saved())
        if self.names is not None:
            save_vocabularies(store, self.vocabularies)

    def load(self, store: Any) -> None:
        """Assign what `save` wrote. Raises CheckpointMismatchError, before anything changes, if the layer is another."""
        if not self.backend.states:
            return  # an export has no states: it reads the rows from its checkpoint
        check_tables(store, self, self.named_variables())  # a file that is refused changes no stamp
        if self.stamps is not None:
            self.stamps.rewritten()
        if self.names is not None:
            self.names.load(saved_vocabularies(store, self.vocabularies), f"layer {self.name!r}: the file")
        self.updates.assign(load_tables(store, self.named_variables()))
        self.node.given.note(self.backend.states)
        if self.stamps is not None:
            saved = load_stamps(store, self.backend.states, self.stamps.write)
            if saved is not None:
                self.stamps.adopt_saved(saved)


def _check_served(path: str, table: TableConfig, own: Mapping[str, TableConfig]) -> None:
    mine = own.get(table.name)
    if mine is None:
        raise UnknownTableError(
            f"serving_config feature {path!r}: table {table.name!r} is not one of the layer's; {did_you_mean(table.name, own)}"
        )
    if (table.vocabulary_size, table.dim) != (mine.vocabulary_size, mine.dim):
        raise ConfigError(
            f"serving_config feature {path!r}: table {table.name!r} is [{table.vocabulary_size}, {table.dim}] there "
            f"and [{mine.vocabulary_size}, {mine.dim}] in the layer. Make them equal."
        )


def _check_vocabulary(path: str, feature: FeatureConfig, own: Mapping[str, Vocabulary]) -> None:
    """Raise ConfigError unless the feature takes rows, or has the vocabulary of the layer's table."""
    given, mine = feature.vocabulary, own.get(feature.table.name)
    if given is None or given is mine:
        return
    if mine is None or len(given) or given.unlike(mine):
        raise ConfigError(
            f"serving_config feature {path!r}: its vocabulary is not the layer's of table {feature.table.name!r}. Give the "
            "layer's tpuembed.Vocabulary, or none for row numbers."
        )
