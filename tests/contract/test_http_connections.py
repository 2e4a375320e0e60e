"""One HTTP connection, byte by byte: requests in pieces, behind each other, of old clients, and of clients that leave."""

import contextlib
import itertools
import json
import socket
import struct
import time
from typing import Any

import pytest

from tests.support.contract_serve import Server, eventually, shared_server

TARGET = "/v1/models/half_plus_two:predict"
BODY = b'{"instances": [1, 2]}'
ANSWER = b'{"predictions":[2.5,3.0]}'
CLOSE = "connection: close"


@pytest.fixture(scope="module")
def server(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Server:
    return shared_server(pytestconfig, tmp_path_factory)


def request(body: bytes = BODY, *headers: str, target: str = TARGET, version: str = "1.1") -> bytes:
    lines = [f"POST {target} HTTP/{version}", "host: s", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def in_chunks(body: bytes, *headers: str, target: str = TARGET) -> bytes:
    lines = [f"POST {target} HTTP/1.1", "host: s", "transfer-encoding: chunked", *headers]
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + chunks + b"0\r\n\r\n"


def exchange(server: Server, *pieces: bytes, pause: float = 0.0) -> list[tuple[int, dict[str, str], bytes]]:
    """Status, headers and body of each answer, until the server closes the connection."""
    with socket.create_connection((server.host, server.port), 60) as client:
        for piece in pieces:
            client.sendall(piece)
            time.sleep(pause)
        found, answers = b"".join(iter(lambda: client.recv(1 << 16), b"")), []
    while found:
        head, _, found = found.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        size = int(headers.get("content-length", 0))
        answers.append((int(status.split()[1]), headers, found[:size]))
        found = found[size:]
    return answers


def test_requests_in_one_packet_are_answered_in_their_order(server: Server) -> None:
    bodies = [b'{"instances": [%d]}' % (2 * number) for number in range(20)]
    found = exchange(server, b"".join(map(request, bodies)) + request(BODY, CLOSE))
    wanted = [b'{"predictions":[%d.0]}' % (number + 2) for number in range(20)]
    assert [body for _, _, body in found] == [*wanted, ANSWER]
    assert [headers.get("connection") for _, headers, _ in found] == [None] * 20 + ["close"]


def test_no_answer_overtakes_another(server: Server) -> None:
    status = b"GET /v1/models/half_plus_two HTTP/1.1\r\nhost: s\r\n\r\n"
    sent = [in_chunks(BODY), request(b"{"), request(), status, request(b"{"), in_chunks(b"{"), request(BODY, CLOSE)]
    assert [status for status, _, _ in exchange(server, b"".join(sent))] == [200, 400, 200, 200, 400, 400, 200]


def test_a_request_in_pieces_is_put_together(server: Server) -> None:
    whole = request()
    cuts = [0, 10, len(whole) - 12, len(whole) - 5, len(whole)]
    pieces = [whole[start:stop] for start, stop in itertools.pairwise(cuts)]
    found = exchange(server, *pieces, request(BODY, CLOSE), pause=0.02)
    assert [body for _, _, body in found] == [ANSWER, ANSWER]


INFER = json.dumps({"inputs": [{"name": "ids", "shape": [1, 2], "datatype": "INT64", "data": [1, 2]}], "id": "7"})
SENT: list[tuple[str, bytes, int]] = [
    (TARGET, BODY, 200),
    ("/v1/models/half_plus_two/versions/123:predict", b'{"inputs": [3]}', 200),
    ("/v1/models/scale/labels/stable:predict", b'{"instances": [1], "instances": [5]}', 200),
    (TARGET, b'{"instances": ["x"]}', 400),
    (TARGET, b"{", 400),
    (TARGET, b"", 400),
    (TARGET, b'{"signature_name": "none", "instances": [1]}', 400),
    (f"{TARGET}?x=1", BODY, 400),
    ("/v1/models/other:predict", BODY, 404),
    ("/v1/models/scale/versions/9:predict", BODY, 404),
    ("/invocations", BODY, 400),  # there are several models
    ("/v2/models/zoo/infer", INFER.encode(), 200),
    ("/v2/models/zoo/versions/9/infer", INFER.encode(), 404),
    ("/v2/models/zoo/infer", b"{", 400),
]


def test_the_answer_does_not_depend_on_how_a_request_is_sent(server: Server) -> None:
    """At its length, as the last one of its connection, in chunks, and with a header that expects to be told to go on."""
    for target, body, status in SENT:
        own = (request(body, "x-request-id: a-1", target=target), in_chunks(body, "x-request-id: a-1", target=target))
        last = request(body, CLOSE, "expect: 100-continue", "x-request-id: a-1", target=target)
        found = [one for one in exchange(server, *own, last) if one[0] != 100]
        assert [one[0] for one in found] == [status] * 3, (target, found)
        assert len({one[2] for one in found}) == 1
        shown = [{name: value for name, value in one[1].items() if name not in ("date", "connection")} for one in found]
        assert shown == [shown[0]] * 3
        assert shown[0]["x-request-id"] == "a-1"


def test_who_expects_to_be_told_to_go_on_is(server: Server) -> None:
    found = exchange(server, request(BODY, "expect: 100-continue", CLOSE))
    assert [(status, body) for status, _, body in found] == [(100, b""), (200, ANSWER)]


def test_the_connection_of_an_old_client_is_closed(server: Server) -> None:
    ((status, headers, body),) = exchange(server, request(version="1.0"))
    assert (status, headers["connection"], body) == (200, "close", ANSWER)


@pytest.mark.parametrize("missing", [0, 3])
@pytest.mark.parametrize("headers", [(), (CLOSE,)])
def test_a_client_that_leaves_has_one_line_in_the_log(server: Server, headers: tuple[str, ...], missing: int) -> None:
    """Whether its request was complete or not. Its other requests are given up too."""
    name = f"gone-{missing}-{len(headers)}"
    body = json.dumps({"signature_name": "slow", "instances": [300_000]}).encode()
    sent = request(body, f"x-request-id: {name}", *headers, target="/v1/models/zoo:predict")
    with socket.create_connection((server.host, server.port), 60) as client:
        client.sendall(sent[: len(sent) - missing])
        time.sleep(0.2)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset the connection
    log = server.log_path.with_name("access.log")
    eventually(lambda: f'"{name}"' in log.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if f'"{name}"' in line]
    assert [line["status"] for line in lines] == [499]
    assert exchange(server, request(BODY, CLOSE))[0][2] == ANSWER


def test_answers_that_nobody_reads_do_not_pile_up(server: Server) -> None:
    """At some point no more requests are taken."""
    rows: Any = {"instances": [[1, 2]] * 20_000}
    sent = request(json.dumps(rows).encode(), target="/v1/models/zoo:predict")
    with socket.create_connection((server.host, server.port), 5) as client, contextlib.suppress(TimeoutError):
        for _ in range(300):
            client.sendall(sent)
        pytest.fail("the server takes every request")
    assert exchange(server, request(BODY, CLOSE))[0][2] == ANSWER
