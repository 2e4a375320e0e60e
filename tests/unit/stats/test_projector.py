"""Files of the projector, as TensorBoard reads them."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tests.support.messages import refused
from tpuembed.errors import ConfigError, RowRangeError, UnknownTableError
from tpuembed.stats import write_projector

pytestmark = pytest.mark.nightly

NAME = 'vidéos "of" people\\'


def test_tensorboard_reads_it(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    write(tmp_path / "ckpt", {NAME: rows})
    write_projector(tmp_path / "ckpt", NAME, tmp_path / "out", 10, 30)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    arguments = ["--logdir", str(tmp_path / "out"), "--port", str(port), "--host", "127.0.0.1", "--load_fast=false"]
    with (tmp_path / "log").open("w") as log:
        board = subprocess.Popen([sys.executable, "-m", "tensorboard.main", *arguments], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}/data/plugin/projector"
        until = time.monotonic() + 60
        while True:
            try:
                with urllib.request.urlopen(f"{url}/info?run=.") as answer:
                    (found,) = json.load(answer)["embeddings"]
                break
            except (urllib.error.URLError, ConnectionError):
                assert board.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < until
                time.sleep(0.2)
        assert (found["tensorName"], found["tensorShape"]) == (NAME, [20, 3])
        query = urllib.parse.urlencode({"run": ".", "name": NAME})
        with urllib.request.urlopen(f"{url}/tensor?{query}") as answer:
            np.testing.assert_array_equal(np.frombuffer(answer.read(), np.float32).reshape(20, 3), rows[10:30])
        with urllib.request.urlopen(f"{url}/metadata?{query}") as answer:
            lines = answer.read().decode().splitlines()
        assert lines[0] == "row\tnorm"
        numbers, norms = zip(*(line.split("\t") for line in lines[1:]), strict=True)
        assert [int(number) for number in numbers] == [*range(10, 30)]
        np.testing.assert_allclose([float(norm) for norm in norms], np.linalg.norm(rows[10:30], axis=1), rtol=1e-5)
    finally:
        board.terminate()
        board.wait()


@pytest.mark.parametrize(("rows", "sample", "count"), [((None, None), 40, 40), ((100, 160), 40, 40), ((5, 9), 40, 4)])
def test_samples(tmp_path: Path, rows: tuple[int | None, int | None], sample: int, count: int) -> None:
    """Different rows of the range, with their numbers; the same ones each time."""
    values = np.random.default_rng(1).standard_normal((20_000, 3)).astype(np.float32)
    write(tmp_path / "ckpt", {"videos": values})
    for name in ("once", "again"):
        written = write_projector(tmp_path / "ckpt", "videos", tmp_path / name, *rows, sample=sample)
        assert written.rows == count
    lines = (tmp_path / "once" / "metadata.tsv").read_text().splitlines()[1:]
    numbers = [int(line.split("\t")[0]) for line in lines]
    start, stop = rows[0] or 0, rows[1] or len(values)
    assert len(set(numbers)) == count
    assert all(start <= number < stop for number in numbers)
    if rows == (None, None):
        assert max(numbers) > 10_000
    stored = np.frombuffer((tmp_path / "once" / "tensors.bytes").read_bytes(), np.float32).reshape(-1, 3)
    np.testing.assert_array_equal(stored, values[numbers])
    assert f"tensor_shape: {count}\n" in (tmp_path / "once" / "projector_config.pbtxt").read_text()
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_defaults_and_refusals(tmp_path: Path) -> None:
    write(tmp_path / "ckpt", {"videos": np.ones((20_000, 2), np.float32)})
    assert write_projector(tmp_path / "ckpt", "videos", tmp_path / "out").rows == 10_000
    with refused(ConfigError):
        write_projector(tmp_path / "ckpt", "videos", tmp_path / "out")
    with refused(UnknownTableError):
        write_projector(tmp_path / "ckpt", "video", tmp_path / "other")
    with refused(RowRangeError):
        write_projector(tmp_path / "ckpt", "videos", tmp_path / "other", 10, 20_001)
    with refused(ConfigError):
        write_projector(tmp_path / "ckpt", "videos", tmp_path / "other", 10, 10)
    with refused(ConfigError):
        write_projector(tmp_path / "ckpt", "videos", tmp_path / "other", sample=0)
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as error:
        write_projector(tmp_path / "ckpt", "videos", tmp_path / "file" / "out")
    assert "cannot be written" in str(error.value)
