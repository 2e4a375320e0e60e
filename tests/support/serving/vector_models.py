"""SavedModels that the vectors of requests are written for, made by TensorFlow alone; and one exported by this project."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tests.support.serving.models import save_zoo, spec
from tpuembed import export_saved_model

OURS_ROWS = np.arange(12, dtype=np.float32).reshape(6, 2)


def save_models(root: Path) -> dict[str, Path]:
    """Every model's folder by its name."""
    save_zoo(root / "zoo" / "3")
    _save(root / "half" / "00000123", _half_plus_two())
    _save(root / "examples" / "1", _examples())
    _save(root / "more" / "9", _more())
    _export_ours(root)
    return {name: root / name for name in ("zoo", "half", "examples", "more", "ours")}


def _save(path: Path, functions: dict[str, tuple[Any, list[Any]]]) -> None:
    module = tf.Module()
    signatures = {name: tf.function(call).get_concrete_function(*specs) for name, (call, specs) in functions.items()}
    tf.saved_model.save(module, str(path), signatures=signatures)


def _parse(examples: Any, **features: tuple[Any, Any]) -> Any:
    """One value of each feature per example, [examples]; (dtype, default) by name."""
    wanted = {name: tf.io.FixedLenFeature([], dtype, default) for name, (dtype, default) in features.items()}
    return tf.io.parse_example(examples, wanted)


def _x(examples: Any) -> Any:
    return _parse(examples, x=(tf.float32, -1.0))["x"]


def _half_plus_two() -> dict[str, tuple[Any, list[Any]]]:
    """The signatures of the sample that TensorFlow Serving's documentation uses, and one of two inputs and outputs."""
    text = [spec(tf.string, "inputs")]
    return {
        "serving_default": (lambda x: {"y": 0.5 * x + 2}, [spec(tf.float32, "x")]),
        "regress_x_to_y": (lambda inputs: {"outputs": (0.5 * _x(inputs) + 2)[:, tf.newaxis]}, text),
        "classify_x_to_y": (lambda inputs: {"scores": (0.5 * _x(inputs) + 2)[:, tf.newaxis]}, text),
        "two": (
            lambda a, b: {"sum": a + b, "difference": a - b},
            [spec(tf.float32, "a", (None, 2)), spec(tf.float32, "b", (None, 2))],
        ),
    }


def _examples() -> dict[str, tuple[Any, list[Any]]]:
    """What classify and regress take, and everything that they refuse."""
    text = [spec(tf.string, "inputs")]
    return {
        "serving_default": (_classes_and_scores, text),
        "classes": (lambda inputs: {"classes": _classes_and_scores(inputs)["classes"]}, text),
        "raw": (lambda inputs: {"classes": _parse(inputs, s=(tf.string, ""))["s"][:, tf.newaxis]}, text),
        "kinds": (_kinds, text),
        "class_vector": (lambda inputs: {"scores": _x(inputs)}, text),
        "class_double": (lambda inputs: {"scores": tf.cast(_x(inputs), tf.float64)[:, tf.newaxis]}, text),
        "class_numbers": (lambda inputs: {"classes": tf.cast(_x(inputs), tf.int64)[:, tf.newaxis]}, text),
        "class_batch": (lambda inputs: {"scores": _x(inputs)[:1, tf.newaxis]}, text),
        "class_sizes": (_uneven_classes, text),
        "class_three": (lambda inputs: _classes_and_scores(inputs) | {"more": _x(inputs)}, text),
        "class_neither": (lambda inputs: {"labels": _x(inputs)}, text),
        "class_input": (lambda examples: {"scores": _x(examples)[:, tf.newaxis]}, [spec(tf.string, "examples")]),
        "regress": (lambda inputs: {"outputs": _sum(inputs)}, text),
        "regress_wide": (lambda inputs: {"outputs": tf.stack([_x(inputs)] * 2, 1)}, text),
        "regress_double": (lambda inputs: {"outputs": tf.cast(_x(inputs), tf.float64)}, text),
        "regress_batch": (lambda inputs: {"outputs": _x(inputs)[:1]}, text),
        "regress_total": (lambda inputs: {"outputs": tf.reduce_sum(_x(inputs))}, text),
        "regress_two": (lambda inputs: {"outputs": _x(inputs), "more": _x(inputs)}, text),
        "regress_name": (lambda inputs: {"y": _x(inputs)}, text),
        "regress_input": (lambda examples: {"outputs": _x(examples)}, [spec(tf.string, "examples")]),
        "regress_number": (lambda inputs: {"outputs": inputs * 1}, [spec(tf.float32, "inputs")]),
        "inputs_two": (lambda inputs, more: {"outputs": _x(inputs) + more}, [*text, spec(tf.float32, "more")]),
    }


def _classes_and_scores(inputs: Any) -> dict[str, Any]:
    x = _x(inputs)
    names = tf.constant(["low", 'h"igh'])
    return {"classes": tf.repeat(names[tf.newaxis], tf.shape(x)[0], 0), "scores": tf.stack([x, 1 - x], 1)}


def _uneven_classes(inputs: Any) -> dict[str, Any]:
    found = _classes_and_scores(inputs)
    return {"classes": found["classes"], "scores": found["scores"][:, :1]}


def _sum(inputs: Any) -> Any:
    """x + c: features of an example and of the context."""
    parsed = _parse(inputs, x=(tf.float32, -1.0), c=(tf.float32, 0.0))
    return parsed["x"] + parsed["c"]


def _kinds(inputs: Any) -> dict[str, Any]:
    """Each feature's values as text, to show what an example held."""
    sparse = {"s": tf.string, "f": tf.float32, "i": tf.int64}
    parsed = tf.io.parse_example(inputs, {name: tf.io.VarLenFeature(dtype) for name, dtype in sparse.items()})
    texts = []
    for name in sparse:
        values = tf.sparse.to_dense(parsed[name])
        if name != "s":
            values = tf.strings.as_string(values)
        texts.append(tf.strings.reduce_join(values, 1, separator="|"))
    return {"classes": tf.stack(texts, 1)}


def _more() -> dict[str, tuple[Any, list[Any]]]:
    """dtypes that the zoo has not."""
    simple = ("int8", "int16", "uint16", "uint32", "uint64", "bfloat16", "complex64", "float16", "float64", "int64")
    functions: dict[str, tuple[Any, list[Any]]] = {
        name: (lambda x: {"y": tf.identity(x)}, [spec(tf.as_dtype(name), "x")]) for name in simple
    }
    functions["serving_default"] = (lambda x: {"y": tf.identity(x)}, [tf.TensorSpec(None, tf.float32, name="x")])
    functions["strings"] = (
        lambda s: {"s": tf.identity(s), "s_bytes": tf.identity(s)},
        [tf.TensorSpec(None, tf.string, name="s")],
    )
    functions["nothing"] = (lambda: {"y": tf.constant([1.5])}, [])
    functions["divide"] = (lambda x: {"y": 1 / x}, [spec(tf.float32, "x")])
    functions["b64"] = (lambda b64: {"y": tf.strings.length(b64)}, [spec(tf.string, "b64")])
    return functions


def _export_ours(root: Path) -> None:
    """Lists of ids, looked up in a table and added."""
    checkpoint = tf.train.Checkpoint(videos=tf.Variable(OURS_ROWS, name="videos"))
    prefix = checkpoint.write(str(root / "checkpoint" / "ckpt"))
    features = {"watched": {"table": "videos", "combiner": "sum"}, "liked": {"table": "videos", "input": "id"}}
    export_saved_model(prefix, root / "ours", serving_config={"features": features}, version=1)
