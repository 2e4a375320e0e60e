"""Rows of a table as files of TensorBoard's projector, which shows them as points."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tpuembed.checkpoint.tools import stream_rows
from tpuembed.checkpoint.tools.exports import first_row, open_tables
from tpuembed.checkpoint.types import Array
from tpuembed.errors import ConfigError, reason
from tpuembed.files import FilePath

__all__ = ["ProjectorFiles", "write_projector"]

_TENSORS: Final = "tensors.bytes"
_METADATA: Final = "metadata.tsv"
_CONFIG: Final = "projector_config.pbtxt"
_DEFAULT_ROWS: Final = 10_000


@dataclasses.dataclass(frozen=True)
class ProjectorFiles:
    """What was written in `folder`: `rows` rows of width `dim`, from `first_row` on, or a sample of the rows from there on."""

    folder: Path
    first_row: int
    rows: int
    dim: int


def write_projector(
    path: str | FilePath,
    table: str,
    folder: str | Path,
    start: int | None = None,
    stop: int | None = None,
    *,
    sample: int | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> ProjectorFiles:
    """Write rows [start, stop) of a table, with their numbers and norms, for `tensorboard --logdir FOLDER`.

    The config is written last. Source: tensorboard/plugins/projector/projector_config.proto.

    Args:
        path: as for `open_checkpoint`; or a version of an export, or a MODEL_DIR, whose highest version is read.
        table: its name.
        folder: is created. Must not have a projector_config.pbtxt.
        start: None is the first existing row.
        stop: None is 10,000 rows after `start`, or the table's end. TensorBoard shows up to 100,000 points.
        sample: write this many random rows of them, the same in each call. Without `stop`, they are of the whole table.
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        ConfigError: the folder has a config, or cannot be written; or `sample` is below 1.
        UnknownTableError, RowRangeError, TpuEmbedError: as `stream_rows`.
    """
    folder = Path(folder)
    if (folder / _CONFIG).exists():
        raise ConfigError(f"folder {folder}: contains {_CONFIG}. Give another folder, or remove the file")
    if sample is not None and sample < 1:
        raise ConfigError(f"sample must be 1 or more rows, got {sample}")
    with open_tables(path, checkpoint_options or {}) as tables:
        info = tables.tables().get(table)
        start = first_row(tables, table) if start is None else start
        if stop is None:
            stop = start if info is None else info.rows if sample else min(start + _DEFAULT_ROWS, info.rows)
    pieces = stream_rows(path, table, start, stop, checkpoint_options=checkpoint_options)
    first = next(pieces)
    if not first.values.size:
        raise ConfigError(f"{path}: table {table!r}: has no rows in [{start}, {stop}). Give rows that it has")
    count, dim = min(sample or stop - start, stop - start), first.values.shape[1]
    blocks: Iterator[tuple[Iterable[int], Array]] = (
        (itertools.count(piece.start), piece.values) for piece in itertools.chain([first], pieces)
    )
    if sample:
        blocks = _drawn(path, table, range(start, stop), count, checkpoint_options or {})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / _TENSORS).open("wb") as tensors, (folder / _METADATA).open("w", encoding="utf-8") as metadata:
            metadata.write("row\tnorm\n")
            for numbers, rows in blocks:
                values = np.ascontiguousarray(rows, "<f4")
                tensors.write(values.data)
                norms = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
                metadata.writelines(f"{row}\t{norm:.6g}\n" for row, norm in zip(numbers, norms.tolist(), strict=False))
        config = (
            "embeddings {\n"
            f"  tensor_name: {json.dumps(table, ensure_ascii=False)}\n"
            f"  tensor_shape: {count}\n"
            f"  tensor_shape: {dim}\n"
            f'  tensor_path: "{_TENSORS}"\n'
            f'  metadata_path: "{_METADATA}"\n'
            "}\n"
        )
        (folder / _CONFIG).write_text(config, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"folder {folder}: cannot be written: {reason(error)}") from None
    return ProjectorFiles(folder, start, count, dim)


def _drawn(
    path: str | FilePath, table: str, rows: range, count: int, options: Mapping[str, Any]
) -> Iterator[tuple[Iterable[int], Array]]:
    """Yield `count` random ones of the rows by number, in ascending order."""
    drawn = np.random.default_rng(0).choice(len(rows), count, replace=False, shuffle=False)
    with open_tables(path, options) as tables:
        for row in (np.sort(drawn) + rows.start).tolist():
            yield (row,), tables.read(table, row, row + 1)
