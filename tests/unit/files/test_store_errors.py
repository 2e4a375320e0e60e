"""What is left of a store's answer."""

import pytest

from tpuembed.files.store_errors import refusal

# As Amazon's documentation of error responses prints them, and as a proxy answers.
XML = """<?xml version="1.0" encoding="UTF-8"?>
<Error>
  <Code>NoSuchBucket</Code>
  <Message>The specified bucket
  does not exist</Message>
  <Resource>/mybucket/myfoto.jpg</Resource><RequestId>4442587FB7D0A2F9</RequestId><HostId>aBcD</HostId>
</Error>"""
HTML = (
    "<!DOCTYPE html>\n<html lang=en>\n<title>500 Internal Server Error</title>\n<h1>Internal Server Error</h1>"
    + "x" * 999
)


@pytest.mark.parametrize(
    ("status", "body", "line"),
    [
        (404, XML, "the store answers 404 NoSuchBucket: The specified bucket does not exist"),
        (500, HTML, "the store answers 500 Internal Server Error"),
        (403, "", "the store answers 403 Forbidden"),
        (599, "", "the store answers 599"),
        (403, "<Error><Code>AccessDenied</Code></Error>", "the store answers 403 AccessDenied"),
        (403, "<Error><Code>AccessDenied</Code><Messa", "the store answers 403 AccessDenied"),
    ],
)
def test_status_code_and_message_are_kept(status: int, body: str, line: str) -> None:
    assert refusal(status, body) == line


def test_an_answer_that_is_taken_apart() -> None:
    assert refusal(500, code="500", message="Internal Server Error") == "the store answers 500 Internal Server Error"
    assert refusal(403, code="AccessDenied", message="no") == "the store answers 403 AccessDenied: no"
