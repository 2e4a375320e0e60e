"""The versions of a store as a process that loads them sees them: those that another thread or process has pulled."""

import contextlib
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from tpuembed.files import FilePath, UrlPath
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.reload_paths import ReloadPaths
from tpuembed_serving.core.status import Code, StatusError
from tpuembed_serving.models.policies import SpecificVersions, VersionPolicy
from tpuembed_serving.models.stores.cache import STATE_FILE, folder_of, hold, read_state
from tpuembed_serving.models.versions import Identity

__all__ = ["FollowedStore"]

logger = logging.getLogger(__name__)


class FollowedStore:
    """Reads the state that the puller writes. Has the methods of the model's folder.

    Attributes:
        within: as that of the folder. It is not used again, because URLs have no links.
    """

    within: ReloadPaths | None = None

    def __init__(self, model: str, url: UrlPath, cache: Path) -> None:
        self._model, self._url = model, url
        self._place = folder_of(cache, url)
        self._missing: frozenset[int] = frozenset()
        self.error = ""
        self.settled = False
        self.waiting: Mapping[int, tuple[FilePath, StatusError | None, bool]] = {}

    def versions(self) -> dict[int, Path] | None:
        """Return every version that was pulled, or None if there is none yet and one may come."""
        state = read_state(self._place / STATE_FILE)
        if state is None:
            return None
        if state.error and not self.error:
            text = "model %s: %s cannot be listed: %s. The versions in the cache are served"
            logger.error(text, self._model, self._url, state.error, extra=ONCE)
        self.settled, self.error = state.settled, state.error
        pulled = {number: self._place / one.folder for number, one in state.versions.items() if one.folder}
        self.waiting = {
            number: (
                self._url / str(number),
                StatusError(Code.NOT_FOUND if one.code is None else Code(one.code), one.fault) if one.fault else None,
                one.code is not None,
            )
            for number, one in state.versions.items()
            if not one.folder
        }
        return None if not pulled and (self.waiting or state.error) else pulled

    def wanted(self, policy: VersionPolicy, found: Collection[int]) -> frozenset[int]:
        """Return the versions that `policy` selects from `found`."""
        there = {*found, *self.waiting}
        missing = policy.versions.difference(there) if isinstance(policy, SpecificVersions) else frozenset()
        for number in sorted(missing - self._missing):
            text = "model %s: its config names version %d, which is not in its store"
            logger.warning(text, self._model, number, extra=ONCE)
        self._missing = missing
        return policy.wanted(found)

    def hold(self, path: Path, /) -> contextlib.ExitStack:
        """Keep the version at `path` in the cache until the returned context is closed."""
        return hold(path)

    def identity(self, _: Path, /) -> Identity:
        """Return the same of all versions: one that is loaded stays as it was pulled."""
        return frozenset()
