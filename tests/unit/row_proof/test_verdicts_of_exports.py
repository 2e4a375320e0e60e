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
    model_dir = tmp_path_factory.mktemp("model")
    layout = request.param
    return tpuembed.export_saved_model(keras.Model({"id": ids}, {"y": centred}), model_dir, layout=layout).path


def edited(version: Path, target: Path, /, **changes: Any) -> Path:
    """A copy of a version, in whose manifest `serving_default` has a reason that no proof gives."""
    shutil.copytree(version, target / version.name)
    path = target / version.name / MANIFEST_PATH
    manifest = json.loads(path.read_text())
    manifest["row_proof"] |= {"reasons": CLAIM, **changes}
    path.write_text(json.dumps(manifest))
    return target / version.name


def logged(version: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What a load logs."""
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        runtime.load(version).close()
    return caplog.text


def test_the_server_logs_the_reason_that_the_export_found(version: Path, caplog: pytest.LogCaptureFixture) -> None:
    manifest = Manifest.read(version)
    assert manifest is not None
    assert manifest.row_proof is not None
    reason = manifest.row_proof.reasons["serving_default"]
    assert reason.startswith("output 'y': ")
    assert "it makes one of several rows" in reason
    text = logged(version, caplog)
    assert f"signature serving_default: requests are not batched: {reason}. Give --enable-batching" in text
    assert f"signature serving_examples: requests are not batched: {reason}. Give --enable-batching" in text


def test_nothing_is_proven_again_of_the_same_graph(
    version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = edited(version, tmp_path)
    text = logged(copy, caplog)
    assert "requests are not batched: the manifest says so." in text
    assert "serving_examples" not in text


@pytest.mark.parametrize("changes", [{"version": VERSION + 1}, {"sha256": 64 * "0"}], ids=["version", "sha256"])
def test_another_proof_or_graph_is_proven_again(
    changes: Mapping[str, Any], version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = logged(edited(version, tmp_path, **changes), caplog)
    assert "the manifest says so" not in text
    assert "it makes one of several rows" in text


def test_verdicts_do_not_hold_for_an_edited_graph(
    version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = edited(version, tmp_path)
    graph = (copy / GRAPH_FILE).read_bytes()
    (copy / GRAPH_FILE).write_bytes(graph + b"\x08\x01")  # saved_model_schema_version again
    assert "it makes one of several rows" in logged(copy, caplog)


def test_verdicts_move_with_the_version(version: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    copy = edited(version, tmp_path)
    manifest = Manifest.read(copy)
    assert manifest is not None
    if manifest.layout == "mmap":
        assert relocate_export(copy, manifest, str(tmp_path)).changed
    shutil.copytree(copy, tmp_path / "2")
    if manifest.layout == "mmap":
        relocate_export(tmp_path / "2", manifest, str(tmp_path))
    again = tpuembed.rollback_version(tmp_path, 1).path
    assert "the manifest says so" in logged(again, caplog)
