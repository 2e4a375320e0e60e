"""Which folders a client may name in a HandleReloadConfigRequest. A SavedModel is a program, and the operator chooses programs.

The operator's own folders say where that is: where one model is, a client may add others. It may not where other users can write.
"""

import dataclasses
import os
import pwd
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Self

from tpuembed.files import FilePath, UrlPath

__all__ = ["ReloadPaths"]

_HOMES: Final = (Path("/root"), Path("/home"), Path("/Users"))


@dataclasses.dataclass(frozen=True)
class ReloadPaths:
    """The folders of a server's start, and those below which clients may choose others.

    Attributes:
        chosen: the base paths of the start as the operator wrote them, but absolute. They may be links that change.
        folders: where they led at the start.
        parents: the parent of each, if only its owner can write there. Every folder below one is allowed.
        log_prefixes: where the start's config logs requests.
    """

    chosen: frozenset[FilePath] = frozenset()
    folders: frozenset[FilePath] = frozenset()
    parents: frozenset[FilePath] = frozenset()
    log_prefixes: frozenset[str] = frozenset()

    @classmethod
    def of(cls, base_paths: Iterable[FilePath], log_prefixes: Iterable[str] = ()) -> Self:
        """Return what a server that starts with these base paths allows. Looks at the parents' modes."""
        chosen = frozenset(map(_absolute, base_paths))
        parents = {path.parent if isinstance(path, UrlPath) else _real(path.parent) for path in chosen}
        return cls(
            chosen,
            frozenset(path if isinstance(path, UrlPath) else _real(path) for path in chosen),
            frozenset(parent for parent in parents if not _is_shared(parent)),
            frozenset(log_prefixes),
        )

    def is_chosen(self, base_path: FilePath) -> bool:
        """Return True for a base path of the start."""
        return _absolute(base_path) in self.chosen

    def find(self, base_path: FilePath) -> FilePath | None:
        """Return where `base_path` leads now, without links, or None if that is outside. Whether it exists makes no difference."""
        if isinstance(base_path, UrlPath):
            found: FilePath = base_path
            is_below = any(
                isinstance(parent, UrlPath)
                and (parent.scheme, parent.bucket) == (base_path.scheme, base_path.bucket)
                and base_path.key.startswith(f"{parent.key}/")
                for parent in self.parents
            )
        else:
            found = _real(base_path)
            is_below = not self.parents.isdisjoint(found.parents)
        return found if is_below or found in self.folders else None


def _absolute(path: FilePath) -> FilePath:
    if isinstance(path, UrlPath):
        return path
    absolute = path.absolute()
    return _real(absolute) if ".." in absolute.parts else absolute  # the parent of a/.. is not a


def _real(path: Path) -> Path:
    """Return where `path` leads. Unlike `Path.resolve`, it takes links in a circle, and //a is /a."""
    return Path("/" + os.path.realpath(path).lstrip("/"))


def _is_shared(parent: FilePath) -> bool:
    """Return True if folders of others may be in `parent`: it is a root or a home, or more than its owner can write to it.

    The sticky bit, as /tmp has it, protects what is there, and not against new folders.
    """
    if isinstance(parent, UrlPath):
        return not parent.key
    if (
        parent == Path(parent.anchor)
        or parent.parent in _HOMES[1:]
        or parent in map(_real, (*_HOMES, Path(os.environ.get("HOME", "/"))))
    ):
        return True
    try:
        found = parent.stat()
    except OSError:
        return True
    try:
        is_home = _real(Path(pwd.getpwuid(found.st_uid).pw_dir)) == parent
    except KeyError:  # the owner is no user of this machine, as in a container
        is_home = False
    return is_home or bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
