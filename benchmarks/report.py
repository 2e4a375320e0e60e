"""docs/performance.md, written from the JSON in results/: `python -m benchmarks.report`.

The page states ratios to a peer or a limit of the same run, and figures beside them for scale.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, PAGE = HERE / "results", HERE.parent / "docs" / "performance.md"

HEAD = """# Performance

`python -m benchmarks` measures, and `python -m benchmarks.report` writes this page from `benchmarks/results/`.

- Every number has a peer or a limit beside it. Both were measured in the same run, in turns. Numbers are medians of the rounds.
- Compare the ratios. The figures are those of a virtual machine with 2 cores, which also ran the clients.
- Rounds differ by 30%, because other machines share the disk and the processors.
"""

Row = Sequence[object]

_GRPC = ("tpuembed, gRPC", "grpc.aio echo", "grpc.aio model")
_TRAINERS = ("tpuembed", "keras", "keras_rs")


def main() -> None:
    """Write the page."""
    parts = [HEAD, *_ratios(), *_training(), *_exports(), *_fresh()]
    parts += [
        *_loads(),
        *_lookups(),
        *_retrieval(),
        *_two_towers(),
        *_overlays(),
        *_servers(),
        *_grpc(),
        *_redis(),
        *_tools(),
    ]
    PAGE.write_text("\n".join(parts))


def _result(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _table(head: Row, rows: Sequence[Row]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# ---- the ratios


def _ratios() -> Iterator[str]:
    """How many times faster than the peer."""
    yield "## Times faster than the peer or the limit (1 is as fast)\n"
    yield _table(["measured / peer or limit", "times faster"], [[name, f"{value:.2f}"] for name, value in _bars()])


def _bars() -> Iterator[tuple[str, float]]:
    training = _result("train_step")
    if training:
        yield "training step, 10 thousand rows / keras-rs", training["adam, vocabulary 10000"]["keras_rs / tpuembed"]
    export = _result("export")
    if export:
        seconds = {one["name"]: one["seconds"] for one in export["streaming"]["contenders"]}
        best = _best_cp(export["streaming"])
        yield "export / the best cp", best / seconds["export, 2 workers, float32"]
        yield "export from SparseCores / the best cp", best / seconds["export, 2 workers, float32, from 32 SparseCores"]
        yield "export / TensorFlow's", export["beside TensorFlow's restore-and-save"]["ratio"]["seconds"]
    lookups = _result("lookups")
    if lookups:
        small, large = lookups["batch 1, hotness 1, caller's thread"], lookups["batch 4096, hotness 1"]
        peer = "embedding_lookup_sparse, at its best / packed"
        yield "lookup of 1 / TensorFlow's", small[peer]
        yield "lookup of 4096 / TensorFlow's", large[peer]
    for name in ("serve", "serve_2"):
        for peer, ratio in _over(_result(name).get("1 row, 64 connections", {})):
            yield f"server, {_result(name)['workers']} worker(s) / {peer}", ratio
    grpc = _result("serve_grpc")
    if grpc:
        for connections in (16, 64):
            case = grpc[f"1 row, {connections} connections"]
            for peer in _GRPC[1:]:
                yield f"server, gRPC, {connections} connections / {peer}", case[f"gRPC over {peer}"]


def _best_cp(streams: Mapping[str, Any]) -> float:
    """Return the seconds of the fastest `cp` of the run."""
    return min(next(one["seconds_of_rounds"] for one in streams["contenders"] if one["name"] == "cp"))


def _over(case: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    return ((key.removeprefix("over "), value) for key, value in case.items() if key.startswith("over "))


# ---- the tables


def _training() -> Iterator[str]:
    found = _result("train_step")
    if not found:
        return
    yield "## A training step of 4,096 ids, width 32 (`benchmarks/train_step.py`)\n"
    rows = []
    for case, one in found.items():
        optimizer, vocabulary = case.split(", vocabulary ")
        times = [f"{one[f'{name}_ms']:,.1f}" for name in _TRAINERS]
        peaks = [f"{one[f'{name}_peak_tables']:.1f}" if f"{name}_peak_tables" in one else "" for name in _TRAINERS]
        rows.append((optimizer, f"{int(vocabulary):,}", *times, f"{one['keras_rs / tpuembed']:.1f}", *peaks))
    head = ("optimizer", "rows", "tpuembed, ms", "Keras, ms", "keras-rs, ms", "keras-rs / tpuembed")
    yield _table((*head, "tpuembed, tables", "Keras, tables", "keras-rs, tables"), rows)
    yield (
        'The layer updates the rows of a step. Keras and keras-rs update the whole table. "Tables" is the peak of memory, in '
        "sizes of the table: Adam needs 3 and Adagrad 2 for the table and its slots. It is not measured for small tables.\n"
    )
    yield from _gpu()
    yield from _tracking()
    yield from _names()


def _gpu() -> Iterator[str]:
    found = _result("gpu")
    if not found:
        return
    yield f"## A training step on a GPU, width 32: {found['GPU']} (`benchmarks/gpu.py`)\n"
    rows = []
    for case, one in found.items():
        if not isinstance(one, dict) or case == "checks":
            continue
        optimizer, vocabulary, batch = (part.split()[-1] for part in case.split(", "))
        times = [f"{one[f'{name}_ms']:,.2f}" for name in ("tpuembed GPU", "keras GPU", "tpuembed CPU", "keras CPU")]
        ratios = [f"{one[name]:.2f}" for name in ("keras / tpuembed, GPU", "CPU / GPU, tpuembed")]
        peaks = [
            f"{one[key]:.1f}" if (key := f"{name} GPU_peak_tables") in one else "" for name in ("tpuembed", "keras")
        ]
        rows.append((optimizer, f"{int(vocabulary):,}", f"{int(batch):,}", *times, *ratios, *peaks))
    head = ("optimizer", "rows", "ids", "tpuembed GPU, ms", "Keras GPU, ms", "tpuembed CPU, ms", "Keras CPU, ms")
    yield _table((*head, "Keras / tpuembed, GPU", "CPU / GPU, tpuembed", "tpuembed, tables", "Keras, tables"), rows)
    yield (
        "The CPU is that of the GPU's machine, with 16 cores. The layer's step on the GPU takes the same time for every size. "
        "So Keras is faster with Adam and a table of 10 thousand rows, and a GPU gains little for 4,096 ids.\n"
    )


def _names() -> Iterator[str]:
    found = _result("names")
    if found:
        peers = ("int64 names", "string names", "keras StringLookup")
        yield f"## A training step with names, {found['rows']:,} rows, Adam, width {found['dim']} (`benchmarks/names.py`)\n"
        cases = {name: one for name, one in found.items() if name.endswith(" ids")}
        rows = [
            (f"{int(name.removesuffix(' ids')):,}", one["ids ms"], *(f"{one[f'{peer} / ids']:.2f}" for peer in peers))
            for name, one in cases.items()
        ]
        yield _table(("ids of a step", "row numbers, ms", *(f"{peer} / row numbers" for peer in peers)), rows)
        yield "The last column has Keras' lookup before a layer of row numbers. All names of the steps are known.\n"
    found = _result("vocabularies")
    if not found:
        return
    yield "## Names in a SavedModel, in a fresh process with one thread (`benchmarks/vocabularies.py`)\n"
    rows = [
        (
            f"{int(case.removesuffix(' names')):,}",
            name,
            f"{one['load s']:.2f}",
            f"{one['load CPU s']:.2f}",
            *(_number(one[key]) for key in ("private MiB", "ns per name", "MiB on disk")),
        )
        for case, by_name in found.items()
        if case.endswith(" names")
        for name, one in by_name.items()
        if isinstance(one, dict)
    ]
    yield _table(("names", "", "load, s", "CPU of the load, s", "private MiB", "ns a name", "MiB on the disk"), rows)
    yield (
        "The export maps its files, so processes and versions share their memory, and a load reads nothing. Small vocabularies are "
        "found faster in TensorFlow's hash tables.\n"
    )


def _retrieval() -> Iterator[str]:
    found = _result("retrieval")
    if not found:
        return
    yield f"## The best 10 of {found['candidates']:,} candidates, width {found['width']}, one thread (`benchmarks/retrieval.py`)\n"
    columns = ("us per query, batch 1", "us per query, batch 16")
    contenders = found["contenders"]
    rows = []
    for name, one in contenders.items():
        peer = contenders.get("faiss Flat, exact" if "exact" in name else "faiss IVFFlat", {})
        over = [f"{one[column] / peer[column]:.2f}" if peer else "" for column in columns]
        rows.append((name, f"{one['recall']:.3f}", *(_number(one[column]) for column in columns), *over))
    yield _table(("", "recall", "us a query alone", "us a query of 16", "alone / faiss", "of 16 / faiss"), rows)
    loads = found["load s of our server, mapped"]
    yield (
        f"Processor time. Our index has {found['partitions']} partitions, and a search reads {found['nprobe']}. Others search as "
        "little as finds as much. Exact searches are beside faiss' flat index. Our server runs the query's model in TensorFlow "
        f"first. It loads the mapped exports in {' and '.join(f'{s:.2f} s ({kind})' for kind, s in loads.items())}.\n"
    )


def _two_towers() -> Iterator[str]:
    found = _result("two_towers")
    if not found:
        return
    yield f"## Two towers on MovieLens 100K, {found['epochs']} epochs (`benchmarks/two_towers.py`)\n"
    contenders = [name for name in ("tpuembed", "TensorFlow Recommenders") if name in found]
    rows = [
        (
            name.replace("train s", "training, s"),
            *(f"{found[one][name]['mean']:.4g} ± {found[one][name]['spread'] / 2:.2g}" for one in contenders),
        )
        for name in found["tpuembed"]
    ]
    yield _table(("share of test pairs found among the best", *contenders), rows)
    yield (
        'The model of TensorFlow Recommenders\' tutorial "basic retrieval", with each library, on the same splits. The mean of '
        f"{found['seeds']} seeds; ± is half of the largest difference between them.\n"
    )


def _tracking() -> Iterator[str]:
    found = _result("tracking")
    if not found:
        return
    yield f"## A training step with `track_rows=True`, Adam, width {found['dim']} (`benchmarks/tracking.py`)\n"
    cases = {name: one for name, one in found.items() if name.endswith(" ids")}
    rows = [
        (f"{int(name.removesuffix(' ids')):,}", one["plain ms"], one["tracked ms"], one["tracked / plain"])
        for name, one in cases.items()
    ]
    yield _table(("ids", "without, ms", "with, ms", "with / without"), rows)


def _fresh() -> Iterator[str]:
    found = _result("fresh")
    if not found:
        return
    yield "## From a training step to the first answer with its rows (`benchmarks/fresh.py`)\n"
    yield (
        f"A table of {found['table GB']:.0f} GB; each step changes {found['rows changed a step']:,} rows. ExportCallback publishes "
        f"an overlay, and a server that looks for versions every 0.2 s loads it: {found['seconds median']} s, of which the export "
        f"takes {found['of it export']} s. The full export of the same table takes {found['full export']} s until it is "
        "published.\n"
    )
    rows = list(zip(found["rows in the overlay"], found["seconds"], found["bytes written / full"], strict=True))
    yield _table(
        ("rows in the overlay", "seconds", "bytes written / full export"),
        [(f"{count:,}", seconds, share) for count, seconds, share in rows],
    )


def _exports() -> Iterator[str]:
    found = _result("export")
    if not found:
        return
    streams = found["streaming"]
    yield f"## Streaming a table of {streams['bytes'] / (1 << 30):.0f} GiB, fsynced (`benchmarks/export.py`)\n"
    rows = [
        (one["name"], one["seconds"], " to ".join(map(str, one["seconds_min_max"])), one["times_cp"],
         "" if one["worker_peak_rss_mb"] is None else f"{one['worker_peak_rss_mb']:.0f}")
        for one in streams["contenders"]
    ]  # fmt: skip
    yield _table(("", "seconds", "least to most", "rate / cp's", "peak of a worker, MB"), rows)
    yield (
        "All start after a rest, when a virtual machine's free memory has gone back to its host. That costs `cp` most. So the "
        f"chart compares with the fastest `cp` of the run, which took {_best_cp(streams):.1f} s.\n"
    )
    yield "Whole exports, by the command:\n"
    whole = found["whole exports"]
    yield _table(
        ("GiB", "seconds", "of which streaming", "peak of the command, MB", "peak of a worker, MB"),
        [
            (one["gib"], one["seconds"], one["stream_seconds"], one["peak_rss_mb"], one["worker_peak_rss_mb"])
            for one in whole
        ],
    )
    peer = found["beside TensorFlow's restore-and-save"]
    yield f"TensorFlow's restore-and-save of {peer['gib']} GiB, in turns with the command:\n"
    beside = [(name, peer[name]["seconds"], peer[name]["peak_rss_mb"]) for name in ("export", "TensorFlow", "ratio")]
    yield _table(("", "seconds", "peak, MB"), beside)


def _loads() -> Iterator[str]:
    found = _result("load")
    if not found:
        return
    yield f"## Load and first answer, {found['bytes'] / (1 << 30):.0f} GiB (`benchmarks/load.py`)\n"
    times, ratios = found["seconds to the first answer"], found["variables / mmap"]
    rows = [(loader, each["variables"], each["mmap"], ratios[loader]) for loader, each in times.items()]
    yield _table(("", "variables, s", "mmap, s", "variables / mmap"), rows)
    if lists := found.get("26 features of lists"):
        yield (
            f"26 features of lists, whose graph is most of the load, layout mmap: C API {lists['C API']} s, server "
            f"{lists['server']} s (ratio {lists['server / C API']}).\n"
        )
    yield (
        "".join(f"Two serving processes: {name} {_number(value)}. " for name, value in found["two processes"].items())
        + "\n"
    )


def _lookups() -> Iterator[str]:
    for name, threads in (("lookups", "one thread"), ("lookups_2", "two threads")):
        cases = {case: each for case, each in _result(name).items() if isinstance(each, dict)}
        if cases:
            yield f"## Lookups: 26 tables of 100,000 x 64, {threads}, microseconds (`benchmarks/lookups.py`)\n"
            yield _lookup_table(cases)

    peers = {case: each for case, each in _result("lookups_torch").items() if isinstance(each, dict)}
    if peers:
        yield "## Native lookups beside torch: the same tables, one thread, microseconds (`benchmarks/lookups_torch.py`)\n"
        names = list(next(iter(peers.values()))["us"])
        rows = [
            (
                case,
                *(_number(each["us"][name]) for name in names),
                *(f"{each[f'{name} / native']:.2f}" for name in names[1:]),
            )
            for case, each in peers.items()
        ]
        yield _table(("", *names, *(f"{name} / native" for name in names[1:])), rows)
        yield "Ratios above 1: native is faster. `embedding_bag` is called for each feature, and FBGEMM once for all.\n"


def _lookup_table(cases: dict[str, Any]) -> str:
    names = [
        "packed",
        "packed lists",
        "native",
        "C bound",
        "serving_default",
        "embedding_lookup_sparse, at its best",
        "serving_embedding_lookup, at its best",
    ]
    rows = [
        (case, *(_number(each["us"][name]) if name in each["us"] else "" for name in names))
        for case, each in cases.items()
    ]
    return _table(("", *names), rows)


def _overlays() -> Iterator[str]:
    found = _result("overlay")
    if found:
        size = found["rows"] * found["dim"] * 4 / 1e9
        yield f"## Overlays of a table of {size:.1f} GB (`benchmarks/overlay.py`)\n"
        yield "A lookup of random ids with TensorFlow's operations, one thread. An overlay of 1% has 1% of the ids:\n"
        names = ("plain", "overlay of 1%", "overlay of 10%")
        lookups = {case: each for case, each in found.items() if case.endswith(" ids")}
        rows: list[Row] = [
            (case, *(_number(each["us"][name]) for name in names), *(each[f"{name} / plain"] for name in names[1:]))
            for case, each in lookups.items()
        ]
        yield _table(("", *(f"{name}, microseconds" for name in names), "1% / plain", "10% / plain"), rows)
        yield "Load and first answer:\n"
        loads = {case.removeprefix("load, "): each for case, each in found.items() if case.startswith("load, ")}
        rows = [
            (
                case,
                *(_number(each["seconds"][name]) for name in names),
                *(each[f"{name} / plain"] for name in names[1:]),
            )
            for case, each in loads.items()
        ]
        yield _table(("", *(f"{name}, s" for name in names), "1% / plain", "10% / plain"), rows)
    found = _result("overlay_soak")
    if found:
        yield "## A delta every three seconds, under load (`benchmarks/overlay_soak.py`)\n"
        windows = found["windows"]
        keys = ("count", "requests_per_second", "p50_ms", "p99_ms")
        yield _table(
            ("windows of a second", "count", "requests per second", "p50, ms", "p99, ms"),
            [(name, *(each[key] for key in keys)) for name, each in windows.items()],
        )
        yield (
            f"{found['deltas']} deltas in {found['minutes']:g} minutes, {found['requests']:,} requests over {found['connections']} "
            f"connections: {found['requests failed']} failed. Of {found['answers compared']:,} answers that were compared with the "
            f"rows of the live versions, {found['answers of no live version']} differed. The server's own memory: "
            f"{found['memory MB, after swap 10']:.0f} MB after ten deltas, {found['memory MB, at the end']:.0f} MB at the end, "
            f"{found['memory MB, most']:.0f} MB at most. p99 with a swap / without: {found['p99 with a swap / without']}. "
            "`tpuembed apply` and the client ran on the same 2 cores.\n"
        )


def _redis() -> Iterator[str]:
    found = _result("redis")
    if not found:
        return
    yield f"## Rows from Redis: {found['rows']:,} rows of {found['dim']} float32 (`benchmarks/redis.py`)\n"
    columns = ("ms", "client CPU ms", "server CPU ms", "rows/s of a client core")
    rows = [
        (
            f"{kind}, {case}",
            *(_number(each[f"{name} {column}"]) for column in columns for name in ("tpuembed", "redis-py")),
            f"{each['redis-py / tpuembed, client CPU ms']:.2f}",
        )
        for kind in ("one server", "cluster")
        for case, each in found[kind].items()
    ]
    heads = [f"{name}, {column}" for column in columns for name in ("tpuembed", "redis-py")]
    yield _table(("", *heads, "redis-py / tpuembed, client CPU"), rows)
    yield (
        "redis-py reads with `mget`, and in the cluster of three masters with `mget_nonatomic`. Clients and servers share two "
        "cores.\n"
    )


def _tools() -> Iterator[str]:
    found = _result("native_models")
    if found:
        yield "## 26 lists of 20 ids: the C library beside TensorFlow, in the server (`benchmarks/native_models.py`)\n"
        kinds = {
            "lookups": "an export of lookups",
            "model": "a DLRM",
            "model with 5 lists": "a DLRM with 5 lists",
            "model without lists": "a DLRM without lists",
        }
        keys = ("native", "tensorflow", "native / tensorflow")
        rows = [
            (f"{kind}, 64 rows, requests per second", *(found[name]["requests per second"][key] for key in keys))
            for name, kind in kinds.items()
            if "requests per second" in found[name]
        ]
        rows += [
            (f"{kind}, {size.replace(' x ', ' rows, lists of ')}, CPU ms of a call", *(taken[key] for key in keys))
            for name, kind in kinds.items()
            for size, taken in found[name]["CPU ms of a call"].items()
        ]
        yield _table(("", *keys), rows)
        yield (
            "Ratios are times faster. A call is on one thread, in the process itself. The server's clients are on the same "
            "machine.\n"
        )
    found = _result("cold_rows")
    if found:
        yield f"## {found['rows']:,} rows of {found['GB']} GB that are not in memory (`benchmarks/cold_rows.py`)\n"
        rows = [
            (way, took, " to ".join(map(str, found["least and most ms"][way]))) for way, took in found["ms"].items()
        ]
        yield _table(("", "ms, median", "least to most"), rows)
        ratio = found["one page for each fault / read-ahead"]
        yield (
            f"One page for each fault / read-ahead: {ratio}. Before there was read-ahead, `--random-access` read one page for each "
            f"fault. Read-ahead / the disk, whose pages 32 threads read without a lookup: {found['read-ahead / the disk']}.\n"
        )
    found = _result("stats")
    if found:
        yield f"## `tpuembed stats` and `tpuembed verify` of {found['GB']} GB in the page cache (`benchmarks/stats.py`)\n"
        rows = [(name, found[f"{name} GB/s"], found[f"{name} peak MB"]) for name in ("stats", "verify")]
        yield _table(("", "GB/s", "peak memory, MB"), rows)
        yield f"stats / verify: {found['stats / verify']}. It stores every row as each type, and compares it with 256 others.\n"
    found = _result("console")
    if found:
        least, most = found["least and greatest ratio"]
        yield "## Predictions beside open consoles (`benchmarks/console.py`)\n"
        yield (
            f"With {found['pages']} open pages / with none: {found['open / closed']:.3f} of the requests per second, the median of "
            f"{found['rounds']} rounds ({least:.2f} to {most:.2f}), at {found['connections']} connections. "
            f"The pages alone take {found['processors, pages alone']:.1%} of one processor.\n"
        )


def _rates_and_times(cases: Mapping[str, Any], servers: Sequence[str]) -> Iterator[str]:
    rates, times = list[Row](), list[Row]()
    for case, each in cases.items():
        rates.append((case, *(_number(each[server]["requests_per_second"]) for server in servers)))
        times.append((case, *(f"{each[s]['p50_ms']:.3g} / {each[s]['p99_ms']:.3g}" for s in servers)))
    yield _table(("", *servers), rates)
    yield "Milliseconds, p50 / p99:\n"
    yield _table(("", *servers), times)


def _grpc() -> Iterator[str]:
    found = _result("serve_grpc")
    cases = {case: each for case, each in found.items() if isinstance(each, dict) and "tpuembed" in each}
    if not cases:
        return
    yield "## gRPC, requests per second (`benchmarks/serve.py`)\n"
    yield (
        "The echo is a bare grpc.aio server, which answers the same bytes without reading the request. The model is the shortest "
        "grpc.aio server that parses the request, runs the model and builds the answer, each call alone. The client of all is "
        "h2load. REST is the same server in the same run, with wrk.\n"
    )
    names = tuple(f"gRPC over {peer}" for peer in (*_GRPC[1:], "REST"))
    yield _table(
        ("requests per second, ratio of the rounds", *names),
        [(case, *(f"{each[name]:.2f}" for name in names)) for case, each in cases.items()],
    )
    yield from _rates_and_times(cases, ("tpuembed", *_GRPC))


def _servers() -> Iterator[str]:
    plain = _result("serve_plain").get("a plain SavedModel, 1 row, 64 connections")
    for name in ("serve", "serve_2"):
        found = _result(name)
        cases = {case: each for case, each in found.items() if isinstance(each, dict) and "tpuembed" in each}
        if not cases:
            continue
        workers = f"{found['workers']} worker{'s' * (found['workers'] > 1)}"
        yield f"## Servers of one model, {workers} each, requests per second (`benchmarks/serve.py`)\n"
        servers = [key for key, value in next(iter(cases.values())).items() if isinstance(value, dict)]
        yield from _rates_and_times(cases, [server for server in servers if server not in _GRPC])
        bad = found["1 of 16 clients sends bad ids"]
        yield (
            f"With bad ids from 1 of 16 clients {bad['good requests failed']} good requests failed, and the others' rate was "
            f"{bad['good throughput, ratio']:.2f} of what it was without. A call of 1 row in the process itself: "
            f"{found['1 row, 1 connection']['in-process call_ms']:.3f} ms; p99 at 16 connections in the best round: "
            f"{found['1 row, 16 connections']['best p99_ms']} ms.\n"
        )
    if plain:
        rates = [_number(plain[server]["requests_per_second"]) for server in ("tpuembed", "naive")]
        yield "## A SavedModel that Keras saved (`benchmarks/serve.py`)\n"
        yield (
            f"1 worker, default options, 1 row, 64 connections: {rates[0]} requests per second. The naive server, which runs each "
            f"request by itself: {rates[1]}. The ratio of the rounds is {plain['over naive']:.1f}.\n"
        )


if __name__ == "__main__":
    main()
