"""Checks of settings."""

from tpuembed.errors import ConfigError

__all__ = ["check_positive"]


def check_positive(name: str, value: float | None) -> None:
    """Raise ConfigError unless `value` is above 0 or None."""
    if value is not None and not value > 0:
        raise ConfigError(f"{name} is {value}. Give a number above 0")
