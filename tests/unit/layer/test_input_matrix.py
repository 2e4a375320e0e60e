"""Every kind of input, cell by cell: equal to TensorFlow's own CPU lookup, or to the policy that docs/layer.md states.

The cells of a group are features of one layer, looked up in one call: eagerly, and in a `tf.function` that knows no batch size.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.config import COMBINERS
from tpuembed.errors import ConfigError

E = tf.tpu.experimental.embedding
Array = npt.NDArray[np.float32]
ROWS: Array = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
FULL = [[3, 1, 3], [7], [0, 19]]
EMPTIES = [[], [3, 1], [], [], [7, 7, 7], []]
UNCHECKED: Mapping[str, Any] = {"validate_weights_and_indices": False}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One input; `expected`, or TensorFlow's answer to a ragged tensor, is the policy's where TensorFlow's is not taken."""

    ids: Any
    weights: Any = None
    combiner: str = "sum"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    expected: Array | None = None
    batch_known: bool = False
    as_ragged: bool = False

    def truth(self) -> Any:
        if self.expected is not None:
            return self.expected
        table = E.TableConfig(20, 4, name="t", combiner=self.combiner)
        feature = E.FeatureConfig(table, **self.options)
        ids, weights = self.ids, None if self.weights is None else {"x": self.weights}
        if self.as_ragged:
            ids, weights = (
                tf.RaggedTensor.from_sparse(ids),
                weights and {"x": tf.RaggedTensor.from_sparse(self.weights)},
            )
        return E.serving_embedding_lookup({"x": ids}, weights, {table: tf.Variable(ROWS)}, {"x": feature})["x"]

    def spec(self, value: Any) -> Any:
        """The type of `value` with nothing known of its batch."""
        if self.batch_known:
            return tf.type_spec_from_value(value)
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
        if isinstance(value, tf.RaggedTensor):
            return tf.RaggedTensorSpec([None, None], value.dtype)
        return tf.TensorSpec([None, *value.shape[1:]], value.dtype)


def ragged(rows: list[list[Any]], dtype: Any = tf.int64) -> Any:
    return tf.ragged.constant(rows, dtype, ragged_rank=1)


def sparse(rows: list[list[Any]], dtype: Any = tf.int64) -> Any:
    return ragged(rows, dtype).to_sparse()


KINDS: Mapping[str, Callable[..., Any]] = {"ragged": ragged, "sparse": sparse}


def _weights(rows: list[list[int]]) -> list[list[float]]:
    """Positive ones, and zeros where the position is 1."""
    return [[0.5 + i if i != 1 else 0.0 for i in range(len(row))] for row in rows]


def _unchecked_cells() -> Iterator[tuple[str, Cell]]:
    """Unchecked, TensorFlow drops the trailing empty examples of a sparse tensor: a row of the policy."""
    for (kind, make), combiner in itertools.product(KINDS.items(), COMBINERS):
        cell = Cell(make(EMPTIES), None, combiner, UNCHECKED, as_ragged=kind == "sparse")
        yield f"{kind}, {combiner}", cell
        yield f"{kind}, {combiner}, weighted", dataclasses.replace(cell, weights=make(_weights(EMPTIES), tf.float32))
    batches: dict[str, list[list[int]]] = {"no examples": [], "empty": [[], []]}
    for name, rows in batches.items():
        for kind, make in KINDS.items():
            yield f"{kind}, {name}", Cell(make(rows), None, "mean")
            yield f"{kind}, {name}, sequence", Cell(make(rows), None, "mean", {"max_sequence_length": 2})


def _other_cells() -> Iterator[tuple[str, Cell]]:
    full = FULL
    for kind, make in KINDS.items():
        yield f"{kind} int32", Cell(make(full, tf.int32), None, "mean")
        yield f"{kind} int32 sequence", Cell(make(full, tf.int32), None, "mean", {"max_sequence_length": 2})
        negative = make([[-1.0, 3.0, 2.0], [-2.0], [1.0, 1.0]], tf.float32)
        yield f"{kind}, negative weights, sum", Cell(make(full), negative, "sum")
    three = tf.SparseTensor([[0, 0, 0], [0, 0, 3], [1, 1, 2]], tf.constant([3, 5, 19], tf.int64), [3, 2, 4])
    for combiner in COMBINERS:
        yield f"sparse of rank 3, {combiner}", Cell(three, None, combiner)
        weights = three.with_values(tf.constant([2.0, 1.0, 0.5]))
        yield f"sparse of rank 3, {combiner}, weighted", Cell(three, weights, combiner)
    four = tf.SparseTensor([[0, 1, 0, 2]], tf.constant([4], tf.int64), [2, 2, 1, 3])
    yield "sparse of rank 4", Cell(four, None, "mean")
    weights = ragged(_weights(full), tf.float32)
    yield (
        "ragged laid out in [1, 3], weighted",
        Cell(ragged(full), weights, "mean", {"output_shape": [1, 3]}, None, True),
    )


def _policy_cells() -> Iterator[tuple[str, Cell]]:
    """The rows of docs/layer.md where TensorFlow contradicts itself or fails."""
    zeros = np.zeros(4, np.float32)
    one, two, three = ROWS[1], ROWS[2], ROWS[3]
    for kind, make in KINDS.items():
        weights = make([[-1.0, 3.0], [-2.0]], tf.float32)
        mean = np.stack([(3 * two - one) / 2, three])
        yield f"{kind}, negative weights, mean", Cell(make([[1, 2], [3]]), weights, "mean", {}, mean)
        sqrtn = np.stack([(3 * two - one) / np.sqrt(np.float32(10)), -three])
        yield f"{kind}, negative weights, sqrtn", Cell(make([[1, 2], [3]]), weights, "sqrtn", {}, sqrtn)
        sequence = np.stack([[zeros, three], [zeros, zeros], [one, zeros]])
        yield (
            f"{kind}, negative ids in a sequence",
            Cell(make([[-1, 3], [-5], [1]]), None, "mean", {"max_sequence_length": 2}, sequence),
        )
        both = {"max_sequence_length": 2, "output_shape": [1, 2]}
        yield f"{kind}, sequence with its output_shape", Cell(make([[1]]), None, "sum", both, np.stack([[one, zeros]]))
        shaped = {"output_shape": [2]}
        yield f"{kind}, output_shape that agrees", Cell(make([[1], [3]]), None, "sum", shaped, np.stack([one, three]))
    agreeing = {"output_shape": [2, 1]}
    yield (
        "dense, output_shape that agrees",
        Cell(tf.constant([[1], [3]]), None, "sum", agreeing, np.stack([[one], [three]])),
    )


def _type_cells() -> Iterator[tuple[str, Cell]]:
    one, three = ROWS[1], ROWS[3]
    for kind, make in KINDS.items():
        for dtype in (tf.uint8, tf.int16, tf.uint32, tf.uint64, tf.float32, tf.float64):
            yield f"{kind} {dtype.name}", Cell(make([[1], [3]], dtype), None, "sum", {}, np.stack([one, three]))
        for dtype in (tf.float16, tf.bfloat16, tf.float64, tf.int32):
            doubled = make([[2], [1]], dtype)
            yield (
                f"{kind}, {dtype.name} weights",
                Cell(make([[1], [3]]), doubled, "sum", {}, np.stack([2 * one, three])),
            )


GROUPS: Mapping[str, Mapping[str, Cell]] = {
    "unchecked and empty": dict(_unchecked_cells()),
    "others": dict(_other_cells()),
    "policy": dict(_policy_cells()),
    "types": dict(_type_cells()),
}


def _table(combiner: str) -> TableConfig:
    return TableConfig(20, 4, combiner, combiner, initializer=lambda *_, **__: tf.constant(ROWS))


@pytest.mark.parametrize("mode", ["eager", "function"])
@pytest.mark.parametrize("group", GROUPS)
def test_every_cell_equals_tensorflow_or_the_policy(group: str, mode: str) -> None:
    cells, tables = GROUPS[group], {combiner: _table(combiner) for combiner in COMBINERS}
    layer = TPUEmbedding({k: FeatureConfig(tables[c.combiner], **c.options) for k, c in cells.items()}, "sgd")
    ids = {name: cell.ids for name, cell in cells.items()}
    weights = {name: cell.weights for name, cell in cells.items() if cell.weights is not None}
    unweighted = dict.fromkeys(cells.keys() - weights.keys())

    def call(ids: Any, weights: Any) -> Any:
        return layer(ids, {**weights, **unweighted})

    if mode == "function":
        call = tf.function(
            call, input_signature=[{k: cells[k].spec(v) for k, v in part.items()} for part in (ids, weights)]
        )
    found = call(ids, weights)
    for name, cell in cells.items():
        truth = np.asarray(cell.truth())
        assert found[name].shape == truth.shape, name
        np.testing.assert_allclose(found[name], truth, atol=1e-6, err_msg=name)


WEIGHTS = [[1.0, 1.0, 1.0], [1.0], [1.0, 1.0]]
RANK_THREE = tf.SparseTensor([[0, 0, 0]], tf.constant([3], tf.int64), [2, 2, 2])


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (Cell(tf.constant([1]), None, "sum", {"max_sequence_length": 2}), "needs sparse or ragged ids"),
        (Cell(tf.constant([1, 2]), None, "sum", {"output_shape": [3]}), r"output_shape \(3,\): the ids give"),
        (Cell(tf.constant([[1, 2]]), None, "sum", {"output_shape": [2]}), r"output_shape \(2,\): the ids give"),
        (Cell(sparse(FULL), None, "sum", {"output_shape": [3, 2]}), r"output_shape \(3, 2\): the ids give"),
        (Cell(sparse(FULL), None, "sum", {"output_shape": [3], "max_sequence_length": 2}), r"output_shape \(3,\)"),
        (Cell(ragged(FULL), None, "sum", {"output_shape": [4]}), r"output_shape \(4,\): the ids give"),
        (Cell(ragged(FULL), None, "sum", {"output_shape": [3, 2], "max_sequence_length": 3}), r"output_shape \(3, 2\)"),
        (Cell(ragged(FULL), ragged(WEIGHTS, tf.float32), "sum", {"output_shape": [3, 2]}), "weights have no meaning"),
        (Cell(ragged(FULL), ragged(WEIGHTS, tf.float32), "sum", {"max_sequence_length": 2}), "weights have no meaning"),
        (Cell(RANK_THREE, None, "sum", {"max_sequence_length": 2}), "max_sequence_length needs sparse ids of rank 2"),
        (Cell(tf.SparseTensor([[0]], tf.constant([1], tf.int64), [2])), "sparse ids must have rank 2 or above"),
        (Cell(tf.constant([True])), "ids must be integers"),
        (Cell(tf.constant([1j])), "ids must be integers"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(cell: Cell, message: str) -> None:
    layer = TPUEmbedding({"x": FeatureConfig(_table(cell.combiner), **cell.options)}, optimizer="sgd")
    with pytest.raises(ConfigError, match=f"feature 'x': .*{message}") as error:
        layer({"x": cell.ids}, None if cell.weights is None else {"x": cell.weights})
    assert isinstance(error.value, ValueError)


def test_what_tensorflow_lets_pass_fails() -> None:
    """A negative id of a sparse tensor of rank 3 that is not to be validated; weights that stand elsewhere than the ids."""
    layer = TPUEmbedding({"x": FeatureConfig(_table("sum"), **UNCHECKED)}, optimizer="sgd")
    with pytest.raises(tf.errors.InvalidArgumentError):
        layer({"x": RANK_THREE.with_values(tf.constant([-3], tf.int64))})
    layer = TPUEmbedding({"x": FeatureConfig(_table("sum"))}, optimizer="sgd")
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="feature 'x': the weights and the ids have different positions"
    ):
        layer({"x": sparse([[1, 2], [3]])}, {"x": sparse([[1.0], [2.0, 3.0]], tf.float32)})


def test_an_output_shape_is_checked_when_only_the_step_knows_the_batch() -> None:
    layer = TPUEmbedding({"x": FeatureConfig(_table("sum"), output_shape=(2,))}, optimizer="sgd")
    traced = tf.function(layer, input_signature=[{"x": tf.RaggedTensorSpec([None, None], tf.int64)}])
    assert traced.get_concrete_function().structured_outputs["x"].shape == (2, 4)
    np.testing.assert_allclose(traced({"x": ragged([[1], [3]])})["x"], ROWS[[1, 3]])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"feature .+x.+: output_shape"):
        traced({"x": ragged([[1], [2], [3]])})


def test_an_ambiguous_output_shape_is_refused_by_name() -> None:
    layer = TPUEmbedding({"x": FeatureConfig(_table("sum"), output_shape=(2, 3))}, optimizer="sgd")
    with refused(ConfigError):
        tf.function(layer, input_signature=[{"x": tf.RaggedTensorSpec([None, None], tf.int64)}]).get_concrete_function()
