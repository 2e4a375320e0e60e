"""TensorFlow Serving's JSON, both ways: request bodies to arrays, arrays to response bodies.

document   bytes -> members, by orjson where it agrees with RapidJSON, else by `parser`
requests   members + signature -> arrays, whole columns at once (`tensors`), or value by value to name an error
examples   the same for classify and regress: members -> serialized tf.Examples, results -> bytes
ragged     lists of different lengths, where the manifest of an export allows them
responses  arrays -> bytes; `floats` holds the number format, `debug` the form of values in messages
"""

from tpuembed_serving.http.json.document import Document, parse_document
from tpuembed_serving.http.json.examples import decode_examples, encode_result
from tpuembed_serving.http.json.ragged import pad_ragged
from tpuembed_serving.http.json.requests import PredictInputs, decode_inputs, signature_name
from tpuembed_serving.http.json.responses import encode_error, encode_outputs

__all__ = [
    "Document",
    "PredictInputs",
    "decode_examples",
    "decode_inputs",
    "encode_error",
    "encode_outputs",
    "encode_result",
    "pad_ragged",
    "parse_document",
    "signature_name",
]
