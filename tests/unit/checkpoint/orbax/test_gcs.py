"""Orbax checkpoints in Google Cloud Storage, of which there is a stub: the API in JSON, which TensorStore speaks.

Each test reads in a process of its own, as TensorStore takes its server's address from the environment once.
"""

import contextlib
import http.server
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoint.orbax_trees import write_tree
from tests.support.stores import GcsStub

ROWS = np.arange(92, dtype=np.float32).reshape(23, 4)
SCRIPT = """
import sys
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.orbax import arrays
from tpuembed.errors import CheckpointError
arrays.OPEN_SECONDS = 2
arrays.RETRIES["gcs_request_retries"].update(max_retries=2, initial_delay="10ms", max_delay="10ms")
try:
    with open_checkpoint(sys.argv[1]) as checkpoint:
        print(checkpoint.read("emb").tolist())
except CheckpointError as error:
    print(type(error).__name__, error)
"""


class _Request(http.server.BaseHTTPRequestHandler):
    """Objects and their metadata, as https://cloud.google.com/storage/docs/json_api/v1/objects/get has them."""

    protocol_version = "HTTP/1.1"
    objects: Mapping[str, bytes] = {}

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name there
        pass

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        found = re.fullmatch(r"/storage/v1/b/([^/]+)/o/([^/]+)", url.path)
        assert found is not None
        name = f"{found[1]}/{urllib.parse.unquote(found[2])}"
        if name not in self.objects:
            self.answer(404, b"")
        elif dict(urllib.parse.parse_qsl(url.query))["alt"] == "json":
            about = {"name": name, "size": str(len(self.objects[name])), "generation": "1", "metageneration": "1"}
            self.answer(200, json.dumps(about).encode())
        else:
            self.answer_range(self.objects[name])

    def answer_range(self, data: bytes) -> None:
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if found is None:
            self.answer(200, data)
        else:
            start, stop = int(found[1]), min(int(found[2] or len(data)) + 1, len(data))
            self.answer(206, data[start:stop], **{"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "x-goog-generation": "1", "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


class _BusyRequest(_Request):
    def do_GET(self) -> None:
        self.answer(503, b"")


@contextlib.contextmanager
def json_server(handler: type[_Request]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture(params=[False, True], ids=["files", "ocdbt"])
def stub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[GcsStub]:
    """Holds the checkpoint bucket/run."""
    write_tree(tmp_path / "ckpt", {("emb",): ROWS}, chunks=(5, 4), ocdbt=request.param)
    with GcsStub() as server:
        server.upload(tmp_path / "ckpt", "bucket", "run")
        yield server


def read(stub: GcsStub, json_url: str | None) -> str:
    """What a process says that reads the checkpoint; TensorStore's requests go to `json_url`."""
    # The last keeps TensorStore from asking the machine it runs on who it is.
    more = {"TENSORSTORE_GCS_HTTP_URL": json_url or "", "GCE_METADATA_ROOT": "127.0.0.1:9"}
    environment = {**os.environ, **stub.environment, **(more if json_url else {})}
    command = [sys.executable, "-c", SCRIPT, "gs://bucket/run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def test_rows_are_those_written(stub: GcsStub) -> None:
    handler = type("Handler", (_Request,), {"objects": stub.objects})
    with json_server(handler) as url:
        assert json.loads(read(stub, url)) == ROWS.tolist()


def test_a_store_that_is_busy(stub: GcsStub) -> None:
    with json_server(_BusyRequest) as url:
        said = read(stub, url)
    assert re.match(
        r"CheckpointError checkpoint gs://bucket/run: array 'emb': ABORTED: .*All 2 retry attempts failed", said
    )


@pytest.mark.nightly
def test_a_store_that_never_answers(stub: GcsStub) -> None:
    started = time.monotonic()
    with silent_server() as url:
        said = read(stub, url)
    assert said.startswith("CheckpointError checkpoint gs://bucket/run: array 'emb': the store did not answer in time")
    assert time.monotonic() - started < 30


def test_a_server_that_tensorstore_does_not_know_of(stub: GcsStub) -> None:
    """It would look for the arrays at Google, and ask for long."""
    said = read(stub, None)
    assert said.startswith("CheckpointError checkpoint gs://bucket/run: GOOGLE_BASE_URL")
    assert "Set TENSORSTORE_GCS_HTTP_URL" in said
