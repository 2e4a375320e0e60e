"""The weights of a model, besides tables, read from the saved model that is proven to be the same: see `weight_names`.

Values are read with the checkpoint's reader, whose checks neither TensorFlow's restore nor Keras' loading makes.
"""

import contextlib
import dataclasses
import functools
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import keras
import tensorflow as tf

from tpuembed.backends.table_state import TablesNode
from tpuembed.backends.tf_config import SavedNode
from tpuembed.checkpoint.keras.layers import layer_policies
from tpuembed.checkpoint.keras.tables import CONFIG
from tpuembed.checkpoint.saved_objects import Objects, SavedObject, Weight
from tpuembed.checkpoint.types import SavedLayers
from tpuembed.errors import CheckpointMismatchError
from tpuembed.export.graph.weight_names import Candidate, Mismatch, Names, OwnNames, find_candidates, match_by_name
from tpuembed.export.graph.wiring import find_contradiction
from tpuembed.vocabulary.model_files import snake_case

__all__ = ["raw_variables", "restore_dense_weights"]

_SHOWN: Final = 40
_LOOKUPS: Final = (keras.layers.StringLookup, keras.layers.IntegerLookup)
_OF_LOOKUPS: Final = ("idf_weights", "num_documents")
"""The plain variables of these layers: Keras saves the first by a function of theirs, and no call reads the second."""
_NO_NAME: Final = "Variable"
"""What TensorFlow calls the copies of Keras' variables that it writes with CheckpointOptions(enable_async=True)."""
_WEIGHTS_FILE: Final = "model.save_weights('model.weights.h5')"


def restore_dense_weights(
    model: Any,
    checkpoint: Any,
    tables: Collection[str] = (),
    *,
    allow_unused_weights: bool = False,
) -> None:
    """Assign the weights of `model` (a Keras model without tables) from `checkpoint`.

    Args:
        model: built.
        checkpoint: a `tpuembed.checkpoint.Checkpoint`.
        tables: of the checkpoint that the model looks up in; they are no weights.
        allow_unused_weights: whether the saved model may have weights that this one has no place for.

    Raises:
        CheckpointMismatchError: a weight finds no value that is proven to be its own, or a saved one is left over.
    """
    if not model.weights and not raw_variables(model):
        return
    where = f"checkpoint {checkpoint.path}"
    layers = checkpoint.layers
    if layers is None:
        raise CheckpointMismatchError(f"{where}: it has no object graph to find the model's weights in")
    saved = layers.objects(tables)
    wanted = _keras_objects(model) if checkpoint.format == "keras" else _tracked_objects(model)
    wanted.check_complete(where, model)
    names = Names(_stems(model))
    kinds = {snake_case(kind.__name__) for kind in type(model).__mro__ if issubclass(kind, keras.Model)}
    found = _find(where, names, OwnNames(model.name, frozenset(kinds)), wanted, saved)
    _check_config(where, names, model, wanted, saved, found, layers.config)
    _check_dtypes(where, wanted, found)
    _check_policies(where, model, layer_policies(layers.config))
    left = [weight for weight in found.left_over if weight.key not in _of_metrics(saved)]
    if left and not allow_unused_weights:
        raise CheckpointMismatchError(
            f"{where}: the model has no place for {len(left)} saved weight{'s' * (len(left) > 1)}: {_shown(left)}. Build the "
            "model as it was trained. To export only a part of it, pass allow_unused_weights=True."
        )
    wanted.assign(found, layers)
    # These compute with constants that were made of their weights.
    for node in tf.train.TrackableView(model).descendants():
        if isinstance(node, keras.layers.Normalization):
            node.finalize_state()
        elif isinstance(node, _LOOKUPS) and node.output_mode == "tf_idf":
            node.idf_weights_const = node.idf_weights.value()


def raw_variables(model: Any) -> list[Any]:
    """The `tf.Variable`s that layers hold as they are, which Keras does not count among the weights."""
    tree, kept, seen, pending = tf.train.TrackableView(model), {}, {id(model)}, [model]
    for trackable in pending:
        for child in tree.children(trackable).values():
            if isinstance(child, tf.Variable):
                kept[id(child)] = child
            elif id(child) not in seen and not isinstance(
                child, SavedNode | keras.Variable | keras.optimizers.Optimizer
            ):
                seen.add(id(child))
                pending.append(child)
    return list(kept.values())


def _find(where: str, names: Names, own: OwnNames, wanted: "_Wanted", saved: Objects) -> Candidate:
    """The one proven correspondence of the model's weights and saved ones."""
    candidates, failures = find_candidates(names, own, wanted.objects, saved)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        roots = ", ".join(candidate.path or "the root" for candidate in candidates)
        raise CheckpointMismatchError(
            f"{where}: {len(candidates)} saved models fit this one: {roots}. Name the right one "
            f"with --checkpoint-option root={candidates[0].path}."
        )
    try:
        return match_by_name(names, wanted.objects, saved)
    except Mismatch as error:
        raise CheckpointMismatchError(
            f"{where}: no saved model is proven to hold every weight of this model. "
            f"{_difference(names, wanted.objects, saved, failures, error)}"
        ) from None


def _difference(names: Names, wanted: Objects, saved: Objects, failures: Sequence[Mismatch], error: Mismatch) -> str:
    """Return the first difference that the author of the model made, and what to do about it."""
    mine, theirs = wanted.weights(), saved.weights()
    if numbered := [weight for weight in theirs.values() if "layer_with_weights-" in weight.key]:
        return (
            f"It is of Keras 2, which saved the layers of a functional model by their numbers alone ({_shown(numbered[:1])}). "
            "Build the model in memory, restore its tables with restore_tables, assign its other weights, and export it with "
            "export_saved_model. docs/compat.md has the lines under Checkpoints of TFRS."
        )
    known, asked = {weight.name for weight in theirs.values()}, {weight.name for weight in mine.values()}
    without = [weight for weight in mine.values() if weight.name not in known]
    left = [weight for weight in theirs.values() if weight.name not in asked and not weight.is_count]
    if left and all(weight.name == _NO_NAME for weight in left):
        return (
            f"Its weights have no names, because TensorFlow wrote it asynchronously: {_shown(left)}. You can export its tables "
            "without a model. For a whole model, read it into the model with tf.train.Checkpoint(model=model).read(PATH), and call "
            "tpuembed.export_saved_model(model, MODEL_DIR). Or write it without enable_async=True."
        )
    said = [f"In the most similar saved model, {failures[0]}."] if failures else []
    for what, weights in (("Without a value", without), ("Left over in the checkpoint", left)):
        chosen = [one for one in weights if not any(names.number(part) for part in one.name.split("/")[:-1])]
        if chosen or not failures:
            said.append(f"{what}: {_shown(chosen or weights)}.")
    if not failures:
        said.append(f"Names do not match: {error}.")
    said.append(
        "Build the model as it was trained, give its layers names, as in keras.layers.Dense(1, name='watch'), before you train, or "
        "name the saved model with --checkpoint-option root=PATH."
    )
    return " ".join(said)


def _shown(weights: Iterable[Weight]) -> str:
    listed = [_label(weight) for weight in weights]
    return (", ".join(listed[:_SHOWN]) + (f", ... ({len(listed)} in all)" if len(listed) > _SHOWN else "")) or "none"


def _label(weight: Weight) -> str:
    key = weight.key.partition("/.ATTRIBUTES")[0]
    return weight.name if key in (weight.name, "") or key.isdigit() else f"{weight.name or '(no name)'} ({key})"


def _stems(model: Any) -> set[str]:
    """The names, without numbers, that Keras makes up for layers of its own classes and of the model's."""
    own = {type(layer).__name__ for layer in model._flatten_layers()}
    kinds = (name for name, kind in vars(keras.layers).items() if isinstance(kind, type))
    return {
        snake_case(name) for name in (*own, *kinds, "Functional", "Sequential", "Model", "TPUEmbedding", "Variable")
    }


def _of_metrics(saved: Objects) -> set[str]:
    """The weights of objects called as Keras calls metrics, all of one shape, as no layer has them."""
    metrics = Names({snake_case(name) for name, kind in vars(keras.metrics).items() if isinstance(kind, type)})
    found: set[str] = set()
    for node in saved.nodes:
        shapes = {weight.shape for weight in node.weights.values()}
        if node.name is not None and metrics.number(node.name) and len(node.weights) > 1 and len(shapes) == 1:
            found.update(weight.key for weight in node.weights.values())
    return found


def _check_config(
    where: str, names: Names, model: Any, wanted: "_Wanted", saved: Objects, found: Candidate, config: Any
) -> None:
    """Raise CheckpointMismatchError where the saved config says that layers of one form were confused."""
    if config is None:
        return
    try:
        with warnings.catch_warnings(action="ignore"):
            mine = keras.saving.serialize_keras_object(model)
    except Exception:  # whatever a get_config does
        return
    layers = [(wanted.objects.nodes[number].name, saved.nodes[other]) for number, other in found.layers.items()]
    paths = {node.name: node.path for node in saved.nodes}
    wrong = find_contradiction(
        names, mine, config, [(name, layer.name) for name, layer in layers if name and layer.name]
    )
    if wrong is not None:
        name, other, like = wrong
        raise CheckpointMismatchError(
            f"{where}: the model's layer {name!r} has no name of its own. By its place it is {other!r} ({paths[other]}), but by "
            f"the config in the file {like!r} ({paths.get(like)}). Build and return layers in "
            "the order of training, or give them names."
        )


def _check_dtypes(where: str, wanted: "_Wanted", found: Candidate) -> None:
    """Raise CheckpointMismatchError where a value would be rounded."""
    mine = wanted.objects.weights()
    for key, weight in found.pairs.items():
        if weight.dtype != mine[key].dtype:
            raise CheckpointMismatchError(
                f"{where}: {_label(weight)} is {weight.dtype}, but the model's {mine[key].name} is {mine[key].dtype}. Build the "
                "model with the dtype that it was trained with."
            )


def _check_policies(where: str, model: Any, policies: Mapping[str, str]) -> None:
    """Raise CheckpointMismatchError for a layer that computes in another dtype than it did in training."""
    for layer in model._flatten_layers():
        saved, mine = policies.get(layer.name), layer.dtype_policy.name
        if saved is not None and saved != mine and layer.weights:
            raise CheckpointMismatchError(
                f"{where}: layer {layer.name!r} was trained with the dtype policy {saved!r}, and the model's has {mine!r}. Their "
                f"numbers differ. Call keras.config.set_dtype_policy({saved!r}) in the factory, or give the layer dtype={saved!r}."
            )


@dataclasses.dataclass(frozen=True)
class _Tracked:
    """As `tf.train.Checkpoint` sees a model: by the attributes that TensorFlow tracks."""

    objects: Objects
    variables: Mapping[str, Any]

    def check_complete(self, where: str, model: Any) -> None:
        """Raise CheckpointMismatchError for a weight of `model` that such a source cannot hold."""
        reached = {id(variable) for variable in self.variables.values()}
        lost = [weight.path for weight in model.weights if id(weight) not in reached]
        if lost:
            raise CheckpointMismatchError(
                f"{where}: has no value for {', '.join(lost[:_SHOWN])}. tf.train.Checkpoint does not save layers that a model "
                f"keeps in a Python list or dict. Save the trained model with {_WEIGHTS_FILE} and export that file."
            )

    def assign(self, found: Candidate, layers: SavedLayers) -> None:
        """Read the values and assign them."""
        for key, weight in found.pairs.items():
            self.variables[key].assign(layers.read(weight))


def _tracked_objects(model: Any) -> _Tracked:
    tree = tf.train.TrackableView(model)
    numbers, pending, variables, nodes = {id(model): 0}, [model], {}, []
    for trackable in pending:  # grows while it is walked
        children: dict[str, int] = {}
        weights: dict[str, Weight] = {}
        is_closed = isinstance(trackable, SavedNode | keras.optimizers.Optimizer)
        for name, child in {} if is_closed else tree.children(trackable).items():
            if isinstance(child, keras.Variable | tf.Variable):
                weights[name] = _weight(child)
                variables[weights[name].key] = child
                continue
            if id(child) not in numbers:
                numbers[id(child)] = len(pending)
                pending.append(child)
            children[name] = numbers[id(child)]
        tables = frozenset(trackable.table_names) if isinstance(trackable, TablesNode) else frozenset()
        is_list = bool(children) and all(name.isdigit() for name in children)
        nodes.append(SavedObject("", None, children, weights, tables, is_list))
    return _Tracked(Objects(tuple(nodes)), variables)


def _weight(variable: Any) -> Weight:
    is_raw = isinstance(variable, tf.Variable)
    name = variable.name.partition(":")[0] if is_raw else variable.path
    dtype = variable.dtype.name if is_raw else variable.dtype
    return Weight(str(id(variable)), name, tuple(variable.shape), dtype)


@dataclasses.dataclass(frozen=True)
class _Saveable:
    """As Keras saves a model into weight files: layers by attributes and classes, each with numbered variables."""

    objects: Objects
    layers: Mapping[int, Any]

    def check_complete(self, where: str, model: Any) -> None:
        lookups = [node for node in tf.train.TrackableView(model).descendants() if isinstance(node, _LOOKUPS)]
        saved = {id(getattr(node, name, None)) for node in lookups for name in _OF_LOOKUPS}
        raw = [variable.name.partition(":")[0] for variable in raw_variables(model) if id(variable) not in saved]
        if raw:
            raise CheckpointMismatchError(
                f"{where}: has no value for {', '.join(raw[:_SHOWN])}. Keras saves only what self.add_weight made, and no other "
                "tf.Variable. Make it with self.add_weight, or save the trained model with tf.train.Checkpoint(model=model)."
            )

    def assign(self, found: Candidate, layers: SavedLayers) -> None:
        for wanted in found.layers:
            weights = self.objects.nodes[wanted].weights
            if weights:
                values = {name: layers.read(found.pairs[weight.key]) for name, weight in weights.items()}
                self.layers[wanted].load_own_variables(values)


def _keras_objects(model: Any) -> _Saveable:
    """Source: `_save_state` and `_save_container_state` in keras/src/saving/saving_lib.py."""
    nodes: list[SavedObject] = []
    layers: dict[int, Any] = {}
    visited: set[int] = set()
    around: set[int] = set()

    def add(layer: Any, path: str, scopes: str) -> int:
        visited.add(id(layer))
        number = len(nodes)
        nodes.append(SavedObject(path))
        layers[number] = layer
        children = dict(_held_by(layer, lambda child, key: add_any(child, f"{path}/{key}".strip("/"), scopes)))
        tables = getattr(layer, "_tpu_embedding", None)
        names = frozenset(tables.table_names) if isinstance(tables, TablesNode) else frozenset[str]()
        store: dict[str, Any] = {}
        if not names:
            layer.save_own_variables(store)
        if CONFIG in store:  # of a layer that saves for the ones below it, which have their names
            store = {}
        weights = {
            key: Weight(
                f"{path}/{key}", f"{scopes}{key}", tuple(value.shape), keras.backend.standardize_dtype(value.dtype)
            )
            for key, value in store.items()
        }
        nodes[number] = SavedObject(path, layer.name, children, weights, names)
        return number

    def add_any(child: Any, path: str, scopes: str) -> int | None:
        if isinstance(child, keras.layers.Layer):
            return None if id(child) in visited else add(child, path, f"{scopes}{child.name}/")
        if id(child) in around:  # a list that holds itself
            return None
        around.add(id(child))
        seen: Counter[str] = Counter()
        children: dict[str, int] = {}
        for element in child.values() if isinstance(child, dict) else child:
            if isinstance(element, keras.layers.Layer | list | dict | tuple):
                kind = snake_case(type(element).__name__) if isinstance(element, keras.layers.Layer) else "container"
                key = f"{kind}_{seen[kind]}" if seen[kind] else kind
                seen[kind] += 1
                found = add_any(element, f"{path}/{key}", scopes)
                if found is not None:
                    children[key] = found
        around.remove(id(child))
        nodes.append(SavedObject(path, None, children, is_list=True))
        return len(nodes) - 1 if children else None

    add(model, "", "")
    return _Saveable(Objects(tuple(nodes), root_is_model=True), layers)


_Wanted = _Tracked | _Saveable


@functools.cache
def _of_every_layer() -> frozenset[str]:
    """Attributes that Keras does not look into."""
    return frozenset({"_self_unconditional_dependency_names", *dir(keras.layers.Layer())})


def _held_by(layer: Any, add: Callable[[Any, str], int | None]) -> Iterator[tuple[str, int]]:
    """(attribute, number of the object) for what a layer holds, in Keras' order."""
    hidden, held = _of_every_layer(), list[tuple[str, Any]]()
    if isinstance(layer, keras.Sequential):
        held, hidden = [("layers", layer.layers)], hidden | {"_functional"}
    elif hasattr(layer, "operations") and isinstance(layer, keras.Model):
        held, hidden = [("layers", layer.layers)], hidden | {"operations", "_operations"}
    for attribute in sorted(dir(layer), key=lambda name: f"~{name}" if name.startswith("_") else name):
        if not attribute.startswith("__") and attribute not in hidden:
            with contextlib.suppress(Exception):  # of a property
                held.append((attribute, getattr(layer, attribute)))
    for attribute, child in held:
        if isinstance(child, keras.layers.Layer | list | dict | tuple):
            number = add(child, attribute)
            if number is not None:
                yield attribute, number
