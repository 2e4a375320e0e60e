"""The document of the proof, rendered from its results: the same text for the same results, but for one line with the time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from tests.tpu import shims
from tests.tpu.broken import BROKEN
from tests.tpu.cells import DLRM, DLRM_CELLS, NO_LOOP, Cell
from tests.tpu.checks import CHECKS
from tests.tpu.controls import controls_of
from tests.tpu.environments import JAX, TENSORFLOW_TPU
from tests.tpu.expected import DEFAULT_LIMIT
from tests.tpu.host import check_buffers_of_hosts, check_stamps_of_host

__all__ = ["SENTENCE", "rendered"]

SENTENCE: Final = "traced, lowered, compiled by libtpu for these chips, simulated numerically; never executed on a TPU"
"""What README.md, docs/layer.md and docs/tpu-proof.md say too."""

_HEAD = f"""# The TPU proof

The TPU path is {SENTENCE}.

`make tpu-proof` writes this report. It makes two environments of pinned wheels under `.tpu-proof/`, compares their
versions and files with the pins and the wheels' RECORDs, and takes the step that `tpuembed.TPUEmbedding` traces through three
stages, each in processes of its own:

1. **trace**: the real layer in the scope of a real TPUStrategy over a made-up cluster, called in `strategy.run` in a `tf.function`:
   a dense layer on top, a loss, `tf.GradientTape`, a Keras optimizer; or the loss alone (evaluation).
2. **lower**: TensorFlow's own bridge, the one that a TPU's host runs (`tf-replicated-clustering-bridge-v2`), takes the hosts'
   work out, runs the pipelining and sequencing passes of embeddings and leaves TPU programs, of which TensorFlow's TPU kernels
   make StableHLO.
3. **compile**: libtpu compiles every program for the named chip.

Between lowering and compiling, checks of the lowered text show that the step is the one that was asked for.
"""
_PATHS: Final = {"sparsecore": "on SparseCores", "replicated": "replicated"}
_NOT_PROVEN = """## What is not proven

- The numbers that a TPU computes, and its rounding. The simulator's are compared elsewhere (`tests/tpu/numbers`), with TensorFlow's
  own host kernels and with the rules of the lowered programs run on a CPU.
- The V1 engine (TPU v2 to v4 with embedding hardware): its ops have no kernel outside the TPU's runtime. Each field of its
  configuration is compared with TensorFlow's protos (`tests/tpu/v1`).
- TPU v4 with its embedding hardware: its cells above replicate the tables.
- Real collectives between TPUs: programs of 4 replicas compile; nothing is exchanged.
- `TPUCopyWithDynamicShape`: the bridge moves it to the hosts; buffers get the size of their bound.
- That pipelined programs overlap: TensorFlow's pass splits the loop into the programs above, which compile; their order on a TPU,
  and the staleness of what they look up, is TensorFlow's.
- Minibatches: what divides ids into them on a TPU's host asks the TPU's library. TensorFlow 2.19's class divides none.
- The rest of TensorFlow's bridge (the compile and execute ops of the runtime), other versions than those above, several hosts.
- Speed on hardware. Bytes and counts above are the compiler's.
"""
_OURS = (
    (
        "rows that the SparseCores of all replicas cannot share",
        "`check_shards`",
        "tests/unit/backends/test_stacked_table.py",
    ),
    (
        "samples that a chip's SparseCores cannot share",
        "`SparseCoreBackend`",
        "tests/unit/testing/test_simulated_checkpoints.py",
    ),
    (
        "buffers and row pointers of another length",
        "`lengths_of_buffers`, above",
        "`short_buffer` and `pointers_for_ids`, below",
    ),
    ("ids beyond the limits, or without room in a buffer", "the hosts' ops, and `ids_with_room`", "tests/tpu/numbers"),
    ("ids outside of their table", "`ids_inside`, on the hosts", "tests/tpu/numbers"),
    (
        "a pipelined step outside of a loop (TensorFlow does, below the layer)",
        "`check_loop`",
        "tests/unit/backends/test_tpu_traces.py",
    ),
)


def rendered(results: Mapping[str, Any]) -> str:
    """The page.

    Args:
        results: what `proof` found: "seconds", "cells", "failures", "controls", "no_loop", "broken", "dlrm".
    """
    parts = [
        _HEAD,
        _versions(),
        f"Wall time of the last run: {results['seconds']} seconds.\n",
        _shims(),
        _cells(results),
        _checks(),
        _controls(results),
        _unchecked(),
        _broken(results),
        _dlrm(results),
        _NOT_PROVEN,
    ]
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _versions() -> str:
    def pins(environment: Any) -> str:
        wanted = ("tensorflow-tpu", "keras", "jax", "jaxlib", "libtpu")
        return ", ".join(f"{name} {version}" for name, version in environment.pins().items() if name in wanted)

    return _table(
        ["environment", "wheels"],
        [("trace and lower", pins(TENSORFLOW_TPU)), ("compile", pins(JAX))],
    )


def _shims() -> str:
    rows = [(f"`{name}`", shims.sentence(name)) for name in shims.SHIMS]
    return "## What stands between `strategy.run` and the compiler\n\n" + _table(["shim", "what it does"], rows)


def _cells(results: Mapping[str, Any]) -> str:
    head = [
        "chip",
        "tables are",
        "replicas",
        "optimizer",
        "tables",
        "combiner",
        "weights",
        "pipelined",
        "rows tracked",
        "step",
        "result",
    ]
    rows = [_row(cell, results) for cell in results["cells"]]
    return f"## Steps: {len(rows)} cells\n\n" + _table(head, rows)


def _row(cell: Cell, results: Mapping[str, Any]) -> list[object]:
    return [
        cell.chip,
        _tables_are(cell),
        cell.replicas,
        cell.optimizer,
        cell.tables,
        cell.combiner,
        _yes(cell.weighted),
        _yes(cell.pipelining),
        _yes(cell.tracked),
        "training" if cell.training else "evaluation",
        _verdict(cell, results),
    ]


def _tables_are(cell: Cell) -> str:
    return _PATHS[cell.path]


def _verdict(cell: Cell, results: Mapping[str, Any]) -> str:
    if cell.name in results["failures"]:
        return f"FAILED: {_quoted(results['failures'][cell.name])}"
    programs = results["compiled"][cell.name]["programs"]
    starts = sum(program["sparse_core_starts"] for program in programs.values())
    of = "1 program" if len(programs) == 1 else f"{len(programs)} programs"
    return f"compiled: {of}, {starts} starts on SparseCores" if starts else f"compiled: {of}"


def _yes(value: bool) -> str:
    return "yes" if value else ""


def _checks() -> str:
    checks: list[Callable[..., Any]] = [check for of_path in CHECKS.values() for check in of_path]
    checks += [check_buffers_of_hosts, check_stamps_of_host]
    unique = list(dict.fromkeys(checks))
    rows = [(f"`{check.__name__}`", _paths(check), _first(check)) for check in unique]
    return "## Checks of the lowered steps\n\n" + _table(["check", "of tables", "what holds"], rows)


def _paths(check: Callable[..., Any]) -> str:
    names = [name for path, name in _PATHS.items() if check in CHECKS[path]]
    return ", ".join(names) or "on SparseCores, not pipelined"


def _first(function: Callable[..., Any]) -> str:
    return " ".join((function.__doc__ or "").split("\n\n")[0].split())


def _controls(results: Mapping[str, Any]) -> str:
    rows = [
        (cell.chip, _tables_are(cell), control.name, _quoted(refusals.get(control.name, "")) or "ACCEPTED")
        for cell, refusals in results["controls"]
        for control in controls_of(cell.path)
    ]
    no_loop = (NO_LOOP.chip, _tables_are(NO_LOOP), "pipelining without a loop, which the layer refuses first")
    rows.append((*no_loop, _quoted(results["no_loop"]) or "ACCEPTED"))
    head = ["chip", "tables are", "step of the layer, changed", "refusal"]
    return "## What is refused, as it must be\n\n" + _table(head, rows)


def _quoted(text: str) -> str:
    short = " ".join(text.split())[:220].replace("`", "'")
    return f"`{short}`" if short else ""


def _unchecked() -> str:
    return "## What the compiler does not check, and we do\n\n" + _table(["what", "where", "shown by"], _OURS)


def _broken(results: Mapping[str, Any]) -> str:
    rows = [
        (f"`{name}`", one.breaks, f"`{one.check}`", results["broken"].get(name, "not run"))
        for name, one in BROKEN.items()
    ]
    return "## The layer, deliberately broken\n\n" + _table(["variant", "what is wrong", "check", "caught"], rows)


def _dlrm(results: Mapping[str, Any]) -> str:
    head = ["chip", "pipelined", "program", "starts on SparseCores", *_MEMORY]
    rows = [row for cell in DLRM_CELLS for row in _programs(cell, results)]
    return f"## A larger model, as the compiler sees it\n\n{_ABOUT_DLRM}\n" + _table(head, rows)


_MEMORY: Final = ("generated_code", "argument", "output", "alias", "temp", "peak")


_ABOUT_DLRM = f"""{len(DLRM.tables)} tables of width {DLRM.tables[0].dim} (1,000 to 7,000 rows), one id each, Adagrad, one replica
of {DLRM.batch} examples. Bytes of one TPU as the compiler gives them; `alias` are arguments that are updated in place, `peak` is
what is in use at most. `starts` are the instructions that a program starts on the thread of the SparseCores ("sparsecore", the only
such thread that the compiler names), beside its own. Programs of a pipelined step do not all run in every step. Limits of ids
are TensorFlow's default, {DEFAULT_LIMIT} of a stack from one SparseCore to another.
"""


def _programs(cell: Cell, results: Mapping[str, Any]) -> Iterator[list[object]]:
    if cell.name in results["failures"]:
        yield [*_flags(cell), f"FAILED: {_quoted(results['failures'][cell.name])}", *[""] * (1 + len(_MEMORY))]
        return
    for number, facts in enumerate(results["compiled"][cell.name]["programs"].values(), 1):
        yield [*_flags(cell), number, *_facts(facts)]


def _flags(cell: Cell) -> list[object]:
    return [cell.chip, _yes(cell.pipelining)]


def _facts(facts: Mapping[str, Any]) -> list[object]:
    return [facts.get("sparse_core_starts", ""), *(_grouped(facts["memory"].get(kind)) for kind in _MEMORY)]


def _grouped(number: int | None) -> str:
    """With commas; "" where it was not measured."""
    return "" if number is None else f"{number:,}"
