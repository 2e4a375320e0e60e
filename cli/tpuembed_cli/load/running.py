"""Runs a load: this package's client, wrk or h2load on one side, and the processor time of the server's processes on the other."""

import base64
import contextlib
import dataclasses
import json
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tpuembed.errors import ConfigError, ServingError

__all__ = ["CLIENTS", "Figures", "LoadTarget", "choose_client", "run_load"]

CLIENTS: Final = ("auto", "own", "wrk", "h2load")
WARM_SECONDS: Final = 0.5
"""Connections are opened, and first requests answered, before the measured time."""
_GRPC_PATH: Final = "/tensorflow.serving.PredictionService/Predict"
_UNITS: Final = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4, "h": 3.6e6}
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadTarget:
    """What is asked.

    Attributes:
        host, port, model: of the server.
        grpc: over gRPC, else REST.
        tls: over HTTPS.
        tls_ca: a file of certificates to trust; None for those of the system.
        api_key: sent with each request; None sends none.
        pid: the server's process, if it is ours.
    """

    host: str
    port: int
    model: str
    grpc: bool = False
    tls: bool = False
    tls_ca: str | None = None
    api_key: str | None = None
    pid: int | None = None

    @property
    def path(self) -> str:
        """The URL's path, or the method of gRPC."""
        return _GRPC_PATH if self.grpc else f"/v1/models/{urllib.parse.quote(self.model, safe='')}:predict"

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an address of IPv6."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers of each request."""
        return {} if self.api_key is None else {"X-API-Key": self.api_key}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One measurement.

    Attributes:
        rate: requests per second.
        p50_ms, p99_ms: of the time from a request to its answer.
        client_cpu: processors that the client used; one is all that it can use.
        server_cpu: processors that the server's processes used; None if they are not ours.
        busiest: the processors that the busiest process of the server used.
    """

    rate: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    server_cpu: float | None = None
    busiest: float | None = None

    @classmethod
    def median(cls, rounds: Sequence["Figures"]) -> "Figures":
        """Return the medians of each figure."""
        columns = zip(*map(dataclasses.astuple, rounds), strict=True)
        return cls(*(None if None in column else statistics.median(column) for column in columns))  # type: ignore[arg-type]


def choose_client(wanted: str, target: LoadTarget) -> str:
    """Return the client for `target`: wrk or h2load where they are on PATH, else our own.

    Raises:
        ConfigError: `wanted` is not installed, or cannot ask this target.
    """
    able = "h2load" if target.grpc else "wrk"
    if wanted == "auto":
        return able if shutil.which(able) and not target.tls else "own"
    if wanted != "own":
        if wanted != able or target.tls:
            how = "gRPC" if target.grpc else "HTTPS, whose certificate it does not check" if target.tls else "REST"
            raise ConfigError(f"client {wanted}: is not used for {how}. Use {'own' if target.tls else able}, or auto.")
        if not shutil.which(wanted):
            raise ConfigError(f"client {wanted}: is not on PATH. Install it, or use own.")
    return wanted


def run_load(client: str, target: LoadTarget, requests: Sequence[bytes], concurrency: int, seconds: float) -> Figures:
    """Ask `target` on so many connections for so many seconds, each with one request at a time.

    Raises:
        ServingError: a request failed.
    """
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-") as folder:
        if client == "own":
            return _run_own(target, requests, concurrency, seconds)
        command, read = (_wrk if client == "wrk" else _h2load)(target, requests, concurrency, Path(folder))
        _run(command(max(1, round(WARM_SECONDS))))
        before, began = _server_times(target.pid), time.monotonic()
        used = _children_seconds()
        output = _run(command(max(1, round(seconds))))
        taken = time.monotonic() - began
        rate, p50, p99 = read(output)
        return Figures(rate, p50, p99, (_children_seconds() - used) / taken, *_used(target.pid, before, taken))


def _run_own(target: LoadTarget, requests: Sequence[bytes], concurrency: int, seconds: float) -> Figures:
    load = {
        **dataclasses.asdict(target),
        "path": target.path,
        "address": target.address,
        "headers": target.headers,
        "requests": [base64.b64encode(one).decode() for one in requests],
        "concurrency": concurrency,
        "warm_seconds": WARM_SECONDS,
        "seconds": seconds,
    }
    command = [sys.executable, "-m", "tpuembed_cli.load.client"]
    with _stopped_at_the_end(
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(json.dumps(load))
        process.stdin.close()
        first = process.stdout.readline()
        before, began = _server_times(target.pid), time.monotonic()
        line = process.stdout.readline() if first == "begin\n" else first
        taken = time.monotonic() - began
        server = _used(target.pid, before, taken)
    if not line:
        raise ServingError(f"the client ended with {process.returncode}. Its error is above.")
    found = json.loads(line)
    if "error" in found:
        raise ServingError(f"{target.address}: {found['error']}")
    milliseconds = found["milliseconds"]
    if not milliseconds:
        raise ServingError(f"{target.address}: no answer in {seconds} s. Measure for longer.")
    p50, p99 = percentiles(milliseconds)
    return Figures(len(milliseconds) / seconds, p50, p99, found["cpu"] / seconds, *server)


def percentiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the least values that 50 and 99 percent of `values` do not exceed."""
    ordered = sorted(values)
    p50, p99 = (ordered[-(-len(ordered) * part // 100) - 1] for part in (50, 99))
    return p50, p99


@contextlib.contextmanager
def _stopped_at_the_end(process: "subprocess.Popen[str]") -> Any:
    try:
        with process:
            yield process
    finally:
        process.kill()
        process.wait()


def _run(command: Sequence[str]) -> str:
    with _stopped_at_the_end(
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    ) as process:
        output: str = process.communicate()[0]
    if process.returncode:
        raise ServingError(f"{command[0]}: ended with {process.returncode}: {' '.join(output.split())[-500:]}")
    return output


_Read = Callable[[str], tuple[float, float, float]]


def _wrk(
    target: LoadTarget, requests: Sequence[bytes], concurrency: int, folder: Path
) -> tuple[Callable[[int], list[str]], _Read]:
    headers = {**target.headers, "Host": target.address, "Content-Type": "application/json"}
    fields = ", ".join(f"[{_lua(name.encode())}] = {_lua(value.encode())}" for name, value in headers.items())
    bodies = ",\n".join(map(_lua, requests))
    script = folder / "requests.lua"  # the folder is ours alone: the script may have a key
    script.write_text(
        f"local bodies, headers, sent, at = {{{bodies}}}, {{{fields}}}, {{}}, 0\n"
        "function init(args) for i, body in ipairs(bodies) do sent[i] = wrk.format('POST', nil, headers, body) end end\n"
        "function request() at = at % #sent + 1; return sent[at] end\n",
        encoding="ascii",
    )
    url = f"http://{target.address}{target.path}"

    def command(seconds: int) -> list[str]:
        return [
            "wrk",
            "-t1",
            f"-c{concurrency}",
            f"-d{seconds}s",
            "--timeout",
            "30s",
            "--latency",
            "-s",
            str(script),
            url,
        ]

    def read(output: str) -> tuple[float, float, float]:
        errors = re.search(r"Non-2xx or 3xx responses: (\d+)|Socket errors: (.*)", output)
        if errors:
            raise ServingError(f"{target.address}: wrk counts errors: {errors[0]}. See one with --client own.")
        rate = re.search(r"Requests/sec:\s+([\d.]+)", output)
        parts = [re.search(rf"\b{part}%\s+([\d.]+)(us|ms|s|m|h)\b", output) for part in (50, 99)]
        if not rate or not all(parts):
            raise ServingError(f"wrk: its output has no figures: {' '.join(output.split())[-500:]}")
        p50, p99 = (float(part[1]) * _UNITS[part[2]] for part in parts if part)
        return float(rate[1]), p50, p99

    return command, read


def _lua(data: bytes) -> str:
    """Return a string of Lua, in ASCII."""
    return (
        '"' + "".join(chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03d}" for byte in data) + '"'
    )


def _h2load(
    target: LoadTarget, requests: Sequence[bytes], concurrency: int, folder: Path
) -> tuple[Callable[[int], list[str]], _Read]:
    """h2load sends one body, and does not read the trailer that has gRPC's status: `bench` asks once before."""
    body, log = folder / "request", folder / "log"
    body.write_bytes(b"\0" + len(requests[0]).to_bytes(4, "big") + requests[0])
    headers = {**target.headers, "content-type": "application/grpc", "te": "trailers"}

    def command(seconds: int) -> list[str]:
        log.unlink(missing_ok=True)
        options = [one for name, value in headers.items() for one in ("-H", f"{name}: {value}")]
        url = f"http://{target.address}{target.path}"
        return [
            "h2load",
            "-t1",
            f"-c{concurrency}",
            "-m1",
            "-D",
            str(seconds),
            "-d",
            str(body),
            f"--log-file={log}",
            *options,
            url,
        ]

    def read(output: str) -> tuple[float, float, float]:
        rate = re.search(r"finished in [\d.]+\w+, ([\d.]+) req/s", output)
        counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored", output)
        if not rate or not counts or not log.exists():
            raise ServingError(f"h2load: its output has no figures: {' '.join(output.split())[-500:]}")
        if int(counts[1]) == 0 or int(counts[2]):
            raise ServingError(f"{target.address}: h2load counts errors: {counts[0]}. See one with --client own.")
        durations = [int(line.split("\t")[2]) / 1e3 for line in log.read_text().splitlines()]
        return float(rate[1]), *percentiles(durations)

    return command, read


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _server_times(pid: int | None) -> Mapping[int, float]:
    """Return the processor seconds of a process and of each of its descendants. Empty where /proc is not."""
    found: dict[int, float] = {}
    pending = [] if pid is None else [pid]
    for process in pending:  # grows
        with contextlib.suppress(OSError):
            place = Path(f"/proc/{process}")
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            found[process] = (int(fields[11]) + int(fields[12])) / _TICKS
            for thread in (place / "task").iterdir():
                pending += map(int, (thread / "children").read_text().split())
    return found


def _used(pid: int | None, before: Mapping[int, float], seconds: float) -> tuple[float | None, float | None]:
    """Return how many processors the server used since `before`, and its busiest process."""
    after = _server_times(pid)
    if not after:
        return None, None
    each = [used - before.get(process, 0.0) for process, used in after.items()]
    return sum(each) / seconds, max(each) / seconds
