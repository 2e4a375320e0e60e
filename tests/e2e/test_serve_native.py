"""Lookups by the C library in the server: the answers and the errors of TensorFlow's graph, for every kind of feature."""

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.messages import refused
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_model, native_lookup
from tpuembed.errors import ConfigError
from tpuembed.manifest import Manifest
from tpuembed.native_lookup import NativeLookups, available
from tpuembed_serving import ServerSettings
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.tensorflow import native
from tpuembed_serving.tensorflow import session as runtime

pytestmark = [
    pytest.mark.usefixtures("exports_in_this_process"),
    pytest.mark.skipif(bool(available()), reason=f"the C library of native lookups: {available()}"),
]

Array = npt.NDArray[Any]
SIZES = {"a": (40, 4), "b": (30, 4), "c": (500, 33)}
FEATURES: dict[str, dict[str, Any]] = {
    "one_a": {"table": "a", "input": "id"},
    "one_c": {"table": "c", "input": "id", "out_of_vocabulary": "zeros"},
    "sum_a": {"table": "a", "combiner": "sum"},
    "mean_b": {"table": "b", "combiner": "mean", "out_of_vocabulary": "zeros"},
    "sqrtn_c": {"table": "c", "combiner": "sqrtn", "out_of_vocabulary": 7},
    "history": {"table": "b", "max_sequence_length": 3},
}


@pytest.fixture(scope="module")
def layer() -> TPUEmbedding:
    tables = [TableConfig(*size, name) for name, size in SIZES.items()]
    return TPUEmbedding({table.name: FeatureConfig(table) for table in tables}, optimizer="sgd", track_rows=True)


def export(layer: TPUEmbedding, folder: Path, features: Any, **options: Any) -> Path:
    return export_model(layer, folder / "m", serving_config={"features": features}, layout="mmap", **options).path


def drawn(random: np.random.Generator, features: Any, batch: int, hot: int, bad: float = 0.0) -> dict[str, Array]:
    """Inputs; some ids of features with a policy are outside, and of the others with the probability `bad`."""
    inputs: dict[str, Array] = {}
    for name, spec in features.items():
        rows = SIZES[spec["table"]][0]
        is_one = spec.get("input") == "id"
        ids = random.integers(0, rows, (batch,) if is_one else (batch, hot))
        outside = 0.2 if "out_of_vocabulary" in spec else bad
        ids = np.where(random.random(ids.shape) < outside, random.choice([rows, -2, 2**62, -(2**63)]), ids)
        inputs[name] = ids if is_one else np.where(random.random(ids.shape) < 0.3, -1, ids)
        if spec.get("weighted"):
            inputs[f"{name}_weights"] = (random.random(ids.shape) + 0.1).astype(np.float32)
    return inputs


def run(servable: Any, name: str, inputs: Any) -> Any:
    """Outputs by alias, or the error's code and text."""
    signature = servable.signatures[name]
    try:
        found = servable.run(signature, [inputs[info.alias] for info in signature.inputs])
    except StatusError as error:
        return error.code, error.message
    return {info.alias: array for info, array in zip(signature.outputs, found, strict=True)}


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.nightly
def test_a_call_needs_no_thread_that_cannot_be_started(
    layer: TPUEmbedding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """A limit on processes is reached. A thread that was started before must not write after the call."""
    version = export(layer, tmp_path, FEATURES)
    manifest = Manifest.read(version)
    assert manifest
    inputs = drawn(np.random.default_rng(7), FEATURES, 3000, 20)
    expected = NativeLookups(manifest, version, threads=1).named(inputs)
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(native_lookup, "available_cpus", lambda: 4)
    native_lookup._pool.cache_clear()
    monkeypatch.setattr(threading.Thread, "start", limited)
    found = NativeLookups(manifest, version, threads=4).named(inputs)
    native_lookup._pool.cache_clear()
    assert len(started) == allowed
    for name, rows in expected.items():
        assert found[name].tobytes() == rows.tobytes(), name


@pytest.mark.nightly
def test_what_is_not_run_natively_says_so(
    layer: TPUEmbedding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    features = {"features": {"one": {"table": "a", "input": "id"}}}
    variables = export_model(layer, tmp_path / "v", serving_config=features, layout="variables").path
    servable = runtime.load(variables, options=runtime.RunOptions(lookups="native"))
    assert servable._native is None
    assert "v/1: TensorFlow runs it: its layout is variables" in caplog.text
    monkeypatch.setattr(native, "available", lambda: "there is none")
    assert runtime.load(export(layer, tmp_path, FEATURES))._native is None
    assert "TensorFlow runs all lookups: there is none" in caplog.text
    monkeypatch.setattr("tpuembed.native_lookup.available", lambda: "there is none")
    ServerSettings.for_model_dir(tmp_path, name="m")
    with refused(ConfigError, match="there is none"):
        ServerSettings.for_model_dir(tmp_path, name="m", lookups="native")
    with refused(ConfigError, match="'fast'"):
        ServerSettings.for_model_dir(tmp_path, name="m", lookups="fast")
