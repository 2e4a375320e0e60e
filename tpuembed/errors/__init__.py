"""Every exception that tpuembed raises on purpose, one class per action of the caller::

    TpuEmbedError
    ├── ConfigError (ValueError)               fix the config, the option or the input it names
    │   └── UnknownObjectError                 name one of the checkpoint's objects with `root`
    ├── MissingExtraError (ImportError)        install the extra it names
    ├── UnknownTableError (KeyError)           use one of the tables it lists
    ├── RowRangeError (IndexError)             use rows inside the range it gives
    ├── CheckpointError
    │   ├── CheckpointNotFoundError            the path holds no checkpoint
    │   ├── CheckpointFormatError              no reader recognises or supports the files
    │   ├── CheckpointCorruptError             the bytes contradict themselves: restore from another copy
    │   └── CheckpointMismatchError            the checkpoint is sound and disagrees with the config
    ├── TrainingError (RuntimeError)           table updates do not support the training loop
    ├── ExportError                            the export could not be planned, streamed or committed
    │   └── WorkerError                        a worker process died or failed
    ├── RowStoreError                          Redis cannot be reached, or refuses
    │   └── RowStoreDataError                  Redis does not have the rows that were published
    └── ServingError                           the server could not load, bind or run

An error names the object, both values and the remedy.
"""

import errno
import os
import re
import sys
import warnings
from collections.abc import Iterable
from typing import Self

__all__ = [
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointFormatError",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ConfigError",
    "ExportError",
    "MissingExtraError",
    "RowRangeError",
    "RowStoreDataError",
    "RowStoreError",
    "ServingError",
    "TpuEmbedError",
    "TrainingError",
    "TrainingWarning",
    "UnknownObjectError",
    "UnknownTableError",
    "WorkerError",
    "first_few",
    "one_line",
    "printable",
    "reason",
    "warn",
]

_REMEDIES = {
    errno.ENOENT: "Check the path",
    errno.ENOTDIR: "Check the path",
    errno.ENAMETOOLONG: "Check the path",
    errno.EISDIR: "Name a file",
    errno.EACCES: "Check its permissions",
    errno.EIO: "Check the disk",
}
"""The remedy for a file that the system refuses to read."""


class TpuEmbedError(Exception):
    """The root of the tree above."""

    # AutoGraph re-raises an error from inside a tf.function with its own type only if this holds.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        """Return the message unchanged (a KeyError would return its repr)."""
        return str(self.args[0]) if self.args else ""


class ConfigError(TpuEmbedError, ValueError):
    """A config, an option or an input that is not supported as given."""


class UnknownObjectError(ConfigError):
    """The option `root` names an object that the checkpoint does not have.

    Attributes:
        objects: the paths of the objects that hold other objects with weights, nearest to the checkpoint's root first.
    """

    objects: tuple[str, ...] = ()

    @classmethod
    def of(cls, what: str, objects: Iterable[str]) -> Self:
        """The error of `what`, which lists the first few of `objects`."""
        error = cls()
        error.objects = tuple(objects)
        shown = ", ".join(error.objects[:5]) + (
            f", ... ({len(error.objects)} in all)" if len(error.objects) > 5 else ""
        )
        error.args = (f"{what}. Objects that hold layers with weights: {shown or 'none'}",)
        return error


class MissingExtraError(TpuEmbedError, ImportError):
    """A package that an optional part needs is not installed."""

    def __init__(self, purpose: str, package: str, extra: str) -> None:
        """Report that `purpose` needs the importable `package`, which `pip install tpuembed[extra]` installs."""
        super().__init__(f"{purpose} needs {package}, which is not installed: pip install 'tpuembed[{extra}]'")


class _OneLineError(TpuEmbedError):
    """An error whose message may contain text from a file."""

    def __str__(self) -> str:
        """Return the message in one printable line, for any name in a damaged file."""
        return printable(super().__str__())


class UnknownTableError(_OneLineError, KeyError):
    """A table or slot name that the checkpoint, export or layer does not have."""


class RowRangeError(_OneLineError, IndexError):
    """A row range that is not inside the table."""


class CheckpointError(_OneLineError):
    """A checkpoint that cannot be read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """The path holds no checkpoint."""


class CheckpointFormatError(CheckpointError):
    """Files exist, but no reader recognises or supports them."""


class CheckpointCorruptError(CheckpointError):
    """The files contradict themselves: truncated, overwritten or damaged."""

    @classmethod
    def of(cls, what: str) -> Self:
        """Return the error with the remedy that all damaged files have."""
        return cls(f"{what}. Restore it from another copy.")


class CheckpointMismatchError(CheckpointError):
    """The checkpoint is sound and disagrees with the caller's arguments."""


class TrainingError(TpuEmbedError, RuntimeError):
    """Table updates do not support the training loop."""


class ExportError(TpuEmbedError):
    """The export could not be planned, streamed or committed. Nothing became visible."""


class WorkerError(ExportError):
    """A worker process failed or died."""


class RowStoreError(_OneLineError):
    """Redis cannot be reached, has not answered in time, or refuses."""


class RowStoreDataError(RowStoreError):
    """Redis does not have the rows that were published: a value is missing or has another length, or a record differs."""


class ServingError(TpuEmbedError):
    """The server could not load a model, bind a port or run."""


def printable(text: str) -> str:
    """Return `text` in one line that is safe for a terminal. Line ends and escapes are written as in Python."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def first_few(names: Iterable[str], most: int = 5) -> str:
    """Return the first of `names` for a message, and how many there are more."""
    listed = list(names)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def reason(error: Exception) -> str:
    """Return why a file cannot be read or parsed, for a message that names the file. The system's words get a remedy."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8 text. Save it as UTF-8"
    if isinstance(error, RecursionError):
        return "its values are nested too deeply"
    if not isinstance(error, OSError) or not error.errno:
        return str(error)
    own = error.strerror or str(error)  # a store's words have a remedy where there is one
    return f"{own}. {_REMEDIES[error.errno]}" if own == os.strerror(error.errno) and error.errno in _REMEDIES else own


def one_line(error: BaseException) -> str:
    """Return the type of another package's error and the start of its message, without colours and line ends."""
    message = re.sub(r"\x1b\[[0-9;]*m", "", str(error.args[0]) if len(error.args) == 1 else str(error))
    return f"{type(error).__name__}: {' '.join(message.split())[:300]}"


class TrainingWarning(UserWarning):
    """Tables do not follow an option of the trainer. The message names the option, the tables, and what to do."""


def warn(message: str, kind: type[Warning] = UserWarning) -> None:
    """Warn. The warning names the caller's line, which is the last one outside of tpuembed."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "tpuembed":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, kind, stacklevel=level)
