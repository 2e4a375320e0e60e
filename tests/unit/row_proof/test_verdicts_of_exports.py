"""The verdicts in an export's manifest: a server takes them for the same graph and the same proof, and else proves again."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import pytest

import tpuembed
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding
from tpuembed.formats.saved_model import GRAPH_FILE, relocate_export
from tpuembed.manifest import MANIFEST_PATH, Manifest
from tpuembed.row_proof import VERSION
from tpuembed_serving.tensorflow import session as runtime

CLAIM = {"serving_default": "the manifest says so", "serving_examples": ""}


@pytest.fixture(scope="module", params=["variables", "mmap"])
def version(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = keras.Input((), dtype="int64", name="id")
    rows = TPUEmbedding({"id": FeatureConfig(TableConfig(9, 4, "t"))}, optimizer="sgd", name="embedding")({"id": ids})
    centred = keras.layers.Lambda(lambda x: x - keras.ops.mean(x, 0), name="centred")(rows["id"])
    model = keras.Model({"id": ids}, {"y": centred})
    return tpuembed.export_saved_model(model, tmp_path_factory.mktemp("model"), layout=request.param).path


def claiming(version: Path, target: Path, /, **changes: Any) -> Path:
    """A copy of a version, in whose manifest `serving_default` has a reason that no proof gives."""
    shutil.copytree(version, target)
    manifest = json.loads((target / MANIFEST_PATH).read_text())
    manifest["row_proof"] |= {"reasons": CLAIM, **changes}
    (target / MANIFEST_PATH).write_text(json.dumps(manifest))
    return target


def logged(version: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What a load logs."""
    with caplog.at_level(logging.WARNING):
        runtime.load(version).close()
    return caplog.text


def test_the_server_logs_the_reason_that_the_export_found(version: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = Manifest.read(version)
    assert manifest is not None
    assert manifest.row_proof is not None
    reason = manifest.row_proof.reasons["serving_default"]
    assert reason.startswith("output 'y': ")
    assert reason.endswith("it makes one of several rows")
    for signature in ("serving_default", "serving_examples"):
        text = f"signature {signature}: requests are not batched: {reason}. Give --enable-batching"
        assert text in logged(version, caplog)


def test_nothing_is_proven_again_wherever_the_version_moves(
    version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in ("1", "2"):
        copy = claiming(version, tmp_path / number)
        manifest = Manifest.read(copy)
        if manifest is not None and manifest.layout == "mmap":
            assert relocate_export(copy, manifest, str(tmp_path)).changed
    text = logged(tpuembed.rollback_version(tmp_path, 1).path, caplog)
    assert "requests are not batched: the manifest says so." in text
    assert "serving_examples" not in text


@pytest.mark.parametrize(
    "changes", [{"version": VERSION + 1}, {"sha256": 64 * "0"}, {}], ids=["proof", "hash", "graph"]
)
def test_another_proof_or_graph_is_proven_again(
    changes: Mapping[str, Any], version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = claiming(version, tmp_path / "1", **changes)
    if not changes:
        (copy / GRAPH_FILE).write_bytes((copy / GRAPH_FILE).read_bytes() + b"\x08\x01")  # its schema's version, again
    text = logged(copy, caplog)
    assert "the manifest says so" not in text
    assert "it makes one of several rows" in text
