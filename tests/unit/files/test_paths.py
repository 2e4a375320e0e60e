"""What text means, on a disk and in a store."""

from pathlib import Path, PurePosixPath

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed.files import UrlPath, as_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b", Path("/a/b")),
        ("a b", Path("a b")),
        ("file:///a%20b", Path("/a b")),
        ("file://localhost/a", Path("/a")),
        ("s3://bucket", UrlPath("s3", "bucket")),
        ("s3://bucket/", UrlPath("s3", "bucket")),
        ("s3://bucket/a/b/", UrlPath("s3", "bucket", "a/b")),
        ("gs://bucket/a%20b c", UrlPath("gs", "bucket", "a%20b c")),
        ("gs://bucket//a/./b/../c", UrlPath("gs", "bucket", "a/c")),
    ],
)
def test_text_becomes_a_path_or_a_url(text: str, expected: Path | UrlPath) -> None:
    assert as_path(text) == expected
    assert as_path(expected) is expected


@pytest.mark.parametrize("text", ["http://host/x", "S3://bucket/x", "s3://", "s3:///x", "://x", "hdfs://a/b"])
def test_other_urls_are_refused(text: str) -> None:
    with refused(ConfigError):
        as_path(text)


@pytest.mark.parametrize("name", ["c", "c/d", "../c", "../../../../c", ".", "./c/", "c.index", "é x"])
def test_joins_as_paths_do(name: str) -> None:
    """The independent truth is pathlib, under a root that cannot be left."""
    import os

    joined = UrlPath("s3", "bucket", "a/b") / name
    truth = PurePosixPath(os.path.normpath(PurePosixPath("/a/b") / name))
    assert joined.key == str(truth).lstrip("/")
    assert str(joined) == f"s3://bucket{truth}".rstrip("/")
    assert (joined.name, joined.suffix) == (truth.name, truth.suffix)
    assert joined.parent.key == str(truth.parent).lstrip("/")


def test_nothing_leads_above(tmp_path: Path) -> None:
    """A name that begins with a slash is still below."""
    assert UrlPath("s3", "bucket", "a") / "/etc/passwd" == UrlPath("s3", "bucket", "a/etc/passwd")
