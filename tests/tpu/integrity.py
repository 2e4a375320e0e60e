"""Whether an environment's files are those of its wheels: two TensorFlows in one place overwrite each other's."""

import base64
import csv
import hashlib
from pathlib import Path

__all__ = ["distributions", "foreign_tensorflows", "overwritten_files", "problems"]

_TENSORFLOWS = {"tensorflow", "tensorflow-cpu", "tensorflow-intel", "tensorflow-tpu"}
_CHUNK_BYTES = 1 << 22


def problems(site_packages: Path, distribution: str) -> list[str]:
    """What is wrong with `distribution` in `site_packages`, a sentence each: none where it can be trusted.

    Args:
        site_packages: where the distributions lie.
        distribution: the one whose files are compared with its RECORD.
    """
    if distribution not in distributions(site_packages):
        return [f"{distribution} is not installed in {site_packages}"]
    others = foreign_tensorflows(site_packages, distribution)
    return [f"{other} is installed beside {distribution} and overwrites its files" for other in others] + [
        f"{distribution}: {path} is not the file of its RECORD"
        for path in overwritten_files(site_packages, distribution)
    ]


def distributions(site_packages: Path) -> dict[str, Path]:
    """Name, in lower case with dashes -> its .dist-info folder."""
    folders = sorted(site_packages.glob("*.dist-info"))
    return {folder.name.split("-")[0].replace("_", "-").lower(): folder for folder in folders}


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
