"""The graph that an overlay would have as a full version. It lies in assets.extra, so that `compact` needs no model."""

import filecmp
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tpuembed.manifest import NAMES_FOLDER
from tpuembed.saved_model import GRAPH_FILE

__all__ = ["FULL_GRAPH", "save_full_graph", "take_full_graph"]

FULL_GRAPH: Final = Path("assets.extra", "full")
_REWRITTEN: Final = (GRAPH_FILE.name, "variables.index")


def save_full_graph(save: Callable[[Path], Any], version: Path) -> None:
    """Call `save` with the folder for the graph inside `version`. Files that the version has too are hard links.

    But not those that are written again before the version is published.
    """
    folder = version / FULL_GRAPH
    save(folder)
    for own in ("assets.extra", NAMES_FOLDER):  # warm-up requests and names, which are the version's
        shutil.rmtree(folder / own, ignore_errors=True)
    for place, _, names in os.walk(folder):
        for path in (Path(place, name) for name in names):
            same = version / path.relative_to(folder)
            if path.name not in _REWRITTEN and same.is_file() and filecmp.cmp(path, same, shallow=False):
                path.unlink()
                path.hardlink_to(same)


def take_full_graph(version: Path, target: Path) -> None:
    """Copy the graph of `version` as a full version would have it, and its other files, to the new folder `target`."""
    shutil.copytree(version / FULL_GRAPH, target)
    if (version / NAMES_FOLDER).is_dir():
        shutil.copytree(version / NAMES_FOLDER, target / NAMES_FOLDER)
    shutil.copytree(
        version / FULL_GRAPH.parent,
        target / FULL_GRAPH.parent,
        ignore=lambda place, _: [FULL_GRAPH.name] if Path(place) == version / FULL_GRAPH.parent else [],
    )
