"""Servers of shards, the server in front of them, and what tests ask it."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import tensorflow as tf
import yaml
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

from tests.support.serving.process import ServerProcess
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, Vocabulary

Array = np.ndarray[Any, Any]
TABLES = {"a": (40, 4), "b": (30, 8), "c": (500, 4), "d": (20, 16), "e": (3, 2)}
NAMES = [f"item {number}" for number in range(20)]
FEATURES: dict[str, Any] = {
    "one": {"table": "a", "input": "id"},
    "zeros": {"table": "b", "input": "id", "out_of_vocabulary": "zeros"},
    "listed": {"table": "a", "combiner": "sum"},
    "weighed": {"table": "c", "weighted": True, "combiner": "sqrtn"},
    "sequence": {"table": "b", "max_sequence_length": 3},
    "named": {"table": "d", "combiner": "mean"},
    "small": {"table": "e", "combiner": "mean"},
}


class Trained:
    """Two checkpoints of the same tables, with other rows."""

    def __init__(self, folder: Path) -> None:
        self.paths = []
        for step in (1, 2):
            tf.random.set_seed(step)
            configs = {
                name: FeatureConfig(TableConfig(*shape, name), vocabulary=Vocabulary(NAMES) if name == "d" else None)
                for name, shape in TABLES.items()
            }
            layer = TPUEmbedding(configs, optimizer="sgd")
            self.paths.append(tf.train.Checkpoint(layer=layer).write(str(folder / f"ckpt-{step}")))


def requests(rng: np.random.Generator, batch: int) -> dict[str, Array]:
    def lists(rows: int) -> Array:
        ids = rng.integers(0, rows, (batch, 4))
        ids[np.arange(4) >= rng.integers(0, 5, (batch, 1))] = -1
        return ids

    weighed = lists(500)
    names = np.array([name.encode() for name in NAMES], object)[rng.integers(0, 20, (batch, 3))]
    names[np.arange(3) >= rng.integers(0, 4, (batch, 1))] = b""
    return {
        "one": rng.integers(0, 40, batch),
        "zeros": rng.integers(-2, 40, batch),
        "listed": lists(40),
        "weighed": weighed,
        "weighed_weights": np.where(weighed < 0, 0, rng.random((batch, 4))).astype(np.float32),
        "sequence": lists(30),
        "named": names,
        "small": lists(3),
    }


class Cluster:
    """Servers of all shards, some with replicas, and the server in front."""

    def __init__(
        self,
        folder: Path,
        work: Path,
        stack: ExitStack,
        replicas: int = 1,
        *options: str,
        of_shards: Sequence[str] = (),
        **more: Any,
    ) -> None:
        """`options` are those of the front, `of_shards` those of the other servers, and `more` keys of shards.yaml."""
        content = {**yaml.safe_load((folder / "shards.yaml").read_text()), **more}
        self.servers: dict[str, list[ServerProcess]] = {}
        for shard in content["shards"]:
            config = str(folder / f"{shard['name']}.config")
            own = ("--config", config, "--grpc-port", "0", "--lame-duck-seconds", "0", *of_shards)
            self.servers[shard["name"]] = [
                stack.enter_context(ServerProcess(None, work / f"{shard['name']}-{number}.log", *own))
                for number in range(replicas)
            ]
            addresses = ",".join(server.grpc_address for server in self.servers[shard["name"]])
            shard["address"] = f"ipv4:{addresses}"
        if "front" in content:
            content["front"] = str(folder / content["front"])
        self.file = work / "front.yaml"
        self.file.write_text(yaml.safe_dump(content))
        if not of_shards:
            for servers in self.servers.values():
                for server in servers:
                    server.wait_for(1)
        front = ("--shards", str(self.file), "--grpc-port", "0", *options)
        self.front = stack.enter_context(ServerProcess(None, work / "front.log", *front))
        self.front.wait_for(1)

    def another_front(self, stack: ExitStack, *options: str, **more: Any) -> ServerProcess:
        """Start one more front, with other keys of shards.yaml. It may get no version."""
        file = self.file.with_name("another.yaml")
        content = {**yaml.safe_load(self.file.read_text()), **more}
        file.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        log = self.file.with_name("another.log")
        return stack.enter_context(ServerProcess(None, log, "--shards", str(file), *options))

    def ask(
        self, inputs: dict[str, Array], version: int | None = None, timeout: float = 60
    ) -> tuple[int, dict[str, Array]]:
        """Return the version that answered, and the outputs."""
        reply, _ = self.call(inputs, version, timeout)
        return reply.model_spec.version.value, {name: tf.make_ndarray(value) for name, value in reply.outputs.items()}

    def call(
        self, inputs: dict[str, Array], version: int | None = None, timeout: float = 60
    ) -> tuple[Any, dict[str, Any]]:
        """Return the answer, and its trailing metadata."""
        request = predict_pb2.PredictRequest()
        request.model_spec.name = self.front.path.rsplit("/", 1)[1]
        if version is not None:
            request.model_spec.version.value = version
        for name, value in inputs.items():
            request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
        with grpc.insecure_channel(self.front.grpc_address) as channel:
            stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
            reply, call = stub.Predict.with_call(request, timeout=timeout)
        return reply, dict(call.trailing_metadata())

    @contextmanager
    def under_load(
        self, inputs: dict[str, Array], check: Callable[[int, dict[str, Array]], None]
    ) -> Iterator[list[int]]:
        """Ask in two threads inside the block, until version 2 has answered. `check` gets each version and its outputs.

        Yields the versions that answered, which are complete after the block. No request may fail.
        """
        seen, faults, stopping = list[int](), list[BaseException](), threading.Event()

        def load() -> None:
            while not stopping.is_set():
                try:
                    version, found = self.ask(inputs)
                    check(version, found)
                    seen.append(version)
                except BaseException as error:
                    faults.append(error)
                    return

        threads = [threading.Thread(target=load) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield seen
            deadline = time.monotonic() + 60
            while seen[-1:] != [2] and time.monotonic() < deadline and not faults:
                time.sleep(0.1)
            time.sleep(1)
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
        assert not faults, faults[0]
