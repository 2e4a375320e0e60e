"""A server of several models in a process of its own, on free ports, and the vectors that are asked of it.

A vector is a request and what its answer must be. A group's keys hold for each of its vectors that does not have its own.

REST: `method` (POST), `path`, `headers`, `send` (the body; with `gzip`, compressed); `status`, and one of
  `json`        the body's value, numbers of the same kind
  `has`         members that the body's object has
  `body`        the body, byte for byte
  `error`       the message of an error, whole
  `error_like`  a regular expression for it

gRPC: `rpc`, `send` (the request in protobuf's JSON form) or `raw` (its bytes, in hexadecimal); `code`, and one of
  `answer`      the response in protobuf's JSON form
  `text`        the message of an error, whole
  `text_like`   a regular expression for it
A tensor may have `shape: [2, 3]` in place of a tensor_shape.
"""

import gzip
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import yaml

from tests.support.serving.process import messages

__all__ = ["VectorServer", "ask", "read_vectors", "with_shapes"]

FOLDER = Path(__file__).parents[2] / "e2e" / "vectors"
START_SECONDS = 120.0
_SERVE = """
import json, sys
from pathlib import Path
from tpuembed_serving import ModelSettings, ServerSettings, serve
models = tuple(ModelSettings(name=name, base_path=Path(path)) for name, path in json.loads(sys.argv[1]).items())
serve(ServerSettings(models=models, rest_port=0, grpc_port=0, poll_seconds=0.05, lame_duck_seconds=0))
"""


def read_vectors(pattern: str) -> Iterator[dict[str, Any]]:
    """Every vector of the files that match, complete with what its group says, and with a name."""
    for path in sorted(FOLDER.glob(pattern)):
        for group in yaml.safe_load(path.read_text(encoding="utf-8")):
            common = {key: value for key, value in group.items() if key not in ("group", "vectors")}
            for index, vector in enumerate(group["vectors"]):
                yield _joined(common, vector) | {"name": f"{group['group']}-{index}"}


def _joined(common: Mapping[str, Any], vector: Mapping[str, Any]) -> dict[str, Any]:
    """A vector that expects something expects nothing that its group does, but for the status."""
    expected = {"json", "has", "body", "error", "error_like", "answer", "text", "text_like"}
    kept = {key: value for key, value in common.items() if not (expected & set(vector) and key in expected)}
    return {**kept, **vector}


def with_shapes(value: Any) -> Any:
    """`shape: [2, 3]` as a tensor_shape."""
    if isinstance(value, list):
        return [with_shapes(element) for element in value]
    if not isinstance(value, dict):
        return value
    found = {key: with_shapes(member) for key, member in value.items() if key != "shape"}
    if "shape" in value:
        found["tensor_shape"] = {"dim": [{"size": str(size)} for size in value["shape"]]}
    return found


class VectorServer:
    """A running server of `models`; `with` ends it."""

    def __init__(self, models: Mapping[str, Path], log: Path) -> None:
        self._log = log
        paths = json.dumps({name: str(path) for name, path in models.items()})
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([sys.executable, "-c", _SERVE, paths], stderr=stderr)
        names = list(models)
        self._wait_for(lambda: re.search("gRPC at .*\n", self.log))
        self.url = self._announced(f"serving {names[0]} at ").partition("/v1/")[0]
        self.grpc_address = self._announced("gRPC at ")
        self._wait_for(lambda: all(f"model {name} version " in self.log for name in names))

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def _announced(self, start: str) -> str:
        return next(line.removeprefix(start) for line in messages(self.log) if line.startswith(start))

    def _wait_for(self, condition: Any) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not condition():
            assert self.process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)


def ask(client: httpx.Client, vector: dict[str, Any]) -> httpx.Response:
    body = vector["send"].encode()
    if vector.get("gzip"):
        body = gzip.compress(body)
    url = client.base_url.copy_with(raw_path=vector["path"].encode())
    return client.request(vector.get("method", "POST"), url, content=body, headers=vector.get("headers"))
