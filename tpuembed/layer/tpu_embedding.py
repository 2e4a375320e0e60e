"""`TPUEmbedding`: the Keras 3 layer, a shell over `LayerTables`."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from tpuembed.backends import LayerCall, RowGradients, TakenGradients
from tpuembed.backends.restores import check_restores
from tpuembed.config.structure import pack_like
from tpuembed.errors import ConfigError
from tpuembed.layer.core import LayerTables
from tpuembed.layer.export_checks import check_table_names
from tpuembed.layer.methods import CoreMethods
from tpuembed.layer.stamps import TableWeight
from tpuembed.lookup import as_tensors
from tpuembed.runtime.keras_saving import callers, check_built, hide_default_signature

__all__ = ["TPUEmbedding", "weights_with_gradients"]

_KERAS_LISTS = ("_trainable_variables", "_non_trainable_variables")


@keras.saving.register_keras_serializable(package="tpuembed")
class TPUEmbedding(CoreMethods, keras.layers.Layer):
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
        self.core = LayerTables(
            self.name,
            feature_config,
            optimizer,
            pipeline_execution_with_tensor_core,
            batch_size,
            embedding_feature,
            sparse_core_embedding_config,
            size_threshold=size_threshold,
            track_rows=track_rows,
            takes_rows=takes_rows,
        )
        self._tables_were_compared = False
        self._create_weights()

    def _create_weights(self) -> None:
        """Create the weights in the constructor. Keras builds symbolically, and a checkpoint restored before that would be lost."""
        core = self.core
        # TensorFlow saves what attributes lead to, under their names.
        self._tpu_embedding, self._row_stamps, self._vocabularies = core.node, core.stamps, core.names
        core.node.restore_rows, core.node.restore_count = self.restore_saved, self._restore_count
        # Keras counts, lists and freezes them as weights of the layer. They are wrapped, not copied.
        variables = core.backend.weights()
        self._table_weights = [TableWeight(variable, trainable) for variable, trainable in variables]
        states = list(core.backend.states.values())
        names = {id(state.variable): state.config.name for state in states}
        for weight, (variable, _) in zip(self._table_weights, variables, strict=True):
            if id(variable) in names:
                weight.assigned = partial(core.node.given.note, [names[id(variable)]])
        if (
            core.is_trained
        ):  # named after a table, because Keras refuses a path of two weights in the state tree of a model
            name = f"{states[0].config.name}_updates".replace("/", "_")
            self._table_weights.append(TableWeight(core.updates, trainable=False, name=name))
        if core.stamps is not None:
            for weight in self._table_weights:
                weight.watcher = core.stamps
        self._dummy = None
        if core.is_trained:
            self._dummy = self.add_weight(
                shape=(1,), initializer="zeros", dtype="float32", name="gradient_trap", autocast=False
            )
            with keras.name_scope(self.name):
                rows = core.backend.row_gradients()
            core.rule = rows or TakenGradients()
            self._row_weights = [] if rows is None else list(rows.weights.values())
        self.built = True

    def build(self, input_shape: Any = None) -> None:
        """Check `input_shape`, the shape of each feature's ids, and use it in calls. There is nothing to build."""
        self.core.build(input_shape)

    # ---- lookup

    @tf.autograph.experimental.do_not_convert
    def __call__(self, features: Any, weights: Any = None, serving_config: Any = None, **kwargs: Any) -> Any:
        """Run `call`, as Keras calls it. Ids may also be Python integers and lists of them."""
        given = as_tensors(self.core.structure(serving_config), features, "features")
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
        trains = serving_config is None and self.trainable and not self.core.backend.is_export
        # A restore stops the functions that models have traced.
        in_graph = not tf.executing_eagerly() or (trains and not self._tables_were_compared)
        models = [one for one in callers() if isinstance(one, keras.Model)] if in_graph else []
        if trains and models and not self._tables_were_compared:
            self._compare_tables(models[0])
        optimizer = getattr(self._get_call_context().entry_layer, "optimizer", None)
        given = LayerCall(self.compute_dtype, self.trainable, self._dummy, optimizer, models)
        return self.core.call(given, features, weights, serving_config)

    def _compare_tables(self, model: Any) -> None:
        """Check, before the first step, that no other layer of the model has a table of the same name."""
        others = [one for one in model._flatten_layers() if isinstance(one, TPUEmbedding) and one is not self]
        tables = [{table.name for table in one.core.options.tables} for one in (self, *others)]
        check_table_names(model.name, self.name, tables[0], zip([one.name for one in others], tables[1:], strict=True))
        self._tables_were_compared = True

    def compute_output_spec(self, features: Any, weights: Any = None, serving_config: Any = None) -> Any:
        """Return the symbolic activations of symbolic `features`. Raises errors as `LayerTables.shapes`."""
        structure, shapes = self.core.shapes(features, weights, serving_config, self.trainable)
        return pack_like(structure, [keras.KerasTensor(shape, self.compute_dtype) for shape in shapes])

    # ---- gradients

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
        if isinstance(self.core.rule, RowGradients) and given:
            self.core.rule.apply(given)

    def checked_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Return those of `apply_gradients` that are of the tables' rows. Raises as it does."""
        weights, rule = self.trainable_variables, self.core.rule
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
        of_keras = {key: value for key, value in super().get_config().items() if key != "autocast"}
        return {**of_keras, **self.core.arguments()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "TPUEmbedding":
        """Return the layer that `get_config` described."""
        return cls(**LayerTables.arguments_of(config))

    def save_own_variables(self, store: Any) -> None:
        """Write tables, slots, count of updates and config into `.weights.h5` and `.keras`, by name."""
        self.core.check_before_saving()
        if not self.saved_by_another:
            self.core.save(store)

    def load_own_variables(self, store: Any) -> None:
        """Assign the arrays of `save_own_variables`.

        Raises:
            CheckpointMismatchError: the file lacks a table or slot, has others, or has another shape.
            ConfigError: Keras could not build the model of the file, and would skip weights of other layers.
        """
        check_built(self.name)
        if not self.saved_by_another:
            self.core.load(store)


def _refusal(model: Any) -> ConfigError | None:
    layers = (each for each in model._flatten_layers() if isinstance(each, TPUEmbedding))
    return next((refusal for layer in layers if (refusal := layer.core.lists.refusal()) is not None), None)


hide_default_signature(_refusal)


def weights_with_gradients(layer: str, weights: Sequence[Any], gradients: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return (weight, gradient) of each weight of `layer`. Raises ConfigError if there is not one gradient for each."""
    if len(gradients) != len(weights):
        raise ConfigError(
            f"layer {layer!r}: apply_gradients got {len(gradients)} gradients, and the layer has {len(weights)} trainable "
            "variables. Give one for each."
        )
    return list(zip(weights, gradients, strict=True))
