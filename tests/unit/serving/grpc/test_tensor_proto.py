"""TensorProtos against TensorFlow's own reading of the same bytes (`Tensor::FromProto`, by way of tf.io.parse_tensor)."""

import itertools
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.core.framework import tensor_pb2, types_pb2

from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.grpc.tensor_proto import MAX_FILLED_BYTES, decode_tensor, encode_input, encode_tensor

DTYPES = (
    "float32", "float64", "float16", "bfloat16", "int8", "int16", "int32", "int64",
    "uint8", "uint16", "uint32", "uint64", "bool", "complex64", "complex128", "string",
)  # fmt: skip
SHAPES = [(), (0,), (1,), (5,), (2, 3), (2, 0, 3), (1, 1, 1, 2)]
FIELDS = {
    "half": "half_val", "bfloat16": "half_val", "float": "float_val", "double": "double_val", "int64": "int64_val",
    "uint32": "uint32_val", "uint64": "uint64_val", "bool": "bool_val", "string": "string_val",
    "complex64": "scomplex_val", "complex128": "dcomplex_val",
}  # fmt: skip


def sample(dtype: Any, shape: tuple[int, ...]) -> Any:
    """An array with the extremes of its dtype."""
    size = int(np.prod(shape))
    random = np.random.default_rng(size)
    if dtype == tf.string:
        values = np.empty(size, object)
        values[:] = [random.bytes(n) for n in range(size)]
        return values.reshape(shape)
    if dtype == tf.bool:
        return random.random(shape) < 0.5
    if dtype.is_complex or dtype.is_floating:
        return np.resize([1.5, -0.0, np.nan, np.inf, -2.25], shape).astype(dtype.as_numpy_dtype)
    return np.resize(np.array([dtype.min, dtype.max, 7], dtype.as_numpy_dtype), shape)


def name_of(dtype: Any) -> str:
    return str(types_pb2.DataType.Name(dtype.as_datatype_enum)).removeprefix("DT_").lower()


def truth(proto: Any, dtype: Any) -> Any:
    """What TensorFlow's C++ makes of a TensorProto; None where it refuses."""
    try:
        value = tf.io.parse_tensor(proto.SerializeToString(), dtype).numpy()
    except (tf.errors.InvalidArgumentError, ValueError):  # it refuses, or numpy has no such array
        return None
    return np.array(value, object) if isinstance(value, bytes) else value


def decoded(proto: Any) -> Any:
    try:
        return decode_tensor(proto, "x")
    except StatusError as error:
        is_range = ", which cannot hold " in error.message or ", and has values in " in error.message
        if error.code is not Code.INVALID_ARGUMENT or not (is_range or error.message == "tensor parsing error: x"):
            raise
        return None


def same(found: Any, wanted: Any) -> None:
    """To the last bit, NaN included."""
    assert (found.dtype, found.shape) == (np.asarray(wanted).dtype, np.shape(wanted))
    if not found.size:  # of 2^40 empty rows there is no list
        return
    assert found.tolist() == np.asarray(wanted).tolist() or found.tobytes() == np.asarray(wanted).tobytes()


@pytest.mark.parametrize(("name", "shape"), list(itertools.product(DTYPES, SHAPES)))
def test_what_tensorflow_wrote_is_read_and_what_is_written_tensorflow_reads(name: str, shape: tuple[int, ...]) -> None:
    dtype = tf.as_dtype(name)
    array = sample(dtype, shape)
    same(decode_tensor(tf.make_tensor_proto(array, dtype), "x"), array)
    proto = tensor_pb2.TensorProto()
    encode_tensor(array, name_of(dtype), proto)
    assert not proto.tensor_content
    assert len(getattr(proto, FIELDS.get(name_of(dtype), "int_val"))) == array.size * (1 + dtype.is_complex)
    same(truth(proto, dtype), array)
    same(decode_tensor(proto, "x"), array)
    assert decode_tensor(proto, "x").flags.aligned  # C code takes its address
    in_bytes = content_of(array, name_of(dtype))
    assert bool(in_bytes.tensor_content) == (name != "string" and array.size > 0)
    same(truth(in_bytes, dtype), array)
    same(decode_tensor(in_bytes, "x"), array)


def content_of(array: Any, dtype: str) -> Any:
    proto = tensor_pb2.TensorProto()
    encode_input(array, dtype, proto)
    return proto


def test_an_array_in_another_order_is_written_by_rows() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3).T
    proto = tensor_pb2.TensorProto()
    encode_tensor(array, "float", proto)
    same(tf.make_ndarray(proto), array)
    same(tf.make_ndarray(content_of(array, "float")), array)


def test_the_bytes_of_another_dtype_are_not_sent() -> None:
    proto = tensor_pb2.TensorProto()
    encode_tensor(np.array([1.5, -2], ">f2"), "half", proto)
    same(decode_tensor(proto, "x"), np.array([1.5, -2], np.float16))
    same(tf.make_ndarray(content_of(np.array([1, 2], ">i8"), "int64")), np.array([1, 2]))


NUMBERS = {
    tf.float32: st.floats(width=32), tf.float64: st.floats(), tf.int32: st.integers(-(2**31), 2**31 - 1),
    tf.int64: st.integers(-(2**63), 2**63 - 1), tf.uint64: st.integers(0, 2**64 - 1), tf.bool: st.booleans(),
    tf.int8: st.integers(-(2**31), 2**31 - 1), tf.uint16: st.integers(-(2**31), 2**31 - 1),
    tf.float16: st.integers(0, 2**16 - 1), tf.bfloat16: st.integers(0, 2**16 - 1), tf.complex64: st.floats(width=32),
    tf.string: st.binary(max_size=3),
}  # fmt: skip


@st.composite
def protos(draw: Any) -> tuple[Any, Any]:
    """A TensorProto that may contradict itself, and its dtype."""
    dtype = draw(st.sampled_from(list(NUMBERS)))
    proto = tensor_pb2.TensorProto(dtype=dtype.as_datatype_enum)
    sizes = draw(st.lists(st.sampled_from([0, 1, 1, 2, 2, 3, -1, 2**40, 2**62]), max_size=3))
    for size in sizes:
        proto.tensor_shape.dim.add().size = size
    proto.tensor_shape.unknown_rank = draw(st.sampled_from([False] * 9 + [True]))
    if draw(st.booleans()):
        proto.tensor_content = draw(st.binary(max_size=26))
    else:
        values = draw(st.lists(NUMBERS[dtype], max_size=6))
        getattr(proto, FIELDS.get(name_of(dtype), "int_val")).extend(values)
    return proto, dtype


@settings(max_examples=400, deadline=None)
@given(protos())
def test_any_proto_is_read_as_tensorflow_reads_it_or_refused(case: tuple[Any, Any]) -> None:
    proto, dtype = case
    dims = [dim.size for dim in proto.tensor_shape.dim]
    huge = 2**40 in dims or 2**62 in dims
    found = decoded(proto)
    if huge and 0 not in dims:
        assert found is None  # TensorFlow would go and allocate it
        return
    wanted = truth(proto, dtype)
    values = len(getattr(proto, FIELDS.get(name_of(dtype), "int_val"))) // (1 + dtype.is_complex)
    if wanted is None or proto.tensor_shape.unknown_rank:
        assert found is None
    elif found is None:
        # TensorFlow drops what is too much without a word, also of integers, and knows no limit of numpy's.
        odd = dtype.is_integer and any(not dtype.min <= value <= dtype.max for value in proto.int_val)
        odd |= dtype.is_complex and len(proto.scomplex_val) % 2
        odd |= dtype == tf.bool and max(proto.tensor_content, default=0) > 1  # refused by TensorFlow of late
        assert odd or huge or (not proto.tensor_content and values > np.prod(dims))
    elif dtype == tf.bool and proto.tensor_content:
        np.testing.assert_array_equal(found, wanted.view(np.uint8) != 0)
    else:
        same(found, wanted)


@pytest.mark.parametrize("values", [[], [b"a\0"], [b"z", b"\0"], [b"", b"a\0\0"]])
def test_a_string_for_many_keeps_its_bytes(values: list[bytes]) -> None:
    proto = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=values)
    proto.tensor_shape.dim.add().size = 3
    assert decode_tensor(proto, "x").tolist() == truth(proto, tf.string).tolist()


def test_a_value_for_many_fills_no_more_than_its_limit() -> None:
    proto = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, float_val=[2.5])
    dim = proto.tensor_shape.dim.add(size=MAX_FILLED_BYTES // 4)
    assert decode_tensor(proto, "x")[-1] == 2.5
    dim.size += 1
    assert decoded(proto) is None
    text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[b"ab"])
    dim = text.tensor_shape.dim.add(size=2**20)
    assert decode_tensor(text, "x")[-1] == b"ab"
    dim.size += 1
    assert decoded(text) is None


def test_a_dtype_that_has_no_field_is_not_sent() -> None:
    with pytest.raises(StatusError, match=r"^tensors of type float8_e4m3fn cannot be sent$"):
        encode_tensor(np.zeros(1, np.uint8), "float8_e4m3fn", tensor_pb2.TensorProto())
