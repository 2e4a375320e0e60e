"""Negative controls: what the compiler must refuse, made from programs that it takes, so that its yes means something."""

import dataclasses
import re
from collections.abc import Callable
from typing import Final

__all__ = ["CONTROLS", "Control"]


@dataclasses.dataclass(frozen=True)
class Control:
    """A change of a lowered program, after which it must not compile.

    Attributes:
        name: of the change.
        change: of the text.
        says: what the compiler's refusal must contain, a regular expression.
        topology: instead of the chip's; None for the chip's.
    """

    name: str
    change: Callable[[str], str]
    says: str
    topology: str | None = None


def _renamed(text: str) -> str:
    return text.replace("@SparseDenseMatmulWithMinibatchingOp(", "@SparseDenseMatmulOfNobody(")


def _limits(number: int) -> Callable[[str], str]:
    return lambda text: re.sub(r'(_xla_max_(?:unique_)?ids_per_partition = )"\d+"', rf'\1"{number}"', text)


def _badly_sharded(text: str) -> str:
    return text.replace('_xla_sharding_strategy = "mod"', '_xla_sharding_strategy = "zigzag"')


CONTROLS: Final = (
    Control("a custom call of another name", _renamed, "SparseDenseMatmul"),
    Control("max_ids = 0", _limits(0), "max_ids_per_partition"),
    Control("max_ids = 100000000", _limits(100_000_000), "E3001|exceed|memory"),
    Control("sharding strategy zigzag", _badly_sharded, "sharding"),
    Control("a chip without SparseCores", str, "mixed device type", "v5e:2x2"),
)
"""Of one-replica programs of SparseCores."""
