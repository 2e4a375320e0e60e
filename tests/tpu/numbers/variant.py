"""A deliberately broken variant of the layer or the simulator, and the check that must catch it."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

__all__ = ["Variant"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is wrong while `patch()` is entered.

    Attributes:
        name: of the variant, one word.
        breaks: what is wrong, for people.
        check: the name of the check that must fail.
        on: what it is checked on: a model, an optimizer or a case.
    """

    name: str
    breaks: str
    check: str
    on: str
    patch: Callable[[], AbstractContextManager[object]]
