"""What a store says when it refuses, in one short line: its status, code and message, and nothing else of the body."""

import http
import re
from typing import Final

__all__ = ["NOT_ALLOWED", "refusal"]

NOT_ALLOWED: Final = (401, 403)
"""Statuses of credentials that are wrong, and of those that are not allowed to do it: stores do not say which."""
_MAX_MESSAGE: Final = 200


def refusal(status: int, body: str = "", code: str = "", message: str = "") -> str:
    """The line of an answer of `status`, whose `body` is S3's XML, a proxy's HTML, or anything; or is taken apart already."""
    code, message = code or _field("Code", body), message or _field("Message", body)
    if not code or code == str(status):
        return f"the store answers {status} {_phrase(status)}".rstrip()
    return f"the store answers {status} {code}: {message[:_MAX_MESSAGE]}".rstrip(": ")


def _field(name: str, body: str) -> str:
    found = re.search(rf"<{name}>([^<]*)", body)
    return " ".join(found[1].split()) if found else ""


def _phrase(status: int) -> str:
    try:
        return http.HTTPStatus(status).phrase
    except ValueError:
        return ""
