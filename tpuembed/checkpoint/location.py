"""From a user's path to the prefix of one tensor bundle."""

import re
from pathlib import Path

from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointNotFoundError,
    first_few,
    reason,
)
from tpuembed.files import FilePath, as_path
from tpuembed.formats.tensor_bundle import index_path

__all__ = ["find_bundle"]

_STATE_FILE = "checkpoint"
_FILE_ENDING = re.compile(r"(?P<prefix>.+)(\.index|\.data-\d{5,}-of-\d{5,})", re.DOTALL)
_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d+)", re.DOTALL)
_STATE_LINE = re.compile(r'^\s*model_checkpoint_path\s*:\s*"(?P<path>(?:[^"\\]|\\.)*)"\s*$', re.MULTILINE)
_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def find_bundle(path: FilePath) -> FilePath | None:
    """Return the prefix of the bundle that `path` names, or None if there is none.

    `path` is a prefix, one of its files, a SavedModel, or a directory of checkpoints. In a directory, its `checkpoint`
    file names the latest. Without that file, it is the only bundle in the directory, or the one with the highest
    number.

    Raises:
        CheckpointNotFoundError: the `checkpoint` file names a checkpoint that does not exist.
        CheckpointCorruptError: the `checkpoint` file names none.
        CheckpointFormatError: a directory has several bundles and no `checkpoint` file.
    """
    ending = _FILE_ENDING.fullmatch(str(path))
    if ending and path.is_file():
        return as_path(ending["prefix"])
    if index_path(path).is_file():
        return path
    if not path.is_dir():
        return None
    if (path / "saved_model.pb").is_file():
        prefix = path / "variables" / "variables"
        if not index_path(prefix).is_file():
            return None
        if others := _prefixes(path):
            raise CheckpointFormatError(
                f"directory {path}: contains a SavedModel ({index_path(prefix)}) and a checkpoint "
                f"({index_path(others[0])}). Give the path of one of them."
            )
        return prefix
    if (path / _STATE_FILE).is_file():
        return _named_by(path / _STATE_FILE)
    names = [prefix.name for prefix in _prefixes(path)]
    if len(names) < 2:
        return path / names[0] if names else None
    numbered = [match for match in map(_NUMBERED.fullmatch, names) if match]
    if len(numbered) < len(names) or len({match["stem"] for match in numbered}) > 1:
        raise CheckpointFormatError(
            f"directory {path}: contains several checkpoints ({first_few(names)}). Give the path of one."
        )
    return path / max(numbered, key=lambda match: int(match["number"]))[0]


def _prefixes(directory: FilePath) -> list[FilePath]:
    """Return the prefixes of the bundles directly in `directory`, sorted. In a store, only names are checked, to save
    requests.
    """
    indices = sorted(path for path in directory.iterdir() if path.name.endswith(".index"))
    found = [path for path in indices if not isinstance(path, Path) or path.is_file()]
    return [directory / path.name.removesuffix(".index") for path in found]


def _named_by(state_file: FilePath) -> FilePath:
    """Return the latest checkpoint according to a `checkpoint` file.

    A checkpoint beside the `checkpoint` file is preferred. An absolute path in that file is where the checkpoint was
    written, which may have another one by now.
    """
    try:
        match = _STATE_LINE.search(state_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint state {state_file}: cannot be read: {reason(error)}.") from None
    if match is None:
        raise CheckpointCorruptError(
            f"checkpoint state {state_file}: has no model_checkpoint_path. Give the checkpoint's own path."
        )
    named = _unescape(match["path"])
    folder = state_file.parent
    beside: FilePath = folder / Path(named).name
    # Always in the same store or bucket, or on the disk.
    if isinstance(folder, Path):
        candidates = [beside, Path(named)] if Path(named).is_absolute() else [folder / named, beside]
    elif named.startswith(f"{folder.scheme}://{folder.bucket}/"):
        candidates = [beside, as_path(named)]
    else:
        candidates = [beside] if "://" in named or Path(named).is_absolute() else [folder / named, beside]
    for candidate in candidates:
        if index_path(candidate).is_file():
            return candidate
    raise CheckpointNotFoundError(
        f"checkpoint state {state_file}: names {named!r} as the latest, but there is no "
        f"{index_path(candidates[0])}. Give the path of an existing checkpoint."
    )


def _unescape(text: str) -> str:
    """Decode a string of protocol buffers' text format."""
    return _ESCAPE.sub(_unescaped, text.encode()).decode(errors="replace")


def _unescaped(match: re.Match[bytes]) -> bytes:
    code = match[1]
    return bytes([int(code, 8) & 0xFF]) if code.isdigit() else _ESCAPED.get(code, code)
