"""Runs one case with tritonclient: `python -m tests.clients.triton CASE ...`, see `common.main`."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils

from tests.clients.common import ALL, EMPTY, IN_JSON, NOT_UTF8, Server, main, same


def refused(call: Callable[[], Any], status: str, *words: str) -> None:
    refusal: tritonclient.utils.InferenceServerException | None = None
    try:
        call()
    except tritonclient.utils.InferenceServerException as error:
        refusal = error
    assert refusal is not None, "it was not refused"
    assert refusal.status() == status, refusal
    assert all(word in refusal.message() for word in words), refusal


def _both(module: Any, url: str, server: Server, **binary: Any) -> None:
    """What both of its clients do; `binary` is what its HTTP inputs take besides their array."""
    is_http = module is tritonclient.http
    with module.InferenceServerClient(url) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("m")
        assert client.is_model_ready("m", "1")
        assert client.is_model_ready("m", "stable")
        assert not client.is_model_ready("m", "9")
        as_json = {} if is_http else {"as_json": True}
        about = client.get_server_metadata(**as_json)
        assert about["name"] == "tpuembed"
        assert about["extensions"] == ["binary_tensor_data"]
        model = client.get_model_metadata("m", **as_json)
        assert model["platform"] == "tensorflow_savedmodel"
        assert model["versions"] == ["1"]
        (tensor,) = model["inputs"]
        assert (tensor["name"], tensor["datatype"], [int(size) for size in tensor["shape"]]) == ("ids", "INT64", [-1])

        def ask(name: str, array: Any, **options: Any) -> Any:
            tensor = module.InferInput(name, array.shape, tritonclient.utils.np_to_triton_dtype(array.dtype))
            tensor.set_data_from_numpy(array, **binary)
            return client.infer("m", [tensor], **options)

        result = ask("ids", server.ids, request_id="seven")
        same(result.as_numpy("embedding"), server.embedding)
        answer = result.get_response() if is_http else result.get_response(as_json=True)
        assert (answer["id"], answer["model_name"], answer["model_version"]) == ("seven", "m", "1")
        same(ask("ids", server.ids, model_version="stable").as_numpy("embedding"), server.embedding)

        tensors = IN_JSON if binary.get("binary_data") is False else ALL
        for name, array in tensors.items():
            parameters = {"signature_name": name}
            same(ask("x", array, parameters=parameters).as_numpy("y"), array)
            outputs = [module.InferRequestedOutput("y", **binary)]
            found = ask("x", array, parameters=parameters, outputs=outputs)
            same(found.as_numpy("y"), array)
        same(ask("x", EMPTY, parameters={"signature_name": "FP32"}).as_numpy("y"), EMPTY)

        if is_http:
            invalid, missing, unimplemented = "400", "404", "501"
        else:
            invalid, missing, unimplemented = (
                f"StatusCode.{code}" for code in ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED")
            )
        refused(lambda: ask("ids", server.ids.astype(np.int32)), invalid, "INT32", "INT64")
        refused(lambda: ask("id", server.ids), invalid, "ids")
        refused(lambda: ask("ids", server.ids, parameters={"signature_name": "nothing"}), invalid, "nothing")
        refused(lambda: ask("ids", server.ids, parameters={"signatur": "FP32"}), invalid, "signatur")
        refused(lambda: ask("ids", server.ids, sequence_id=7), invalid, "sequence_end")
        refused(lambda: ask("ids", server.ids, model_version="9"), missing, "9")
        refused(lambda: client.get_model_metadata("nothing"), missing, "nothing")
        not_served = (
            client.get_system_shared_memory_status,
            client.get_model_repository_index,
            client.get_inference_statistics,
            client.get_trace_settings,
            client.get_log_settings,
            lambda: client.load_model("m"),
            lambda: client.get_model_config("m"),
        )
        for call in not_served:
            refused(call, unimplemented)


def http_binary(server: Server) -> None:
    _both(tritonclient.http, server.rest, server, binary_data=True)
    with tritonclient.http.InferenceServerClient(server.rest) as client:
        tensor = tritonclient.http.InferInput("x", NOT_UTF8.shape, "BYTES")
        tensor.set_data_from_numpy(NOT_UTF8)
        same(client.infer("m", [tensor], parameters={"signature_name": "BYTES"}).as_numpy("y"), NOT_UTF8)
        outputs = [tritonclient.http.InferRequestedOutput("y", binary_data=False)]
        refused(
            lambda: client.infer("m", [tensor], outputs=outputs, parameters={"signature_name": "BYTES"}), "400", "UTF-8"
        )


def http_json(server: Server) -> None:
    _both(tritonclient.http, server.rest, server, binary_data=False)
    with tritonclient.http.InferenceServerClient(server.rest) as client:
        body = b'{"inputs": [{"name": "ids", "shape": [1], "datatype": "INT64", "data": [7]}]}'
        for target, version in (("m", "1"), ("m/versions/1", "1"), ("m/versions/stable", "1"), ("m/versions/9", None)):
            # The client shows no headers of an answer: this is how it sends itself.
            reply = client._post(f"v2/models/{target}/infer", body, {}, None)
            assert reply.get("x-model-version") == version, target


def http_compressed(server: Server) -> None:
    tensor = tritonclient.http.InferInput("ids", server.ids.shape, "INT64")
    tensor.set_data_from_numpy(server.ids)
    with tritonclient.http.InferenceServerClient(server.rest) as client:
        found = client.infer("m", [tensor], request_compression_algorithm="gzip", response_compression_algorithm="gzip")
        same(found.as_numpy("embedding"), server.embedding)
        refused(lambda: client.infer("m", [tensor], request_compression_algorithm="deflate"), "415", "deflate")


def http_async(server: Server) -> None:
    tensor = tritonclient.http.InferInput("ids", server.ids.shape, "INT64")
    tensor.set_data_from_numpy(server.ids)
    with tritonclient.http.InferenceServerClient(server.rest, concurrency=8) as client:
        pending = [client.async_infer("m", [tensor]) for _ in range(64)]
        for one in pending:
            same(one.get_result().as_numpy("embedding"), server.embedding)


def grpc(server: Server) -> None:
    _both(tritonclient.grpc, server.grpc, server)


def grpc_stream(server: Server) -> None:
    """Streams are Triton's own."""
    errors: list[Any] = []
    tensor = tritonclient.grpc.InferInput("ids", server.ids.shape, "INT64")
    tensor.set_data_from_numpy(server.ids)
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(callback=lambda **found: errors.append(found["error"]))
        with contextlib.suppress(tritonclient.utils.InferenceServerException):  # the stream may have ended
            client.async_stream_infer("m", [tensor])
        client.stop_stream()
    assert [error.status() for error in errors] == ["StatusCode.UNIMPLEMENTED"], errors


if __name__ == "__main__":
    main(
        {
            "http_binary": http_binary,
            "http_json": http_json,
            "http_compressed": http_compressed,
            "http_async": http_async,
            "grpc": grpc,
            "grpc_stream": grpc_stream,
        }
    )
