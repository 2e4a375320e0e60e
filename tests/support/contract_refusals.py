"""Assert that each of several calls is refused, and that the message says why."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest

__all__ = ["assert_each_is_refused"]


def assert_each_is_refused(kind: type[Exception], cases: Iterable[tuple[Callable[[], Any], str]]) -> None:
    """Fail for the first call that does not raise `kind`, or whose message does not match.

    Args:
        kind: the class of the errors.
        cases: calls, each with a regular expression of the words that its message must have.
    """
    __tracebackhide__ = True
    for call, words in cases:
        try:
            call()
        except kind as error:
            if re.search(words, str(error)) is None:
                pytest.fail(f"no {words!r} in the message: {error}", pytrace=False)
        else:
            pytest.fail(f"nothing was refused where the message should have {words!r}", pytrace=False)
