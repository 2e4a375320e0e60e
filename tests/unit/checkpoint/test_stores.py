"""Checkpoints in object stores: the same rows as on a disk, from whatever URL leads to them."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.support.checkpoint.manager import save
from tests.support.messages import refused
from tests.support.stores import S3, GcsStub, moto_server
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from tpuembed.files import remote
from tpuembed.formats.tensor_bundle import Entry, index_path, shard_path, write_index

TABLE = np.random.default_rng(0).normal(size=(1000, 7)).astype(np.float32)

Upload = Callable[[Path, str], str]


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with moto_server() as server:
        server.make_bucket("models")
        yield server


@pytest.fixture(params=["s3", "gs"])
def upload(request: pytest.FixtureRequest, s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Upload]:
    """Copies a folder to a prefix of the store, and says its URL."""
    remote._store.cache_clear()
    with GcsStub() as stub:
        for name, value in {**s3.environment, **stub.environment}.items():
            monkeypatch.setenv(name, value)
        store: S3 | GcsStub = s3 if request.param == "s3" else stub
        test = re.sub(r"\W+", "-", request.node.name)
        yield lambda folder, prefix: store.upload(folder, "models", f"{test}/{prefix}")
    remote._store.cache_clear()


def write(folder: Path) -> Path:
    """TABLE and its slot in row and column slices over several data files."""
    root = tf.train.Checkpoint(table=tf.Variable(TABLE), other=tf.Variable([[1.0, 2.0]]))
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=5_000)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    return Path(root.write(str(folder / "ckpt-1"), options))


def value(url: str) -> float:
    with open_checkpoint(url) as checkpoint:
        return float(checkpoint.read("table")[0, 0])


def test_the_same_as_on_a_disk(tmp_path: Path, upload: Upload) -> None:
    local = write(tmp_path)
    assert len(list(tmp_path.glob("*.data-*"))) > 2
    url = upload(tmp_path, "dir")
    with open_checkpoint(local) as on_disk, open_checkpoint(f"{url}/ckpt-1") as checkpoint:
        assert checkpoint.tables() == on_disk.tables()
        assert checkpoint.path == f"{url}/ckpt-1"
        np.testing.assert_array_equal(checkpoint.read("table"), TABLE)
        np.testing.assert_array_equal(checkpoint.read("table", 123, 777), TABLE[123:777])
        out = np.zeros((5, 7), np.float32)
        checkpoint.read_into("table", 995, out)
        np.testing.assert_array_equal(out, TABLE[995:])
        with open_checkpoint(checkpoint.path) as again:
            assert again.fingerprint() == checkpoint.fingerprint()


def test_what_leads_to_a_checkpoint(tmp_path: Path, upload: Upload) -> None:
    save(tmp_path, 1, 2)
    url = upload(tmp_path, "dir")
    assert value(url) == value(f"{url}/") == 2
    for path, expected in [("ckpt-1", 1), ("ckpt-2.index", 2), ("ckpt-1.data-00000-of-00001", 1)]:
        assert value(f"{url}/{path}") == expected


def test_the_highest_number_without_a_state_file(tmp_path: Path, upload: Upload) -> None:
    save(tmp_path, *range(1, 12))
    (tmp_path / "checkpoint").unlink()
    assert value(upload(tmp_path, "dir")) == 11
    (tmp_path / "best.index").write_bytes(b"")
    with refused(CheckpointFormatError):
        open_checkpoint(upload(tmp_path, "dir"))


def test_a_saved_model(tmp_path: Path, upload: Upload) -> None:
    module = tf.Module()
    module.table = tf.Variable([[3.0]])
    tf.saved_model.save(module, str(tmp_path / "model"))
    assert value(upload(tmp_path / "model", "model")) == 3


@pytest.mark.parametrize(
    "named", ["ckpt-1", "{url}/ckpt-1", "/home/somebody/ckpt-1", "hdfs://old/ckpt-1", "s3://another-bucket/ckpt-1"]
)
@pytest.mark.sampled(3)
def test_state_files(tmp_path: Path, upload: Upload, named: str) -> None:
    """Relative, of the store's own, or of another place: then the one of that name beside it."""
    save(tmp_path, 1, 2)
    url = upload(tmp_path, "dir")
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{named.format(url=url)}"\n')
    assert value(upload(tmp_path, "dir")) == 1


def test_a_state_file_that_names_another_folder_of_its_bucket(tmp_path: Path, upload: Upload) -> None:
    save(tmp_path, 1)
    there = upload(tmp_path, "there")
    (tmp_path / "checkpoint").write_text(f'model_checkpoint_path: "{there}/ckpt-1"\n')
    for file in tmp_path.glob("ckpt-1*"):
        file.unlink()
    assert value(upload(tmp_path, "here")) == 1


def test_a_state_file_never_leads_to_a_disk(tmp_path: Path, upload: Upload) -> None:
    save(tmp_path / "disk", 1)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "checkpoint").write_text(f'model_checkpoint_path: "{tmp_path}/disk/ckpt-1"\n')
    with refused(CheckpointNotFoundError):
        open_checkpoint(upload(tmp_path / "store", "dir"))


def test_what_is_missing_or_cut(tmp_path: Path, upload: Upload) -> None:
    write(tmp_path)
    url = upload(tmp_path, "whole")
    with refused(CheckpointNotFoundError):
        open_checkpoint(f"{url}/ckpt-2")
    with refused(CheckpointNotFoundError):
        open_checkpoint(f"{url}/none/")
    for missing in (f"{url}/ckpt-1", url, url.partition("models")[0] + "models"):
        with refused(CheckpointNotFoundError, match="'no-such-bucket'"):
            open_checkpoint(missing.replace("models", "no-such-bucket"))
    [data, *_] = sorted(tmp_path.glob("*.data-00001-of-*"))
    data.write_bytes(data.read_bytes()[:-1])
    with refused(CheckpointCorruptError):
        open_checkpoint(upload(tmp_path, "cut") + "/ckpt-1")
    data.unlink()
    with refused(CheckpointCorruptError):
        open_checkpoint(upload(tmp_path, "gone") + "/ckpt-1")
    (tmp_path / "ckpt-1.index").write_bytes(b"x" * 100)
    with refused(CheckpointCorruptError):
        open_checkpoint(upload(tmp_path, "garbage") + "/ckpt-1")


def test_written_over_while_it_is_open(tmp_path: Path, upload: Upload) -> None:
    """Never rows of two checkpoints."""
    save(tmp_path, 1)
    url = upload(tmp_path, "dir")
    with open_checkpoint(f"{url}/ckpt-1") as checkpoint:
        assert checkpoint.read("table")[0, 0] == 1
        before = checkpoint.fingerprint()
        save(tmp_path / "new", 2)
        upload(tmp_path / "new", "dir")
        with refused(CheckpointError, match="00000"):
            checkpoint.read("table")
        assert checkpoint.fingerprint() != before


@pytest.mark.parametrize("place", ["disk", "store"])
def test_other_bytes_of_the_same_size_are_another_fingerprint(tmp_path: Path, upload: Upload, place: str) -> None:
    """The index being the same."""
    [path] = save(tmp_path, 1)
    url = upload(tmp_path, "dir") if place == "store" else str(tmp_path)
    with open_checkpoint(url) as checkpoint:
        before = checkpoint.fingerprint()
        assert checkpoint.fingerprint() == before
        data = Path(f"{path}.data-00000-of-00001")
        data.write_bytes(data.read_bytes()[::-1])
        upload(tmp_path, "dir")
        assert checkpoint.fingerprint() != before


@pytest.mark.nightly
def test_exports_by_processes_of_their_own(tmp_path: Path, upload: Upload) -> None:
    """`tpuembed export` from a URL: every worker opens it; TensorFlow loads the result."""
    write(tmp_path / "checkpoints")
    url = upload(tmp_path / "checkpoints", "dir")
    (tmp_path / "serving.yaml").write_text("features:\n  x: {table: table, input: id}\n")
    command = [sys.executable, "-m", "tpuembed_cli.main", "export", url, str(tmp_path / "model")]
    options = ["--serving-config", str(tmp_path / "serving.yaml"), "--workers", "2", "--json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    model = tf.saved_model.load(report["path"])
    rows = model.signatures["serving_default"](x=tf.range(1000, dtype=tf.int64))["x"]
    np.testing.assert_array_equal(rows, TABLE)
    manifest = json.loads((Path(report["path"]) / "assets.extra" / "tpuembed.json").read_text())
    assert manifest["source"]["path"] == f"{url}/ckpt-1"


@pytest.mark.nightly
def test_memory_of_a_large_table(tmp_path: Path, upload: Upload) -> None:
    """512 MiB through reads of 16 MiB, in a process of its own."""
    rows = 1 << 21
    table = np.broadcast_to(np.arange(64, dtype=np.float32), (rows, 64))
    prefix = tmp_path / "big" / "ckpt"
    prefix.parent.mkdir()
    with open(shard_path(prefix, 0, 1), "wb") as file:
        for _ in range(16):
            file.write(table[: rows // 16].tobytes())
    write_index(index_path(prefix), {"t": Entry(dtype="float32", shape=(rows, 64), size=rows * 256)}, 1)
    script = """
import sys
import numpy as np
from tpuembed.checkpoint import open_checkpoint
out = np.empty((1 << 16, 64), np.float32)
with open_checkpoint(sys.argv[1]) as checkpoint:
    for start in range(0, 1 << 21, 1 << 16):
        checkpoint.read_into("t", start, out)
        assert (out == np.arange(64)).all()
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM:")).split()[1])
"""
    command = [sys.executable, "-c", script, upload(prefix.parent, "big")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 128e6
