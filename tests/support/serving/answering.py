"""A pretend server of HTTP, for clients."""

import contextlib
import http.server
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def answering(code: int, body: str, asked: list[tuple[str, str | None]] | None = None) -> Iterator[str]:
    """A server that answers every GET so; its URL."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if asked is not None:
                asked.append((self.path, self.headers["Authorization"]))
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
