"""Collects candidates, batch by batch: their vectors go into a file, their ids and tags stay in memory."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tpuembed.checkpoint import Checkpoint
from tpuembed.errors import ConfigError, reason
from tpuembed.retrieval.partitions import Floats

if TYPE_CHECKING:  # that module imports TensorFlow
    from tpuembed.retrieval.towers import Tower

__all__ = ["CandidateBatch", "Candidates", "array_of", "collect", "of_array", "of_table", "of_tower"]

_BATCH_BYTES: Final = 8 << 20

Ids = npt.NDArray[Any]
"""int64 [n], or bytes in an array of dtype object."""


@dataclasses.dataclass(frozen=True)
class CandidateBatch:
    """Some candidates.

    Attributes:
        vectors: float32 [n, dim].
        ids: None for the number of each candidate.
        tags: uint64 [n], or None.
    """

    vectors: Floats
    ids: Ids | None = None
    tags: npt.NDArray[np.uint64] | None = None


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Collected candidates, in the order in which they came.

    Attributes:
        folder: has the file `vectors`.
        dim: of the vectors.
        ids: int64 [count], or bytes in an array of dtype object.
        tags: uint64 [count]; None if all of them are 0.
        digest: of all of them.
    """

    folder: Path
    dim: int
    ids: npt.NDArray[Any]
    tags: npt.NDArray[np.uint64] | None
    digest: str

    @property
    def count(self) -> int:
        """Return how many there are."""
        return len(self.ids)

    @property
    def vectors(self) -> Floats:
        """Return the vectors, mapped: float32 [count, dim]."""
        return np.memmap(self.folder / "vectors", np.float32, "r", shape=(self.count, self.dim))

    def batches(self) -> Iterator[tuple[int, Floats]]:
        """Yield the number of the first vector of some megabytes, and these vectors."""
        step = max(1, _BATCH_BYTES // (4 * self.dim))
        for start in range(0, self.count, step):
            yield start, np.array(self.vectors[start : start + step])


def collect(batches: Iterable[CandidateBatch], folder: Path) -> Candidates:
    """Write all candidates into files of `folder`, and check them.

    Args:
        batches: of candidates.
        folder: an existing one.

    Raises:
        ConfigError: a vector is not finite; an id is repeated, is the padding -1 or "", or has another type than those before;
            vectors have different widths; or there is no candidate.
    """
    count = dim = 0
    all_ids, all_tags, digest = list[Ids](), list[Any](), hashlib.blake2b(digest_size=16)
    with (folder / "vectors").open("wb") as file:
        for batch in batches:
            vectors = np.ascontiguousarray(batch.vectors, np.float32)
            if vectors.ndim != 2 or vectors.shape[1] != (dim or vectors.shape[1]) or not vectors.shape[1]:
                raise ConfigError(
                    f"candidates: vectors must be [n, {dim or 'dim'}], got {list(vectors.shape)} after {count} candidates. Give "
                    "vectors of one width."
                )
            dim = vectors.shape[1]
            _check_finite(vectors, count)
            ids: Ids = np.arange(count, count + len(vectors)) if batch.ids is None else batch.ids
            if all_ids and ids.dtype != all_ids[0].dtype:
                first, other = (_kind(each) for each in (all_ids[0], ids))
                raise ConfigError(f"candidates: ids are {first}, and after {count} candidates {other}. Give one type.")
            tags = np.zeros(len(vectors), np.uint64) if batch.tags is None else batch.tags
            for given, what, one in ((ids, "ids", "id"), (tags, "tags", "tag")):
                if len(given) != len(vectors):
                    raise ConfigError(
                        f"candidates: {len(vectors)} vectors have {len(given)} {what}. Give one {one} for each."
                    )
            all_ids.append(ids)
            all_tags.append(tags)
            file.write(vectors.data)
            digest.update(vectors.data)
            count += len(vectors)
    if not count:
        raise ConfigError("candidates: there are none. Give at least one.")
    ids, tags = np.concatenate(all_ids), np.concatenate(all_tags)
    _check_ids(ids)
    digest.update(repr(ids.tolist()).encode())
    digest.update(tags.data)
    return Candidates(folder, dim, ids, tags if tags.any() else None, digest.hexdigest())


def _kind(ids: Ids) -> str:
    return "int64" if ids.dtype == np.int64 else "string"


def _check_finite(vectors: Floats, first: int) -> None:
    bad = ~np.isfinite(vectors).all(1)
    if bad.any():
        index = int(bad.argmax())
        value = vectors[index][~np.isfinite(vectors[index])][0]
        raise ConfigError(
            f"candidates: vector {first + index} contains {value}, which has no place in an order of scores. Find out why "
            "training produced it."
        )


def _check_ids(ids: Ids) -> None:
    """Raise ConfigError if an id is repeated, or is the padding of exclusions."""
    padding: Any = b"" if ids.dtype == object else -1
    seen: dict[Any, int] = {}
    for number, one in enumerate(ids.tolist()):
        if one == padding:
            raise ConfigError(
                f"candidates: the id of candidate {number} is {padding!r}, which is the padding of exclusions. Give it another id."
            )
        if (other := seen.setdefault(one, number)) != number:
            raise ConfigError(
                f"candidates: the id {one!r} is that of candidates {other} and {number}. Give each candidate an id of its own."
            )


# ---- sources


def of_table(checkpoint: Checkpoint, name: str, ids: Ids | None, tags: Any) -> Iterator[CandidateBatch]:
    """Yield the rows of a table, with their numbers or their names as ids.

    Rows of a table with a vocabulary that have no name are no candidates.
    """
    info = checkpoint.tables().get(name)
    if info is None:
        checkpoint.read(name, 0, 0)  # raises the reader's error
        raise AssertionError
    _check_count("ids", ids, info.rows, f"table {name!r}")
    _check_count("tags", tags, info.rows, f"table {name!r}")
    vocabulary = checkpoint.vocabulary(name) if ids is None else None
    step = max(1, _BATCH_BYTES // (4 * info.dim))
    for start in range(0, info.rows, step):
        stop = min(start + step, info.rows)
        rows = checkpoint.read(name, start, stop).astype(np.float32)
        its_tags = None if tags is None else tags[start:stop]
        if vocabulary is None:
            yield CandidateBatch(rows, None if ids is None else ids[start:stop], its_tags)
            continue
        names = vocabulary.names(np.arange(start, min(stop, vocabulary.rows)))
        named = np.array([index for index, one in enumerate(names) if one is not None], np.int64)
        chosen = np.array([names[index] for index in named], np.int64 if vocabulary.dtype == "int64" else object)
        yield CandidateBatch(rows[named], chosen, None if its_tags is None else its_tags[named])


def of_array(vectors: Any, ids: Ids | None, tags: Any) -> Iterator[CandidateBatch]:
    """Yield the rows of an array, [n, dim]."""
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu":
        raise ConfigError(
            f"candidates: an array must have numbers [n, dim], got {vectors.dtype} {list(vectors.shape)}. Give one vector a row."
        )
    _check_count("ids", ids, len(vectors), "the array")
    _check_count("tags", tags, len(vectors), "the array")
    step = max(1, _BATCH_BYTES // (4 * vectors.shape[1] or 1))
    for start in range(0, len(vectors), step):
        some = slice(start, start + step)
        with np.errstate(over="ignore"):
            converted = np.array(vectors[some], np.float32)
        is_wide = vectors.dtype.itemsize > converted.dtype.itemsize
        if is_wide and (lost := np.isfinite(vectors[some]) & ~np.isfinite(converted)).any():
            row, column = np.argwhere(lost)[0]
            raise ConfigError(
                f"candidates: vector {start + row} contains {vectors[start + row, column]}, which is too large for float32. "
                "Scale the vectors."
            )
        yield CandidateBatch(
            converted,
            None if ids is None else ids[some],
            None if tags is None else tags[some],
        )


def of_tower(tower: "Tower", dataset: Iterable[Any]) -> Iterator[CandidateBatch]:
    """Yield what `tower` makes of the elements of `dataset`: dicts of its inputs, and `id`, and perhaps `tags`.

    If the tower has inputs of these names, the keys of candidates are `candidate_id` and `candidate_tags`. Without a
    `candidate_id`, an input `id` is the id too.
    """
    for number, element in enumerate(dataset):
        if not isinstance(element, Mapping) or not element.keys() & {"id", "candidate_id"}:
            raise ConfigError(
                f"candidates: element {number} of the dataset must be a dict with the model's inputs and 'id', got "
                f"{sorted(element) if isinstance(element, Mapping) else type(element).__name__}. Add the ids of the batch."
            )
        tags = element.get("candidate_tags", None if "tags" in tower.input_names else element.get("tags"))
        yield CandidateBatch(tower(element), _ids("id", element.get("candidate_id", element.get("id"))), _tags(tags))


def _check_count(what: str, given: Any, rows: int, of: str) -> None:
    if given is not None and len(given) != rows:
        raise ConfigError(f"{what}: there are {len(given)}, but {of} has {rows} rows. Give one for each row.")


def array_of(what: str, given: Any) -> Any:
    """Return `ids` or `tags` as they were given: an array, a list, or the path of a .npy file or of a text file of names.

    Raises:
        ConfigError: the file cannot be read, or they are no ids or tags.
    """
    if given is None:
        return None
    if isinstance(given, str | Path):
        path = Path(given)
        try:
            if path.suffix == ".npy":
                given = np.load(path, mmap_mode="r", allow_pickle=False)
            elif what == "ids":
                given = path.read_bytes().splitlines()
            else:
                raise ConfigError(f"{what}: {path} is no .npy file. Save the array with numpy.save.")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{what}: {path} cannot be read: {reason(error)}.") from None
    return _ids(what, given) if what == "ids" else _tags(given)


def _ids(what: str, given: Any) -> Ids:
    array = given.numpy() if hasattr(given, "numpy") else np.asarray(given)
    if array.dtype.kind in "SU" and not isinstance(given, np.ndarray):
        array = np.array(given, object)  # strings of NumPy lose NULs at their ends, and numbers become strings
    if array.ndim == 1 and array.dtype.kind in "iu":
        if array.dtype.kind == "u" and len(array) and int(array.max()) >= 2**63:
            raise ConfigError(f"{what}: {int(array.max())} is no int64. Give smaller ids, or strings.")
        return array.astype(np.int64, copy=False)
    if array.ndim == 1 and array.dtype.kind in "SUO":
        names = [one.encode() if isinstance(one, str) else one for one in array.tolist()]
        if all(isinstance(one, bytes) for one in names):
            return np.array(names, object)
    raise ConfigError(
        f"{what} must be integers or strings [n], got {array.dtype} {list(array.shape)}. Give one id for each candidate."
    )


def _tags(given: Any) -> Any:
    if given is None:
        return None
    array = given.numpy() if hasattr(given, "numpy") else np.asarray(given)
    if array.dtype.kind in "fO" and all(type(one) is int and 0 <= one < 2**64 for one in given):
        array = np.array(given, np.uint64)  # NumPy makes floats of a list with numbers of 64 bits
    if array.ndim != 1 or array.dtype.kind not in "iu" or (len(array) and int(array.min()) < 0):
        raise ConfigError(
            f"tags must be integers from 0 to 2^64 - 1, [n], got {array.dtype} {list(array.shape)}. Give one number for each "
            "candidate, a bit for each tag."
        )
    return array.astype(np.uint64, copy=False)
