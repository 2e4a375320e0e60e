"""The pages of docs/tutorials, docs/how-to and docs/migrate do what they say, and print what they show."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import NotRun, PageError, run, steps

pytestmark = pytest.mark.nightly  # `make test-docs` runs them too

ROOT = Path(__file__).parents[2]
FOLDERS = ("tutorials", "how-to", "migrate")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
}
if "```console" in (readme := (ROOT / "README.md").read_text(encoding="utf-8")):
    PAGES["README.md"] = readme


NEEDS = {"docs/how-to/load-test.md": "wrk", "docs/how-to/redis.md": "redis-server"}
"""Page -> a program that it starts, and that CI has."""


@pytest.mark.parametrize("page", PAGES)
def test_the_page_does_what_it_says(page: str, tmp_path: Path) -> None:
    if page in NEEDS and shutil.which(NEEDS[page]) is None and "CI" not in os.environ:
        pytest.skip(f"{NEEDS[page]} is not installed: apt-get install {NEEDS[page]}")
    shutil.copytree(ROOT / "examples", tmp_path / "page" / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    run(PAGES[page], tmp_path / "page")


def not_run() -> Iterator[tuple[str, int, str]]:
    for page, text in PAGES.items():
        with contextlib.suppress(PageError):  # which fails the page's own test
            yield from ((page, step.line, step.reason) for step in steps(text) if isinstance(step, NotRun))


@pytest.mark.parametrize(("page", "line", "reason"), list(not_run()))
def test_what_is_not_run(page: str, line: int, reason: str) -> None:
    pytest.skip(f"{page}, line {line}: {reason}")
