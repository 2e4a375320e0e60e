"""Requests that TensorFlow Serving runs before a version becomes available, so that no user's request is the first one.

One record per signature and batch size. A record that fails makes the load fail. So the ids in records are rows of
their tables, and a model that computes more than lookups is called with them before they are written.

Source: tensorflow_serving/apis/prediction_log.proto, predict.proto and model.proto, and TensorFlow Serving's page
"SavedModel Warmup" for the place and the format of the file.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.formats.protobuf import bytes_field
from tpuembed.manifest import Packing

__all__ = ["BATCHES", "WARMUP_PATH", "sample_inputs", "write_warmup"]

WARMUP_PATH: Final = Path("assets.extra") / "tf_serving_warmup_requests"
BATCHES: Final = (1, 32)
_HOT = 2  # columns of a list

_Array = npt.NDArray[Any]


def sample_inputs(
    specs: Mapping[str, tf.TensorSpec],
    ids: Mapping[str, Any],
    batch: int,
    widths: Mapping[str, int] | None = None,
    padding: Mapping[str, Any] | None = None,
) -> dict[str, _Array]:
    """Return inputs of `specs`: the rows in `ids`, and zeros. In batches of more than one, lists end in padding.

    Args:
        specs: of all inputs.
        ids: by name, the row, or the name as bytes, for a list of ids or a single id.
        batch: number of examples.
        widths: columns of lists that need a given number of them.
        padding: of the lists; None for -1 of those in `ids`.
    """
    pads = dict.fromkeys(ids, -1) if padding is None else padding
    columns = {name: (widths or {}).get(name, _HOT) for name in specs}
    return {name: _sample(spec, ids.get(name, 0), pads.get(name), batch, columns[name]) for name, spec in specs.items()}


def _sample(spec: tf.TensorSpec, fill: Any, padding: Any, batch: int, columns: int) -> _Array:
    known = spec.shape.as_list()
    shape = [(columns if index else batch) if size is None else size for index, size in enumerate(known)]
    if spec.dtype == tf.string:
        fill, padding = fill if isinstance(fill, bytes) else b"", None if padding is None else b""
    values = np.full(shape, fill, spec.dtype.as_numpy_dtype)
    if padding is not None and batch > 1 and None in known[1:]:
        values[:, -1] = padding
    return values


def write_warmup(
    folder: Path,
    requests: list[dict[str, _Array]],
    signatures: Mapping[str, Any],
    packing: Packing,
    activations: Collection[str] = (),
    packed: Sequence[dict[str, _Array]] | None = None,
) -> None:
    """Write records of all `signatures` for the inputs `requests` into the SavedModel in `folder`.

    Args:
        folder: the version's folder.
        requests: the inputs of `serving_default`.
        signatures: their traced functions, by name.
        packing: of the signature `packed`.
        activations: the inputs of `from_activations` that are no inputs of `serving_default`. They are zeros, as are those of
            other signatures.
        packed: the same requests with row numbers, for `packed`. None if `requests` have no names.
    """
    path = folder / WARMUP_PATH
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for inputs, rows in zip(requests, packed or requests, strict=True):
            forms = {"serving_default": inputs, "packed": _packed(rows, packing)}
            if "serving_examples" in signatures:
                forms["serving_examples"] = _examples(inputs)
            for name in signatures:
                if name not in forms:
                    (specs,), _ = signatures[name].structured_input_signature
                    zeros = activations if name == "from_activations" else specs.keys() - inputs.keys()
                    forms[name] = _with_zeros(inputs, signatures, specs, zeros)
                writer.write(_prediction_log(name, forms[name]))


def _packed(inputs: Mapping[str, _Array], packing: Packing) -> dict[str, _Array]:
    if packing.left_out:
        return {}
    columns = [inputs[packed.name] for packed in packing.inputs]
    return {"ids": np.concatenate([column.reshape(len(column), -1) for column in columns], 1, dtype=np.int64)}


def _with_zeros(
    inputs: Mapping[str, _Array], signatures: Mapping[str, Any], specs: Mapping[str, Any], names: Collection[str]
) -> dict[str, _Array]:
    """Return the inputs of another signature, of `specs`: zeros for `names`, and the rest from `inputs`."""
    (of_default,), _ = signatures["serving_default"].structured_input_signature
    of_any_size = [name for name, spec in of_default.items() if spec.shape.rank and spec.shape[0] is None]
    batch = len(inputs[of_any_size[0]]) if of_any_size else 1
    zeros = sample_inputs({name: specs[name] for name in names}, {}, batch)
    return {name: zeros[name] if name in zeros else inputs[name] for name in sorted(specs)}


def _examples(inputs: Mapping[str, _Array]) -> dict[str, _Array]:
    count = len(next(iter(inputs.values())))
    rows = [{name: _feature(values[row]) for name, values in inputs.items()} for row in range(count)]
    return {"examples": np.array([_example(row) for row in rows], np.object_)}


def _example(row: Mapping[str, tf.train.Feature]) -> bytes:
    """Serialize the Example with its features sorted by name: otherwise the order differs from process to process."""
    return tf.train.Example(features=tf.train.Features(feature=row)).SerializeToString(deterministic=True)


def _feature(value: Any) -> tf.train.Feature:
    values = np.asarray(value, np.object_ if isinstance(value, bytes) else None).reshape(-1)
    if values.dtype == np.object_:
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values.tolist()))
    if np.issubdtype(values.dtype, np.integer) or values.dtype == np.bool_:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values.astype(np.int64).tolist()))
    return tf.train.Feature(float_list=tf.train.FloatList(value=values.astype(np.float32).tolist()))


def _prediction_log(signature: str, inputs: Mapping[str, _Array]) -> bytes:
    """Return a PredictionLog.

    PredictionLog.predict_log = 6, PredictLog.request = 1; ModelSpec.signature_name = 3 in PredictRequest.model_spec =
    1.
    """
    entries = b"".join(_input(name, values) for name, values in inputs.items())
    request = bytes_field(1, bytes_field(3, signature.encode())) + entries
    return bytes_field(6, bytes_field(1, request))


def _input(name: str, values: _Array) -> bytes:
    """Return an entry of the map PredictRequest.inputs = 2: its key = 1 and its TensorProto = 2."""
    tensor = tf.make_tensor_proto(values).SerializeToString(deterministic=True)
    return bytes_field(2, bytes_field(1, name.encode()) + bytes_field(2, tensor))
