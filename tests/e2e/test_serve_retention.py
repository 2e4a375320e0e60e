"""Prune and roll back beside a running server: its answers stay right, and it takes up what is published."""

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.export.fakes import random_table, write_checkpoint
from tests.support.export.in_process import exports_in_this_process
from tests.support.serving.process import ServerProcess
from tpuembed import export_saved_model, list_versions, prune_versions, rollback_version
from tpuembed_serving import versions_in_use

CONFIG = {"features": {"user": {"table": "users", "input": "id"}}}
ROWS, DIM = 400, 16
BODY = {"instances": [0, 7, ROWS - 1]}


class Asker(threading.Thread):
    """Asks until told to stop, and keeps every answer."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__()
        self._server, self.stopping = server, threading.Event()
        self.answers: list[tuple[int, Any]] = []

    def run(self) -> None:
        while not self.stopping.is_set():
            self.answers.append(self._server.predict(BODY))
            time.sleep(0.005)


def expected(seed: int) -> Any:
    return random_table(ROWS, DIM, seed=seed)[[0, 7, ROWS - 1]]


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["mmap", "variables"])
def test_exports_prunes_and_rollbacks_under_load(tmp_path: Path, layout: str) -> None:
    model_dir = tmp_path / "rec"
    for seed in (1, 2, 3):
        write_checkpoint(tmp_path / f"ckpt-{seed}", {"users": random_table(ROWS, DIM, seed=seed)})

    def export(seed: int, **options: Any) -> None:
        with exports_in_this_process():
            export_saved_model(tmp_path / f"ckpt-{seed}", model_dir, serving_config=CONFIG, layout=layout, **options)

    export(1)
    config = tmp_path / "models.config"
    config.write_text(
        f'model_config_list {{ config {{ name: "rec" base_path: "{model_dir}" model_platform: "tensorflow"'
        " model_version_policy { latest { num_versions: 2 } } } }"
    )
    with ServerProcess(None, tmp_path / "log", "--config", str(config)) as server:
        server.wait_for(1)
        url = f"http://{server.host}:{server.port}"
        asker = Asker(server)
        asker.start()
        try:
            for seed in (2, 3):
                export(seed)
                server.wait_for(seed)
            server.wait_for(1, "END")
            # The server has 2 and 3 loaded: 2 stays because it says so.
            report = prune_versions(
                model_dir, keep=1, in_use=lambda found: versions_in_use(model_dir, found, servers=[url])
            )
            assert report.removed == (1,)
            assert report.kept == {2: f"AVAILABLE at {url}", 3: f"AVAILABLE at {url}"}
            assert server.predict(BODY, "/versions/2")[0] == 200

            assert rollback_version(model_dir).version == 4
            server.wait_for(4)
            np.testing.assert_allclose(server.predict(BODY)[1]["predictions"], expected(2), rtol=1e-6)

            # A server that was not asked keeps what it has loaded until it has the newest.
            export(1, keep=1)
            assert [info.version for info in list_versions(model_dir)] == [5]
            server.wait_for(5)
            np.testing.assert_allclose(server.predict(BODY)[1]["predictions"], expected(1), rtol=1e-6)
        finally:
            asker.stopping.set()
            asker.join()
    assert {status for status, _ in asker.answers} == {200}
    seen = [answer["predictions"] for _, answer in asker.answers]
    rows = {seed: expected(seed) for seed in (1, 2, 3)}
    assert all(any(np.allclose(one, row, rtol=1e-6) for row in rows.values()) for one in seen)


def test_a_loaded_version_answers_every_signature_after_it_is_removed(tmp_path: Path) -> None:
    """The files stay mapped: no request opens them again, even one of a signature that was never asked for."""
    model_dir = tmp_path / "rec"
    write_checkpoint(tmp_path / "ckpt", {"users": random_table(200_000, DIM)})
    with exports_in_this_process():
        export_saved_model(tmp_path / "ckpt", model_dir, serving_config=CONFIG, layout="mmap")
    with ServerProcess(model_dir, tmp_path / "log", "--poll-seconds", "3600") as server:
        server.wait_for(1)
        rollback = model_dir / "2"
        rollback.mkdir()
        (rollback / "saved_model.pb").write_bytes(b"")
        assert prune_versions(model_dir, keep=1).removed == (1,)
        status, answer = server.predict({"signature_name": "packed", "inputs": [[7]]})
        assert status == 200, answer
        (row,) = answer["outputs"] if isinstance(answer["outputs"], list) else answer["outputs"].values()
        np.testing.assert_allclose(np.ravel(row), random_table(200_000, DIM)[7], rtol=1e-6)
        status, answer = server.predict({"instances": [9]})
        np.testing.assert_allclose(answer["predictions"][0], random_table(200_000, DIM)[9], rtol=1e-6)
