"""The files of the console and of the documentation. They hold no data, so they are served without a key."""

from importlib import resources
from typing import Final

from fastapi import Response

__all__ = ["OPEN_PATHS", "static_file", "wants_page"]

_CONSOLE: Final = ("console.css", "console.js", "icon.svg")
_SWAGGER: Final = ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png")
OPEN_PATHS: Final[frozenset[str]] = frozenset(
    {"/", "/docs", "/docs/docs.js", "/openapi.json", *(f"/console/{name}" for name in _CONSOLE)}
    | {f"/docs/assets/{name}" for name in _SWAGGER}
)
"""The URL paths of pages, which need no key."""
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_POLICY: Final = "default-src 'self'; frame-ancestors 'none'"
_DOCS_POLICY: Final = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-ancestors 'none'"
)
"""Swagger UI sets styles and images inline."""


def wants_page(accept: str) -> bool:
    """Returns True if an Accept header names HTML, as those of browsers do. `*/*` is what programs send."""
    for media in accept.split(","):
        kind, *parameters = (part.replace(" ", "").lower() for part in media.split(";"))
        if kind == "text/html":
            return not any(part in ("q=0", "q=0.0", "q=0.00", "q=0.000") for part in parameters)
    return False


def static_file(name: str) -> Response:
    """Return the answer that has the file `name`. Browsers ask for it again each time: the next release changes it."""
    headers = {
        "Content-Security-Policy": _DOCS_POLICY if name == "docs.html" else _POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    content = resources.files(__name__).joinpath(name).read_bytes()
    return Response(content, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])
