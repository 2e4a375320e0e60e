"""From the path that a user gives to the prefix of one tensor bundle."""

import glob
import os
import re
from pathlib import Path

from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, CheckpointNotFoundError
from tpuembed.files import FilePath, as_path
from tpuembed.tensor_bundle import index_path

__all__ = ["find_bundle", "find_index"]

_STATE_FILE = "checkpoint"
_FILE_ENDING = re.compile(r"(?P<prefix>.+)(\.index|\.data-\d{5,}-of-\d{5,})", re.DOTALL)
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)", re.DOTALL)
_STATE_LINE = re.compile(r'^\s*model_checkpoint_path\s*:\s*"(?P<path>(?:[^"\\]|\\.)*)"\s*$', re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_SSTABLE_END = (0xDB4775248B80FB57).to_bytes(8, "little")
"""How each file of a checkpoint in TensorFlow 1's format V1 ends, and no data file of V2. Source: table_format.txt of LevelDB."""
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def find_bundle(path: FilePath) -> FilePath | None:
    """The prefix of the bundle that `path` names, or None where there is none.

    `path` is a prefix, one of its files, a SavedModel, or a directory of checkpoints: the latest by its `checkpoint`
    file; without one the only bundle in it, or the one of the highest number.

    Raises:
        CheckpointNotFoundError: the `checkpoint` file names a checkpoint that is not there.
        CheckpointCorruptError: the `checkpoint` file names none.
        CheckpointFormatError: a directory holds several and nothing says which is meant, or it is of format V1.
    """
    ending = _FILE_ENDING.fullmatch(str(path))
    if ending and path.is_file():
        return as_path(ending["prefix"])
    if index_path(path).is_file():
        return path
    _refuse_v1(path)
    return _find_in_directory(path) if path.is_dir() else None


def find_index(directory: FilePath) -> FilePath | None:
    """The index file of the bundle that `directory` names; of several, of any; None where there is none."""
    try:
        prefix = find_bundle(directory)
    except CheckpointError:
        prefix = next(iter(_prefixes(directory)), None)
    return index_path(prefix) if prefix is not None and index_path(prefix).is_file() else None


def _find_in_directory(directory: FilePath) -> FilePath | None:
    if (directory / "saved_model.pb").is_file():
        prefix = directory / "variables" / "variables"
        return _only(directory, prefix) if index_path(prefix).is_file() else None
    if (directory / _STATE_FILE).is_file():
        return _named_by(directory / _STATE_FILE)
    return _highest(directory)


def _only(directory: FilePath, saved_model: FilePath) -> FilePath:
    """The SavedModel's prefix; CheckpointFormatError where `directory` holds other bundles too."""
    others = _prefixes(directory)
    if others:
        raise CheckpointFormatError(
            f"directory {directory}: holds a SavedModel ({index_path(saved_model)}) and a checkpoint "
            f"({index_path(others[0])}), and which is meant cannot be told; give the path of that one"
        )
    return saved_model


def _prefixes(directory: FilePath) -> list[FilePath]:
    """Of the bundles right in `directory`, sorted; in a store, where asking is dear, whatever is called so."""
    if not directory.is_dir():
        return []
    indices = sorted(path for path in directory.iterdir() if path.name.endswith(".index"))
    found = [path for path in indices if not isinstance(path, Path) or path.is_file()]
    return [directory / path.name.removesuffix(".index") for path in found]


def _named_by(state_file: FilePath) -> FilePath:
    """Return the checkpoint that a `checkpoint` file calls the latest.

    It is taken from beside the `checkpoint` file where it is there. An absolute path in that file is of where the checkpoint was
    written, and may by now hold another one.
    """
    try:
        match = _STATE_LINE.search(state_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint state {state_file}: cannot be read: {error}") from None
    if match is None:
        raise CheckpointCorruptError(
            f"checkpoint state {state_file}: has no model_checkpoint_path; give the checkpoint's own path"
        )
    named = _unescape(match["path"])
    candidates = _candidates(state_file, named)
    for candidate in candidates:
        if index_path(candidate).is_file():
            return candidate
        _refuse_v1(candidate)
    raise CheckpointNotFoundError(
        f"checkpoint state {state_file}: names {named!r} as the latest, and there is no "
        f"{_in_one_line(index_path(candidates[0]))}; give the path of a checkpoint that is there"
    )


def _refuse_v1(path: FilePath) -> None:
    """Raise CheckpointFormatError for a checkpoint of TensorFlow 1's format V1: one sstable, which may be cut in shards."""
    if not isinstance(path, Path):
        return
    stem = re.sub(r"-\?{5}-of-\d{5}$", "", path.name)  # how a state file names shards
    for file in (path, *path.parent.glob(f"{glob.escape(stem)}-?????-of-?????")):
        if file.is_file() and file.stat().st_size >= len(_SSTABLE_END):
            with open(file, "rb") as stream:
                stream.seek(-len(_SSTABLE_END), os.SEEK_END)
                is_v1 = stream.read() == _SSTABLE_END
            if is_v1:
                raise CheckpointFormatError(
                    f"checkpoint {path}: is of TensorFlow 1's format V1, and only V2 is read. Restore it with "
                    "tf.compat.v1.train.Saver() and save it again, which writes V2"
                )


def _candidates(state_file: FilePath, named: str) -> list[FilePath]:
    """Where a `checkpoint` file may mean: never from a store to a disk or to another bucket, nor from a disk to a store."""
    folder = state_file.parent
    base: FilePath = folder / Path(named).name
    if isinstance(folder, Path):
        return [base, Path(named)] if Path(named).is_absolute() else [folder / named, base]
    if named.startswith(f"{folder.scheme}://{folder.bucket}/"):
        return [base, as_path(named)]
    return [base] if "://" in named or Path(named).is_absolute() else [folder / named, base]


def _in_one_line(path: FilePath) -> str:
    return str(path) if str(path).isprintable() else repr(str(path))


def _unescape(text: str) -> str:
    """A string of protocol buffers' text format."""

    def replace(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if code.isdigit() else _ESCAPED.get(code, code)

    return _ESCAPE.sub(replace, text.encode()).decode(errors="replace")


def _highest(directory: FilePath) -> FilePath | None:
    """The only bundle of `directory`, or the one of the highest number where all are numbered alike."""
    names = [prefix.name for prefix in _prefixes(directory)]
    if len(names) < 2:
        return directory / names[0] if names else None
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
    if len(numbered) < len(names) or len({match["stem"] for match in numbered}) > 1:
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise CheckpointFormatError(f"directory {directory}: holds several checkpoints ({shown}); give the path of one")
    return directory / max(numbered, key=lambda match: int(match["number"]))[0]
