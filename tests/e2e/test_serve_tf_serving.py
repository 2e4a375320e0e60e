"""A server in front of another one that runs the models: every answer is the other one's, whoever is asked."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.messages import said
from tests.support.serving.process import run_command
from tests.support.serving.vector_server import VectorServer, ask, read_vectors

VECTORS = [vector for vector in read_vectors("rest_*.yaml") if not vector.get("ragged")]
"""Lists of different lengths are for models whose manifest is here."""


@pytest.fixture(scope="module")
def behind(vector_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VectorServer]:
    with VectorServer(vector_models, tmp_path_factory.mktemp("behind") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def front(
    vector_models: dict[str, Path], behind: VectorServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VectorServer]:
    nowhere = dict.fromkeys(vector_models, Path("/nowhere"))
    with VectorServer(nowhere, tmp_path_factory.mktemp("front") / "log", behind.grpc_address) as running:
        yield running


def unlike(direct: httpx.Response, forwarded: httpx.Response) -> bool:
    """But for where in a graph a type was wrong: gRPC refuses it before."""
    texts = [re.sub(r"\\n\\t \[\[.*?\]\]", "", reply.text) for reply in (direct, forwarded)]
    return direct.status_code != forwarded.status_code or texts[0] != texts[1]


@pytest.mark.nightly
def test_every_rest_request_has_the_same_answer(behind: VectorServer, front: VectorServer) -> None:
    with httpx.Client(base_url=behind.url, timeout=60) as one, httpx.Client(base_url=front.url, timeout=60) as other:
        replies = {vector["name"]: (ask(one, vector), ask(other, vector)) for vector in VECTORS}
        ready = other.get("/readyz")
    differing = {name: [reply.text for reply in pair] for name, pair in replies.items() if unlike(*pair)}
    assert differing == {}
    assert len(replies) >= 250
    assert ready.status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        ["--target", "localhost:1"],
        ["--target", "localhost", "--name", "m"],
        ["/tmp", "--target", "localhost:1", "--name", "m"],
        ["--target", "localhost:1", "--name", "m", "--prewarm"],
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str]) -> None:
    done = run_command("serve", *options)
    assert done.returncode == 2
    said(done.stderr)
