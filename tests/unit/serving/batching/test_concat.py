"""Arrays of requests are put together and taken apart."""

from typing import Any

import numpy as np
import pytest

from tpuembed_serving.batching.concat import merge, split, trailing_shapes
from tpuembed_serving.core.servable import Columns


def ids(*values: int) -> Any:
    return np.array(values, np.int64)


def floats(values: Any, dtype: Any = np.float32) -> Any:
    return np.array(values, dtype)


@pytest.mark.parametrize("allowed", [(), (8,)])
@pytest.mark.parametrize("mixed", [False, True])
def test_columns_of_one_matrix_are_joined_as_any_inputs(allowed: tuple[int, ...], mixed: bool) -> None:
    matrices = [ids(1, 10, 2, 20).reshape(2, 2), ids(3, 30).reshape(1, 2), ids(4, 40, 5, 50).reshape(2, 2)]
    plain = [[matrix[:, 0], matrix[:, 1]] for matrix in matrices]
    columns = [Columns(matrix) for matrix in matrices]
    given = [columns[0], plain[1], columns[2]] if mixed else columns
    found, wanted = (merge(requests, (), False, allowed) for requests in (given, plain))
    assert [array.tolist() for array in found.inputs] == [array.tolist() for array in wanted.inputs]
    assert (found.stops, found.rows) == (wanted.stops, wanted.rows)


def test_dtypes_are_kept() -> None:
    text = np.array([b"a", b"bc\0"], dtype=object)
    merged = merge([[floats([[1, 2]] * 2), text], [floats([[3, 4]] * 2), text]], (), False, ())
    assert [array.dtype for array in merged.inputs] == [np.float32, object]
    np.testing.assert_array_equal(merged.inputs[0], [[1, 2], [1, 2], [3, 4], [3, 4]])
    assert merged.inputs[1].tolist() == [b"a", b"bc\0", b"a", b"bc\0"]


def test_lists_are_padded_where_padding_changes_nothing() -> None:
    one, other = np.array([[1], [2]]), np.array([[3, 4, 5]])
    assert trailing_shapes([one], [True]) == trailing_shapes([other], [True])
    assert trailing_shapes([one], [False]) != trailing_shapes([other], [False])
    merged = merge([[one], [other]], (-1,), False, ())
    assert merged.inputs[0].tolist() == [[1, -1, -1], [2, -1, -1], [3, 4, 5]]


def test_one_long_list_does_not_widen_the_rows_of_others_much() -> None:
    """A batch of 500 rows and of a list of a million took gigabytes."""
    many, few, long = np.zeros((500, 3), np.int64), np.zeros((1, 60), np.int64), np.zeros((1, 1_000_000), np.int64)
    assert trailing_shapes([many], [True]) == trailing_shapes([few], [True])
    assert trailing_shapes([many], [True]) != trailing_shapes([long], [True])
    assert trailing_shapes([long], [True]) == trailing_shapes([long[:, :800_000]], [True])


def test_inputs_are_widened_by_their_own_first_element_as_theirs_are() -> None:
    one, other = np.array([[[7, 8]]]), np.array([[[1], [2]]])
    merged = merge([[one], [other]], (), True, ())
    assert merged.inputs[0].tolist() == [[[7, 8], [7, 7]], [[1, 1], [2, 1]]]
    text = merge([[np.array([[b"a"]], dtype=object)], [np.array([[b"b", b"c"]], dtype=object)]], (), True, ())
    assert text.inputs[0].tolist() == [[b"a", b"a"], [b"b", b"c"]]
    empty = merge([[np.zeros((1, 0), np.float32)], [floats([[1, 2]])]], (), True, ())
    assert empty.inputs[0].tolist() == [[0, 0], [1, 2]]


def test_a_run_is_filled_up_with_the_last_requests_first_row() -> None:
    merged = merge([[ids(1, 2)], [ids(3, 4, 5)]], (), False, (4, 8))
    assert merged.inputs[0].tolist() == [1, 2, 3, 4, 5, 3, 3, 3]
    assert (merged.stops, merged.rows) == ([2, 5], 8)
    parts = split([merged.inputs[0] * 10], merged)
    assert parts is not None
    assert [part[0].tolist() for part in parts] == [[10, 20], [30, 40, 50]]
    assert merge([[ids(1, 2)], [ids(3, 4)]], (), False, (4, 8)).rows == 4


def test_outputs_of_other_rows_are_not_split() -> None:
    merged = merge([[ids(1, 2)], [ids(3)]], (), False, ())
    assert split([np.zeros(3), np.zeros(2)], merged) is None
    assert split([np.array(0.0)], merged) is None
