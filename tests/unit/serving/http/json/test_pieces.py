"""Bodies that are parsed in pieces, against the same bodies parsed at once."""

import dataclasses
import gc
import json
import threading
import time
import tracemalloc
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.serving.doubles import signature
from tpuembed_serving.core.servable import Signature, TensorInfo
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.http.json import (
    decode_examples,
    decode_inputs,
    document,
    pad_ragged,
    parse_document,
    pieces,
    ragged,
    signature_name,
)

pytestmark = pytest.mark.nightly

ONE, PAIR, TEXT = {"x": "int64"}, {"a": "int64", "b": "float"}, {"x": "string"}


def outcome(body: bytes, inputs: Mapping[str, str], max_depth: int | None = None) -> Any:
    """The arrays, the form and the name of the signature, or the error."""
    try:
        parsed = parse_document(body, max_depth)
        name = signature_name(parsed)
        padded = dataclasses.replace(signature(inputs), padding=("" if inputs == TEXT else 0,) * len(inputs))
        try:
            found = decode_inputs(parsed, padded)
        except StatusError:
            found = decode_inputs(pad_ragged(parsed, padded) or parsed, padded)
    except StatusError as error:
        return error.to_string()
    return name, found.row_form, [(array.dtype, array.shape, array.tolist()) for array in found.arrays]


def examples(body: bytes) -> Any:
    try:
        return decode_examples(parse_document(body))
    except StatusError as error:
        return error.to_string()


def in_pieces(piece_bytes: int = 24) -> Any:
    """Cut bodies of all sizes into small pieces."""
    return mock.patch.multiple(pieces, _PIECE_BYTES=piece_bytes, _LONGEST_BYTES=4 * piece_bytes, _PAUSE_SECONDS=0), (
        mock.patch.object(document, "LARGE_BYTES", 0)
    )


def check(body: bytes, inputs: Mapping[str, str], piece_bytes: int = 24, max_depth: int | None = None) -> None:
    wanted, in_examples = outcome(body, inputs, max_depth), examples(body)
    small, large = in_pieces(piece_bytes)
    with small, large, mock.patch.object(ragged, "_PIECE_VALUES", piece_bytes):
        np.testing.assert_equal(outcome(body, inputs, max_depth), wanted)
        assert examples(body) == in_examples


numbers = st.one_of(st.integers(-9, 9), st.integers(-(2**64), 2**65), st.floats(), st.floats(-1e3, 1e3))
texts = st.one_of(st.text(max_size=6), st.text('ab", []{}:\\', max_size=8))
leaves = st.one_of(st.integers(-99, 99), st.integers(-99, 99), numbers, texts, st.booleans(), st.none())
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2))


def rows_of(element: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Rows of one form, in some of which is something else."""
    strange = st.tuples(st.integers(0, 60), values)
    lists = st.lists(element, max_size=60)
    return st.tuples(lists, st.lists(strange, max_size=1)).map(
        lambda drawn: [dict(drawn[1]).get(index, row) for index, row in enumerate(drawn[0])]
    )


ids = st.integers(-99, 99)
pairs = st.fixed_dictionaries({"a": ids, "b": st.one_of(ids, st.floats(-9, 9))})
rows = st.one_of(
    *map(
        rows_of,
        [ids, numbers, texts, st.lists(ids, min_size=2, max_size=2), st.lists(st.lists(ids, max_size=2)), pairs],
    ),
    rows_of(values),
)
documents = st.one_of(
    st.fixed_dictionaries({"instances": rows}),
    st.fixed_dictionaries({"signature_name": st.one_of(texts, values), "instances": rows}),
    st.fixed_dictionaries({"instances": rows, "signature_name": st.one_of(texts, values)}),
    st.fixed_dictionaries({"inputs": rows}),
    st.fixed_dictionaries({"inputs": st.fixed_dictionaries({"a": rows, "b": rows})}),
    st.fixed_dictionaries({"inputs": st.dictionaries(texts, rows, max_size=3), "instances": rows}),
    st.fixed_dictionaries({"examples": rows_of(pairs), "context": values}),
    st.fixed_dictionaries({"parameters": values, "inputs": st.fixed_dictionaries({"a": ids, "b": rows})}),
    st.fixed_dictionaries({"instances": rows_of(rows)}),
    st.fixed_dictionaries({"instances": rows_of(st.fixed_dictionaries({"a": rows, "b": rows}))}),
    st.fixed_dictionaries({"inputs": st.fixed_dictionaries({"x": rows_of(rows)})}),
    st.fixed_dictionaries({"examples": rows_of(st.fixed_dictionaries({"a": rows, "b": rows}))}),
    rows,
)
separators = st.tuples(st.sampled_from([",", ", ", " ,\n "]), st.sampled_from([":", ": ", " :\t"]))
signatures = st.sampled_from([ONE, PAIR, TEXT, {"x": "float"}, {"a": "int64", "b": "int64"}])
pieces_of = st.sampled_from([8, 24, 60])


def bodies() -> st.SearchStrategy[bytes]:
    return st.builds(
        lambda value, marks, indent, plain: json.dumps(
            value, separators=marks, indent=indent, ensure_ascii=plain
        ).encode("utf-8", "surrogatepass"),
        documents,
        separators,
        st.sampled_from([None, None, 1]),
        st.booleans(),
    )


@settings(max_examples=400, deadline=None)
@given(bodies(), signatures, pieces_of, st.sampled_from([None, None, 3, 4]))
def test_pieces_have_the_result_of_the_whole(
    body: bytes, inputs: Mapping[str, str], size: int, max_depth: int | None
) -> None:
    check(body, inputs, size, max_depth)


SPLICES = [
    b"]",
    b"]]",
    b"[",
    b"{",
    b"}",
    b",",
    b'"',
    b"\\",
    b":",
    b"NaN",
    b"1e999",
    b"\xff",
    b'"\\ud800"',
    b"], ",
    b"1,",
]
SPLICES += [b'], "b": [', b'"x": 1, ', b'{"b64": "AA=="}', b'"instances": [', b" trailing", b"\x0b", b"/"]


@settings(max_examples=1000, deadline=None)
@given(bodies(), signatures, pieces_of, st.data())
def test_so_have_damaged_bodies(body: bytes, inputs: Mapping[str, str], size: int, data: st.DataObject) -> None:
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(changed)))
        changed[at : at + data.draw(st.integers(0, 3))] = data.draw(st.sampled_from(SPLICES))
    check(bytes(changed), inputs, size)


@pytest.mark.parametrize(
    "body",
    [
        b'{"instances": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ]}',
        b'{"instances": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "instances": [1]}',
        b'{"inputs": {"x": [1, 2, 3, 4, 5, 6, 7, 8, 9], "x": [11, 12, 13, 14, 15, 16, 17]}}',
        b'{"inputs": {"x": [1, 2, 3, 4, 5, 6, 7, 8, 9], "y": [1, 2], "\\u0078": [11, 12, 13]}}',
        b'{"inputs": {"x": [1, 2, 3, 4, 5, 6, 7, 8, 9,], "y": [1, 2, 3, 4, 5, 6, 7, 8]}}',
        b'{"instances": [{"x": 1, "x": 2}, {"x": 1}, {"x": 1}, {"x": 1}, {"x": 1}]}',
        b'{"instances": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "b": [1, 2, 3, 4, 5, 6, 7, 8]} and more',
        b'{"instances": ["a", "], \\"b\\": [", "c", "d", "e", "f", "g, h", "i"]}',
        b'{"instances": [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9]]}',
        b'{"instances": [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3], [4], [1, 2, 3, 4, 5, 6, 7, 8, 9], 7]}',
        b'{"instances": [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3], [4], [1, 2, 3, 4, 5, 6, 7, 8, 9], [7]]}',
        b'{"instances": [{"x": [1, 2, 3, 4, 5, 6, 7]}, {"x": [1, 2, 3, 4, 5, 6, 7, 8, 9], "x": [1, 2, 3, 4, 5, 6]}]}',
        b'{"instances": [{"x": [1, 2, 3, 4, 5, 6, 7]}, {"x": [1, 2, 3, 4, 5, 6, 7, 8]}, {"x": [1, 2]}]}',
        b'{"other": {"a": [1, 2, 3, 4, 5, 6, 7]}, "instances": [[[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]]]}',
        b"[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]",
        b'{"instances": [1, 2, 3, 4, 5]} [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]',
        b'{"instances": ' + b"[" * 200 + b"1, 2, 3, 4, 5, 6, 7, 8, 9, 10" + b"]" * 200 + b"}",
        b'{"other": ' + b"[" * 900 + b"1" + b"]" * 900 + b', "instances": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}',
    ],
)
@pytest.mark.parametrize("inputs", [ONE, TEXT])
def test_these_too(body: bytes, inputs: Mapping[str, str]) -> None:
    for size in (4, 8, 16):
        check(body, inputs, size)


COUNT = 600_000
IDS = str(list(range(COUNT))).encode()
LARGE = {
    "rows": (b'{"instances": [' + b", ".join(b'{"a": %d, "b": 7}' % i for i in range(COUNT)) + b"]}", PAIR),
    "lists": (b'{"instances": [' + b",".join(b"[%d,%d]" % (i, i) for i in range(COUNT)) + b"]}", ONE),
    "columns": (
        b'{"signature_name": "", "inputs": {"a": %b, "b": %b}}' % (IDS, IDS),
        PAIR,
    ),
    "one row": (b'{"instances": [%b]}' % IDS, ONE),
    "one row object": (b'{"parameters": {"a": 1}, "instances": [{"a": %b, "b": %b}]}' % (IDS, IDS), PAIR),
}


def longest_wait_seconds(body: bytes, inputs: Mapping[str, str]) -> float:
    """Decode a body. Return the longest time that another thread waited for the lock."""
    waits, stop = [0.0], threading.Event()

    def wait() -> None:
        while not stop.is_set():
            started = time.perf_counter()
            time.sleep(0.0005)
            waits.append(time.perf_counter() - started)

    thread = threading.Thread(target=wait)
    gc.collect()
    gc.freeze()  # as the server does: else each full collection visits all objects of the tests
    thread.start()
    try:
        outcome_of_large(body, inputs)
    finally:
        stop.set()
        thread.join()
        gc.unfreeze()
    return max(waits)


def outcome_of_large(body: bytes, inputs: Mapping[str, str]) -> None:
    arrays = decode_inputs(parse_document(body), signature(inputs)).arrays
    assert {len(array.ravel()) for array in arrays} <= {COUNT, 2 * COUNT}


@pytest.mark.parametrize("form", LARGE)
def test_other_threads_run_while_a_large_body_is_parsed(form: str) -> None:
    at_once = mock.patch.object(document, "LARGE_BYTES", 1 << 40)
    with at_once:
        whole = longest_wait_seconds(*LARGE[form])
    assert any(longest_wait_seconds(*LARGE[form]) < whole / 2 for _ in range(3))


def test_it_takes_less_memory() -> None:
    def peak_bytes() -> int:
        tracemalloc.start()
        try:
            outcome_of_large(*LARGE["columns"])
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    with mock.patch.object(document, "LARGE_BYTES", 1 << 40):
        whole = peak_bytes()
    assert peak_bytes() < whole / 3


@pytest.mark.parametrize(
    "body",
    [
        b'{"instances": ["' + b'\\"' * 400_000 + b'"]}',
        b'{"instances": ["' + b'\\"' * 131_071 + b"\\" * 600_000,
        b'{"instances": ["", "' + b"\\" * 600_001,
        b'{"inputs": {"x": [' + b"]," * 400_000,
        b"{" + b" " * 4_000_000,
        b'{"signature_name": "' + b" " * 4_000_000,
        b'{"instances": [' + b'"a", ' * 5 + b"[" * 600_000,
        b'{"instances": [' + b'"]}, ' * 200_000,
    ],
)
def test_hostile_bodies_take_no_longer(body: bytes) -> None:
    def seconds() -> float:
        started = time.thread_time()
        outcome(body, TEXT)
        return time.thread_time() - started

    with mock.patch.object(document, "LARGE_BYTES", 1 << 40):
        whole = seconds()
    assert seconds() < 4 * whole + 0.5


def test_values_and_objects_are_not_mixed_where_a_piece_ends() -> None:
    """The last comma of the first piece stands before the first object."""
    values, spaces = b"1," * (pieces._PIECE_BYTES // 2 - 100), b" " * 1000
    objects = b",".join([b'{"x":%b1}' % spaces] * 1000)
    document = parse_document(b'{"instances":[' + values + objects + b"]}")
    x = TensorInfo("x", "x", "int64", np.dtype(np.int64))
    with pytest.raises(StatusError, match="Expecting value/list but got object at item"):
        decode_inputs(document, Signature("s", (x,), ()))
