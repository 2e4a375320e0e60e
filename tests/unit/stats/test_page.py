"""The page of statistics: complete, self-contained, and with names as text."""

import html.parser
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.checkpoint.bundles import write
from tpuembed.stats import read_stats, stats_page

NAME = '<img src="x" onerror="alert(1)">&amp;'


class Page(html.parser.HTMLParser):
    """Its tags, attributes and texts. Tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    rows = np.random.default_rng(1).standard_normal((500, 8)).astype(np.float32)
    rows[7, 0] = np.nan
    empty = np.full((3, 2), np.inf, np.float32)
    write(folder / "ckpt", {NAME: rows, "zeros": np.zeros((4, 4), np.float32), "infinite": empty})
    return stats_page(read_stats(folder / "ckpt"))


def test_names_are_text(page: str) -> None:
    found = Page(page)
    assert "img" not in found.tags
    assert not any(name.startswith("on") for name, _ in found.attributes)
    assert found.text.count(NAME) == 2


def test_it_loads_nothing(page: str) -> None:
    found = Page(page)
    assert {"script", "link", "img", "iframe"}.isdisjoint(found.tags)
    assert [
        value for name, value in found.attributes if name in ("src", "href") and not str(value).startswith("#")
    ] == []
    assert not re.search(r"url\(|@import|https?:", page)


def test_figures(page: str) -> None:
    found = Page(page)
    assert found.tags.count("svg") == 1, "tables without positive norms have no plot"
    assert "All rows are zero." in found.text
    assert "1 (row 7)" in found.text
    assert "row 7 contains nan, which int8 cannot hold" in found.text
    assert "nan" not in found.text.replace("contains nan", "")
    assert sum(int(rows) for rows in re.findall(r"<title>(\d+) rows of norm", page)) == 499


@pytest.mark.parametrize("value", [1e-45, 3e38, 1.0, 1.001])
def test_norms_of_any_size_are_plotted(tmp_path: Path, value: float) -> None:
    write(tmp_path / "ckpt", {"table": np.linspace(0.3, 1, 40).reshape(10, 4).astype(np.float32) * np.float32(value)})
    text = stats_page(read_stats(tmp_path / "ckpt"))
    Page(text)
    assert all(0 <= float(x) <= 640 for x in re.findall(r'\b(?:x|x1|x2)="([^"]+)"', text))
