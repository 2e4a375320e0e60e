"""A callback that does nothing."""

__all__ = ["noop"]


def noop(*_: object, **__: object) -> None:
    """Do nothing."""
