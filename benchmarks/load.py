"""Load and first lookup of exports: mapped tables beside loaded ones, many features, and two processes that share a table.

    python -m benchmarks.load [--gib N] [--rounds N] [--folder DIR]

Every load is a process of its own, in the C API and in the server's runtime, in turns; the files are in the page cache, as
after the copy that brought them. Seconds are from the call that loads to the first answer, without the import of TensorFlow;
medians are reported, and ratios are medians of the rounds' own. Everything it makes is deleted.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.export import write_table

LAYOUTS = ("variables", "mmap")
BATCH = 256
SWEEP_ROWS = 1 << 16
FEATURES, LIST_ROWS, LIST_IDS = 26, 1000, 10
"""Small tables of features of lists: their graph is most of the load."""


def run(rounds: int = 5, gib: float = 6, folder: str | None = None) -> dict[str, Any]:
    """Seconds by loader and layout for a table of `gib` GiB in `folder`, and the memory of two processes."""
    with tempfile.TemporaryDirectory(prefix="tpuembed-bench-", dir=folder) as made:
        place = Path(made)
        size = write_table(place / "table", int(gib * (1 << 30)))
        versions = _versions(place)
        seconds = {loader: _rounds(loader, versions, rounds) for loader in LOADERS}
        shared = _two_processes(versions["mmap"])
        lists = {"lists": _lists(place)}
        of_lists = {loader: _rounds(loader, lists, rounds)["lists"] for loader in LOADERS}
    return {
        "bytes": size,
        "rounds": rounds,
        "seconds to the first answer": {loader: _medians(taken) for loader, taken in seconds.items()},
        "variables / mmap": {loader: _ratio(taken["variables"], taken["mmap"]) for loader, taken in seconds.items()},
        f"{FEATURES} features of lists": {
            **{loader: round(statistics.median(taken), 3) for loader, taken in of_lists.items()},
            "server / C API": _ratio(of_lists["server"], of_lists["C API"]),
        },
        "two processes": shared,
    }


def _versions(place: Path) -> dict[str, Path]:
    """The table, exported in both layouts by a process that imports TensorFlow for it."""
    arguments = [str(place / "table"), str(place / "model"), '{"features": {"x": {"table": "table", "input": "id"}}}']
    code = (
        "import json, sys; from tpuembed import export_saved_model\n"
        "source, target, config = sys.argv[1:]\n"
        f"for layout in {LAYOUTS}: export_saved_model(source, target, serving_config=json.loads(config), layout=layout)"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, env=_quiet())
    return {layout: place / "model" / str(number) for number, layout in enumerate(LAYOUTS, start=1)}


def _lists(place: Path) -> Path:
    """An export of FEATURES features of lists."""
    code = (
        "import sys, tensorflow as tf; from tpuembed import export_saved_model\n"
        f"tables = {{f't{{number}}': tf.Variable(tf.ones(({LIST_ROWS}, 16))) for number in range({FEATURES})}}\n"
        "path = tf.train.Checkpoint(**tables).write(sys.argv[1] + '/lists')\n"
        "features = {f'f{number}': {'table': table, 'combiner': 'sum'} for number, table in enumerate(tables)}\n"
        "export_saved_model(path, sys.argv[1] + '/of_lists', serving_config={'features': features}, layout='mmap')"
    )
    subprocess.run([sys.executable, "-c", code, str(place)], check=True, env=_quiet())
    return place / "of_lists" / "1"


def _rounds(loader: str, versions: dict[str, Path], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {layout: [] for layout in versions}
    for index in range(rounds + 1):
        for layout in versions if index % 2 else reversed(versions):
            took = seconds_to_answer(loader, versions[layout])
            if index:  # the first round warms up
                seconds[layout].append(took)
    return seconds


def seconds_to_answer(loader: str, version: Path) -> float:
    """Load a version in a process of its own; return the seconds from the call that loads to the first answer."""
    with _child(loader, version) as child:
        return float(json.loads(_line(child))["seconds"])


def _two_processes(version: Path) -> dict[str, float]:
    """MB of the mapped table in each of two processes that have looked up every row of it; PSS counts a shared page half."""
    with _child("server, every row", version) as one, _child("server, every row", version) as other:
        for child in (one, other):
            _line(child)
        found = [_mapped_memory(child.pid) for child in (one, other)]
    return {
        "table, RSS of each, MB": max(memory["Rss"] for memory in found),
        "table, PSS of each, MB": max(memory["Pss"] for memory in found),
        "anonymous memory of each, MB": max(memory["Anonymous"] for memory in found),
    }


def _mapped_memory(pid: int) -> dict[str, float]:
    """MB: Rss and Pss of the mapped table, and all anonymous memory. See proc_pid_smaps(5)."""
    sums = {"Rss": 0.0, "Pss": 0.0, "Anonymous": 0.0}
    is_table = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            is_table = "/variables/variables.data-" in line
        elif name[:-1] in sums and (is_table or name == "Anonymous:"):
            sums[name[:-1]] += int(rest[0]) * 1024 / 1e6
    return sums


def _medians(taken: dict[str, list[float]]) -> dict[str, float]:
    return {layout: round(statistics.median(values), 4) for layout, values in taken.items()}


def _ratio(one: list[float], other: list[float]) -> float:
    """Return the median of the rounds' ratios."""
    return float(f"{statistics.median(first / second for first, second in zip(one, other, strict=True)):.3g}")


def _child(loader: str, version: Path) -> subprocess.Popen[str]:
    """A process that loads, answers, says how long that took, and stays until its stdin is closed."""
    command = [sys.executable, "-m", "benchmarks.load", "--child", loader, str(version)]
    here = Path(__file__).parent.parent
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_quiet(),
        cwd=here,
        start_new_session=True,
    )


def _line(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise RuntimeError(f"a process that loads ended with {child.wait()}")
    return line


def _quiet() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}


def _ids(rows: int) -> np.ndarray[Any, Any]:
    """Some ids of each feature: one in each row, or the lists of one row."""
    random = np.random.default_rng(1)
    return random.integers(0, rows, (1, LIST_IDS) if rows == LIST_ROWS else BATCH)


def _load_with_c_api(version: Path, rows: int) -> float:
    import importlib.util

    from tests.support.capi import Session

    found = importlib.util.find_spec("tensorflow")
    assert found is not None
    assert found.submodule_search_locations
    session = Session(Path(found.submodule_search_locations[0]))
    given, wanted = (_tensor_names(version, side) for side in (1, 2))
    ids = _ids(rows)
    started = time.monotonic()
    session.load(str(version))
    session.run(dict.fromkeys(given, ids), wanted)
    return time.monotonic() - started


def _tensor_names(version: Path, side: int) -> list[str]:
    """Of the inputs (1) or outputs (2) of serving_default.

    Source: SavedModel.meta_graphs = 2, MetaGraphDef.signature_def = 5, a map of SignatureDef.inputs = 1 and .outputs = 2,
    maps of TensorInfo.name = 1.
    """
    from tpuembed.formats.protobuf import Message

    (meta,) = Message((version / "saved_model.pb").read_bytes()).messages(2)
    signatures = {entry.text(1): entry.message(2) for entry in meta.messages(5)}
    return [entry.message(2).text(1) for entry in signatures["serving_default"].messages(side)]


def _load_with_server(version: Path, rows: int) -> float:
    return _serve(version, lambda _: _ids(rows))


def _sweep_with_server(version: Path, rows: int) -> float:
    took = 0.0
    for start in range(0, rows, SWEEP_ROWS):
        ids = np.arange(start, min(start + SWEEP_ROWS, rows))
        took += _serve(version, lambda _, ids=ids: ids)  # type: ignore[misc]
    return took


_SERVABLES: dict[Path, Any] = {}


def _serve(version: Path, ids: Callable[[None], np.ndarray[Any, Any]]) -> float:
    from tpuembed_serving.tensorflow import session as runtime

    started = time.monotonic()
    servable = _SERVABLES.get(version) or _SERVABLES.setdefault(version, runtime.load(version))
    signature = servable.signatures["serving_default"]
    servable.run(signature, [ids(None)] * len(signature.inputs))
    return time.monotonic() - started


LOADERS: dict[str, Callable[[Path, int], float]] = {"C API": _load_with_c_api, "server": _load_with_server}


def _be_child(loader: str, version: Path) -> None:
    from tpuembed.manifest import Manifest

    manifest = Manifest.read(version)
    assert manifest is not None
    rows = manifest.tables[0].rows
    took = (LOADERS | {"server, every row": _sweep_with_server})[loader](version, rows)
    print(json.dumps({"seconds": took}), flush=True)
    sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gib", type=float, default=6)
    parser.add_argument("--folder", help="where to write")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    child = options.pop("child")
    if child:
        _be_child(child[0], Path(child[1]))
    else:
        print(json.dumps(run(**options), indent=1))


if __name__ == "__main__":
    main()
