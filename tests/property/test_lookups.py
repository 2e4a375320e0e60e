"""Every way to look ids up equals one brute force in numpy: the strategies of `pool`, layers, whole models and lookup-only exports.

The stack has two tables. The second one holds rows [3, 12) of its table, behind the first one. Row 0 of the first one is NaN.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tpuembed import FeatureConfig, TableConfig
from tpuembed.config import ServingFeature
from tpuembed.export.graph import feature_groups
from tpuembed.export.graph.signature import ServedFeature
from tpuembed.export.graph.stacked_tables import StackedTables, span_of
from tpuembed.export.plan.plan import Placement, StackPlan
from tpuembed.lookup import FlatIds, check_range, gather_grouped, ids_of
from tpuembed.lookup.ids import PaddedIds

Array = npt.NDArray[Any]
Lists = list[list[tuple[int, float]]]

DIM, LENGTH = 3, 2
PLACES = {
    "a": Placement(table="a", rows=7, row_offset=0, source_dtype="float32"),
    "b": Placement(table="b", rows=9, row_offset=7, source_dtype="float32"),
}
STACK: Array = np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)
STACK[0] = np.nan
ROWS = {"a": STACK[:7], "b": STACK[7:]}
POLICIES: Mapping[str, Sequence[str | int]] = {"error": ("error",) * 2, "zeros": ("zeros",) * 2, "row": (2, 5)}
SETTINGS = settings(max_examples=10, deadline=None, derandomize=True)


def brute_force(table: str, lists: Lists, combiner: str, policy: str | int) -> Array:
    """The formulas of `tf.nn.embedding_lookup_sparse`'s documentation, in float64."""
    return np.array([_example(table, entries, combiner, policy) for entries in lists]).reshape(-1, DIM)


def _example(table: str, entries: list[tuple[int, float]], combiner: str, policy: str | int) -> Array:
    entries = [(i, w) for i, w in entries if i != -1]
    if not entries:
        return np.zeros(DIM)
    total = np.sum([w * row_of(table, i, policy) for i, w in entries], 0)
    weights = np.array([w for _, w in entries], np.float64)
    divisors = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}
    found: Array = total / divisors[combiner]
    return found


def row_of(table: str, i: int, policy: str | int) -> Array:
    place = PLACES[table]
    if not 0 <= i < place.rows:
        assert policy != "error"
        return np.zeros(DIM) if policy == "zeros" else ROWS[table][int(policy)].astype(np.float64)
    return ROWS[table][i].astype(np.float64)


def random_lists(policy: str, *, weighted: bool = True) -> st.SearchStrategy[Lists]:
    """Examples of (id, weight), with ids of both tables, dropped ones, and those outside if the `policy` takes them."""
    outside = [] if policy == "error" else [-(2**63), -7, 7, 9, 12, 2**40]
    ids = st.sampled_from([*range(1, 7), -1, *outside])
    entry = st.tuples(ids, st.sampled_from([0.25, 0.5, 1.0, 2.0]) if weighted else st.just(1.0))
    return st.lists(st.lists(entry, max_size=5), max_size=5)


def arrays(lists: Lists) -> tuple[Array, Array, Array]:
    flat = [entry for entries in lists for entry in entries]
    return (
        np.array([i for i, _ in flat], np.int64),
        np.array([w for _, w in flat], np.float32),
        np.array([len(entries) for entries in lists], np.int64),
    )


# ---- whole lookups


def tables() -> StackedTables:
    stack = StackPlan(name="s", dim=DIM, storage="float32", rows=16, size=0, tables=tuple(PLACES.values()))
    made = StackedTables({})
    made.bind([stack], {"s": tf.Variable(STACK, trainable=False)})
    return made


def _trained(flat: Sequence[FlatIds], names: Sequence[str]) -> list[Any]:
    """As a layer looks up, but in tables whose first rows are not there."""
    pairs = [(one, span_of(PLACES[name])) for one, name in zip(flat, names, strict=True)]
    within = [one.within(span) for one, span in pairs]
    check = check_range([one.ranged(span) for one, (_, span) in zip(within, pairs, strict=True)])
    with tf.control_dependencies([check] if tf.is_tensor(check) else []):
        return gather_grouped(within, names, lambda name, ids: tf.gather(ROWS[name], tf.identity(ids)))


@functools.cache
def lookups(combiner: str, weighted: bool, policy: str, length: int = 0, few: bool = True) -> Callable[..., Any]:
    """A traced function of ids, weights and counts, to {"way, table": activations}."""
    bound, names = tables(), ["a", "b"]
    served, layer_features = [], {}
    for name, of_table in zip(names, POLICIES[policy], strict=True):
        place = PLACES[name]
        table = TableConfig(place.rows, DIM, name, combiner)
        layer_features[name] = FeatureConfig(table, name=name, max_sequence_length=length, out_of_vocabulary=of_table)
        spec = ServingFeature(
            table=name, combiner=combiner, weighted=weighted, max_sequence_length=length, out_of_vocabulary=of_table
        )
        served.append(ServedFeature(name=name, table=name, rows=place.rows, dim=DIM, spec=spec))

    def look_up(values: Any, weights: Any, counts: Any) -> Any:
        ragged = tf.RaggedTensor.from_row_lengths(values, counts)
        of_ids = ragged.with_values(weights) if weighted else None
        found: dict[str, Any] = {}
        matrix, of_matrix = ragged.to_tensor(-1), None if of_ids is None else of_ids.to_tensor(0.0)
        kinds: dict[str, Callable[[str], Any]] = {
            "ragged": lambda name: ids_of(name, layer_features[name], ragged, of_ids),
            "sparse": lambda name: ids_of(
                name, layer_features[name], ragged.to_sparse(), None if of_ids is None else of_ids.to_sparse()
            ),
            "padded": lambda name: PaddedIds(name, layer_features[name], matrix, of_matrix),
        }
        for kind, make in kinds.items() if few else ():  # only exports depend on `few`
            flat = [make(name).flatten() for name in names]
            for way, rows in (("layer", _trained(flat, names)), ("model", bound.lookup(flat, names))):
                found |= {f"{way}, {kind}, {name}": each for name, each in zip(names, rows, strict=True)}
        with mock.patch.object(feature_groups, "_FEW_ROWS_BYTES", (4 << 20) if few else 0):
            groups = feature_groups.group_features(served, bound)
            inputs = dict.fromkeys(names, matrix) | {f"{name}_weights": of_matrix for name in names}
            for group in groups:
                found |= {f"export, {name}": rows for name, rows in group.named(inputs).items()}
                if not weighted:
                    packed = group.packed(tf.stack([matrix] * len(group.features), 1))
                    parts = tf.split(packed, len(group.features), 1)
                    shape = tf.stack([tf.shape(matrix)[0], *([length] if length else []), DIM])
                    found |= {
                        f"packed, {feature.name}": tf.reshape(part, shape)
                        for feature, part in zip(group.features, parts, strict=True)
                    }
        return found

    specs = [tf.TensorSpec([None], dtype) for dtype in (tf.int64, tf.float32, tf.int64)]
    return tf.function(look_up, input_signature=specs, autograph=False)


def _compare(found: Mapping[str, Any], expected: Callable[[str], Array]) -> None:
    for way, rows in found.items():
        truth = expected(way.rpartition(", ")[2])
        assert rows.shape == truth.shape, way
        np.testing.assert_allclose(rows, truth, rtol=1e-5, atol=1e-6, err_msg=way)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("combiner", "policy"), [("sum", "error"), ("mean", "error"), ("sqrtn", "zeros"), ("mean", "row")]
)
@given(data=st.data())
@SETTINGS
@pytest.mark.sampled(2)
def test_every_lookup_of_lists_equals_brute_force(
    combiner: str, policy: str, weighted: bool, few: bool, data: Any
) -> None:
    lists = data.draw(random_lists(policy, weighted=weighted))
    found = lookups(combiner, weighted, policy, 0, few)(*arrays(lists))
    policies = dict(zip(PLACES, POLICIES[policy], strict=True))
    _compare(found, lambda table: brute_force(table, lists, combiner, policies[table]))


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@SETTINGS
@pytest.mark.sampled(1)
def test_every_lookup_of_sequences_equals_brute_force(policy: str, data: Any) -> None:
    lists = data.draw(random_lists(policy, weighted=False))
    policies = dict(zip(PLACES, POLICIES[policy], strict=True))

    def expected(table: str) -> Array:
        found = np.zeros((len(lists), LENGTH, DIM))
        for row, entries in enumerate(lists):
            for column, (i, _) in enumerate(entries[:LENGTH]):
                found[row, column] = 0.0 if i == -1 else row_of(table, i, policies[table])
        return found

    _compare(lookups("sum", False, policy, LENGTH)(*arrays(lists)), expected)


@functools.cache
def single_lookups(policy: str) -> Callable[..., Any]:
    bound, names = tables(), ["a", "b"]
    served, features = [], {}
    for name, of_table in zip(names, POLICIES[policy], strict=True):
        place = PLACES[name]
        table = TableConfig(place.rows, DIM, name)
        features[name] = FeatureConfig(table, name=name, out_of_vocabulary=of_table)
        spec = ServingFeature(table=name, input="id", out_of_vocabulary=of_table)
        served.append(ServedFeature(name=name, table=name, rows=place.rows, dim=DIM, spec=spec))

    def look_up(ids: Any) -> Any:
        flat = [ids_of(name, features[name], ids).flatten() for name in names]
        found: dict[str, Any] = {}
        for way, rows in (("layer", _trained(flat, names)), ("model", bound.lookup(flat, names))):
            found |= {f"{way}, {name}": each for name, each in zip(names, rows, strict=True)}
        # Two tables that are whole are shifted together.
        both = bound.lookup([flat[0], flat[0]], ["a", "a"])
        found |= {"model together, a": both[1]}
        for group in feature_groups.group_features(served, bound):
            found |= {f"export, {name}": rows for name, rows in group.named(dict.fromkeys(names, ids)).items()}
            packed = tf.split(group.packed(tf.stack([ids] * len(group.features), 1)), len(group.features), 1)
            found |= {f"packed, {each.name}": part for each, part in zip(group.features, packed, strict=True)}
        return found

    return tf.function(look_up, input_signature=[tf.TensorSpec([None], tf.int64)], autograph=False)


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
@SETTINGS
@pytest.mark.sampled(1)
def test_every_lookup_of_single_ids_equals_brute_force(policy: str, data: Any) -> None:
    outside = [] if policy == "error" else [-1, -(2**63), 0, 2, 7, 12, 2**40, 2**63 - 1]
    ids = data.draw(st.lists(st.sampled_from([*range(3, 7), *outside]), max_size=6))
    policies = dict(zip(PLACES, POLICIES[policy], strict=True))
    _compare(
        single_lookups(policy)(np.array(ids, np.int64)),
        lambda table: np.array([row_of(table, i, policies[table]) for i in ids]).reshape(-1, DIM),
    )
