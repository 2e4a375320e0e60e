"""docs/performance.md, written from the JSON in results/: `python -m benchmarks.report`.

The page has one line for each comparison. The results have every case.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"

HEAD = """# Performance

`python -m benchmarks` measures into `benchmarks/results/`, which has every case. `python -m benchmarks.report` writes this page. It
has one line for each comparison.

- Each line has a peer or a limit that was measured in the same run, in turns. The figures are medians of the rounds.
- Compare the ratios: above 1, tpuembed is faster. The figures are those of a virtual machine with 2 cores, which also ran the
  clients. Other machines share it, so rounds differ by 30%.
"""


class Line(NamedTuple):
    """One comparison: what was measured, in which unit, by us and by whom else. `ratio` is how many times faster we are."""

    what: str
    unit: str
    ours: float
    peer: str
    theirs: float
    ratio: float
    script: str


def main() -> None:
    """Write the page."""
    parts = [HEAD]
    for title, lines in (
        ("Training", _training()),
        ("Export", _exports()),
        ("Lookups", _lookups()),
        ("Serving", _serving()),
    ):
        head = ("| | unit | tpuembed | beside | | times faster | benchmark |", "| --- " * 7 + "|")
        rows = (
            f"| {one.what} | {one.unit} | {_number(one.ours)} | {one.peer} | {_number(one.theirs)} | {one.ratio:.2f} | "
            f"`{one.script}` |"
            for one in lines
        )
        parts.append("\n".join((f"## {title}\n", *head, *rows, "")))
    PAGE.write_text("\n".join([*parts, *_notes()]))


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _faster(what: str, unit: str, ours: float, peer: str, theirs: float, script: str) -> Line:
    """Return a comparison of times."""
    return Line(what, unit, ours, peer, theirs, theirs / ours, script)


def _training() -> Iterator[Line]:
    peers = {"keras": "Keras", "keras_rs": "keras-rs"}
    for case, one in _result("train_step").items():
        optimizer, rows = case.split(", vocabulary ")
        for key, peer in peers.items():
            what = f"a step of 4,096 ids, {optimizer}, {int(rows):,} rows"
            yield _faster(what, "ms", one["tpuembed_ms"], peer, one[f"{key}_ms"], "train_step")
    models = _result("real_models")
    shown = {
        "dense": "the dense part alone",
        "keras": "Keras",
        "embedding_bag": "EmbeddingBag of torch",
        "fbgemm": "FBGEMM",
    }
    for case in (name for name in models if "batch" in name):
        ours, what = models[case]["ms"]["tpuembed"], f"a step of a DLRM, 26 tables, Adagrad, {case}"
        for key, peer in shown.items():
            ratio = 1 / models[case]["tpuembed / dense"] if key == "dense" else models[case][f"{key} / tpuembed"]
            yield Line(what, "ms", ours, peer, ours * ratio, ratio, "real_models")
    gpu = _result("gpu")
    for case in ("adam, vocabulary 10000, batch 4096", "adam, vocabulary 10000000, batch 65536"):
        size, ids = (int(part.split()[-1]) for part in case.split(", ")[1:])
        what, one = f"the same on a GPU ({gpu['GPU']}), {ids:,} ids, {size:,} rows", gpu[case]
        yield _faster(what, "ms", one["tpuembed GPU_ms"], "Keras on the GPU", one["keras GPU_ms"], "gpu")
    tracking = _result("tracking")["65536 ids"]
    yield _faster(
        "a step with `track_rows=True`", "ms", tracking["tracked ms"], "without", tracking["plain ms"], "tracking"
    )
    names = _result("names")["65536 ids"]
    for peer, shown in (("string names", "row numbers"), ("keras StringLookup", "keras.layers.StringLookup")):
        theirs = names["ids ms"] * (1 if peer == "string names" else names["keras StringLookup / ids"])
        ours = names["ids ms"] * names["string names / ids"]
        yield _faster("a step with string names", "ms", ours, shown, theirs, "names")
    towers = _result("two_towers")
    ours, theirs = (towers[name]["train s"]["mean"] for name in ("tpuembed", "TensorFlow Recommenders"))
    yield _faster("two towers on MovieLens, 3 epochs", "s", ours, "TensorFlow Recommenders", theirs, "two_towers")


def _exports() -> Iterator[Line]:
    found = _result("export")
    streams = {one["name"]: one for one in found["streaming"]["contenders"]}
    best = min(streams["cp"]["seconds_of_rounds"])
    for name in ("float32", "bfloat16", "float16", "int8", "float32, from 32 SparseCores"):
        seconds = streams[f"export, 2 workers, {name}"]["seconds"]
        yield _faster(f"stream 6 GiB, {name}", "s", seconds, "the fastest `cp` of the run", best, "export")
    beside = found["beside TensorFlow's restore-and-save"]
    for key, what, unit in (("seconds", "a whole export of 6 GiB", "s"), ("peak_rss_mb", "its peak of memory", "MB")):
        ours, theirs = beside["export"][key], beside["TensorFlow"][key]
        yield _faster(what, unit, ours, "TensorFlow's restore and save", theirs, "export")
    fresh = _result("fresh")
    what = f"a step's {fresh['rows changed a step']:,} rows of {fresh['table GB']:.0f} GB, until they are published"
    yield _faster(what, "s", fresh["of it export"], "a full export", fresh["full export"], "fresh")
    stats = _result("stats")
    yield Line(
        "`stats`", "GB/s", stats["stats GB/s"], "`verify`", stats["verify GB/s"], stats["stats / verify"], "stats"
    )


def _lookups() -> Iterator[Line]:
    lookups, shown = _result("lookups"), "26 tables, batch {}, {} id{} each"
    for batch, hotness, ours in (
        (1, 1, "packed"),
        (4096, 1, "packed"),
        (1, 20, "native"),
        (256, 20, "native"),
        (4096, 20, "native"),
    ):
        times, what = (
            lookups[f"batch {batch}, hotness {hotness}"]["us"],
            shown.format(batch, hotness, "s" * (hotness > 1)),
        )
        peers = {
            "embedding_lookup_sparse, at its best": "tf.nn.embedding_lookup_sparse",
            "C bound": "a loop in C, without TensorFlow",
        }
        for key, peer in peers.items():
            yield _faster(what, "us", times[ours], peer, times[key], "lookups")
    for case in ("batch 1, hotness 20", "batch 4096, hotness 20"):
        times = _result("lookups_torch")[case]["us"]
        for peer in ("embedding_bag", "FBGEMM"):
            yield _faster(
                f"26 tables, {case}, native", "us", times["native"], f"torch {peer}", times[peer], "lookups_torch"
            )
    names = _result("vocabularies")
    for count in ("200000 names", "10000000 names"):
        ours, theirs = (names[count][name] for name in ("export", "keras StringLookup"))
        for key, what, unit in (("ns per name", "find a name of {:,}", "ns"), ("load s", "load {:,} names", "s")):
            shown = what.format(int(count.split()[0]))
            yield _faster(shown, unit, ours[key], "keras.layers.StringLookup", theirs[key], "vocabularies")
    contenders, column = _result("retrieval")["contenders"], "us per query, batch 1"
    for ours, peer in (
        ("exact", "faiss Flat, exact"),
        ("ivf", "faiss IVFFlat"),
        ("ivf", "hnswlib, M 16"),
        ("ivf", "ScaNN, reorder 300"),
    ):
        mine = contenders[f"our server, {ours}"][column]
        yield _faster(f"the best 10 of a million, {ours}", "us", mine, peer, contenders[peer][column], "retrieval")
    overlay = _result("overlay")["6656 ids"]["us"]
    yield _faster(
        "6,656 ids of an overlay of 1%", "us", overlay["overlay of 1%"], "a full version", overlay["plain"], "overlay"
    )
    cold = _result("cold_rows")["ms"]
    for way in ("the kernel's readahead", "the disk"):
        yield _faster("1,024 rows of 4 GB on the disk", "ms", cold["read-ahead"], way, cold[way], "cold_rows")


def _serving() -> Iterator[Line]:
    for name in ("serve", "serve_2"):
        found = _result(name)
        case = found["1 row, 64 connections"]
        what = f"1 row, 64 connections, {found['workers']} worker{'s' * (found['workers'] > 1)}"
        yield from _rates(what, case, [key.removeprefix("over ") for key in case if key.startswith("over ")])
    plain = _result("serve_plain")["a plain SavedModel, 1 row, 64 connections"]
    yield from _rates("a SavedModel that Keras saved, 64 connections", plain, ["naive"])
    grpc = _result("serve_grpc")
    for connections in (1, 64):
        case = grpc[f"1 row, {connections} connections".replace("1 connections", "1 connection")]
        for peer in ("grpc.aio echo", "grpc.aio model"):
            rates = (case[one]["requests_per_second"] for one in ("tpuembed, gRPC", peer))
            ours, theirs = rates
            what = f"gRPC, 1 row, connections: {connections}"
            yield Line(what, "requests/s", ours, peer, theirs, case[f"gRPC over {peer}"], "serve")
    native = _result("native_models")["model"]["requests per second"]
    what = "a DLRM of 26 lists, 64 rows, looked up in C"
    yield Line(
        what,
        "requests/s",
        native["native"],
        "in TensorFlow",
        native["tensorflow"],
        native["native / tensorflow"],
        "native_models",
    )
    redis = _result("redis")
    for kind in ("one server", "cluster"):
        for case in ("26 x 1 rows", "26 x 256 rows"):
            times = {client: redis[kind][case][f"{client}, read"]["ms"] for client in ("redis-py", "valkey-glide")}
            what = f"{case} from Redis, {kind}, with redis-py"
            yield _faster(what, "ms", times["redis-py"], "valkey-glide", times["valkey-glide"], "redis")
    load = _result("load")["seconds to the first answer"]["server"]
    yield _faster("load 6 GiB, layout mmap", "s", load["mmap"], "layout variables", load["variables"], "load")


def _rates(what: str, case: Mapping[str, Any], peers: list[str]) -> Iterator[Line]:
    for peer in peers:
        ours, theirs = (case[one]["requests_per_second"] for one in ("tpuembed", peer))
        yield Line(what, "requests/s", ours, peer, theirs, case[f"over {peer}"], "serve")


def _notes() -> Iterator[str]:
    bad = _result("serve")["1 of 16 clients sends bad ids"]
    yield (
        "## What the lines mean\n\n"
        "- The layer updates the rows of a step. Keras and keras-rs update the whole table.\n"
        "- An echo returns fixed bytes and reads no request: no server of its library can be faster. Naive runs each request\n"
        "  alone. The model of grpc.aio is the shortest server that parses, runs and answers.\n"
        f"- When 1 of 16 clients sends bad ids, {bad['good requests failed']} requests of the others fail. They get "
        f"{bad['good throughput, ratio']:.2f} of their rate without it.\n"
    )


if __name__ == "__main__":
    main()
