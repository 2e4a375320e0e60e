"""Keys of slices sort as what they encode, and bundles survive the trip to TensorFlow and back, whatever they hold."""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.checkpoint.bundles import restore, save, write
from tpuembed.formats.protobuf import read_varint, varint
from tpuembed.formats.tensor_bundle import Bundle, Entry, Slice, crc, shard_path, write_index
from tpuembed.formats.tensor_bundle.entries import slice_key

INT64 = st.integers(-(2**63), 2**63 - 1)
Array = np.ndarray[Any, Any]


@given(st.tuples(st.binary(), INT64, INT64), st.tuples(st.binary(), INT64, INT64))
def test_keys_of_slices_sort_as_what_they_encode(a: tuple[bytes, int, int], b: tuple[bytes, int, int]) -> None:
    one, other = (slice_key(name, (start,), (length,)) for name, start, length in (a, b))
    assert ((one < other), (one == other)) == ((a < b), (a == b))


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_varints(value: int, rest: bytes) -> None:
    assert read_varint(varint(value) + rest, 0) == (value, len(varint(value)))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=40)
dtypes = st.sampled_from([np.float32, np.float64, np.int8, np.int64, np.uint16, np.bool_, np.complex64])
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
strings = st.lists(st.binary(max_size=200), max_size=5).map(lambda values: np.array([*values, b""], object)[:-1])
tensors = st.dictionaries(names, st.one_of(arrays, strings), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(tensors)
def test_what_tensorflow_writes_is_read(tensors: dict[str, Array]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        values = {
            name: tf.constant(array, tf.string if array.dtype == object else None) for name, array in tensors.items()
        }
        with Bundle.open(save(Path(folder, "ckpt"), values)) as bundle:
            assert set(bundle.entries) == set(tensors)
            for name, array in tensors.items():
                np.testing.assert_array_equal(bundle.read(name), array)
                bundle.verify(name, chunk_bytes=7)


@settings(deadline=None, max_examples=60)
@given(tensors)
def test_what_is_written_tensorflow_reads(tensors: dict[str, Array]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "ckpt")
        write(prefix, tensors)
        for name, array in tensors.items():
            dtype = "string" if array.dtype == object else array.dtype.name
            np.testing.assert_array_equal(restore(prefix, name, dtype), array)


Box = tuple[tuple[int, ...], tuple[int, ...]]


def cut(draw: st.DrawFn, start: tuple[int, ...], shape: tuple[int, ...], depth: int) -> list[Box]:
    """Random boxes that tile [start, start + shape)."""
    dim = draw(st.integers(0, len(shape) - 1))
    if not depth or shape[dim] < 2 or draw(st.integers(0, 3)) == 0:
        return [(start, shape)]
    low = draw(st.integers(1, shape[dim] - 1))
    left = (*shape[:dim], low, *shape[dim + 1 :])
    right = (*shape[:dim], shape[dim] - low, *shape[dim + 1 :])
    moved = (*start[:dim], start[dim] + low, *start[dim + 1 :])
    return cut(draw, start, left, depth - 1) + cut(draw, moved, right, depth - 1)


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[int]]:
    """A shape, boxes that tile it in random order, and the number of a data file for each."""
    shape = tuple(draw(st.lists(st.integers(1, 200), min_size=1, max_size=3)))
    boxes = draw(st.permutations(cut(draw, (0,) * len(shape), shape, 4)))
    return shape, boxes, draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))


@settings(deadline=None, max_examples=60)
@given(tilings(), st.data())
def test_slices_in_any_direction_over_any_files(
    tiling: tuple[tuple[int, ...], list[Box], list[int]], data: st.DataObject
) -> None:
    shape, boxes, shards = tiling
    tensor = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    payloads, slices = [b"odd"] * 3, []
    for (start, size), shard in zip(boxes, shards, strict=True):
        box = tensor[tuple(slice(low, low + length) for low, length in zip(start, size, strict=True))].tobytes()
        place = {"shard": shard, "offset": len(payloads[shard]), "size": len(box), "crc32c": crc.value(box)}
        slices.append(Slice(start=start, shape=size, **place))
        payloads[shard] += box
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder, "ckpt")
        for shard, payload in enumerate(payloads):
            shard_path(prefix, shard, 3).write_bytes(payload)
        write_index(f"{prefix}.index", {"x": Entry(dtype="int32", shape=shape, slices=tuple(slices))}, 3)
        np.testing.assert_array_equal(restore(prefix, "x", "int32"), tensor)
        with Bundle.open(prefix) as bundle:
            start, stop = sorted(data.draw(st.tuples(*[st.integers(0, shape[0])] * 2)))
            np.testing.assert_array_equal(bundle.read_rows("x", start, stop), tensor[start:stop])
            np.testing.assert_array_equal(bundle.read("x"), tensor)
            bundle.verify("x")
