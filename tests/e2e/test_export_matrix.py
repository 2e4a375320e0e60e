"""Every checkpoint format x storage x layout x signature, in Python and through the C API: the rows that the writer saved.

Each row of each table is asked for. Every format is exported once, formats in turn in the storage types and the layouts.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from tests.support import capi
from tests.support.checkpoint.own_checkpoints import HARDWARE, write_own
from tests.support.goldens import Golden, read_golden
from tpuembed import export_saved_model
from tpuembed.manifest import Manifest

pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' function is deprecated:DeprecationWarning")  # TensorFlow's

Array = npt.NDArray[Any]

GOLDENS: Final = (
    "tfrs/adam_lookups",
    "tfrs/partial",
    "tensorflow/own_layer",
    "tensorflow/saved_model",
    "tpu/hosts_2_adagrad",
    "tpu/sparse_cores_2_adagrad_momentum",
    "tpu/partitioned_mod",
    "tpu/partitioned_div",
    "keras_rs/weights_h5",
    "keras_rs/keras_adam",
    "keras_rs/sharded",
    "keras_rs/checkpoint_adam",
    "orbax/keras_rs_adam",
    "orbax/keras_rs_stacked",
    "orbax/tree_zarr3",
)
"""One of every format."""


def _golden(name: str, _: Path) -> Golden:
    return read_golden(name)


Sources = Mapping[str, Callable[[Path], Golden]]
SOURCES: Final[Sources] = {
    **{name: partial(_golden, name) for name in GOLDENS},
    **{f"own/{hardware}": partial(write_own, hardware) for hardware in HARDWARE if hardware != "mirrored"},
}
STORAGES: Final = ("float32", "bfloat16", "float16", "int8")
LAYOUTS: Final = ("variables", "mmap")
SIGNATURES: Final = ("serving_default", "serving_examples", "packed")


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of the matrix, and the signature that each loader calls."""

    source: str
    storage: str
    layout: str
    in_python: str
    in_c: str

    def __str__(self) -> str:
        return f"{self.source}-{self.storage}-{self.layout}"


def _cut(number: int, source: str) -> Cell:
    storage, layout = STORAGES[number % 4], LAYOUTS[number // 4 % 2]
    return Cell(source, storage, layout, SIGNATURES[number % 3], SIGNATURES[(number + 1) % 3])


CUT: Final = [_cut(number, source) for number, source in enumerate(SOURCES)]


@pytest.fixture(scope="module")
def c_api() -> Iterator[capi.Process]:
    with capi.Process() as process:
        yield process


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    """Opens each source once."""
    made: dict[str, Golden] = {}

    def find(name: str) -> Golden:
        if name not in made:
            made[name] = SOURCES[name](tmp_path_factory.mktemp("source"))
        return made[name]

    return find


def _check(cell: Cell, golden: Golden, c_api: capi.Process, model_dir: Path) -> None:
    tables = {name: roles[None].astype(np.float64) for name, roles in golden.tables.items()}
    features: dict[str, Any] = {f"f{number}": {"table": name, "input": "id"} for number, name in enumerate(tables)}
    features["sum"] = {"table": next(iter(tables)), "combiner": "sum"}
    path = export_saved_model(
        golden.path,
        model_dir,
        serving_config={"features": features},
        checkpoint_options=golden.options,
        storage=cell.storage,
        layout=cell.layout,
        workers=1,
    ).path
    inputs = _inputs(tables)
    calls = _calls(path, inputs)
    model = tf.saved_model.load(str(path))  # a mapped table lives as long as it
    in_python = {cell.in_python: _call(model.signatures[cell.in_python], calls[cell.in_python])}
    for answers in (in_python, c_api.ask(path, {cell.in_c: calls[cell.in_c]})):
        for signature, found in answers.items():
            named = _unpacked(path, found["activations"]) if signature == "packed" else found
            assert set(named) == set(inputs), f"{cell}, {signature}"
            _compare(named, inputs, tables, cell.storage)


def _inputs(tables: Mapping[str, Array]) -> dict[str, Array]:
    """Every row of every table, in an order of its own, and pairs of rows of the first one."""
    count, rng = max(map(len, tables.values())), np.random.default_rng(0)
    inputs = {f"f{n}": rng.permutation(np.arange(count) % len(rows)) for n, rows in enumerate(tables.values())}
    return inputs | {"sum": np.stack([inputs["f0"], inputs["f0"][::-1]], 1)}


def _calls(path: Path, inputs: Mapping[str, Array]) -> dict[str, dict[str, Any]]:
    """The inputs of each signature."""
    manifest = Manifest.read(path)
    assert manifest is not None
    batch = len(inputs["f0"])
    columns = [inputs[packed.name].reshape(batch, -1) for packed in manifest.packing.inputs]
    rows = [{name: values[row].reshape(-1) for name, values in inputs.items()} for row in range(batch)]
    examples = [tf.train.Example(features=tf.train.Features(feature=_features(row))) for row in rows]
    return {
        "serving_default": dict(inputs),
        "serving_examples": {"examples": [example.SerializeToString() for example in examples]},
        "packed": {"ids": np.concatenate(columns, 1)},
    }


def _features(row: Mapping[str, Array]) -> dict[str, tf.train.Feature]:
    return {name: tf.train.Feature(int64_list=tf.train.Int64List(value=ids)) for name, ids in row.items()}


def _call(signature: Any, inputs: Mapping[str, Any]) -> dict[str, Array]:
    found = signature(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in found.items()}


def _unpacked(path: Path, activations: Array) -> dict[str, Array]:
    manifest = Manifest.read(path)
    assert manifest is not None
    assert manifest.packing.outputs is not None
    return {output.name: activations[:, output.start : output.stop] for output in manifest.packing.outputs}


def _compare(
    found: Mapping[str, Array], inputs: Mapping[str, Array], tables: Mapping[str, Array], storage: str
) -> None:
    for number, (name, rows) in enumerate(tables.items()):
        ids, bound = inputs[f"f{number}"], _bound(rows, storage)
        _assert_within(found[f"f{number}"], rows[ids], bound[ids], name)
        if number == 0:
            pairs = inputs["sum"]
            _assert_within(found["sum"], rows[pairs].sum(1), bound[pairs].sum(1), f"sums of {name}")


def _assert_within(found: Array, truth: Array, bound: Array, where: str) -> None:
    assert found.dtype == np.float32, where
    assert found.shape == truth.shape, where
    assert (np.abs(found - truth) <= bound + 1e-6).all(), where


def _bound(rows: Array, storage: str) -> Array:
    """How far a value stored so may be from `rows`, float64 [rows, dim]: half the distance of two neighbours of the type."""
    magnitude = np.abs(rows)
    if storage == "int8":
        half_step = (rows.max(1, keepdims=True) - rows.min(1, keepdims=True)) / 254 / 2
        return np.broadcast_to(half_step, rows.shape) + magnitude * 2**-22
    halves: dict[str, Array] = {
        "float32": np.zeros_like(rows),
        "bfloat16": magnitude * 2**-8,
        "float16": magnitude * 2**-11,
    }
    return halves[storage]


@pytest.mark.nightly
@pytest.mark.parametrize("cell", CUT, ids=str)
def test_every_format(cell: Cell, sources: Any, c_api: capi.Process, tmp_path: Path) -> None:
    _check(cell, sources(cell.source), c_api, tmp_path / "model")
