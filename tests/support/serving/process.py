"""`tpuembed serve` as a process of its own, and what tests ask it."""

import dataclasses
import http.client
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tpuembed_cli.main import main

SCRIPT = Path(sys.executable).with_name("tpuembed")
START_SECONDS = 120.0
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.support.serving.preloaded"])


@dataclasses.dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def value(self) -> Any:
        """Its JSON."""
        return json.loads(self.body)

    @property
    def error(self) -> str:
        """The text of an error, which is the only member of its JSON."""
        value = self.value
        assert list(value) == ["error"], value
        return str(value["error"])


class Fork:
    """`tpuembed` in a fork of a process that has imported TensorFlow, which takes most of the time of a start.

    It has the methods of `subprocess.Popen` that tests of servers use. stdin is empty.
    """

    def __init__(
        self,
        command: Sequence[str],
        stderr: Path,
        stdout: Path = Path(os.devnull),
        before: Callable[[], None] | None = None,
    ) -> None:
        """`before` is called in the fork, before the command."""
        streams = (os.devnull, str(stdout), str(stderr))
        arguments = (list(command), dict(os.environ), str(Path.cwd()), streams, before)
        self._process = _FORKS.Process(target=_run, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("tpuembed", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    streams: Sequence[str],
    before: Callable[[], None] | None,
) -> None:
    """Be the command, in the fork."""
    for descriptor, path in enumerate(streams):
        opened = os.open(path, os.O_WRONLY if descriptor else os.O_RDONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    if before is not None:
        before()
    main()


class ServerProcess:
    """A running server on a free port; `with` stops it."""

    def __init__(
        self,
        model_dir: Path | None,
        log: Path,
        *options: str,
        default_grpc: bool = False,
        fresh: bool = False,
        bare: bool = False,
        group: Path | None = None,
    ) -> None:
        """`model_dir` is None where the options have a config; the model of `predict` and others is its first.

        Without gRPC, unless an option names its port or `default_grpc` leaves it to the command. `fresh` starts the
        command as a shell does: for tests of the start itself. `bare` is `tpuembed serve` with these options alone. `group` is
        the folder of a control group that the process is in from its start.
        """
        self._log = log
        what = [] if model_dir is None else [str(model_dir)]
        grpc = [] if default_grpc or {"--grpc-port", "--no-grpc"} & set(options) else ["--no-grpc"]
        command = [str(SCRIPT), "serve", *what, "--rest-port", "0", "--poll-seconds", "0.05", *grpc, *options]
        command = [str(SCRIPT), "serve", *options] if bare else command
        if group is not None:
            command = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs"), *command]
        fresh |= group is not None
        with log.open("wb") as stderr:
            self.process: Fork | subprocess.Popen[bytes] = (
                subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL) if fresh else Fork(command, log)
            )
        try:
            self.model_url = self.announced("serving ").split()[-1]
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        parts = urllib.parse.urlsplit(self.model_url)
        self.host, self.port, self.path = str(parts.hostname), int(parts.port or 0), parts.path

    def announced(self, start: str) -> str:
        """Wait for the first message of the log that begins with `start`; return what follows in its line."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            written = self.log
            for message in messages(written[: written.rfind("\n") + 1]):
                if message.startswith(start):
                    return message.removeprefix(start)
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        raise TimeoutError(self.log)

    @property
    def log_path(self) -> Path:
        """Where what it writes to stderr goes."""
        return self._log

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def grpc_address(self) -> str:
        """HOST:PORT, where gRPC was asked for."""
        return self.announced("gRPC at ")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=60)

    def request(
        self, method: str, target: str, body: str | bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request(method, target, body, headers or {})
            reply = connection.getresponse()
            return reply.status, reply.read()
        finally:
            connection.close()

    def predict(self, body: Any, version: str = "", headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and decoded JSON for a predict request; `body` is sent as it is where it is text."""
        text = body if isinstance(body, str | bytes) else json.dumps(body)
        status, reply = self.request("POST", f"{self.path}{version}:predict", text, headers)
        return status, json.loads(reply)

    def statuses(self) -> dict[int, dict[str, Any]]:
        """The model's versions by number."""
        status, body = self.request("GET", self.path)
        versions = json.loads(body)["model_version_status"] if status == 200 else []
        return {int(version["version"]): version for version in versions}

    def wait_for(self, version: int, state: str = "AVAILABLE") -> None:
        """Until `version` is in `state`."""
        deadline = time.monotonic() + START_SECONDS
        while self.statuses().get(version, {}).get("state") != state:
            assert time.monotonic() < deadline, (self.statuses(), self.log)
            assert self.process.poll() is None, self.log
            time.sleep(0.02)

    def stop(self) -> int:
        """SIGINT, which is SIGTERM without a lame duck; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def messages(log: str) -> list[str]:
    """What follows the time and the level in each line of a log of text."""
    return [match[1] for match in re.finditer(r"^\d{4}-\d\d-\d\dT[\d:.]{12}Z [A-Z]+ +(.*)$", log, re.MULTILINE)]


def run_command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """`tpuembed` with these arguments, to its end."""
    command = [str(SCRIPT), *map(str, arguments)]
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        process = Fork(command, Path(err.name), Path(out.name))
        try:
            code = process.wait(120)
        finally:
            process.kill()
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def workers(server: ServerProcess) -> list[int]:
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []
