"""A worker process, which the supervisor starts: `python -m tpuembed_serving.workers.worker INDEX FD`."""

import sys
from multiprocessing.connection import Connection

from tpuembed_serving.http.app import create_app
from tpuembed_serving.http.server import prepare_tensorflow, run_app
from tpuembed_serving.telemetry.server_log import log_to_stderr
from tpuembed_serving.workers.link import WorkerLink
from tpuembed_serving.workers.messages import Channel, Start
from tpuembed_serving.workers.sockets import bind_shared
from tpuembed_serving.workers.stopping import WorkerStop, stop_on_signals

__all__ = ["main"]


def main() -> None:
    """Serve the models that the supervisor sends over file descriptor FD, until SIGTERM or until the supervisor exits."""
    index, descriptor = (int(argument) for argument in sys.argv[1:])
    with stop_on_signals(WorkerStop()) as stop:
        channel = Channel(Connection(descriptor))
        try:
            start = channel.receive()
        except (EOFError, OSError):
            return
        assert isinstance(start, Start)
        prepare_tensorflow(start.settings.log)
        log_to_stderr(start.settings.log, index)
        link = WorkerLink(channel, stop=stop.advance)
        app = create_app(start.settings, link=link, load_first=start.load_first)
        link.start()
        with bind_shared(start.settings.host, start.settings.rest_port) as listener:
            run_app(app, listener, stop, on_listening=link.listening)


if __name__ == "__main__":
    main()
