"""A worker as its supervisor sees it: a process, and a channel whose messages become events."""

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
    """Puts (itself, message) for every message, and `Exited` at the end, into a queue."""

    def __init__(self, index: int, events: "queue.SimpleQueue[Any]") -> None:
        self.index = index
        self._events = events
        ours, theirs = socket.socketpair()
        with theirs:
            # -P: the folder that the server is started in is no place for modules.
            command = [sys.executable, "-P", "-m", "tpuembed_serving.workers.worker", str(index), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._channel = Channel(Connection(ours.detach()))
        threading.Thread(target=self._read, name=f"worker-{index}-reader", daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: Any) -> None:
        """Nothing happens where the process is gone: its exit is an event."""
        try:
            self._channel.send(message)
        except OSError:
            return

    def terminate(self) -> None:
        """SIGTERM: it begins its lame duck."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def close(self) -> int:
        """After its exit: free what is left; the exit code, negative for a signal."""
        self._channel.close()
        return self._process.wait()

    def _read(self) -> None:
        """To the end of the channel, which is the end of the process: one that closed it alone is of no use."""
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
    """The event of a process that has ended."""

    process: WorkerProcess
