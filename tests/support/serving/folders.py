"""A server of folders whose versions come and go, and a way to wait until it has looked at all of them."""

import collections
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import grpc
import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tensorflow_serving.apis import model_management_pb2

from tests.support.serving.doubles import FakeLoader, wait_for
from tests.support.serving.process import Reply
from tests.support.serving.served import BODY, Served
from tpuembed_serving import ModelSettings

__all__ = ["FENCE", "Folders", "config"]

FENCE = "fence"
"""A model whose versions show how far the server is."""
RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"


def config(*models: tuple[str, Path], more: str = "") -> str:
    """Return a models.config of these models, and the fields `more` in each."""
    text = "".join(
        f'config {{ name: "{name}" base_path: "{path}" model_platform: "tensorflow" {more} }}' for name, path in models
    )
    return f"model_config_list {{ {text} }}"


class Folders(Served):
    """Models are folders of `root` by their names. Each has a loader of its own, and `FENCE` is one of them."""

    def __init__(
        self, root: Path, patch: pytest.MonkeyPatch, models: Iterable[str | ModelSettings] = (), **options: Any
    ) -> None:
        self.root = root
        self.loaders = collections.defaultdict[str, FakeLoader](FakeLoader)
        for model in models:
            if isinstance(model, str):
                (root / model).mkdir(parents=True, exist_ok=True)
        super().__init__(root, patch, self._load, models=(*models, FENCE), **options)
        self._fence = 1

    def _load(self, path: Path) -> Any:
        """Load a version. One that comes from a store is in a cache, and its model is `m`."""
        return self.loaders[path.parent.name if path.is_relative_to(self.root) else "m"](path)

    def __enter__(self) -> Self:
        super().__enter__()
        wait_for(lambda: self.listens and self.send("GET", f"/v1/models/{FENCE}").status == 200)
        return self

    def publish(self, model: str, *versions: int, graph: bytes = b"graph") -> Path:
        """Publish versions, each by one rename. Returns the folder of the last one."""
        for version in versions:
            staging = self.root / model / ".staging"
            staging.mkdir(parents=True)
            (staging / "saved_model.pb").write_bytes(graph)
            path = staging.rename(staging.with_name(str(version)))
        return path

    def replace(self, model: str) -> None:
        """Write version 1 again, as another export does."""
        shutil.rmtree(self.root / model / "1", ignore_errors=True)
        self.publish(model, 1, graph=b"another graph")

    def settle(self, polls: int = 1) -> None:
        """Wait until so many polls of all folders have begun and ended."""
        for _ in range(polls + 1):
            self._fence += 1
            self.publish(FENCE, self._fence)
            self.wait_for(FENCE, {self._fence: "AVAILABLE"})

    def states(self, model: str) -> dict[int, str]:
        reply = self.send("GET", f"/v1/models/{model}")
        found = reply.value["model_version_status"] if reply.status == 200 else []
        return {int(one["version"]): one["state"] for one in found}

    def error(self, model: str, version: int) -> tuple[str, str]:
        """The code and the text of a version's error."""
        (one,) = self.send("GET", f"/v1/models/{model}/versions/{version}").value["model_version_status"]
        return one["status"]["error_code"], one["status"]["error_message"]

    def wait_for(self, model: str, wanted: dict[int, str]) -> None:
        """Wait until these versions have these states."""
        wait_for(lambda: wanted.items() <= self.states(model).items())

    def predict(self, target: str) -> Reply:
        return self.send("POST", f"/v1/models/{target}:predict", BODY)

    def served(self, target: str) -> Any:
        """The version that answers, or the text of an error."""
        reply = self.predict(target)
        return int(reply.headers["x-model-version"]) if reply.status == 200 else reply.error

    @contextmanager
    def busy(self, model: str, target: str = "") -> Iterator[list[Reply]]:
        """A request of the model is in progress until the end. Then the list has its answer."""
        entered, go_on, replies = threading.Event(), threading.Event(), list[Reply]()

        def block() -> None:
            if not entered.is_set():
                entered.set()
                assert go_on.wait(60)

        self.loaders[model].run_hook = block
        thread = threading.Thread(target=lambda: replies.append(self.predict(target or model)))
        thread.start()
        try:
            assert entered.wait(60)
            yield replies
        finally:
            go_on.set()
            thread.join(60)

    def reload(self, text: str) -> tuple[str, str]:
        """The code and the text of a reload over gRPC."""
        request = model_management_pb2.ReloadConfigRequest()
        text_format.Parse(text, request.config)
        with self.channel() as channel:
            try:
                channel.unary_unary(RELOAD)(request.SerializeToString(), timeout=60, wait_for_ready=True)
            except grpc.RpcError as error:
                return error.code().name, error.details()
        return "OK", ""
