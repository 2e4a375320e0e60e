"""inference.GRPCInferenceService: its tensors against numpy, damaged messages, and each method's key, limits and deadline."""

import asyncio
import struct
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.messages import refused
from tests.support.serving.doubles import OPEN_INFERENCE, EchoServable, make_version
from tpuembed_serving import ServerSettings, create_app
from tpuembed_serving.core.api_keys import ApiKeys
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.security import SecuritySettings
from tpuembed_serving.core.servable import LoadedVersion
from tpuembed_serving.core.status import StatusError
from tpuembed_serving.grpc.open_inference import GrpcInfer
from tpuembed_serving.grpc.open_inference_messages import SERVICE, message
from tpuembed_serving.grpc.server import GrpcServer
from tpuembed_serving.open_inference.tensors import DTYPES

KEY = "the-key-of-this-test-0123456789"
LOADED = LoadedVersion(7, EchoServable())
CONTENTS = {
    "BOOL": "bool", "UINT8": "uint", "UINT16": "uint", "UINT32": "uint", "UINT64": "uint64", "INT8": "int", "INT16": "int",
    "INT32": "int", "INT64": "int64", "FP32": "fp32", "FP64": "fp64",
}  # fmt: skip
NUMBERS = [name for name in OPEN_INFERENCE if name != "BYTES"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)


def infer_request(*tensors: dict[str, Any], raw: tuple[bytes, ...] = (), signature: str = "", **fields: Any) -> bytes:
    parameters = {"signature_name": {"string_param": signature}} if signature else {}
    fields = {"model_name": "m", "parameters": parameters, **fields}
    outputs = [_with_parameters(output) for output in fields.pop("outputs", ())]
    inputs = [_with_parameters(tensor) for tensor in tensors]
    fields |= {"inputs": inputs, "outputs": outputs, "raw_input_contents": raw}
    request = message("ModelInferRequest")(**_with_parameters(fields))
    return bytes(request.SerializeToString())


def _with_parameters(fields: dict[str, Any]) -> dict[str, Any]:
    """Protobuf before version 6 takes no dict for a message in a map."""
    given = fields.get("parameters", {})
    return {**fields, "parameters": {name: message("InferParameter")(**value) for name, value in given.items()}}


IDS = {"name": "ids", "datatype": "INT64", "shape": [2], "contents": {"int64_contents": [1, 2]}}
WORDS = {"name": "words", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"\xff"]}}
REQUEST = infer_request(IDS, WORDS)


def infer(data: bytes) -> Any:
    """What the service answers, without a server: the run returns its inputs."""
    prediction = GrpcInfer()
    prediction.parse(data, noop)
    (task,) = prediction.decode(LOADED, noop)
    aliases = [info.alias for info in task.signature.outputs]
    outputs = dict(zip(aliases, task.inputs, strict=True))
    return message("ModelInferResponse").FromString(prediction.encode(LOADED, [outputs], noop))


def any_array(datatype: str) -> st.SearchStrategy[Any]:
    if datatype == "BF16":
        return hnp.arrays(np.uint16, SHAPES).map(lambda array: array.view(DTYPES["BF16"]))
    return hnp.arrays(DTYPES[datatype], SHAPES)


@pytest.mark.parametrize("datatype", NUMBERS)
@given(data=st.data())
@pytest.mark.sampled(4)
def test_raw_numbers_come_back_bit_by_bit(datatype: str, data: Any) -> None:
    array = data.draw(any_array(datatype))
    tensor = {"name": "x", "datatype": datatype, "shape": array.shape}
    answer = infer(infer_request(tensor, raw=(array.tobytes(),), signature=datatype, id="7"))
    assert (answer.model_name, answer.model_version, answer.id) == ("m", "7", "7")
    (output,) = answer.outputs
    assert (output.name, output.datatype, tuple(output.shape)) == ("y", datatype, array.shape)
    assert list(answer.raw_output_contents) == [array.tobytes()]


@pytest.mark.parametrize("datatype", CONTENTS)
@given(data=st.data())
@pytest.mark.sampled(4)
def test_numbers_in_fields_come_back_in_fields(datatype: str, data: Any) -> None:
    array, field = data.draw(any_array(datatype)), f"{CONTENTS[datatype]}_contents"
    tensor = {"name": "x", "datatype": datatype, "shape": array.shape, "contents": {field: array.ravel().tolist()}}
    answer = infer(infer_request(tensor, signature=datatype))
    (output,) = answer.outputs
    assert not answer.raw_output_contents
    found = np.array(getattr(output.contents, field), array.dtype).reshape(output.shape)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_outputs_are_raw_where_a_field_is_missing(datatype: str) -> None:
    array = np.array([1.5, -2], DTYPES[datatype])
    tensor = {"name": "x", "datatype": datatype, "shape": [2]}
    answer = infer(infer_request(tensor, raw=(array.tobytes(),), signature=datatype))
    assert list(answer.raw_output_contents) == [array.tobytes()]


def test_outputs_are_those_that_are_asked_for() -> None:
    answer = infer(infer_request(IDS, WORDS, outputs=[{"name": "words"}, {"name": "ids"}]))
    assert [output.name for output in answer.outputs] == ["words", "ids"]
    assert list(answer.outputs[0].contents.bytes_contents) == [b"\xff"]
    assert list(answer.outputs[1].contents.int64_contents) == [1, 2]


RAW_IDS, RAW_WORDS = ({key: one[key] for key in ("name", "datatype", "shape")} for one in (IDS, WORDS))
TWO = struct.pack("<2q", 1, 2)


REFUSED = {
    "not a message": b"\xff",
    "one raw for two": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO,)),
    "three raw for two": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a", b"")),
    "short raw": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO[1:], b"\x01\0\0\0a")),
    "short string": infer_request(RAW_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0")),
    "contents and raw": infer_request(IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a")),
    "other binary_data_size": infer_request(
        {**RAW_IDS, "parameters": {"binary_data_size": {"int64_param": 15}}}, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a")
    ),
    "no contents": infer_request(RAW_IDS, WORDS),
    "too few": infer_request({**IDS, "shape": [3]}, WORDS),
    "too many": infer_request({**IDS, "shape": [1]}, WORDS),
    "negative": infer_request({**IDS, "shape": [-2]}, WORDS),
    "huge": infer_request({**IDS, "shape": [2**62, 2**62]}, WORDS),
    "datatype": infer_request({**IDS, "datatype": "INT65"}, WORDS),
    "other field": infer_request({**IDS, "contents": {"int_contents": [1, 2]}}, WORDS),
    "two fields": infer_request({**IDS, "contents": {"int64_contents": [1, 2], "fp32_contents": [1]}}, WORDS),
    "missing input": infer_request(IDS),
    "input twice": infer_request(IDS, WORDS, IDS),
    "sequence": infer_request(IDS, WORDS, parameters={"sequence_id": {"int64_param": 1}}),
    "bool signature": infer_request(IDS, WORDS, parameters={"signature_name": {"bool_param": True}}),
    "empty parameter": infer_request(IDS, WORDS, parameters={"signature_name": {}}),
    "output": infer_request(IDS, WORDS, outputs=[{"name": "z"}]),
    "classification": infer_request(
        IDS, WORDS, outputs=[{"name": "ids", "parameters": {"classification": {"int64_param": 1}}}]
    ),
    "int8": infer_request(
        {"name": "x", "datatype": "INT8", "shape": [1], "contents": {"int_contents": [128]}}, signature="INT8"
    ),
    "fp16 without raw": infer_request({"name": "x", "datatype": "FP16", "shape": [1]}, signature="FP16"),
    "signature": infer_request(signature="nothing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_requests(what: str) -> None:
    with refused(StatusError):
        infer(REFUSED[what])


VALID = infer_request(RAW_IDS, RAW_WORDS, raw=(TWO, b"\x01\0\0\0a"))


@given(at=st.integers(0, len(VALID)), gone=st.integers(0, 20), new=st.binary(max_size=8))
def test_damaged_requests_are_refused_or_answered(at: int, gone: int, new: bytes) -> None:
    data = VALID[:at] + new + VALID[at + gone :]
    try:
        answer = infer(data)
    except StatusError:
        return
    for content in answer.raw_output_contents:
        assert content in data


# ---- a whole server


@asynccontextmanager
async def running(
    base_path: Path,
    load: Callable[[Path], EchoServable] = lambda _: EchoServable(),
    *,
    wait: bool = True,
    **options: Any,
) -> AsyncIterator[Any]:
    """A call of the service's methods: name and message -> answer."""
    make_version(base_path / "m", 7)
    security = options.pop("security", SecuritySettings())
    max_bytes = options.get("max_body_bytes")
    app = create_app(ServerSettings.for_model_dir(base_path / "m", security=security, **options), load=load)
    server = GrpcServer(app.pipeline, app.repository)
    port = await server.start("127.0.0.1", 0, max_bytes, security)
    app.repository.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

        async def call(name: str, data: bytes = b"", key: str | None = None, seconds: float = 30) -> bytes:
            metadata = [] if key is None else [("x-api-key", key)]
            method = channel.unary_unary(f"/{SERVICE}/{name}")
            return bytes(await method(data, metadata=metadata, timeout=seconds))

        async with asyncio.timeout(30):
            while wait and not app.repository.ready:
                await asyncio.sleep(0.01)
        try:
            yield call
        finally:
            await server.stop(5)
            app.executor.close()
            await asyncio.to_thread(app.repository.stop)


async def code_of(call: Any, name: str, data: bytes = b"", **options: Any) -> str:
    try:
        await call(name, data, **options)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name)
    return "OK"


NAMED = bytes(message("ModelReadyRequest")(name="m", version="7").SerializeToString())
METHODS = {
    "ServerLive": b"", "ServerReady": b"", "ServerMetadata": b"", "ModelReady": NAMED, "ModelMetadata": NAMED,
    "ModelInfer": REQUEST,
}  # fmt: skip


def test_every_method_needs_a_key(tmp_path: Path) -> None:
    async def ask() -> dict[str, list[str]]:
        (tmp_path / "keys").write_text(KEY)
        security = SecuritySettings(api_keys=ApiKeys.read(tmp_path / "keys"))
        async with running(tmp_path, security=security) as call:
            return {
                name: [await code_of(call, name, data, key=key) for key in (None, KEY[:-1], KEY)]
                for name, data in METHODS.items()
            }

    no = "UNAUTHENTICATED"
    assert asyncio.run(ask()) == {name: [no, no, "OK"] for name in METHODS}


def test_a_server_that_loads_is_live_and_not_ready(tmp_path: Path) -> None:
    go_on = threading.Event()

    def load(_: Path) -> EchoServable:
        assert go_on.wait(30)
        return EchoServable()

    async def ask() -> list[Any]:
        async with running(tmp_path, load, wait=False) as call:
            found = [
                message("ServerLiveResponse").FromString(await call("ServerLive")).live,
                message("ServerReadyResponse").FromString(await call("ServerReady")).ready,
                message("ModelReadyResponse").FromString(await call("ModelReady", NAMED)).ready,
                await code_of(call, "ModelMetadata", NAMED),
                await code_of(call, "ModelInfer", REQUEST),
            ]
            go_on.set()
            async with asyncio.timeout(30):
                while not message("ServerReadyResponse").FromString(await call("ServerReady")).ready:
                    await asyncio.sleep(0.01)
            return found

    assert asyncio.run(ask()) == [True, False, False, "UNAVAILABLE", "UNAVAILABLE"]
