"""Ratings: read from a MovieLens file, or generated in its shape."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tpuembed.errors import ConfigError, reason

__all__ = ["Ratings", "generate", "load", "split"]

_LARGEST_ID = 50_000_000
_LOWEST, _HIGHEST = 0.5, 5.0


@dataclasses.dataclass(frozen=True)
class Ratings:
    """n ratings: `users` int64 [n], `items` int64 [n], `labels` float32 [n] = (rating - 1) / 4."""

    users: npt.NDArray[np.int64]
    items: npt.NDArray[np.int64]
    labels: npt.NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.users)

    def take(self, rows: Any) -> "Ratings":
        """Return the ratings at `rows`."""
        return Ratings(self.users[rows], self.items[rows], self.labels[rows])


def load(path: Path) -> Ratings:
    """Read a file of user, item, rating (further columns are ignored), separated by tabs, with or without a header
    line.

    Raises:
        ConfigError: a line is invalid; the message has its number.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"ratings {path}: cannot be read: {reason(error)}.") from None
    header = bool(lines) and not lines[0].split("\t")[0].strip().isdecimal()
    rows = [
        _row(path, number, line)
        for number, line in enumerate(lines, 1)
        if line.strip() and not (header and number == 1)
    ]
    if len(rows) < 10:
        raise ConfigError(f"ratings {path}: {len(rows)} ratings are too few to train on. Give at least 10.")
    users, items, ratings = zip(*rows, strict=True)
    labels = (np.asarray(ratings, np.float32) - 1.0) / 4.0
    return Ratings(np.asarray(users, np.int64), np.asarray(items, np.int64), labels)


def _row(path: Path, number: int, line: str) -> tuple[int, int, float]:
    fields = line.split("\t")
    try:
        user, item, rating = int(fields[0]), int(fields[1]), float(fields[2])
    except (ValueError, IndexError):
        raise ConfigError(
            f"ratings {path}, line {number}: expected user, item and rating separated by tabs, got {line!r}."
        ) from None
    if not (0 <= user <= _LARGEST_ID and 0 <= item <= _LARGEST_ID):
        raise ConfigError(
            f"ratings {path}, line {number}: ids must be between 0 and {_LARGEST_ID}, got {user} and {item}."
        )
    if not _LOWEST <= rating <= _HIGHEST:
        raise ConfigError(
            f"ratings {path}, line {number}: a rating must be between {_LOWEST} and {_HIGHEST}, got {rating}."
        )
    return user, item, rating


def generate(users: int = 943, items: int = 1682, count: int = 100_000, seed: int = 7) -> Ratings:
    """Generate `count` different (user, item) pairs with tastes of rank 4, popular items rated more often, stars from 1
    to 5.
    """
    random = np.random.default_rng(seed)
    popularity = 1.0 / np.arange(1, items + 1) ** 0.6
    activity = random.gamma(1.0, 1.0, users) + 0.05
    chances = np.outer(activity / activity.sum(), popularity / popularity.sum()).ravel()
    pairs = np.argpartition(random.exponential(size=chances.size) / chances, count)[:count]
    user, item = np.divmod(random.permutation(pairs), items)
    taste = (random.normal(size=(users, 4)) @ random.normal(size=(4, items)))[user, item] * 0.35
    bias = random.normal(0, 0.45, users)[user] + random.normal(0, 0.5, items)[item]
    stars = np.clip(np.rint(3.5 + taste + bias + random.normal(0, 0.75, count)), 1, 5)
    return Ratings(user + 1, item + 1, ((stars - 1.0) / 4.0).astype(np.float32))


def split(ratings: Ratings, seed: int = 42) -> tuple[Ratings, Ratings]:
    """Return (four fifths to train on, the rest to test on), shuffled by `seed`."""
    order = np.random.default_rng(seed).permutation(len(ratings))
    cut = len(ratings) * 4 // 5
    return ratings.take(order[:cut]), ratings.take(order[cut:])
