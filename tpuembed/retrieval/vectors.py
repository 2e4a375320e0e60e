"""Writes vectors with their ids into files for other systems."""

import contextlib
import dataclasses
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from tpuembed.checkpoint.tools import find_export
from tpuembed.checkpoint.tools.exports import first_row, open_tables
from tpuembed.errors import ConfigError, MissingExtraError, reason
from tpuembed.files import FilePath
from tpuembed.retrieval.candidates import CandidateBatch, Ids, of_table
from tpuembed.retrieval.opened import OpenedRetrieval

__all__ = ["VectorsReport", "write_vectors"]

_HEADER_BYTES: Final = 128
"""Of a .npy file: enough for two numbers of 20 digits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VectorsReport:
    """Vectors in files.

    Attributes:
        path: the file of the vectors.
        ids_path: the file of the ids; `path` itself for Parquet.
        table: whose rows they are; None for the candidates of a retrieval.
        count: how many.
        dim: their width.
        ids: the type of the ids: "int64" or "string".
    """

    path: Path
    ids_path: Path
    table: str | None
    count: int
    dim: int
    ids: str

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {**dataclasses.asdict(self), "path": str(self.path), "ids_path": str(self.ids_path)}


def write_vectors(
    path: str | FilePath,
    out: str | Path,
    *,
    table: str | None = None,
    checkpoint_options: Mapping[str, Any] | None = None,
) -> VectorsReport:
    """Write the candidates of a retrieval, or the rows of a table, with their ids.

    Vectors are float32, as they are stored: those of metric "cosine" have the length 1, and int8 rows are decoded. The ids of
    a table are its names, if it has a vocabulary, and else the numbers of the rows.

    Args:
        path: a version of an export, a MODEL_DIR (its highest version), or what `open_checkpoint` takes.
        out: NAME.npy for the vectors, [n, dim], beside NAME.ids.npy, int64 [n], or NAME.ids.txt, a name per line. Or NAME.parquet,
            with the columns `id` and `vector`; this needs pyarrow. An existing file is replaced at the end.
        table: None for the candidates of a retrieval, or the only table.
        checkpoint_options: further arguments of `open_checkpoint`.

    Raises:
        TpuEmbedError: there is no such table, a file cannot be written, or a name is no UTF-8 (Parquet) or has a line break (text).
    """
    target = Path(out)
    if target.suffix not in (".npy", ".parquet"):
        raise ConfigError(f"out {target}: must end in .npy or .parquet.")
    export = find_export(path)
    with open_tables(path, checkpoint_options or {}) as tables:
        if table is None and export is not None and export[1].retrieval is not None:
            found = OpenedRetrieval(*export, tables)
            batches, dim = _candidates(found), found.dim
        else:
            names = sorted(tables.tables())
            if table is None and len(names) != 1:
                raise ConfigError(f"{path}: it has the tables {', '.join(names)}. Name one.")
            table = names[0] if table is None else table
            if table in names and first_row(tables, table):
                raise ConfigError(
                    f"{path}: has rows of table {table!r} from {first_row(tables, table)} on. Export all rows."
                )
            batches = of_table(tables, f"table:{table}", None, None)
            dim = tables.tables()[table].dim if table in names else 0
        with _naming_file(target):
            write = _write_npy if target.suffix == ".npy" else _write_parquet
            ids_path, count, kind = write(batches, target, dim)
    return VectorsReport(path=target, ids_path=ids_path, table=table, count=count, dim=dim, ids=kind)


def _candidates(found: OpenedRetrieval) -> Iterator[CandidateBatch]:
    for first, vectors in found.batches():
        yield CandidateBatch(vectors, found.ids(first, first + len(vectors)), None)


@contextlib.contextmanager
def _naming_file(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"out {path}: cannot be written: {reason(error)}.") from None


@contextlib.contextmanager
def _replacing(*paths: Path) -> Iterator[list[Path]]:
    """Yield files to write, which become `paths` at the end, and are removed after an error."""
    temporary = [path.with_name(f".{path.name}-{secrets.token_hex(4)}") for path in paths]
    try:
        yield temporary
        for source, path in zip(temporary, paths, strict=True):
            if source.exists():
                source.replace(path)
    finally:
        for source in temporary:
            source.unlink(missing_ok=True)


def _write_npy(batches: Iterator[CandidateBatch], target: Path, dim: int) -> tuple[Path, int, str]:
    numbers, texts = target.with_suffix(".ids.npy"), target.with_suffix(".ids.txt")
    count, kind = 0, "int64"
    with _replacing(target, numbers, texts) as (vectors_path, numbers_path, texts_path):
        with vectors_path.open("wb") as vectors, numbers_path.open("wb") as ids, texts_path.open("wb") as text:
            vectors.write(bytes(_HEADER_BYTES))
            ids.write(bytes(_HEADER_BYTES))
            for batch in batches:
                vectors.write(np.ascontiguousarray(batch.vectors, np.float32).tobytes())
                of_batch: Ids = np.arange(count, count + len(batch.vectors)) if batch.ids is None else batch.ids
                if isinstance(of_batch, np.ndarray):
                    ids.write(of_batch.astype(np.int64).tobytes())
                else:
                    kind = "string"
                    _check_lines(of_batch)
                    text.writelines(name + b"\n" for name in of_batch)
                count += len(batch.vectors)
            _write_header(vectors, np.dtype(np.float32), (count, dim))
            _write_header(ids, np.dtype(np.int64), (count,))
        (texts_path if kind == "int64" else numbers_path).unlink()
    (texts if kind == "int64" else numbers).unlink(missing_ok=True)  # of an earlier dump
    return (numbers if kind == "int64" else texts), count, kind


def _write_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write the header of a .npy file, version 1.0. Source: numpy.lib.format."""
    text = repr({"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}).encode()
    file.seek(0)
    file.write(np.lib.format.magic(1, 0) + (_HEADER_BYTES - 10).to_bytes(2, "little"))
    file.write(text.ljust(_HEADER_BYTES - 11) + b"\n")


def _check_lines(names: list[bytes]) -> None:
    for name in names:
        if b"\n" in name or b"\r" in name:
            raise ConfigError(
                f"ids: the name {name!r} has a line break, and a text file has a name per line. Write .parquet."
            )


def _write_parquet(batches: Iterator[CandidateBatch], target: Path, dim: int) -> tuple[Path, int, str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("Parquet", "pyarrow", "parquet") from None
    count, kind, writer = 0, "int64", None
    with _replacing(target) as (path,), contextlib.ExitStack() as stack:
        for batch in batches:
            of_batch: Ids = np.arange(count, count + len(batch.vectors)) if batch.ids is None else batch.ids
            kind = "int64" if isinstance(of_batch, np.ndarray) else "string"
            try:
                ids = (
                    pa.array(of_batch)
                    if kind == "int64"
                    else pa.array([name.decode() for name in of_batch], pa.string())
                )
            except UnicodeDecodeError as error:
                raise ConfigError(
                    f"ids: the name {error.object!r} is no UTF-8, which Parquet needs. Write .npy."
                ) from None
            flat = pa.array(np.ascontiguousarray(batch.vectors, np.float32).reshape(-1))
            table = pa.table({"id": ids, "vector": pa.FixedSizeListArray.from_arrays(flat, dim)})
            writer = writer or stack.enter_context(pq.ParquetWriter(path, table.schema))
            writer.write_table(table)
            count += len(batch.vectors)
        stack.close()
    return target, count, kind
