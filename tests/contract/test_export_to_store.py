"""`tpuembed export CHECKPOINT s3://...`: TensorFlow loads what is in the store."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.contract_lookups import Lookups, answers
from tests.support.serving.process import run_command
from tests.support.stores import S3, moto_server


@pytest.fixture(scope="module")
def store() -> Iterator[S3]:
    with moto_server() as running:
        yield running


def test_a_version_in_a_store_is_whole(
    lookups: Lookups, store: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.make_bucket("exports")
    (tmp_path / "serving.json").write_text(json.dumps({"features": {"user": {"table": "users", "input": "id"}}}))
    options = ("--serving-config", tmp_path / "serving.json", "--workers", "1", "--json")
    done = run_command("export", lookups.prefix, "s3://exports/models/rec", *options)
    report = json.loads(done.stdout)
    assert (done.stderr, report["path"], report["bytes_written"]) == ("", "s3://exports/models/rec/1", 50 * 4 * 4)
    assert all(key.startswith("models/rec/1/") for key in store.keys("exports"))
    assert store.uploads("exports") == []
    version = store.download("exports", "models/rec/1", tmp_path / "1")
    found = answers(version, {"user": np.arange(50)})["user"]
    np.testing.assert_array_equal(found, lookups.rows["users"])
    done = run_command("export", lookups.prefix, "s3://exports/models/rec", *options, "--version", "1")
    assert done.returncode == 1
    assert "version 1 exists" in done.stderr
    done = run_command("describe", "s3://exports/models/rec", "--json")
    assert [table["rows"] for table in json.loads(done.stdout)["tables"]] == [50]
