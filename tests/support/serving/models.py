"""SavedModels that serving tests are run on, made by TensorFlow alone."""

from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

TABLE = (np.arange(15, dtype=np.float32).reshape(5, 3) / 7).astype(np.float32)


def spec(dtype: Any, name: str, shape: tuple[int | None, ...] = (None,)) -> Any:
    return tf.TensorSpec(shape, dtype, name=name)


def zoo() -> tuple[Any, dict[str, Any]]:
    """A module and its signatures: each dtype, one and several inputs and outputs, and what can go wrong."""
    module = tf.Module()
    module.table = tf.Variable(TABLE)

    def lookup(ids: Any) -> Any:
        return {"embedding": tf.gather(module.table, ids)}

    def mixed(ids: Any, weights: Any, on: Any) -> Any:
        return {
            "weighted": tf.gather(module.table, ids) * weights[:, tf.newaxis],
            "off": tf.logical_not(on),
            "next": ids + 1,
        }

    def text(s: Any) -> Any:
        return {"upper": tf.strings.upper(s, encoding="utf-8"), "raw_bytes": s, "length": tf.strings.length(s)}

    def slow(n: Any) -> Any:
        step = tf.while_loop(lambda i: i < n[0], lambda i: (i + 1,), (tf.constant(0, tf.int64),))
        return {"n": n + 0 * step[0]}

    functions = {
        "serving_default": (lookup, [spec(tf.int64, "ids", (None, 2))]),
        "mixed": (mixed, [spec(tf.int64, "ids"), spec(tf.float32, "weights"), spec(tf.bool, "on")]),
        "text": (text, [spec(tf.string, "s")]),
        "double": (lambda x: {"y": x / 3}, [spec(tf.float64, "x")]),
        "int32": (lambda x: {"y": x * 2}, [spec(tf.int32, "x", (None, None))]),
        "uint8": (lambda x: {"y": x + 0}, [spec(tf.uint8, "x")]),
        "logic": (lambda b: {"y": tf.logical_not(b)}, [spec(tf.bool, "b")]),
        "half": (lambda x: {"y": x * 2}, [spec(tf.float16, "x")]),
        "to_half": (lambda x: {"y": tf.cast(x, tf.float16)}, [spec(tf.float32, "x")]),
        "total": (lambda x: {"y": tf.reduce_sum(x)}, [spec(tf.float32, "x")]),
        "uneven": (lambda x: {"a": x * 1, "b": x[:1] * 1}, [spec(tf.float32, "x")]),
        "first": (lambda s: {"y_bytes": s[0]}, [spec(tf.string, "s")]),
        "slow": (slow, [spec(tf.int64, "n")]),
    }
    signatures = {}
    for name, (function, specs) in functions.items():
        signatures[name] = tf.function(function).get_concrete_function(*specs)
    return module, signatures


def save_zoo(path: Path) -> None:
    module, signatures = zoo()
    tf.saved_model.save(module, str(path), signatures=signatures)


def save_scale(path: Path, factor: float) -> None:
    """A model that multiplies by a variable."""
    module = tf.Module()
    module.factor = tf.Variable(factor, name="factor")
    scale = tf.function(lambda x: {"y": x * module.factor}).get_concrete_function(spec(tf.float32, "x"))
    tf.saved_model.save(module, str(path), signatures={"serving_default": scale})
