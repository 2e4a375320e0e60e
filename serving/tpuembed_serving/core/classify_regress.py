"""Classify and regress as in TensorFlow Serving: checks of signatures and of outputs (classifier.cc, regressor.cc).

Both run on serialized tf.Examples. The signature has one input, called "inputs".
"""

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from tpuembed_serving.core.pipeline import Check, Task
from tpuembed_serving.core.servable import Array, Servable, Signature, TensorInfo
from tpuembed_serving.core.status import Code, StatusError, TooLargeError, invalid_argument

__all__ = [
    "LOG_TYPES",
    "Classification",
    "InferenceResult",
    "Method",
    "Regression",
    "check_context",
    "check_signature",
    "example_task",
    "find_signature",
    "interpret",
    "to_tensor",
]

_INPUTS: Final = "inputs"
_CLASSES: Final = "classes"
_SCORES: Final = "scores"
_OUTPUTS: Final = "outputs"
_COPIED_PER_SLOW: Final = 64
"""How many bytes are copied in the time in which a slow parser reads one."""
_MAX_CONTEXT_BYTES: Final = 64 << 20
"""The limit of the copies of a request's context: each example has one."""


class Method(enum.Enum):
    """An inference method. The values are the method names of TensorFlow's signature_constants.h."""

    CLASSIFY = "tensorflow/serving/classify"
    REGRESS = "tensorflow/serving/regress"

    @classmethod
    def named(cls, name: str) -> "Method":
        """Return the method that a task of MultiInference names.

        Raises:
            StatusError: UNIMPLEMENTED, there is no such method.
        """
        try:
            return cls(name)
        except ValueError:
            raise StatusError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {name}") from None


LOG_TYPES: Final[Mapping[Method, str]] = {Method.CLASSIFY: "classify_log", Method.REGRESS: "regress_log"}
"""The fields of a PredictionLog."""


@dataclasses.dataclass(frozen=True)
class Classification:
    """The result of classify.

    Attributes:
        labels: bytes [examples, classes]; empty bytes if the signature has no classes.
        scores: float32 [examples, classes]; zeros if the signature has no scores.
    """

    labels: Array
    scores: Array


@dataclasses.dataclass(frozen=True)
class Regression:
    """The result of regress; values: float32 [examples]."""

    values: Array


InferenceResult = Classification | Regression


def check_context(context: bytes, examples: int, check: Check) -> None:
    """Check the size of the copies of `context`, one for each example, before they are made.

    Raises:
        StatusError: RESOURCE_EXHAUSTED, they are too large.
    """
    size = len(context) * examples
    if size > _MAX_CONTEXT_BYTES:
        raise TooLargeError(
            f"the context takes {size / 2**20:.1f} MiB, because each of the {examples} examples contains it. The limit is "
            f"{_MAX_CONTEXT_BYTES >> 20} MiB. Send fewer examples per request"
        )
    check(size // _COPIED_PER_SLOW)


def to_tensor(examples: Sequence[bytes]) -> Array:
    """Convert serialized tf.Examples to the input of a signature.

    Raises:
        StatusError: INVALID_ARGUMENT, the list is empty.
    """
    if not examples:
        raise invalid_argument("Input is empty.")
    tensor = np.empty(len(examples), dtype=object)
    tensor[:] = examples
    return tensor


def example_task(signature: Signature, examples: Sequence[bytes]) -> Task:
    """Return the run of serialized tf.Examples.

    Raises:
        StatusError: INVALID_ARGUMENT, there are none.
    """
    return Task(signature, [to_tensor(examples)], sum(map(len, examples)))


def find_signature(servable: Servable, name: str, method: Method) -> Signature:
    """Return the signature that a classify or regress request names. It supports `method`.

    Raises:
        StatusError: INVALID_ARGUMENT, there is no such signature, or it does not support `method`.
    """
    signature = servable.signatures.get(name)
    if signature is None:
        raise invalid_argument(f"No signature was found with the name: {name}")
    check_signature(servable, signature, method)
    return signature


def check_signature(servable: Servable, signature: Signature, method: Method) -> None:
    """Check that a signature supports `method`. `interpret` checks its outputs after the run.

    Raises:
        StatusError: INVALID_ARGUMENT, it does not.
    """
    if len(signature.inputs) != 1:
        raise invalid_argument("Expected one input Tensor.")
    if method is Method.CLASSIFY:
        _check_classification(servable, signature)
    else:
        _check_regression(servable, signature)


def _check_classification(servable: Servable, signature: Signature) -> None:
    outputs = {info.alias for info in signature.outputs}
    if len(outputs) not in (1, 2):
        raise invalid_argument(f"Expected one or two output Tensors, found {len(outputs)}")
    if signature.inputs[0].alias != _INPUTS:
        raise invalid_argument(f"No classification inputs found in SignatureDef: {_shown(servable, signature)}")
    if not outputs & {_CLASSES, _SCORES}:
        text = f'Expected classification signature outputs to contain at least one of "{_CLASSES}" or "{_SCORES}". '
        raise invalid_argument(f"{text}Signature was: {_shown(servable, signature)}")


def _check_regression(servable: Servable, signature: Signature) -> None:
    if len(signature.outputs) != 1:
        raise invalid_argument("Expected one output Tensor.")
    if signature.inputs[0].alias != _INPUTS:
        raise invalid_argument(f"No regression inputs found in SignatureDef: {_shown(servable, signature)}")
    if signature.outputs[0].alias != _OUTPUTS:
        raise invalid_argument(f"No regression outputs found in SignatureDef: {_shown(servable, signature)}")


def _shown(servable: Servable, signature: Signature) -> str:
    """Return a signature in the form of protobuf's DebugString."""
    from google.protobuf import json_format, text_format  # type: ignore[import-untyped]
    from tensorflow.core.protobuf import meta_graph_pb2

    fields = servable.signature_defs.get(signature.name, {})
    definition = json_format.ParseDict(fields, meta_graph_pb2.SignatureDef(), ignore_unknown_fields=True)
    return str(text_format.MessageToString(definition))


def interpret(method: Method, signature: Signature, outputs: Mapping[str, Array], examples: int) -> InferenceResult:
    """Convert the outputs of a checked signature to a result for so many examples.

    Raises:
        StatusError: INVALID_ARGUMENT, an output has another shape or dtype than the method needs.
    """
    infos = {info.alias: info for info in signature.outputs}
    if method is Method.CLASSIFY:
        return _classification(infos, outputs, examples)
    return _regression(infos[_OUTPUTS], outputs[_OUTPUTS], examples)


def _classification(infos: Mapping[str, TensorInfo], outputs: Mapping[str, Array], examples: int) -> Classification:
    classes, scores = outputs.get(_CLASSES), outputs.get(_SCORES)
    if classes is not None:
        _check_matrix(_CLASSES, infos[_CLASSES], classes, "string", examples)
    if scores is not None:
        _check_matrix(_SCORES, infos[_SCORES], scores, "float", examples)
    if classes is not None and scores is not None and classes.shape[1] != scores.shape[1]:
        sizes = f"{classes.shape[1]} vs. {scores.shape[1]}"
        raise invalid_argument(f"Tensors class and score should match in dim_size(1). Got {sizes}")
    if classes is None:
        classes = np.full(_shape(scores), b"", dtype=object)
    return Classification(classes, np.zeros(classes.shape, np.float32) if scores is None else scores)


def _shape(array: Array | None) -> tuple[int, ...]:
    return (0, 0) if array is None else array.shape


def _check_matrix(alias: str, info: TensorInfo, array: Array, dtype: str, examples: int) -> None:
    if array.ndim != 2:
        raise invalid_argument(f"Expected Tensor shape: [batch_size num_classes] but got {_shape_text(array)}")
    if info.dtype != dtype:
        raise invalid_argument(f"Expected {alias} Tensor of DT_{dtype.upper()}. Got: DT_{info.dtype.upper()}")
    if array.shape[0] != examples:
        raise invalid_argument(f"Expected {alias} output batch size of {examples}. Got: {array.shape[0]}")


def _regression(info: TensorInfo, array: Array, examples: int) -> Regression:
    if not (array.ndim == 1 or (array.ndim == 2 and array.shape[1] == 1)):
        shapes = f"[batch_size] or [batch_size, 1] but got {_shape_text(array)}"
        raise invalid_argument(f"Expected output Tensor shape to be either {shapes}")
    if array.shape[0] != examples:
        sizes = f"{examples} vs. {array.shape[0]}"
        raise invalid_argument(f"Input batch size did not match output batch size: {sizes}")
    if info.dtype != "float":
        raise invalid_argument(f"Expected output Tensor of DT_FLOAT.  Got: DT_{info.dtype.upper()}")
    return Regression(array.reshape(examples))


def _shape_text(array: Array) -> str:
    """Return a shape in the form of TensorFlow's messages: [2,3]."""
    return f"[{','.join(map(str, array.shape))}]"
