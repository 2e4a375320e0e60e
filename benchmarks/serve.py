"""Requests per second and latency of predict over loopback, beside other servers of the same model, in one run.

    python -m benchmarks.serve [--rounds N] [--workers N] [--peers FOLDER] [--only NAME]...

The clients are `wrk`, and `h2load` for gRPC (the Debian packages wrk and nghttp2-client). The servers take turns within each round,
and those whose turn it is not are stopped, so that a disturbance of the machine meets all of them; the figures are medians over
the rounds, and the ratios medians of the rounds' own. FOLDER holds an environment for each peer; one that is missing is made there
with pip, which takes minutes and some gigabytes. Without it the peers are the naive server and the two echoes alone.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import grpc_load
from benchmarks.serve_model import FEATURES, NAMES, ROWS, export

OURS = "tpuembed"
OVER_GRPC = "tpuembed, gRPC"
GRPC_ECHO, GRPC_MODEL = GRPC_PEERS = ("grpc.aio echo", "grpc.aio model")
PLAIN, NAIVE_PLAIN = "plain model, tpuembed", "plain model, naive"
PLAIN_CASE = "a plain SavedModel, 1 row, 64 connections"
PEERS = {"litserve": "litserve", "bentoml": "bentoml", "mlserver": "mlserver", "ray": "ray[serve]"}
CASES = [(rows, connections) for rows in (1, 64) for connections in (1, 16, 64)]
BODIES = 64
_ENOUGH = 40
_SCRIPT = Path(__file__).with_name("serve_peers.py")
_UNITS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


def bodies(rows: int, form: str, bad: bool = False) -> list[str]:
    """Requests of random ids; each `bad` one ends in an id that no table has."""
    rng = np.random.default_rng(rows)
    found = []
    for _ in range(BODIES):
        ids = rng.integers(0, ROWS, (rows, FEATURES))
        ids[-1, -1] = ROWS if bad else ids[-1, -1]
        found.append(
            _v2(ids)
            if form == "v2"
            else json.dumps({"instances": [dict(zip(NAMES, row, strict=True)) for row in ids.tolist()]})
        )
    return found


def _v2(ids: Any) -> str:
    columns = ids.T.tolist()
    inputs = [
        {"name": name, "shape": [len(ids)], "datatype": "INT64", "data": column}
        for name, column in zip(NAMES, columns, strict=True)
    ]
    return json.dumps({"inputs": inputs})


def wrk_script(path: Path, requests: Sequence[str]) -> Path:
    """A script for wrk that sends these bodies in turns."""
    table = ",\n".join(f"[[{body}]]" for body in requests)
    path.write_text(
        f"local bodies = {{{table}}}\nlocal sent, at = {{}}, 0\n"
        "function init(args) for i, body in ipairs(bodies) do\n"
        '  sent[i] = wrk.format("POST", nil, {["Content-Type"] = "application/json"}, body)\n'
        "end end\n"
        "function request() at = at % #sent + 1; return sent[at] end\n"
    )
    return path


class Server:
    """A server in a process group of its own."""

    def __init__(self, command: Sequence[str], port: int, path: str, form: str, environment: Mapping[str, str]) -> None:
        self.port, self.url, self.form = port, f"http://127.0.0.1:{port}{path}", form
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **quiet, **environment},
            start_new_session=True,
            stdout=self._log,
            stderr=self._log,
        )

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def ask(self, body: str) -> bytes:
        """One request."""
        if self.form == "grpc":
            return grpc_load.ask(self.port, grpc_load.request(1))
        request = urllib.request.Request(self.url, body.encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            return bytes(reply.read())

    def wait(self) -> bytes:
        """Until all its processes answer, as many answers in a row show; the last of them."""
        body, answer, good = bodies(1, self.form)[0], b"", 0  # over gRPC it is made by `ask`
        for _ in range(600):
            try:
                answer, good = self.ask(body), good + 1
            except OSError:
                good = 0
                time.sleep(0.2)
            if good == _ENOUGH:
                return answer
            if self._process.poll() is not None:
                break
        self._log.seek(0)
        raise RuntimeError(f"{self.url} does not answer: {self._log.read()[-2000:].decode(errors='replace')}")

    def signal(self, number: int) -> None:
        """To the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End it."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self.signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()


def wrk(server: Server, script: Path, connections: int, seconds: int) -> "subprocess.Popen[str]":
    """Begin to load a server."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), server.url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def figures(running: "subprocess.Popen[str]") -> dict[str, float]:
    """What wrk has measured."""
    text, _ = running.communicate()
    errors = sum(map(int, re.findall(r"Non-2xx or 3xx responses: (\d+)", text)))
    errors += sum(
        map(int, re.findall(r"(?:connect|read|write|timeout) (\d+)", text))
    )  # "Socket errors: connect 0, ..."
    rate = re.search(r"Requests/sec:\s+([\d.]+)", text)
    assert rate, text
    return {
        "requests_per_second": float(rate[1]),
        "p50_ms": _latency(text, "50"),
        "p99_ms": _latency(text, "99"),
        "errors": errors,
    }


def _latency(text: str, percent: str) -> float:
    found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s|m)\s", text)
    assert found, text
    return float(found[1]) * _UNITS[found[2]]


class Bench:
    """The servers, and scripts of requests for them."""

    def __init__(self, folder: Path, workers: int, peers: Path | None, only: Sequence[str]) -> None:
        self._folder, self._workers, self._peers = folder, workers, peers
        self.model_dir, self._plain_dir = export(folder)
        self._stack = contextlib.ExitStack()
        self.servers: dict[str, Server] = {}
        try:
            self._start_all(peers, only)
        except BaseException:
            self.close()
            raise

    def _start_all(self, peers: Path | None, only: Sequence[str]) -> None:
        echo = self._start(OURS).wait().decode()
        names = ["echo", "naive", *(PEERS if peers else ())]
        for name in [name for name in names if not only or name in only]:
            self._start(name, ECHO_BODY=echo).wait()
        self.answer_bytes = {rows: len(grpc_load.ask(self._grpc_port, grpc_load.request(rows))) for rows, _ in CASES}
        for name in [name for name in GRPC_PEERS if not only or name in only]:
            answer = grpc_load.ask(self._grpc_port, grpc_load.request(1))
            self._start(name, ECHO_BODY=answer.hex()).wait()
        if not only or PLAIN in only:
            for name in (PLAIN, NAIVE_PLAIN):
                self._start(name).wait()
        for server in self.servers.values():
            server.signal(signal.SIGSTOP)

    @property
    def of_one_model(self) -> list[str]:
        """The servers of the model that tpuembed exported, over HTTP/1."""
        return [name for name in self.servers if name not in (PLAIN, NAIVE_PLAIN, *GRPC_PEERS)]

    def _start(self, name: str, **environment: str) -> Server:
        port = free_port()
        model_dir = self._plain_dir if name in (PLAIN, NAIVE_PLAIN) else self.model_dir
        arguments = [str(port), str(self._workers), str(model_dir)]
        if name == PLAIN:
            code = "from tpuembed_cli.main import main; main()"
            ports = ["--rest-port", str(port), "--no-grpc", "--workers", str(self._workers), "--name", "rec"]
            command = [sys.executable, "-c", code, "serve", str(model_dir), *ports]
        elif name == OURS:
            code = "from tpuembed_cli.main import main; main()"
            self._grpc_port = free_port()
            ports = ["--rest-port", str(port), "--grpc-port", str(self._grpc_port), "--workers", str(self._workers)]
            command = [sys.executable, "-c", code, "serve", str(self.model_dir), *ports]
        else:
            python = environment_of(name, self._peers) if name in PEERS and self._peers else sys.executable
            command = [python, str(_SCRIPT), "naive" if name == NAIVE_PLAIN else name, *arguments]
        form = {"mlserver": "v2", **dict.fromkeys(GRPC_PEERS, "grpc")}.get(name, "rows")
        path = "/v2/models/rec/infer" if form == "v2" else "/v1/models/rec:predict"
        server = self.servers[name] = Server(command, port, path, form, environment)
        self._stack.callback(server.stop)
        return server

    def close(self) -> None:
        """End all servers."""
        self._stack.close()

    @contextlib.contextmanager
    def awake(self, name: str) -> Iterator[Server]:
        """One server, which runs alone meanwhile."""
        server = self.servers[name]
        server.signal(signal.SIGCONT)
        try:
            yield server
        finally:
            server.signal(signal.SIGSTOP)

    def script(self, form: str, rows: int, *, bad: bool = False) -> Path:
        """A script for wrk."""
        path = self._folder / f"{form}-{rows}-{bad}.lua"
        return path if path.exists() else wrk_script(path, bodies(rows, form, bad))

    def measure(self, name: str, rows: int, connections: int, seconds: int) -> dict[str, float]:
        """One server under load."""
        with self.awake(name) as server:
            return figures(wrk(server, self.script(server.form, rows), connections, seconds))

    def measure_grpc(self, rows: int, connections: int, seconds: int) -> dict[str, dict[str, float]]:
        """Ours over gRPC, and the peers that run. The echo answers 1 row, however many it is asked for."""
        found, body = {}, grpc_load.request(rows)
        with self.awake(OURS):
            size = self.answer_bytes[rows]
            found[OVER_GRPC] = grpc_load.load(self._grpc_port, body, size, connections, seconds)
        for name in [name for name in GRPC_PEERS if name in self.servers]:
            with self.awake(name) as server:
                size = self.answer_bytes[1 if name == GRPC_ECHO else rows]
                found[name] = grpc_load.load(server.port, body, size, connections, seconds)
        return found

    def beside_bad(self, seconds: int) -> dict[str, float]:
        """15 clients of ours beside one whose ids are good, and then beside one whose ids are bad."""
        found = {}
        with self.awake(OURS) as server:
            for bad in (False, True):
                good = wrk(server, self.script("rows", 1), 15, seconds)
                other = wrk(server, self.script("rows", 1, bad=bad), 1, seconds)
                found[bad] = figures(good)
                other.communicate()
        rates = [found[bad]["requests_per_second"] for bad in (True, False)]
        return {"good requests failed": found[True]["errors"], "good throughput, ratio": rates[0] / rates[1]}

    def call_ms(self) -> float:
        """Median milliseconds of a call of 1 row in the process that calls."""
        code = (
            "import json, sys, time, numpy as np\nfrom pathlib import Path\n"
            "from tpuembed_serving import LogSettings\nfrom tpuembed_serving.http.server import prepare_tensorflow\n"
            "prepare_tensorflow(LogSettings())\n"
            "from tpuembed_serving.tensorflow import session as runtime\n"
            f"servable = runtime.load(Path({str(self.model_dir / '1')!r}))\n"
            "signature = servable.signatures['serving_default']\n"
            "times = []\nfor number in range(3000):\n"
            "    ids = [np.array([number * 31 % 100000]) for _ in signature.inputs]\n"
            "    started = time.perf_counter(); servable.run(signature, ids); times.append(time.perf_counter() - started)\n"
            "print(json.dumps(float(np.median(times) * 1e3)))"
        )
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True
        )
        return float(json.loads(done.stdout.splitlines()[-1]))


def environment_of(name: str, folder: Path) -> str:
    """The Python of a peer's environment, which is made where it is missing."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        packages = [PEERS[name], "tensorflow>=2.19,<2.22"]
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
    return str(python)


def run(
    rounds: int = 5, workers: int = 1, peers: str | None = None, only: Sequence[str] = (), seconds: int = 2
) -> dict[str, Any]:
    """Measure every case on every server, `rounds` times.

    Returns:
        {case: {server: {"requests_per_second", "p50_ms", "p99_ms"}, "over SERVER": ratio}}; the ratios are of requests per
        second, ours to the peer's. Over gRPC they are "gRPC over PEER" and "gRPC over REST". "best p99_ms" is ours of
        the best round.
    """
    if shutil.which("wrk") is None or shutil.which("h2load") is None:
        raise SystemExit("benchmarks.serve needs wrk and h2load: apt-get install wrk nghttp2-client")
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as folder:
        bench = Bench(Path(folder), workers, Path(peers).absolute() if peers else None, only)
        try:
            for name in bench.of_one_model:
                bench.measure(name, 1, 16, 1)
            bench.measure_grpc(1, 16, 1)
            found = [_round(bench, seconds) for _ in range(rounds)]
            plain = [
                {name: bench.measure(name, 1, 64, seconds) for name in (PLAIN, NAIVE_PLAIN)}
                for _ in range(rounds)
                if PLAIN in bench.servers
            ]
            bad = [bench.beside_bad(seconds) for _ in range(rounds)]
            calls = [bench.call_ms() for _ in range(min(rounds, 3))]
        finally:
            bench.close()
    summary: dict[str, Any] = {_title(case): _summary([each[case] for each in found]) for case in CASES}
    summary["1 of 16 clients sends bad ids"] = {
        "good requests failed": sum(each["good requests failed"] for each in bad),
        "good throughput, ratio": statistics.median(each["good throughput, ratio"] for each in bad),
    }
    if plain:
        summary[PLAIN_CASE] = _summary_of_plain(plain)
    summary["1 row, 1 connection"]["in-process call_ms"] = min(calls)
    return {"workers": workers, "rounds": rounds, **summary}


def run_plain(rounds: int = 7, seconds: int = 3) -> dict[str, Any]:
    """Measure a SavedModel that tpuembed did not export, beside a server that runs each request by itself."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as folder:
        bench = Bench(Path(folder), 1, None, (PLAIN,))
        try:
            for name in (PLAIN, NAIVE_PLAIN):
                bench.measure(name, 1, 64, 1)
            found = [
                {name: bench.measure(name, 1, 64, seconds) for name in (PLAIN, NAIVE_PLAIN)} for _ in range(rounds)
            ]
        finally:
            bench.close()
    return {"workers": 1, "rounds": rounds, PLAIN_CASE: _summary_of_plain(found)}


def _title(case: tuple[int, int]) -> str:
    rows, connections = case
    return f"{rows} row{'s' * (rows > 1)}, {connections} connection{'s' * (connections > 1)}"


def _round(bench: Bench, seconds: int) -> dict[tuple[int, int], dict[str, dict[str, float]]]:
    found = {case: {name: bench.measure(name, *case, seconds) for name in bench.of_one_model} for case in CASES}
    for case in CASES:
        found[case] |= bench.measure_grpc(*case, seconds)
    return found


def _summary(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for name, values in rounds[0].items():
        summary[name] = {key: statistics.median(each[name][key] for each in rounds) for key in values}

    def ratio(ours: str, peer: str) -> float:
        key = "requests_per_second"
        return statistics.median(each[ours][key] / each[peer][key] for each in rounds)

    for name in [name for name in rounds[0] if name not in (OURS, OVER_GRPC, *GRPC_PEERS)]:
        summary[f"over {name}"] = ratio(OURS, name)
    for name in [name for name in GRPC_PEERS if name in rounds[0]]:
        summary[f"gRPC over {name}"] = ratio(OVER_GRPC, name)
    summary["gRPC over REST"] = ratio(OVER_GRPC, OURS)
    summary["best p99_ms"] = min(each[OURS]["p99_ms"] for each in rounds)
    return summary


def _summary_of_plain(rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    key = "requests_per_second"
    names = {PLAIN: OURS, NAIVE_PLAIN: "naive"}
    summary: dict[str, Any] = {
        short: {figure: statistics.median(each[name][figure] for each in rounds) for figure in rounds[0][name]}
        for name, short in names.items()
    }
    return {**summary, "over naive": statistics.median(each[PLAIN][key] / each[NAIVE_PLAIN][key] for each in rounds)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=1, help="processes of each server")
    parser.add_argument("--peers", help="a folder of environments of other servers")
    parser.add_argument("--only", action="append", default=[], help="measure this peer; repeatable")
    parser.add_argument("--seconds", type=int, default=2, help="of each measurement")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
