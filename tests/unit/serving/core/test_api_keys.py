"""Files of keys, and headers that have one."""

import pickle
from pathlib import Path

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving.core.api_keys import UNNAMED, ApiKeys

FIRST, SECOND = "first-key-0123456789", "second_key~9876543210"


def test_any_key_of_the_file_opens_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{FIRST}\n\n  {SECOND}  \n")
    keys = pickle.loads(pickle.dumps(ApiKeys.read(path)))
    for headers in (
        [(b"x-api-key", FIRST.encode())],
        [(b"X-API-Key", SECOND.encode())],
        [(b"authorization", f"Bearer {FIRST}".encode())],
        [("authorization", f"bEARER  {SECOND} ")],
        [(b"x-api-key", b"wrong"), (b"authorization", f"Bearer {FIRST}".encode())],
    ):
        assert keys.accept(headers), headers
    for wrong in (
        [],
        [(b"x-api-key", b"")],
        [(b"x-api-key", FIRST[:-1].encode())],
        [(b"x-api-key", FIRST.encode() + b"x")],
        [(b"x-api-key", FIRST.upper().encode())],
        [(b"x-api-key", b"# of the team")],
        [(b"authorization", FIRST.encode())],
        [(b"authorization", f"Basic {FIRST}".encode())],
        [(b"api-key", FIRST.encode())],
    ):
        assert not keys.accept(wrong), wrong


def test_a_key_may_have_a_name(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ranking-team: {FIRST}\n{SECOND}\nold:{FIRST}\nranking-team:  {FIRST}x\n")
    keys = ApiKeys.read(path)
    assert keys.accept([(b"x-api-key", FIRST.encode())]) == "ranking-team"
    assert keys.accept([(b"x-api-key", f"{FIRST}x".encode())]) == "ranking-team"
    assert keys.accept([(b"x-api-key", SECOND.encode())]) == UNNAMED
    assert keys.accept([(b"x-api-key", f"old:{FIRST}".encode())]) == UNNAMED, "a colon without a space is of the key"
    assert keys.accept([(b"x-api-key", b"ranking-team")]) is None


def test_a_named_key_may_be_an_admins(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"ops admin: {FIRST}\nadmin: {SECOND}\n")
    keys = ApiKeys.read(path)
    ops, plain = (b"x-api-key", FIRST.encode()), (b"authorization", f"Bearer {SECOND}".encode())
    assert (keys.accept([ops]), keys.accept_admin([ops])) == ("ops", True)
    assert (keys.accept([plain]), keys.accept_admin([plain])) == ("admin", False)
    assert not keys.accept_admin([plain, ops]), "the first known key counts"
    assert not keys.accept_admin([(b"x-api-key", b"unknown")])


def test_the_keys_themselves_are_not_kept() -> None:
    assert FIRST.encode() not in pickle.dumps(ApiKeys([("team", FIRST)]))
    assert FIRST not in repr(vars(ApiKeys([("team", FIRST)])))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing\n\n",
        f"{FIRST}\nshort\n",
        "two words in a single line\n",
        "schlüssel-0123456789\n",
    ],
)
def test_files_that_protect_nothing_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with refused(ConfigError) as caught:
        ApiKeys.read(path)
    assert "short" not in str(caught.value).replace("shorter", "")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with refused(ConfigError):
        ApiKeys.read(tmp_path / "none")


def test_a_key_on_two_lines_is_refused(tmp_path: Path) -> None:
    """Which of the two lines counts would decide whether it is an admin's."""
    path = tmp_path / "keys"
    path.write_text(f"ops admin: {FIRST}\nweb: {FIRST}\n")
    with refused(ConfigError):
        ApiKeys.read(path)
