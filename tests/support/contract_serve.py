"""The models of the contract's tests of serving, what each must answer, and the servers that several files ask.

The truth is numpy's, for tables whose rows are known here, and TensorFlow's own run of a SavedModel for everything else.
"""

import functools
import json
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import keras
import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf
from tensorflow_serving.apis import model_service_pb2_grpc, predict_pb2, prediction_service_pb2_grpc

from tests.support.contract_open_inference import SERVICE, message
from tests.support.serving.half_plus_two import save_graph
from tests.support.serving.models import save_scale, save_zoo
from tests.support.serving.process import Reply, ServerProcess
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding, export_saved_model

__all__ = [
    "FEATURES",
    "LOOKUPS",
    "TABLES",
    "ZOO",
    "Server",
    "assert_near",
    "config_of",
    "draw_ids",
    "eventually",
    "forwarding_to",
    "look_up",
    "outputs_of",
    "predict_request",
    "refusal",
    "run_tensorflow",
    "saved_models",
    "shared",
    "shared_server",
    "time_limit",
    "zoo_inputs",
]

Array = npt.NDArray[Any]
T = TypeVar("T")

SECONDS: Final = 120.0
"""The longest time that a test waits for something."""

TABLES: Final = {
    name: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    for seed, (name, shape) in enumerate({"users": (60, 5), "items": (90, 8)}.items())
}
FEATURES: Final[Mapping[str, Mapping[str, Any]]] = {
    "user": {"table": "users", "input": "id"},
    "watched": {"table": "items", "combiner": "mean"},
    "liked": {"table": "items", "combiner": "sum", "out_of_vocabulary": "zeros"},
    "rated": {"table": "items", "combiner": "sqrtn", "weighted": True},
    "history": {"table": "users", "max_sequence_length": 3},
}
LOOKUPS: Final = ("variables", "mapped")
"""The models that are exports of `TABLES`, one for each layout."""


def time_limit(seconds: float) -> tuple[str, ...]:
    """Return the option that limits the time of a request."""
    return ("--rest-timeout-ms", str(round(seconds * 1000)))


def forwarding_to(address: str) -> tuple[str, ...]:
    """Return the options of a server that forwards requests to another server's gRPC."""
    return ("--target", address)


def eventually(condition: Callable[[], Any]) -> None:
    """Wait until `condition` is true."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.05)


# ---- models


def saved_models(config: pytest.Config, folders: pytest.TempPathFactory) -> Path:
    """Return the folder of all models. They are saved once for all files of tests.

    half_plus_two (version 123) is a graph of TensorFlow 1, zoo (3) has many signatures, scale multiplies by its version (1, 2),
    `LOOKUPS` are exports of `TABLES`, and ranker is a whole Keras model with a layer of this library.
    """

    def save() -> Path:
        folder = folders.mktemp("contract_models")
        save_graph(folder / "half_plus_two", 2.0)
        save_zoo(folder / "zoo" / "3")
        for version in (1, 2):
            save_scale(folder / "scale" / str(version), float(version))
        checkpoint = tf.train.Checkpoint(**{name: tf.Variable(rows, name=name) for name, rows in TABLES.items()})
        path = checkpoint.write(str(folder / "lookups"))
        for name, layout in zip(LOOKUPS, ("variables", "mmap"), strict=True):
            export_saved_model(
                path, folder / name, serving_config={"features": FEATURES}, layout=layout, storage="float32", workers=1
            )
        _export_ranker(folder)
        return folder

    return _once(config, _MODELS, save)


def build_ranker() -> Any:
    """Return a Keras model of one id, a list of ids and a number."""
    keras.utils.set_random_seed(3)
    inputs = {
        "user": keras.Input((), dtype="int64", name="user"),
        "seen": keras.Input((None,), dtype="int64", ragged=True, name="seen"),
        "price": keras.Input((1,), name="price"),
    }
    tables = {name: TableConfig(len(rows), rows.shape[1], name, combiner="sum") for name, rows in TABLES.items()}
    configs = {"user": FeatureConfig(tables["users"]), "seen": FeatureConfig(tables["items"])}
    found = TPUEmbedding(configs, optimizer="sgd")({name: inputs[name] for name in configs})
    joined = keras.ops.concatenate([found["user"], found["seen"], inputs["price"]], -1)
    hidden = keras.layers.Dense(4, activation="tanh", name="hidden")(joined)
    return keras.Model(inputs, {"score": keras.layers.Dense(1, name="head")(hidden)})


def _export_ranker(folder: Path) -> None:
    path = tf.train.Checkpoint(model=build_ranker()).write(str(folder / "ranker_checkpoint"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there are no requests to warm up, and no serving_examples
        export_saved_model(path, folder / "ranker", model=build_ranker, layout="mmap", workers=1)


def draw_ids(seed: int, batch: int, width: int) -> dict[str, Array]:
    """Return random inputs of `FEATURES`: lists are padded with -1, and some ids of `liked` are outside its table."""
    random = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for name, spec in FEATURES.items():
        rows = len(TABLES[spec["table"]])
        shape = (batch,) if spec.get("input") == "id" else (batch, width)
        ids = random.integers(0, rows, shape)
        if "out_of_vocabulary" in spec:
            ids = np.where(random.random(shape) < 0.3, rows + 5, ids)
        if len(shape) == 2:
            ids = np.where(np.arange(width) >= random.integers(0, width + 1, (batch, 1)), -1, ids)
        inputs[name] = ids
        if spec.get("weighted"):
            weights = random.uniform(0.25, 2, shape).astype(np.float32)
            inputs[f"{name}_weights"] = np.where(ids == -1, 0, weights).astype(np.float32)
    return inputs


def look_up(inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return what exports of `TABLES` answer, computed by numpy one id at a time."""
    found = {}
    for name, spec in FEATURES.items():
        table, ids = TABLES[spec["table"]].astype(np.float64), inputs[name]
        if spec.get("input") == "id":
            found[name] = table[ids]
            continue
        weights = inputs.get(f"{name}_weights", np.ones(ids.shape))
        found[name] = np.stack([_combined(spec, table, *row) for row in zip(ids, weights, strict=True)])
    return found


def _combined(spec: Mapping[str, Any], table: Array, ids: Array, weights: Array) -> Array:
    zeros = np.zeros(table.shape[1])
    rows = [table[one] if one < len(table) else zeros for one in ids if one != -1]
    if length := spec.get("max_sequence_length"):
        return np.stack([*rows, *([zeros] * length)][:length])
    used = [float(weight) for one, weight in zip(ids, weights, strict=True) if one != -1]
    total = sum((weight * row for weight, row in zip(used, rows, strict=True)), zeros)
    divisor = {"sum": 1.0, "mean": sum(used), "sqrtn": sum(weight**2 for weight in used) ** 0.5}[spec["combiner"]]
    return total / (divisor or 1.0)


def assert_near(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare arrays by name: shapes exactly, and values with the rounding of a float32 sum."""
    assert sorted(found) == sorted(wanted)
    for name, rows in wanted.items():
        array = np.asarray(found[name], np.float64)
        assert array.shape == rows.shape, name
        np.testing.assert_allclose(array, rows, rtol=2e-6, atol=2e-6, err_msg=name)


def zoo_inputs(seed: int, rows: int = 4) -> dict[str, dict[str, Array]]:
    """Return random inputs for the signatures of `zoo` that answer row by row."""
    random = np.random.default_rng(seed)
    words = np.array(["abc", "\u00e9\u4e2d", "", 'q"\\\n', "x y"], object)
    return {
        "serving_default": {"ids": random.integers(0, 5, (rows, 2))},
        "mixed": {
            "ids": random.integers(0, 5, rows),
            "weights": random.normal(size=rows).astype(np.float32),
            "on": random.random(rows) < 0.5,
        },
        "text": {"s": random.choice(words, rows)},
        "double": {"x": random.normal(size=rows) * 10.0 ** random.integers(-300, 300, rows)},
        "int32": {"x": random.integers(-(2**30), 2**30, (rows, 3)).astype(np.int32)},
        "uint8": {"x": random.integers(0, 256, rows).astype(np.uint8)},
        "logic": {"b": random.random(rows) < 0.5},
    }


ZOO: Final = tuple(zoo_inputs(0))


def run_tensorflow(version: Path, signature: str, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Return what TensorFlow itself answers, from a folder of `saved_models`."""
    function = _load(version).signatures[signature]
    outputs = function(**{name: tf.constant(value) for name, value in inputs.items()})
    return {name: value.numpy() for name, value in outputs.items()}


@functools.cache
def _load(version: Path) -> Any:
    return tf.saved_model.load(str(version))


# ---- servers


def config_of(folder: Path, models: Mapping[str, str]) -> str:
    """Return a models.config: the models' names, with the further fields of each."""
    texts = [
        f'config {{ name: "{name}" base_path: "{folder / name}" model_platform: "tensorflow" {more} }}'
        for name, more in models.items()
    ]
    return "model_config_list { " + "\n".join(texts) + " }"


class Server(ServerProcess):
    """A server with gRPC on a free port, and stubs for its services."""

    def __init__(
        self,
        model_dir: Path | None,
        log: Path,
        *options: str,
        variables: Mapping[str, str] | None = None,
        bare: bool = False,
    ) -> None:
        """`variables` are of the server's environment alone. `bare` is as in `ServerProcess`."""
        grpc_port = () if bare else ("--grpc-port", "0", "--lame-duck-seconds", "0")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (variables or {}).items():
                patch.setenv(name, value)
            super().__init__(model_dir, log, *grpc_port, *options, bare=bare)
        self.channel = self.open_channel()
        self.prediction: Any = prediction_service_pb2_grpc.PredictionServiceStub(self.channel)
        self.models: Any = model_service_pb2_grpc.ModelServiceStub(self.channel)

    def open_channel(self) -> Any:
        """Return a channel to gRPC that takes messages of any size."""
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        return grpc.insecure_channel(self.grpc_address, options=[*unlimited, ("grpc.use_local_subchannel_pool", 1)])

    def ask(self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Send a request over a new connection. A body that is neither bytes nor text is sent as JSON."""
        if not isinstance(body, bytes | str | None):
            body = json.dumps(body)
        connection = self.connect()
        try:
            connection.request(method, target, body, dict(headers or {}))
            reply = connection.getresponse()
            return Reply(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    def get(self, target: str, **headers: str) -> Reply:
        """GET a path."""
        return self.ask("GET", target, headers=headers)

    def post(self, target: str, body: Any, **headers: str) -> Reply:
        """POST to a model's path, such as zoo:predict."""
        return self.ask("POST", f"/v1/models/{target}", body, headers)

    def inference(self, method: str, request: Any, **options: Any) -> Any:
        """Call a method of the Open Inference Protocol."""
        answer = message(f"{method}Response")
        call = self.channel.unary_unary(f"/{SERVICE}/{method}", None, answer.FromString)
        return call(request.SerializeToString(), **{"timeout": 60, **options})

    def is_ready(self) -> bool:
        """Whether every model has a version."""
        assert self.process.poll() is None, self.log
        return self.get("/readyz").status == 200

    def __exit__(self, *error: Any) -> None:
        self.channel.close()
        super().__exit__(*error)


def predict_request(model: str, inputs: Mapping[str, Any], signature: str = "") -> Any:
    """Return a request of gRPC's Predict. Numbers of arrays are in tensor_content."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name, request.model_spec.signature_name = model, signature
    for alias, value in inputs.items():
        request.inputs[alias].CopyFrom(tf.make_tensor_proto(value))
    return request


def outputs_of(reply: Any) -> dict[str, Array]:
    """Return the arrays of gRPC's answer."""
    return {alias: tf.make_ndarray(tensor) for alias, tensor in reply.outputs.items()}


def refusal(call: Any, request: Any, **options: Any) -> tuple[Any, str]:
    """Return the code and the text of a call, which has to fail."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, **{"timeout": 60, **options})
    return caught.value.code(), caught.value.details()


_MODELS: Final = pytest.StashKey[Path]()
_SERVER: Final = pytest.StashKey[Server]()


def _once(config: pytest.Config, key: pytest.StashKey[T], make: Callable[[], T]) -> T:
    if key not in config.stash:
        config.stash[key] = make()
    return config.stash[key]


def shared(config: pytest.Config, key: pytest.StashKey[Server], start: Callable[[], Server]) -> Server:
    """Return the one server of this key. The first file that asks starts it, and it ends with pytest."""

    def started() -> Server:
        server = start()
        config.add_cleanup(lambda: server.__exit__(None, None, None))
        eventually(server.is_ready)
        return server

    return _once(config, key, started)


def shared_server(config: pytest.Config, folders: pytest.TempPathFactory) -> Server:
    """Return a server of all of `saved_models`, with metrics, an access log, and lookups by the C library."""

    def start() -> Server:
        models, folder = saved_models(config, folders), folders.mktemp("contract_server")
        labels = "".join(
            f' version_labels {{ key: "{label}" value: {version} }}'
            for label, version in {"stable": 1, "canary": 2}.items()
        )
        listed = dict.fromkeys(("half_plus_two", "zoo", *LOOKUPS, "ranker"), "")
        text = config_of(models, listed | {"scale": "model_version_policy { all {} }" + labels})
        path = folder / "models.config"
        path.write_text(text, encoding="utf-8")
        options = ("--config", str(path), "--metrics", "--access-log", str(folder / "access.log"))
        return Server(None, folder / "log", *options, "--lookups", "native")

    return shared(config, _SERVER, start)
