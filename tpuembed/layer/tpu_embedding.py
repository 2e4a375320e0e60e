"""`TPUEmbedding`: the Keras 3 layer. It validates its arguments, chooses one backend, and delegates to it."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tpuembed.backends import Backend, LayerOptions, RowGradients, TakenGradients, choose, train
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
from tpuembed.layer.export_checks import ListFeatures, check_table_names
from tpuembed.layer.stamps import RowStamps, TableWeight
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
from tpuembed.lookup import Ids, as_tensors, ids_of
from tpuembed.runtime.callers import callers
from tpuembed.runtime.keras_saving import check_built, hide_default_signature, in_symbolic_scope
from tpuembed.runtime.table_scope import TableSource
from tpuembed.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tpuembed.files import FilePath
    from tpuembed.layer.restore import RestoreReport

__all__ = ["TPUEmbedding"]


@keras.saving.register_keras_serializable(package="tpuembed")
class TPUEmbedding(keras.layers.Layer):
    """Looks up features in embedding tables that the layer trains itself, row by row.

    Each table has an optimizer, its own or the layer's. The layer applies it when the trainer's optimizer applies a step, with
    the gradients that reach that optimizer: in `fit`, or in a loop that computes gradients of `trainable_variables`. On an
    accelerator it does so when the gradient is taken. The optimizer given to `compile` trains the rest of the model. Weights of
    ids are data: no gradient flows to them.

    Args:
        feature_config: a nested structure (dicts, lists, tuples) of FeatureConfig, tpuembed's or
            `tf.tpu.experimental.embedding`'s.
        optimizer: for tables without their own: "sgd", "adagrad", "adagrad_momentum", "adam" or "ftrl", a tpuembed
            spec, a `tf.tpu.experimental.embedding` optimizer, or a Keras 3 optimizer (whose learning rate stays live).
            None makes such tables ordinary trainable variables without slots. The model's optimizer trains them,
            densely and slowly.
        pipeline_execution_with_tensor_core: overlap lookups with dense computation, on accelerators only.
        batch_size: one replica's examples, for features without an output_shape on an accelerator.
        embedding_feature: None; UNSUPPORTED to avoid the embedding accelerator; or V1 or V2, which a TPU must then have.
        sparse_core_embedding_config: `tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig`, for SparseCores only.
        size_threshold: on an accelerator, tables of at most this many rows are replicated. None replicates none.
        takes_rows: features with a vocabulary take rows, which `names_to_rows` made in the input pipeline, and no names. Needed
            on TPUs, which take no strings.
        track_rows: keep, for each row, the number of the update that last touched it: 4 bytes a row. An export finds
            changed rows by it. Not for tables whose optimizer changes every row at each step, nor for an accelerator
            of several hosts or with pipelining.
        name: as for every Keras layer.
        **kwargs: the same.

    Raises:
        ConfigError: a config is not supported. The message names it.

    Source: `tfrs.layers.embedding.TPUEmbedding`. Code written for it runs with this layer.
    """

    saved_by_another = False
    """True if an enclosing layer writes this layer's tables into weight files."""

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        batch_size: int | None = None,
        embedding_feature: Any = None,
        sparse_core_embedding_config: Any = None,
        *,
        size_threshold: int | None = None,
        track_rows: bool = False,
        takes_rows: bool = False,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(name=name, autocast=False, **kwargs)
        self.supports_jit = False  # Keras would compile `fit` on a GPU, where an id outside the table does not fail
        if size_threshold is not None:
            check_count("TPUEmbedding: size_threshold", size_threshold, 0)
        for option, value in (("track_rows", track_rows), ("takes_rows", takes_rows)):
            if not isinstance(value, bool):
                raise ConfigError(f"TPUEmbedding: {option} must be True or False, got {value!r}.")
        features, table_names = features_from(feature_config)
        spec = None if optimizer is None else resolve_optimizer(optimizer)
        with tf.init_scope():
            updates = tf.Variable(0, dtype=tf.int64, trainable=False, name="updates")
        layer_options = LayerOptions(
            features=list(flatten(features)),
            optimizer=spec,
            updates=updates,
            embedding_feature=embedding_feature,
            pipelining=pipeline_execution_with_tensor_core,
            batch_size=batch_size,
            sparse_core_config=sparse_core_embedding_config,
            size_threshold=size_threshold,
            track_rows=track_rows,
        )
        self._parts = _Untracked(
            features, table_names, layer_options, choose(layer_options), ListFeatures(self.name), takes_rows
        )
        self._tables_were_compared = False
        self._create_vocabularies()
        self._create_weights(updates)

    def _create_vocabularies(self) -> None:
        vocabularies = shared_vocabularies(self._parts.layer_options.features)
        self._vocabularies = None
        self._note_names()
        if not vocabularies or self._parts.backend.is_export:
            return
        check_names_can_arrive(vocabularies, self._parts.takes_rows)
        capacities = {table.name: table.vocabulary_size for table in self._parts.layer_options.tables}
        self._vocabularies = self._parts.backend.names = LayerVocabularies(vocabularies, capacities)

    def _note_names(self) -> None:
        """Tell an exporter which tables need names, and which do not, before it makes a graph."""
        backend, vocabularies = self._parts.backend, self.vocabularies
        if not self._parts.takes_rows:
            for table, vocabulary in vocabularies.items():
                backend.note_names(vocabulary, table)
            for path, feature in self._parts.layer_options.features:
                if feature.vocabulary is None and feature.table.name in vocabularies:
                    backend.note_numbers(feature.table.name, path)
        for config in self._parts.layer_options.tables:
            if config.name not in vocabularies:
                backend.note_numbers(config.name)

    def _create_weights(self, updates: Any) -> None:
        """Create the weights in the constructor. Keras builds symbolically, and a checkpoint restored before that would be lost."""
        backend = self._parts.backend
        states = list(backend.states.values())
        self._tpu_embedding = TablesNode(
            self.name,
            self._parts.checkpoint_config(),
            states,
            backend.checkpoint_children(),
            backend.layouts(),
            updates,
        )
        self._tpu_embedding.restore_rows, self._tpu_embedding.saving = self.restore_saved, self._check_before_saving
        self._tpu_embedding.restore_count = self._restore_count
        if self._vocabularies is not None:
            self._tpu_embedding.check_saved = self._vocabularies.check_saved
        trained_here = any(state.optimizer is not None for state in states)
        self._row_stamps = (
            RowStamps(backend.states, updates) if self._parts.layer_options.track_rows and states else None
        )
        # Keras counts, lists and freezes them as weights of the layer. They are wrapped, not copied.
        variables = backend.weights()
        self._table_weights = [TableWeight(variable, trainable) for variable, trainable in variables]
        names = {id(state.variable): state.config.name for state in states}
        for weight, (variable, _) in zip(self._table_weights, variables, strict=True):
            if id(variable) in names:
                weight.assigned = partial(self._tpu_embedding.given.note, [names[id(variable)]])
        if (
            trained_here
        ):  # named after a table, because Keras refuses a path of two weights in the state tree of a model
            name = f"{states[0].config.name}_updates".replace("/", "_")
            self._table_weights.append(TableWeight(updates, trainable=False, name=name))
        if self._row_stamps is not None:
            self._tpu_embedding.restoring = self._row_stamps.rewritten
            for weight in self._table_weights:
                weight.watcher = self._row_stamps
        self._dummy, rows = None, None
        if trained_here:
            self._dummy = self.add_weight(
                shape=(1,), initializer="zeros", dtype="float32", name="gradient_trap", autocast=False
            )
            with keras.name_scope(self.name):
                rows = backend.row_gradients()
        if rows is not None:
            self._parts = dataclasses.replace(self._parts, rule=rows)
            self._row_weights = list(rows.weights.values())
        self.built = True

    def build(self, input_shape: Any = None) -> None:
        """Check `input_shape`, the shape of each feature's ids, and use it in calls. There is nothing to build."""
        if input_shape is not None:
            leaves = flatten_up_to(self._parts.features, input_shape, "build()'s input_shape")
            shapes = {path: tuple(tf.TensorShape(shape)) for path, _, shape in leaves}
            self._parts = dataclasses.replace(self._parts, input_shapes=shapes)

    # ---- lookup

    @tf.autograph.experimental.do_not_convert
    def __call__(self, features: Any, weights: Any = None, serving_config: Any = None, **kwargs: Any) -> Any:
        """Run `call`, as Keras calls it. Ids may also be Python integers and lists of them."""
        given = as_tensors(self._parts.structure(serving_config), features, "features")
        if serving_config is not None:
            kwargs = {**kwargs, "serving_config": serving_config}
        return super().__call__(given, *(() if weights is None else (weights,)), **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(self, features: Any, weights: Any = None, serving_config: Any = None) -> Any:
        """Look up `features` and combine their rows.

        Args:
            features: the structure of `feature_config` with ids at its leaves. Integer Tensors of any rank are looked
                up one by one: [...] -> [..., dim]. SparseTensors of rank 2 or above and RaggedTensors of rank 2 are
                combined over the last axis: [batch, hot] -> [batch, dim], or [batch, max_sequence_length, dim]. Float
                ids are cast. Features with a vocabulary take names in the place of ids.
            weights: None, or the same structure with None or weights of the ids' kind at its leaves (sparse and
                ragged).
            serving_config: a nested structure of FeatureConfig over some of the layer's tables, to look up instead of
                `feature_config`'s features. It trains nothing.

        Returns:
            The structure with float activations at its leaves.

        Raises:
            ConfigError: `features` or `weights` have another structure than the config.
        """
        structure, backend = self._parts.structure(serving_config), self._parts.backend
        check_restores(self._tpu_embedding, is_call=True)
        if not tf.executing_eagerly():  # a restore stops the functions that models have traced
            self._tpu_embedding.traced_by.update(one for one in callers() if isinstance(one, keras.Model))
        inputs = _inputs(structure, features, weights, {} if serving_config is not None else self._parts.input_shapes)
        if serving_config is None and not in_symbolic_scope():  # there, Keras makes dense tensors of ragged inputs
            self._parts.lists.note(inputs)
        inputs = [
            each if each.config.vocabulary is None or self._parts.takes_rows else self._from_names(each)
            for each in inputs
        ]
        if serving_config is not None or not self.trainable or backend.is_export:
            activations = backend.lookup(inputs)
        else:
            self._compare_tables()
            dummy = None if self._dummy is None else tf.convert_to_tensor(self._dummy.value)
            parts = self._parts
            activations = train(backend, inputs, dummy, parts.layer_options.updates, parts.rule, self)
        return pack_like(structure, [tf.cast(activation, self.compute_dtype) for activation in activations])

    def _compare_tables(self) -> None:
        """Check, before the first step, that no other layer of the model has a table of the same name."""
        if self._tables_were_compared:
            return
        model = next((caller for caller in callers() if isinstance(caller, keras.Model)), None)
        if model is None:
            return
        others = [one for one in model._flatten_layers() if isinstance(one, TPUEmbedding) and one is not self]
        check_table_names(
            model.name, self.name, self._names_of_tables(), [(one.name, one._names_of_tables()) for one in others]
        )
        self._tables_were_compared = True

    def _names_of_tables(self) -> set[str]:
        return {table.name for table in self._parts.layer_options.tables}

    def _from_names(self, given: Ids) -> Ids:
        vocabulary = self.vocabularies[given.table]
        if given.is_combined:
            vocabulary.check_padding(f"feature {given.path!r}")
        return given.from_names(partial(self._parts.backend.rows_of, vocabulary, given.table))

    @tf.autograph.experimental.do_not_convert
    def names_to_rows(self, features: Any) -> Any:
        """Return `features` with rows in the place of names, int64. Call it in `Dataset.map` if the layer `takes_rows`.

        Args:
            features: the structure of `feature_config`, as `call` takes it.

        Raises:
            ConfigError: the names have another type than the vocabulary, or the layer is part of an export.
        """
        leaves = _inputs(self._parts.features, features, None, {})
        if self._parts.backend.is_export:
            raise ConfigError(
                f"layer {self.name!r}: names_to_rows is for input pipelines. An export takes names itself."
            )
        rows = [each if each.config.vocabulary is None else self._from_names(each) for each in leaves]
        return pack_like(self._parts.features, [each.ids for each in rows])

    def compute_output_spec(
        self,
        features: Any,
        weights: Any = None,
        serving_config: Any = None,
    ) -> Any:
        """Return the symbolic activations of symbolic `features`.

        Raises:
            ConfigError: a call with such ids and weights would fail. The message names the feature.
            TrainingError: the layer was built outside the scope of the strategy that the model is built in.
        """
        if serving_config is None and self.trainable:
            self._parts.backend.check_symbolic_call()
        structure = self._parts.structure(serving_config)
        inputs = _inputs(structure, features, weights, {} if serving_config is not None else self._parts.input_shapes)
        for each in inputs:
            each.check_symbolic(takes_names=not self._parts.takes_rows)
        if serving_config is None:
            self._parts.lists.note([each for each in inputs if each.is_of_input()])
        shapes = [(*each.known_shape(), each.config.table.dim) for each in inputs]
        return pack_like(structure, [keras.KerasTensor(shape, self.compute_dtype) for shape in shapes])

    @property
    def embedding_tables(self) -> dict[Any, Any]:
        """Return the variable, float32 [vocabulary_size, dim], of each TableConfig as it was passed.

        In an export there are no variables. Each table is a tensor that the export stores if it is used.
        """
        return {table: self._parts.backend.table(name) for table, name in self._parts.table_names.items()}

    @property
    def vocabularies(self) -> dict[str, Vocabulary]:
        """Return {table name: the vocabulary of its rows}, for the tables that have one."""
        if self._vocabularies is not None:
            return self._vocabularies.current
        return shared_vocabularies(self._parts.layer_options.features)

    def take_names(self, table: str, saved: Vocabulary) -> None:
        """Replace the names of a table whose rows are restored with those of `saved`. `restore_tables` calls it."""
        assert self._vocabularies is not None, "a layer with tables has the vocabularies of its features"
        self._vocabularies.take(table, saved)

    def checkpoint_config(self) -> dict[str, Any]:
        """Return the layer's config for checkpoints: features, tables and their optimizers, as JSON values."""
        return self._parts.checkpoint_config()

    def _check_before_saving(self) -> None:
        check_restores(self._tpu_embedding)
        if isinstance(self._parts.rule, RowGradients):
            self._parts.rule.warn_unapplied(f"layer {self.name!r} is saved")

    @contextlib.contextmanager
    def looking_up_in(self, source: TableSource) -> Iterator[None]:
        """Make calls take their rows from `source` inside the context. The layer's own tables do not change."""
        self._check_before_saving()
        own = self._parts
        self._parts = dataclasses.replace(own, backend=DeferredBackend(own.layer_options.tables, source))
        try:
            self._note_names()
            yield
        finally:
            self._parts = own

    def apply_gradients(self, gradients: Iterable[Any]) -> None:
        """Update the tables once, by `gradients` of `trainable_variables`. For trainers without a Keras optimizer.

        A Keras optimizer does this itself, in the steps that it applies. Tables in an accelerator moved when their gradient was
        taken: nothing is left to do for them.

        Args:
            gradients: what a tape gave for `trainable_variables`, in their order. You may scale, clip and sum them before. Give
                None for a table without an optimizer, after your own optimizer has trained it.

        Raises:
            ConfigError: there is a gradient of a table without an optimizer, none of the others, or not one for each weight.
        """
        given = self.checked_gradients(list(gradients))
        if isinstance(self._parts.rule, RowGradients) and given:
            self._parts.rule.apply(given)

    def checked_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Return those of `apply_gradients` that are of the tables' rows. Raises as it does."""
        weights, rule = self.trainable_variables, self._parts.rule
        of_rows = {id(weight) for weight in rule.weights.values()} if isinstance(rule, RowGradients) else set()
        found = []
        for weight, gradient in weights_with_gradients(self.name, weights, gradients):
            if gradient is not None and weight is not self._dummy and id(weight) not in of_rows:
                raise ConfigError(
                    f"layer {self.name!r}: table {weight.path!r} has no optimizer. Apply its gradient with your own, and give None "
                    "for it here."
                )
            if id(weight) in of_rows:
                found.append(gradient)
        if any(gradient is None for gradient in found):
            raise ConfigError(
                f"layer {self.name!r}: no gradient reached its tables. Call the layer inside the tape, and the loss must need it."
            )
        return found

    # ---- writing tables

    def live_tables(self, doing: str) -> LiveTables:
        """Return the tables in memory, for `doing`.

        Raises:
            ConfigError: the layer holds no tables, or they cannot be written from here.
        """
        backend = self._parts.backend
        check_writable(self.name, doing, backend.states)
        nodes = [self._tpu_embedding]
        return LiveTables(
            self.name, backend.states, self.updates, backend.writing, self._fetch, self._row_stamps, nodes
        )

    def _fetch(self) -> None:
        check_restores(self._tpu_embedding)
        self._parts.backend.fetch()

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
        passed = (name for config, name in self._parts.table_names.items() if config is table)
        name = next(passed, getattr(table, "name", table))
        self.live_tables("update_embedding_table").assign_table(name, embedding_table)

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
        """Stream tables of a checkpoint of any format into this layer. See `layer.restore.restore_tables`."""
        from tpuembed.layer.restore import restore_tables  # here, so that training imports no reader

        return restore_tables(self, path, tables, slots, by=by, resize=resize, lossy=lossy, updates=updates, **options)

    def restore_saved(self, path: str, tables: Iterable[str]) -> None:
        """Restore `tables` whose keys in the checkpoint are not those of TensorFlow. See `restore.restore_saved`."""
        from tpuembed.layer.restore import restore_saved

        restore_saved(self, path, {table: table for table in tables})

    def _restore_count(self, path: str) -> None:
        from tpuembed.layer.restore import restore_count

        restore_count(self, self._parts.backend.states, path)

    # ---- saving

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Return the children to save. A checkpoint has the tables only below `_tpu_embedding`, and no dummy, like
        those of TFRS.

        A SavedModel has the tables as plain variables, because a graph cannot hold the config and count of that node.
        """
        children: dict[str, Any] = super()._trackable_children(save_type, **kwargs)
        in_model = ("_tpu_embedding", "_row_stamps")
        in_checkpoint = ("_dummy", "_row_weights", "_table_weights", *_KERAS_LISTS)
        hidden: tuple[str, ...] = in_checkpoint
        if save_type != "checkpoint":
            check_restores(self._tpu_embedding)
            hidden = (*in_model, "_vocabularies")
            # A session finds no variable of Keras.
            children["_table_weights"] = [weight.value for weight in self._table_weights]
            children |= {} if self._vocabularies is None else self._vocabularies.variables()
        return {name: child for name, child in children.items() if name not in hidden}

    def get_config(self) -> dict[str, Any]:
        """Return the config, without weights. A live learning rate is written as its current value."""
        parts, layer_options = self._parts, self._parts.layer_options
        return {
            **{key: value for key, value in super().get_config().items() if key != "autocast"},
            "feature_config": features_to_dict(parts.features),
            "optimizer": None if layer_options.optimizer is None else optimizer_to_dict(layer_options.optimizer),
            "pipeline_execution_with_tensor_core": layer_options.pipelining,
            "batch_size": layer_options.batch_size,
            "sparse_core_embedding_config": sparse_core_config_to_dict(layer_options.sparse_core_config),
            "embedding_feature": getattr(layer_options.embedding_feature, "name", layer_options.embedding_feature),
            "size_threshold": layer_options.size_threshold,
            "track_rows": layer_options.track_rows,
            "takes_rows": parts.takes_rows,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TPUEmbedding":
        """Return the layer that `get_config` described."""
        objects = {
            "feature_config": feature_config_from_dict(config["feature_config"]),
            "sparse_core_embedding_config": sparse_core_config_from_dict(config.get("sparse_core_embedding_config")),
        }
        return cls(**{**config, **objects})

    def save_own_variables(self, store: Any) -> None:
        """Write tables, slots, count of updates and config into `.weights.h5` and `.keras`, by name."""
        self._check_before_saving()
        if not self.saved_by_another:
            save_tables(store, self.named_variables(), int(self.updates.numpy()), self.checkpoint_config())
            if self._row_stamps is not None:
                save_stamps(store, self._row_stamps.arrays(), self._row_stamps.saved())
            if self._vocabularies is not None:
                save_vocabularies(store, self.vocabularies)

    def load_own_variables(self, store: Any) -> None:
        """Assign the arrays of `save_own_variables`.

        Raises:
            CheckpointMismatchError: the file lacks a table or slot, has others, or has another shape.
            ConfigError: Keras could not build the model of the file, and would skip weights of other layers.
        """
        check_built(self.name)
        if self.saved_by_another or not self._parts.backend.states:
            return  # an export has no states: it reads the rows from its checkpoint
        stamps = self._row_stamps
        check_tables(store, self, self.named_variables())  # a file that is refused changes no stamp
        if stamps is not None:
            stamps.rewritten()
        if self._vocabularies is not None:
            self._vocabularies.load(saved_vocabularies(store, self.vocabularies), f"layer {self.name!r}: the file")
        self.updates.assign(load_tables(store, self.named_variables()))
        self._tpu_embedding.given.note(self._parts.backend.states)
        if stamps is not None:
            saved = load_stamps(store, self._parts.backend.states, stamps.write)
            if saved is not None:
                stamps.adopt_saved(saved)

    def named_variables(self) -> dict[str, Any]:
        """Return {name of a table, or `<table>/<slot>`: its variable, float32 [rows, dim]}."""
        states = self._parts.backend.states.values()
        return {name: variable for state in states for name, variable in state.named_variables().items()}

    @property
    def updates(self) -> Any:
        """Return the variable that counts the updates of the layer's tables, int64 []."""
        return self._tpu_embedding.updates


def _refusal(model: Any) -> ConfigError | None:
    layers = (each for each in model._flatten_layers() if isinstance(each, TPUEmbedding))
    return next((refusal for layer in layers if (refusal := layer._parts.lists.refusal()) is not None), None)


hide_default_signature(_refusal)

_KERAS_LISTS = ("_trainable_variables", "_non_trainable_variables")


def weights_with_gradients(layer: str, weights: Sequence[Any], gradients: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return (weight, gradient) of each weight of `layer`. Raises ConfigError if there is not one gradient for each."""
    if len(gradients) != len(weights):
        raise ConfigError(
            f"layer {layer!r}: apply_gradients got {len(gradients)} gradients, and the layer has {len(weights)} trainable "
            "variables. Give one for each."
        )
    return list(zip(weights, gradients, strict=True))


@dataclasses.dataclass(frozen=True)
class _Untracked:
    """The parts of the layer. A dataclass hides them from Keras' and TensorFlow's attribute tracking."""

    features: Any
    table_names: Mapping[Any, str]
    layer_options: LayerOptions
    backend: Backend
    lists: ListFeatures
    takes_rows: bool = False
    rule: RowGradients | TakenGradients = dataclasses.field(default_factory=TakenGradients)
    input_shapes: Mapping[str, tuple[int | None, ...]] = dataclasses.field(default_factory=dict)

    def checkpoint_config(self) -> dict[str, Any]:
        """Return the layer's config for a checkpoint, so that an export needs no serving_config."""
        config = features_to_dict(self.features, for_checkpoint=True)
        for name, state in self.backend.states.items():
            config["tables"][name]["optimizer"] = None if state.optimizer is None else state.optimizer.static_dict()
        return config

    def structure(self, serving_config: Any) -> Any:
        """Return the features to look up: the layer's own, or `serving_config`'s, after a check that its tables are the layer's."""
        if serving_config is None:
            return self.features
        structure, _ = features_from(serving_config, self.table_names)
        own = {feature.table.name: feature.table for _, feature in flatten(self.features)}
        vocabularies = shared_vocabularies(self.layer_options.features)
        for path, feature in flatten(structure):
            _check_served(path, feature.table, own)
            _check_vocabulary(path, feature, vocabularies)
            takes_numbers = feature.vocabulary is None and feature.table.name in vocabularies
            if takes_numbers and not self.takes_rows:
                self.backend.note_numbers(feature.table.name, path)
        return structure


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


def _inputs(structure: Any, features: Any, weights: Any, shapes: Mapping[str, Any]) -> list[Ids]:
    """Return every feature with its ids and weights, in walking order."""
    leaves = list(flatten_up_to(structure, features, "features"))
    if weights is None:
        given: list[Any] = [None] * len(leaves)
    else:
        remedy = "Give None for a feature without weights"
        given = [leaf for _, _, leaf in flatten_up_to(structure, weights, "weights", remedy)]
    pairs = zip(leaves, given, strict=True)
    return [ids_of(path, config, ids, w, shapes.get(path)) for (path, config, ids), w in pairs]
