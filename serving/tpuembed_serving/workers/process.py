"""The supervisor's end of a worker: its process, and a channel whose messages become events."""

import dataclasses
import queue
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from tpuembed_serving.workers.messages import Channel

__all__ = ["Exited", "WorkerProcess"]


class WorkerProcess:
    """Starts a worker. Puts (itself, message) for every message, and `Exited` at the end, into a queue."""

    def __init__(self, index: int, events: "queue.SimpleQueue[Any]") -> None:
        self.index = index
        self._events = events
        own_end, worker_end = socket.socketpair()
        with worker_end:
            # -P: do not import modules from the current folder.
            module = "tpuembed_serving.workers.worker"
            command = [sys.executable, "-P", "-m", module, str(index), str(worker_end.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[worker_end.fileno()], stdin=subprocess.DEVNULL)
        self._channel = Channel(Connection(own_end.detach()))
        threading.Thread(target=self._read, name=f"worker-{index}-reader", daemon=True).start()

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Send a message. Does nothing if the process has exited: its exit is an event."""
        try:
            self._channel.send(message)
        except OSError:
            return

    def terminate(self) -> None:
        """Send SIGTERM, on which the worker begins its lame duck stage."""
        self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._process.kill()

    def close(self) -> int:
        """Close the channel of a process that has exited, and return its exit code. Negative for a signal."""
        self._channel.close()
        return self._process.wait()

    def _read(self) -> None:
        """Read until the channel ends, then wait for the exit. Kills a process whose messages cannot be read."""
        try:
            while True:
                self._events.put((self, self._channel.receive()))
        except Exception as error:
            if not isinstance(error, EOFError | OSError):
                self.kill()
            self._process.wait()
            self._events.put(Exited(self))


@dataclasses.dataclass(frozen=True)
class Exited:
    """The event that a process has exited."""

    process: WorkerProcess
