"""Policies: which versions in a folder are served."""

import dataclasses
from collections.abc import Collection
from typing import Protocol

from tpuembed.errors import ConfigError

__all__ = ["AllVersions", "LatestVersions", "SpecificVersions", "VersionPolicy"]


class VersionPolicy(Protocol):
    """A version policy: ServableVersionPolicy of TensorFlow Serving's file_system_storage_path_source.proto."""

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """Return the versions of `found` that are to be served."""


@dataclasses.dataclass(frozen=True)
class LatestVersions:
    """The `count` versions with the greatest numbers."""

    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"latest versions: the count is {self.count}. Give a number above 0")

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """Return the `count` greatest numbers of `found`."""
        return frozenset(sorted(found)[-self.count :])


@dataclasses.dataclass(frozen=True)
class AllVersions:
    """Every version."""

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """Return all of `found`."""
        return frozenset(found)


@dataclasses.dataclass(frozen=True)
class SpecificVersions:
    """The named versions that are in the folder."""

    versions: frozenset[int]

    def __post_init__(self) -> None:
        if not self.versions:
            raise ConfigError("specific versions: the list is empty. Name at least one version")

    def wanted(self, found: Collection[int]) -> frozenset[int]:
        """Return the named versions that are in `found`."""
        return self.versions.intersection(found)
