"""JSON: converts request bodies to arrays, and arrays to response bodies. TensorFlow Serving's form, and `inference`'s.

`decode_inputs` takes whole columns at once. It goes value by value only to report an error in TensorFlow Serving's words.
"""

from tpuembed_serving.http.json.document import LEAST_DECODING_BYTES, Document, decoding_bytes, parse_document
from tpuembed_serving.http.json.examples import decode_examples, encode_result
from tpuembed_serving.http.json.inference import encode_inference, parse_inference
from tpuembed_serving.http.json.ragged import pad_ragged
from tpuembed_serving.http.json.requests import PredictInputs, decode_inputs, signature_name
from tpuembed_serving.http.json.responses import encode_error, encode_outputs

__all__ = [
    "LEAST_DECODING_BYTES",
    "Document",
    "PredictInputs",
    "decode_examples",
    "decode_inputs",
    "decoding_bytes",
    "encode_error",
    "encode_inference",
    "encode_outputs",
    "encode_result",
    "pad_ragged",
    "parse_document",
    "parse_inference",
    "signature_name",
]
