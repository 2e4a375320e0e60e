"""versions, prune, rollback and export --keep: which versions a MODEL_DIR has, and what they answer."""

import shutil
from pathlib import Path

import pytest
import tensorflow as tf

from tests.support.contract_command import json_of, tpuembed
from tests.support.contract_lookups import answers
from tpuembed import export_saved_model, list_versions, prune_versions, rollback_version
from tpuembed.errors import TpuEmbedError

CONFIG = {"features": {"item": {"table": "items", "input": "id"}}}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a checkpoint, and a MODEL_DIR `m` with three versions, whose only row is their number."""
    folder = tmp_path_factory.mktemp("versions")
    for number in (1, 2, 3):
        prefix = tf.train.Checkpoint(items=tf.Variable([[float(number)]])).write(str(folder / "ckpt"))
        export_saved_model(prefix, folder / "m", serving_config=CONFIG, workers=1)
    return folder


@pytest.fixture
def model_dir(three: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three / "m", tmp_path / "m"))


def numbers(model_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in model_dir.iterdir())


def row(model_dir: Path, version: int) -> float:
    return float(answers(model_dir / str(version), {"item": [0]})["item"][0, 0])


def test_versions_are_listed_oldest_first(model_dir: Path) -> None:
    found = json_of("versions", model_dir)["versions"]
    assert [one["version"] for one in found] == [one.version for one in list_versions(model_dir)] == [1, 2, 3]
    for one in found:
        size = sum(path.stat().st_size for path in (model_dir / str(one["version"])).rglob("*") if path.is_file())
        assert one["bytes_own"] + one["bytes_shared"] == size
        assert one["age_seconds"] >= 0
    assert tpuembed("versions", model_dir).returncode == 0


def test_rollback_publishes_the_version_before_the_newest_as_the_next(model_dir: Path) -> None:
    report = json_of("rollback", model_dir)
    assert (report["version"], report["source"], report["path"]) == (4, 2, str(model_dir / "4"))
    assert (numbers(model_dir), row(model_dir, 4)) == ([1, 2, 3, 4], 2)
    assert json_of("rollback", model_dir)["source"] == 3  # which is the one before the newest now
    assert rollback_version(model_dir, 1).version == 6
    assert [row(model_dir, version) for version in (5, 6)] == [3, 1]


def test_prune_keeps_the_newest(model_dir: Path) -> None:
    planned = json_of("prune", model_dir, "--keep", "1", "--dry-run")
    assert (planned["removed"], numbers(model_dir)) == ([1, 2], [1, 2, 3])
    assert json_of("prune", model_dir)["removed"] == [1]  # two are kept
    assert prune_versions(model_dir, keep=1).removed == (2,)
    assert (numbers(model_dir), row(model_dir, 3)) == ([3], 3)


def test_a_version_that_a_config_labels_is_kept(model_dir: Path) -> None:
    config = model_dir.parent / "models.config"
    config.write_text(
        f'model_config_list {{ config {{ name: "m" base_path: "{model_dir}" model_platform: "tensorflow"'
        ' version_labels { key: "stable" value: 1 } } }'
    )
    assert json_of("prune", model_dir, "--keep", "1", "--config", config)["removed"] == [2]
    assert numbers(model_dir) == [1, 3]


def test_export_keep_counts_the_new_version(three: Path, model_dir: Path) -> None:
    report = export_saved_model(three / "ckpt", model_dir, serving_config=CONFIG, workers=1, keep=2)
    assert (report.version, report.removed, numbers(model_dir)) == (4, (1, 2), [3, 4])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("rollback", "{m}", "9"), "9"),
        (("versions", "{m}/none"), "none"),
        (("prune", "{m}", "--config", "{m}/none"), "none"),
        (("prune", "{m}", "--model", "rec"), "--model: it says how to ask"),
        (("prune", "s3://bucket/rec"), "s3://bucket/rec"),
        (("compact", "{m}", "2"), "2"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_refusal_is_one_line_and_changes_nothing(model_dir: Path, arguments: tuple[str, ...], word: str) -> None:
    line = tpuembed(*(argument.format(m=model_dir) for argument in arguments)).refused()
    assert word in line
    assert numbers(model_dir) == [1, 2, 3]


def test_bad_usage_changes_nothing(model_dir: Path) -> None:
    for arguments in (("prune", "--keep", "0"), ("rollback", "0"), ("rollback", "newest"), ("versions", "--keep", "1")):
        assert tpuembed(arguments[0], model_dir, *arguments[1:]).returncode == 2
    with pytest.raises(TpuEmbedError, match="keep"):
        prune_versions(model_dir, keep=0)
    assert numbers(model_dir) == [1, 2, 3]
