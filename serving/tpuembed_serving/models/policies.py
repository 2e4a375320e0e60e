"""Which of the versions that a folder holds are to be served."""

import dataclasses
from collections.abc import Collection
from typing import Protocol

from tpuembed.errors import ConfigError

__all__ = ["AllVersions", "LatestVersions", "SpecificVersions", "VersionPolicy"]


class VersionPolicy(Protocol):
    """ServableVersionPolicy of TensorFlow Serving's file_system_storage_path_source.proto."""

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """Those of the versions `found` that are to be served."""


@dataclasses.dataclass(frozen=True)
class LatestVersions:
    """The `count` versions with the greatest numbers."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"latest versions: {self.count} are asked for; give a number above 0")

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """See VersionPolicy."""
        return frozenset(sorted(found)[-self.count :])


@dataclasses.dataclass(frozen=True)
class AllVersions:
    """Every version."""

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """See VersionPolicy."""
        return frozenset(found)


@dataclasses.dataclass(frozen=True)
class SpecificVersions:
    """These versions, as far as they are there."""

    versions: frozenset[int]

    def __post_init__(self) -> None:
        if not self.versions:
            raise ConfigError("specific versions: none is named; name at least one")

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """See VersionPolicy."""
        return self.versions.intersection(found)
