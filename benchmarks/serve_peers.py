"""Servers that ours is measured beside, each of which answers TensorFlow Serving's row form or has its own.

Runs in an environment that has the peer and TensorFlow, and nothing of ours:

    python serve_peers.py NAME PORT WORKERS MODEL_DIR

`naive` is what everybody writes first. All others run the model in the way that costs a call the least, as ours does: what is
compared is the server. `echo` and `grpc.aio echo` answer the same bytes without any model. `grpc.aio model` is the shortest server
that runs the model over gRPC: each call alone, without checks.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

FEATURES = 8
NAMES = [f"f{number}" for number in range(FEATURES)]
PATH = "/v1/models/rec:predict"


def session_call(model_dir: str) -> Any:
    """int64 ids [rows, features] to scores [rows, 1], by a callable of a TensorFlow session."""
    import tensorflow as tf

    v1 = tf.compat.v1
    config = v1.ConfigProto(inter_op_parallelism_threads=-1, intra_op_parallelism_threads=1)
    session = v1.Session(graph=tf.Graph(), config=config)
    with session.graph.as_default():
        signature = v1.saved_model.load(session, ["serve"], f"{model_dir}/1").signature_def["packed"]
    call = session.make_callable([signature.outputs["score"].name], [signature.inputs["ids"].name])
    return lambda ids: call(ids)[0]


def matrix(instances: list[dict[str, int]]) -> Any:
    """The ids of a request in row form."""
    import numpy as np

    return np.array([[row[name] for name in NAMES] for row in instances], np.int64)


def echo_app() -> Any:
    """Reads a request and answers as many bytes as a model would: what HTTP alone costs."""
    body = os.environ["ECHO_BODY"].encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]

    async def echo(_: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body", False):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return echo


def naive_app() -> Any:
    """FastAPI, a pydantic model, and a call of the signature."""
    import tensorflow as tf
    from fastapi import FastAPI
    from pydantic import BaseModel, create_model

    signature = tf.saved_model.load(f"{os.environ['MODEL_DIR']}/1").signatures["serving_default"]
    row: Any = create_model("row", **dict.fromkeys(NAMES, (int, ...)))
    request: Any = create_model("request", __base__=BaseModel, instances=(list[row], ...))
    app = FastAPI()

    @app.post(PATH)
    def predict(body: request) -> dict[str, Any]:
        columns = {name: tf.constant([getattr(row, name) for row in body.instances], tf.int64) for name in NAMES}
        return {"predictions": signature(**columns)["score"].numpy().tolist()}

    return app


def run_uvicorn(factory: str, port: int, workers: int) -> None:
    """A factory of this module, by its name: each worker calls it."""
    import uvicorn

    sys.path.insert(0, str(Path(__file__).parent))
    options: Any = {"log_level": "error", "access_log": False, "lifespan": "off", "ws": "none"}
    uvicorn.run(f"serve_peers:{factory}", factory=True, port=port, workers=workers, **options)


def run_litserve(port: int, workers: int, model_dir: str) -> None:
    """LitServe, batching as it does. Its processes import the class by name."""
    code = f"""
import litserve
import numpy as np
from serve_peers import matrix, session_call

class Rec(litserve.LitAPI):
    def setup(self, device):
        self.run = session_call({model_dir!r})

    def decode_request(self, request):
        return matrix(request["instances"])

    def batch(self, inputs):
        self.rows = [len(ids) for ids in inputs]
        return np.concatenate(inputs)

    def predict(self, ids):
        return self.run(ids)

    def unbatch(self, output):
        return list(np.split(output, np.cumsum(self.rows)[:-1]))

    def encode_response(self, output):
        return {{"predictions": output.tolist()}}
"""
    folder = tempfile.mkdtemp(prefix="litserve")
    (Path(folder) / "lit_rec.py").write_text(code)
    sys.path[:0] = [folder, str(Path(__file__).parent)]
    import litserve
    from lit_rec import Rec

    api = Rec(max_batch_size=64, batch_timeout=0.001, api_path=PATH)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=workers)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning", num_api_servers=1)


def run_bentoml(port: int, workers: int, model_dir: str) -> None:
    """BentoML."""
    code = f"""
import bentoml, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from serve_peers import PATH, matrix, session_call

@bentoml.service(workers={workers}, traffic={{"timeout": 30, "max_concurrency": 256}})
class Rec:
    def __init__(self):
        self.run = session_call({model_dir!r})

    @bentoml.api(route=PATH)
    def predict(self, instances: list[dict[str, int]]) -> dict[str, list[list[float]]]:
        return {{"predictions": self.run(matrix(instances)).tolist()}}
"""
    folder = tempfile.mkdtemp(prefix="bento")
    (Path(folder) / "service.py").write_text(code)
    os.chdir(folder)
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    command = [sys.executable, "-m", "bentoml", "serve", "service:Rec", "--host", "127.0.0.1", "--port", str(port)]
    os.execv(sys.executable, command)


def run_mlserver(port: int, workers: int, model_dir: str) -> None:
    """MLServer, with its own (V2) form of requests and adaptive batching."""
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
from serve_peers import session_call

class Rec(MLModel):
    async def load(self):
        self.call = session_call({model_dir!r})
        return True

    async def predict(self, payload):
        ids = np.concatenate([NumpyCodec.decode_input(one).reshape(-1, 1) for one in payload.inputs], 1)
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("score", self.call(ids))])
"""
    folder = Path(tempfile.mkdtemp(prefix="mlserver"))
    (folder / "rec.py").write_text(code)
    model = {"name": "rec", "implementation": "rec.Rec", "max_batch_size": 64, "max_batch_time": 0.001}
    (folder / "model-settings.json").write_text(json.dumps(model))
    ports = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    settings = {**ports, "host": "127.0.0.1", "parallel_workers": workers if workers > 1 else 0, "debug": False}
    (folder / "settings.json").write_text(json.dumps(settings))
    os.chdir(folder)
    script = str(Path(sys.executable).with_name("mlserver"))
    os.execv(script, [script, "start", str(folder)])


def run_ray(port: int, workers: int, model_dir: str) -> None:
    """Ray Serve."""
    import signal

    import ray
    from ray import serve

    os.environ["PYTHONPATH"] = str(Path(__file__).parent)

    class Rec:
        def __init__(self) -> None:
            from serve_peers import session_call as load

            self.run = load(model_dir)

        async def __call__(self, request: Any) -> Any:
            from serve_peers import matrix as decode

            return {"predictions": self.run(decode((await request.json())["instances"])).tolist()}

    ray.init(num_cpus=workers + 1, include_dashboard=False, object_store_memory=200_000_000)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"num_replicas": workers, "max_ongoing_requests": 128, "ray_actor_options": {"num_cpus": 1}}
    serve.run(serve.deployment(**options)(Rec).bind(), route_prefix="/")
    signal.pause()


def run_grpc_echo(port: int, workers: int) -> None:
    """Answers the same bytes to every call of Predict: what gRPC alone costs."""

    def prepare() -> Callable[[bytes], bytes]:
        answer = bytes.fromhex(os.environ["ECHO_BODY"])
        return lambda _: answer

    _run_grpc(port, workers, prepare)


def run_grpc_model(port: int, workers: int, model_dir: str) -> None:
    """Parses the request, runs the model, and builds the answer: what a server has to do, and nothing else."""

    def prepare() -> Callable[[bytes], bytes]:
        import numpy as np
        from tensorflow.core.framework import types_pb2
        from tensorflow_serving.apis import predict_pb2

        run = session_call(model_dir)

        def predict(body: bytes) -> bytes:
            inputs = predict_pb2.PredictRequest.FromString(body).inputs
            columns = [np.frombuffer(inputs[name].tensor_content, np.int64) for name in NAMES]
            scores = run(np.stack(columns, 1))
            answer = predict_pb2.PredictResponse()
            answer.model_spec.name, answer.model_spec.signature_name = "rec", "serving_default"
            answer.model_spec.version.value = 1
            tensor = answer.outputs["score"]
            tensor.dtype = types_pb2.DT_FLOAT
            for size in scores.shape:
                tensor.tensor_shape.dim.add().size = size
            tensor.float_val.extend(scores.ravel().tolist())
            return bytes(answer.SerializeToString())

        return predict

    _run_grpc(port, workers, prepare)


def _run_grpc(port: int, workers: int, prepare: Callable[[], Callable[[bytes], bytes]]) -> None:
    for _ in range(workers - 1):
        if not os.fork():
            break
    import grpc  # after the fork
    import uvloop

    answer = prepare()

    async def predict(body: bytes, _: Any) -> bytes:
        return answer(body)

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {"Predict": grpc.unary_unary_rpc_method_handler(predict)}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", handlers),)
        )
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


def main(name: str, port: str, workers: str, model_dir: str) -> None:
    """Serve one of them until killed."""
    os.environ["MODEL_DIR"] = model_dir
    if name == "grpc.aio echo":
        run_grpc_echo(int(port), int(workers))
    elif name == "grpc.aio model":
        run_grpc_model(int(port), int(workers), model_dir)
    elif name in ("echo", "naive"):
        run_uvicorn(f"{name}_app", int(port), int(workers))
    else:
        globals()[f"run_{name}"](int(port), int(workers), model_dir)


if __name__ == "__main__":
    main(*sys.argv[1:])
