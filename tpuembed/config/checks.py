"""Checks that the config classes share. Each error names the object, the value and the remedy."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

from tpuembed.errors import ConfigError

__all__ = [
    "check_choice",
    "check_count",
    "check_keys",
    "check_name",
    "check_number",
    "did_you_mean",
    "differing",
    "from_mapping",
]

T = TypeVar("T")
_SHOWN: Final = 30


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the remedy that ends a message: the nearest of `known`, else the list of them, cut to a readable length."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=1)
    shown = ", ".join(names[:_SHOWN]) + (f", ... ({len(names)} in all)" if len(names) > _SHOWN else "")
    return f"did you mean {near[0]!r}?" if near else f"known: {shown or 'none'}"


def differing(one: object, other: object) -> str:
    """Return the fields in which two configs of one class differ, with both values of numbers and strings."""
    pairs = [(name, value, vars(other)[name]) for name, value in vars(one).items() if value != vars(other)[name]]
    return ", ".join(name + (f" ({a!r}, {b!r})" if isinstance(a, int | str) else "") for name, a, b in pairs)


def check_keys(where: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise ConfigError for the first key of `given` that is not in `known`."""
    known = set(known)
    for key in given:
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r}; {did_you_mean(str(key), known)}")


def from_mapping(cls: type[T], where: str, given: Any, *, begins_all: bool = False) -> T:
    """Return the dataclass `cls` of a mapping of its fields.

    Raises:
        ConfigError: `given` is no mapping, has an unknown key, or lacks a field without a default. `where` begins the message,
            and with `begins_all` those of `cls` too.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: expected a mapping, got {given!r}")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    check_keys(where, given, (field.name for field in fields))
    required = [one.name for one in fields if one.default is one.default_factory is dataclasses.MISSING]
    if missing := [name for name in required if name not in given]:
        raise ConfigError(f"{where}: {' and '.join(missing)} is missing. Give it.")
    try:
        return cls(**given)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if begins_all else str(error)) from None


def check_name(where: str, value: object) -> None:
    """Raise ConfigError unless `value` is a non-empty string without control characters."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ConfigError(f"{where}: the name must be a non-empty printable string, got {value!r}")


def check_count(where: str, value: object, minimum: int = 1, maximum: int = 2**63 - 1) -> None:
    """Raise ConfigError unless `value` is an integer (not a bool or a float) from `minimum` to `maximum`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"{where} must be an integer, got {value!r}")
    if value.__index__() < minimum:
        raise ConfigError(f"{where} must be at least {minimum}, got {value!r}")
    if value.__index__() > maximum:
        raise ConfigError(f"{where} must be at most {maximum}, got {value!r}")


def check_choice(where: str, value: object, choices: Iterable[str]) -> None:
    """Raise ConfigError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        raise ConfigError(f"{where} must be one of {', '.join(choices)}; got {value!r}")


def check_number(
    where: str,
    value: object,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
) -> None:
    """Raise ConfigError unless `value` is a finite number from (or above) `minimum` to (or below) `maximum`."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number:
        raise ConfigError(f"{where} must be a finite number, got {value!r}")
    if value < minimum or (above and value == minimum):  # type: ignore[operator]
        raise ConfigError(f"{where} must be {'above' if above else 'at least'} {minimum:g}, got {value!r}")
    if value > maximum or (below and value == maximum):  # type: ignore[operator]
        raise ConfigError(f"{where} must be {'below' if below else 'at most'} {maximum:g}, got {value!r}")
