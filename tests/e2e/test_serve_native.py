"""Lookups by the C library where no thread can be started."""

import threading
from pathlib import Path

import pytest

from tests.support.contract_lookups import CONFIG, FEATURES, SHAPES, draw
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model
from tpuembed.manifest import Manifest
from tpuembed.native import lookup as native_lookup
from tpuembed.native.lookup import NativeLookups, available


@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.nightly
@pytest.mark.skipif(bool(available()), reason=f"the C library of native lookups: {available()}")
def test_a_call_needs_no_thread_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int
) -> None:
    """A limit on processes is reached. A thread that was started before must not write after the call."""
    layer = TPUEmbedding({name: FeatureConfig(TableConfig(*shape, name)) for name, shape in SHAPES.items()}, "sgd")
    version = export_saved_model(layer, tmp_path / "m", serving_config=CONFIG, layout="mmap").path
    manifest = Manifest.read(version)
    assert manifest
    inputs = draw(FEATURES, 3000, hot=20)
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
