"""TensorFlow Serving's JSON: converts request bodies to arrays, and arrays to response bodies.

document   bytes -> members, with orjson if it agrees with RapidJSON, else with `parser`
requests   members + signature -> arrays, whole columns at once (`tensors`), or value by value to report an error
examples   the same for classify and regress: members -> serialized tf.Examples, results -> bytes
ragged     pads lists of different lengths if the manifest of an export allows it
responses  arrays -> bytes; `floats` has the number format, `debug` the form of values in messages
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
