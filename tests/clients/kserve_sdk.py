"""Runs one case with the SDK of KServe: `python -m tests.clients.kserve_sdk CASE ...`, see `common.main`."""

import asyncio
import contextlib
from typing import Any

import kserve
import numpy as np
from kserve.errors import UnsupportedProtocol
from kserve.protocol.infer_type import RequestedOutput

from tests.clients.common import ALL, IN_JSON, Server, main, same


def _request(array: Any, name: str = "x", *, binary: bool = True, signature: str = "") -> Any:
    datatype = signature or "INT64"
    tensor = kserve.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, binary_data=binary)
    parameters: dict[str, Any] = {"binary_data_output": True} if binary else {}
    if signature:
        parameters["signature_name"] = signature
    return kserve.InferRequest(model_name="m", infer_inputs=[tensor], request_id="seven", parameters=parameters)


async def _rest(server: Server) -> None:
    url = f"http://{server.rest}"
    async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2")) as client:
        assert await client.is_server_live(url) is True
        assert await client.is_server_ready(url) is True
        assert await client.is_model_ready(url, "m") is True
        assert await client.is_model_ready(url, "nothing") is False
        for binary in (True, False):
            request = _request(server.ids, "ids", binary=binary)
            answer = await client.infer(url, request, model_name="m")
            assert (answer.id, answer.model_name) == ("seven", "m")
            same(answer.outputs[0].as_numpy(), server.embedding)
            for name, array in (ALL if binary else IN_JSON).items():
                if name == "BF16":  # this client does not have it
                    continue
                answer = await client.infer(url, _request(array, binary=binary, signature=name), model_name="m")
                same(answer.outputs[0].as_numpy(), array)
        request = _request(server.ids, "ids")
        request.request_outputs = [RequestedOutput("embedding", {"binary_data": False})]
        same((await client.infer(url, request, model_name="m")).outputs[0].as_numpy(), server.embedding)


async def _grpc(server: Server) -> None:
    async with kserve.InferenceGRPCClient(server.grpc) as client:
        assert await client.is_server_live() is True
        assert await client.is_server_ready() is True
        assert await client.is_model_ready("m") is True
        for name, array in ALL.items():
            if name == "BF16":
                continue
            answer = await client.infer(_request(array, signature=name))
            assert (answer.id, answer.model_name, answer.model_version) == ("seven", "m", "1")
            same(answer.outputs[0].as_numpy(), array)
            if name == "FP16":  # the typed fields have no place for it
                continue
            tensor = kserve.InferInput("x", list(array.shape), name, data=array.ravel().tolist())
            request = kserve.InferRequest("m", [tensor], parameters={"signature_name": name})
            same((await client.infer(request)).outputs[0].as_numpy(), array)
        answer = await client.infer(_request(server.ids, "ids"))
        same(answer.outputs[0].as_numpy(), server.embedding)


async def _v1(server: Server) -> None:
    url = f"http://{server.rest}"
    async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v1")) as client:
        assert await client.is_server_live(url) is True  # GET /, which is a page for browsers
        with contextlib.suppress(UnsupportedProtocol):  # of this client: only v2 has the readiness of a server
            raise AssertionError(await client.is_server_ready(url))
        answer = await client.infer(url, {"inputs": server.ids.tolist()}, model_name="m")
        same(np.array(answer["outputs"], np.float32), server.embedding)
        answer = await client.infer(url, {"instances": server.ids.tolist()}, model_name="m")
        same(np.array(answer["predictions"], np.float32), server.embedding)


if __name__ == "__main__":
    main(
        {
            "rest": lambda server: asyncio.run(_rest(server)),
            "grpc": lambda server: asyncio.run(_grpc(server)),
            "v1": lambda server: asyncio.run(_v1(server)),
        }
    )
