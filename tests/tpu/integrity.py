"""Whether an environment's files are those of its wheels: two TensorFlows in one place overwrite each other's."""

import base64
import csv
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["distributions", "foreign_tensorflows", "overwritten_files", "problems"]

_TENSORFLOWS = {"tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-tpu"}
_CHUNK_BYTES = 1 << 22


def problems(site_packages: Path, pins: Mapping[str, str]) -> list[str]:
    """What is wrong with the distributions in `site_packages`, a sentence each: none where they can be trusted.

    Args:
        site_packages: where the distributions lie.
        pins: distribution -> version of those that must be there, with the files of their RECORDs.
    """
    wanted = {_plain(name): version for name, version in pins.items()}
    return [
        *(
            f"{other} is installed beside {name} and overwrites its files"
            for name, other in _rivals(site_packages, wanted)
        ),
        *(problem for name, version in wanted.items() for problem in _of_one(site_packages, name, version)),
    ]


def _of_one(site_packages: Path, name: str, version: str) -> list[str]:
    found = distributions(site_packages).get(name)
    if found is None:
        return [f"{name} is not installed in {site_packages}"]
    there = found.name.removesuffix(".dist-info").rpartition("-")[2]
    if there != version:
        return [f"{name} is of version {there}, not {version}"]
    return [f"{name}: {path} is not the file of its RECORD" for path in overwritten_files(site_packages, name)]


def _rivals(site_packages: Path, wanted: Iterable[str]) -> list[tuple[str, str]]:
    """(name, another TensorFlow) of every one that is wanted."""
    names = sorted(_TENSORFLOWS & set(wanted))
    return [(name, other) for name in names for other in foreign_tensorflows(site_packages, name)]


def _plain(name: str) -> str:
    """In lower case with dashes."""
    return name.replace("_", "-").lower()


def distributions(site_packages: Path) -> dict[str, Path]:
    """Name, in lower case with dashes -> its .dist-info folder."""
    folders = sorted(site_packages.glob("*.dist-info"))
    return {_plain(folder.name.split("-")[0]): folder for folder in folders}


def foreign_tensorflows(site_packages: Path, distribution: str) -> list[str]:
    """Other distributions of TensorFlow than `distribution`."""
    return sorted((_TENSORFLOWS & distributions(site_packages).keys()) - {distribution})


def overwritten_files(site_packages: Path, distribution: str) -> list[str]:
    """Files of `distribution`'s RECORD that are missing or have another size or hash (PEP 376, PEP 427)."""
    record = distributions(site_packages)[distribution] / "RECORD"
    with record.open(encoding="utf-8", newline="") as lines:
        return [path for path, digest, size in csv.reader(lines) if not _is_same(site_packages / path, digest, size)]


def _is_same(file: Path, digest: str, size: str) -> bool:
    if not digest:  # RECORD itself, and what pip compiled
        return True
    if not file.is_file() or file.stat().st_size != int(size):
        return False
    algorithm, _, expected = digest.partition("=")
    return _hash(file, algorithm) == expected


def _hash(file: Path, algorithm: str) -> str:
    """As RECORD writes it: base64 for URLs, without padding."""
    hashed = hashlib.new(algorithm)
    with file.open("rb") as data:
        while chunk := data.read(_CHUNK_BYTES):
            hashed.update(chunk)
    return base64.urlsafe_b64encode(hashed.digest()).rstrip(b"=").decode()
