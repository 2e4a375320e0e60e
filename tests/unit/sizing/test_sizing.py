"""Counts against TensorFlow's own op and against plain loops; layouts against the layer on a fabricated TPU.

tensorflow_counts.json holds ids and what TensorFlow counted of them, `TPUEmbeddingV2.compute_sparse_core_stats` of
tensorflow-tpu 2.19.1, whose host ops run without TPUs.
"""

import collections
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_tpu import fake_tpu
from tests.support.messages import refused
from tpuembed import SGD, Adam, FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.errors import ConfigError
from tpuembed.sizing import FeatureIds, SizingReport, Topology, estimate, read_sample

GOLDEN = json.loads((Path(__file__).parent / "tensorflow_counts.json").read_text())


def sample_of(lists: Any) -> dict[str, FeatureIds]:
    """Return the sample that an array of each feature, padded with -1, has."""
    most = max(len(row) for rows in lists.values() for row in rows)
    padded = {name: [[*row, *[-1] * (most - len(row))] for row in rows] for name, rows in lists.items()}
    return {name: FeatureIds.of_array(np.array(rows).reshape(len(rows), most)) for name, rows in padded.items()}


def stacks(report: SizingReport) -> dict[str, Any]:
    return {stack.stack: stack for stack in report.stacks}


# ---- counts


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: f"{case['chips']} x {case['sparse_cores']}")
def test_counts_are_tensorflows(case: dict[str, Any]) -> None:
    """Of one chip's examples, as its op counts them: the other chips' have no ids here."""
    tables = {"t1": TableConfig(100, 8, "t1"), "t2": TableConfig(50, 8, "t2"), "wide": TableConfig(70, 12, "wide")}
    features = {name: FeatureConfig(tables[table]) for name, table in case["features"].items()}
    chips, batch = case["chips"], case["examples_per_chip"] * case["chips"]
    for chip in range(chips):
        empty: list[list[int]] = [[]] * case["examples_per_chip"]
        lists = {name: empty * chip + rows + empty * (chips - chip - 1) for name, rows in case["ids"].items()}
        report = estimate(
            features, sample_of(lists), Topology(chips, batch, case["sparse_cores"]), optimizer="sgd", margin=0
        )
        assert {name: stack.seen_ids for name, stack in stacks(report).items()} == case["max_ids"]
        assert {name: stack.seen_unique_ids for name, stack in stacks(report).items()} == case["max_unique_ids"]


def brute_force(lists: Any, tables: Any, rotations: Any, topology: Topology) -> tuple[int, int, int]:
    """(ids, unique ids, padded ids of a chip), id by id."""
    cores = topology.chips * topology.sparse_cores_per_chip
    per_core, worst = topology.batch_size // cores, [0, 0, 0]
    for step in range(len(next(iter(lists.values()))) // topology.batch_size):
        ids: Any = collections.Counter()
        unique: Any = collections.defaultdict(set)
        for name, rows in lists.items():
            for place in range(topology.batch_size):
                for one in set(rows[step * topology.batch_size + place]):
                    where = (place // per_core, (one + rotations[tables[name]]) % cores)
                    ids[where] += 1
                    unique[where].add((tables[name], one))
        chip: Any = collections.Counter()
        for (source, _), number in ids.items():
            chip[source // topology.sparse_cores_per_chip] += 8 * math.ceil(number / 8)
        worst = [max(worst[0], *ids.values()), max(worst[1], *map(len, unique.values())), max(worst[2], *chip.values())]
    return worst[0], worst[1], worst[2]


@pytest.mark.parametrize("topology", [Topology(1, 8, 2), Topology(2, 16, 4), Topology(4, 32, 2), Topology(2, 32, 2)])
def test_counts_are_those_of_plain_loops(topology: Topology) -> None:
    random = np.random.default_rng(topology.batch_size)
    wheres = {"a": "s", "b": "s", "c": "t"}
    configs = {"s": TableConfig(90, 8, "s"), "t": TableConfig(40, 6, "t")}
    lists = {
        name: [list(map(int, random.integers(0, random.integers(3, 40), random.integers(0, 9)))) for _ in range(100)]
        for name in wheres
    }
    features = {name: FeatureConfig(configs[table]) for name, table in wheres.items()}
    report = estimate(features, sample_of(lists), topology, margin=0.5, optimizer="adagrad")
    (stack,) = report.stacks
    rotation = topology.sparse_cores_per_chip % (topology.chips * topology.sparse_cores_per_chip)
    ids, unique, of_chip = brute_force(lists, wheres, {"s": 0, "t": rotation}, topology)
    assert (stack.seen_ids, stack.seen_unique_ids) == (ids, unique)
    assert (stack.needed_ids, stack.needed_unique_ids) == (math.ceil(ids * 1.5), math.ceil(unique * 1.5))
    assert stack.ids_per_chip_per_sample == math.ceil(of_chip * 1.5 / (3 * topology.batch_size // topology.chips))
    assert report.steps == 100 // topology.batch_size
    for table in report.tables:
        own = {name: rows for name, rows in lists.items() if wheres[name] == table.table}
        ids, unique, _ = brute_force(own, wheres, {"s": 0, "t": rotation}, topology)
        assert (table.max_ids_per_partition, table.max_unique_ids_per_partition) == (
            math.ceil(ids * 1.5),
            math.ceil(unique * 1.5),
        )


def test_a_sample_without_ids_needs_one() -> None:
    report = estimate({"x": FeatureConfig(TableConfig(9, 8, "t"))}, sample_of({"x": [[]] * 8}), Topology(1, 8))
    assert (report.stacks[0].seen_ids, report.stacks[0].needed_ids, report.warnings) == (0, 1, ())


# ---- layouts and memory

FEATURES = {
    "a": FeatureConfig(TableConfig(1000, 8, "a", optimizer=Adam()), output_shape=(16,)),
    "b": FeatureConfig(TableConfig(70, 5, "b", optimizer=Adam()), output_shape=(16,)),
    "c": FeatureConfig(TableConfig(33, 8, "c", optimizer=SGD()), output_shape=(16,)),
    "d": FeatureConfig(TableConfig(64, 16, "d", optimizer=Adam()), output_shape=(16,)),
}


@pytest.mark.parametrize(("chips", "cores"), [(1, 4), (2, 4), (4, 2)])
@pytest.mark.parametrize("stacking", [True, False])
@pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning")  # TensorFlow calls it
def test_layouts_and_memory_are_the_layers(chips: int, cores: int, stacking: bool) -> None:
    import tensorflow as tf

    config = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(disable_table_stacking=not stacking)
    sample = sample_of({name: [[1]] * 16 * chips for name in FEATURES})
    report = estimate(FEATURES, sample, Topology(chips, 16 * chips, cores), stacking=stacking)
    with fake_tpu("V2", chips, cores) as strategy:
        with strategy.scope():
            layer = TPUEmbedding(FEATURES, sparse_core_embedding_config=config)
        backend: Any = layer.core.backend
        engine = backend.engine
        variables = {name: {role: v.shape for role, v in roles.items()} for name, roles in engine.tables.items()}
        layouts = {name: engine.layout(name) for name in FEATURES}
    assert {stack.stack: (stack.rows, stack.dim) for stack in report.stacks} == {
        name: tuple(roles["parameters"]) for name, roles in variables.items()
    }
    assert {table.table: table.stack for table in report.tables} == {
        name: layout.stack for name, layout in layouts.items()
    }
    held = sum(4 * math.prod(shape) for roles in variables.values() for shape in roles.values())
    assert report.bytes_per_chip == sum(table.bytes_per_chip for table in report.tables) == held // chips
    assert all(table.padded_rows % (8 * chips * cores) == 0 and table.padded_dim % 8 == 0 for table in report.tables)
    assert {table.table: len(table.slots) for table in report.tables} == {"a": 2, "b": 2, "c": 0, "d": 2}


def test_tables_without_an_optimizer_take_the_one_that_is_named() -> None:
    features, sample = {"x": FeatureConfig(TableConfig(9, 8, "t"))}, sample_of({"x": [[1]] * 8})
    bare, with_adam = (estimate(features, sample, Topology(1, 8), optimizer=name) for name in (None, "adam"))
    assert with_adam.bytes_per_chip == 3 * bare.bytes_per_chip
    assert with_adam.tables[0].slots == ("momenta", "velocities")


# ---- warnings


def limited(ids: int | None, unique: int | None) -> tuple[str, ...]:
    """Every example has 32 ids, of which 8 go to each of the four SparseCores: 16 of two examples, 8 unique."""
    table = TableConfig(100, 8, "t", max_ids_per_partition=ids, max_unique_ids_per_partition=unique)
    sample = sample_of({"x": [list(range(32))] * 8})
    return estimate({"x": FeatureConfig(table)}, sample, Topology(1, 8, 4), margin=0.25).warnings


def test_limits_are_compared() -> None:
    assert limited(None, None) == ()  # TensorFlow's 256
    assert limited(20, 10) == ()
    fails, near = limited(15, 9)
    assert fails == (
        "stack t: in a step of the sample, one SparseCore takes 16 ids from another. The limit is 15, so the step fails. "
        "Set max_ids_per_partition of t: 20."
    )
    assert (
        near
        == "stack t: 8 unique ids with the margin are 10. The limit is 9. Set max_unique_ids_per_partition of t: 10."
    )


def test_a_stack_has_the_sum_of_its_tables_limits() -> None:
    tables = [TableConfig(64, 8, "a", max_ids_per_partition=3), TableConfig(64, 8, "b")]
    sample = sample_of({"0": [[1]] * 8, "1": [[1]] * 8})
    report = estimate({str(i): FeatureConfig(table) for i, table in enumerate(tables)}, sample, Topology(1, 8))
    assert [(stack.limit_ids, stack.limit_unique_ids) for stack in report.stacks] == [(259, 256)]


def test_a_chips_buffer_is_compared() -> None:
    table = TableConfig(1000, 8, "t", max_ids_per_partition=9999, max_unique_ids_per_partition=9999)
    sample = sample_of({"x": [list(range(80))] * 8})
    (warning,) = estimate({"x": FeatureConfig(table)}, sample, Topology(1, 8, 4), margin=0).warnings
    assert "stack t: a chip needs space for 80 ids per example. TensorFlow's default is 64" in warning
    assert "Set max_ids_per_chip_per_sample of the SparseCoreEmbeddingConfig" in warning


# ---- refusals


@pytest.mark.parametrize(
    "arguments",
    [
        (3, 24, 4),
        (2, 12, 4),
        (0, 8, 4),
        (1, 8.0, 4),
    ],
)
def test_topologies_that_tensorflow_refuses(arguments: tuple[Any, Any, Any]) -> None:
    with refused(ConfigError):
        Topology(*arguments)


@pytest.mark.parametrize(
    "lists",
    [
        {"y": [[1]] * 8},
        {"x": [[9]] * 8},
        {"x": [[1]] * 7},
    ],
)
def test_samples_that_do_not_fit(lists: Any) -> None:
    with refused(ConfigError):
        estimate({"x": FeatureConfig(TableConfig(9, 8, "t"))}, sample_of(lists), Topology(1, 8))


def test_other_refusals() -> None:
    table, ok = TableConfig(9, 8, "t"), sample_of({"x": [[1]] * 8, "y": [[1]] * 9})
    for config in (FeatureConfig(table, max_sequence_length=3), FeatureConfig(table, output_shape=(8, 3))):
        with refused(ConfigError, match="feature 'x'"):
            estimate({"x": config}, ok, Topology(1, 8))
    with refused(ConfigError, match="'x'"):
        estimate({"x": FeatureConfig(table), "y": FeatureConfig(table)}, ok, Topology(1, 8))
    with refused(ConfigError):
        estimate({"x": FeatureConfig(table)}, ok, Topology(1, 8), margin=-0.1)
    with refused(ConfigError, match="1000"):
        estimate({"x": FeatureConfig(table)}, ok, Topology(1, 8), margin=1e308)
    with refused(ConfigError):
        estimate({"x": FeatureConfig(table)}, ok, Topology(1, 8), optimizer="rmsprop")


# ---- files


def test_a_sample_is_read(tmp_path: Path) -> None:
    padded, lists = np.array([[1, 2], [-1, -1], [3, -1]]), {"a": [[1, 2], [], [3]], "b": [[7], [8], [9]]}
    np.savez(tmp_path / "s.npz", a=padded, b=np.array([7, 8, 9], np.int32))
    found = read_sample(tmp_path / "s.npz")
    assert set(found) == {"a", "b"}
    for name, rows in lists.items():
        assert found[name].count == 3
        assert found[name].ids.tolist() == [one for row in rows for one in row]
        assert found[name].examples.tolist() == [place for place, row in enumerate(rows) for _ in row]


def test_missing_samples_and_arrays_of_floats(tmp_path: Path) -> None:
    with refused(ConfigError):
        read_sample(tmp_path / "none.npz")
    np.savez(tmp_path / "s.npz", a=np.ones(3))
    with refused(ConfigError, match="'a'"):
        read_sample(tmp_path / "s.npz")


def test_arrays_that_are_no_ids(tmp_path: Path) -> None:
    path = tmp_path / "s.npz"
    for content in (b"nonsense", b""):
        path.write_bytes(content)
        with refused(ConfigError):
            read_sample(path)
    np.savez(path, a=np.arange(0))
    with refused(ConfigError, match="no examples"):
        read_sample(path)
    np.savez(path, a=np.array([1, 2**63], np.uint64))
    with refused(ConfigError, match="'a'"):
        read_sample(path)
    with path.open("wb") as file:
        np.save(file, np.arange(3))  # a .npy by another name
    with refused(ConfigError):
        read_sample(path)
    np.savez_compressed(path, a=np.arange(1000))
    data = path.read_bytes()
    path.write_bytes(data[:100] + bytes(20) + data[120:])
    with refused(ConfigError):
        read_sample(path)
