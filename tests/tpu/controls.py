"""Negative controls: what the compiler must refuse, made from programs that it takes, so that its yes means something."""

import dataclasses
import re
from collections.abc import Callable
from typing import Final

__all__ = ["CONTROLS", "CONTROLS_OF_COPIES", "Control", "controls_of"]


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


def _with_limits(text: str, number: int) -> str:
    """A program whose lookups and updates take `number` ids, and unique ids, from every SparseCore."""
    return re.sub(r'(_xla_max_(?:unique_)?ids_per_partition = )"\d+"', rf'\1"{number}"', text)


def _badly_sharded(text: str) -> str:
    return text.replace('_xla_sharding_strategy = "mod"', '_xla_sharding_strategy = "zigzag"')


def _unknown(text: str) -> str:
    """The first product of two matrices, that of the dense layer, by somebody unknown."""
    return re.sub(
        r"stablehlo\.dot_general (%\S+), (%\S+), .*? : (\(.*)",
        r"stablehlo.custom_call @Nobody(\1, \2) : \3",
        text,
        count=1,
    )


CONTROLS: Final = (
    Control("a custom call of another name", _renamed, "SparseDenseMatmul"),
    Control("max_ids = 0", lambda text: _with_limits(text, 0), "max_ids_per_partition"),
    Control("max_ids = 100000000", lambda text: _with_limits(text, 100_000_000), "E3001|exceed|memory"),
    Control("sharding strategy zigzag", _badly_sharded, "sharding"),
    Control("a chip without SparseCores", str, "mixed device type", "v5e:2x2"),
)
"""Of one-replica programs of SparseCores."""
CONTROLS_OF_COPIES: Final = (Control("a custom call of nobody", _unknown, "Nobody"),)
"""Of one-replica programs that replicate the tables."""


def controls_of(path: str) -> tuple[Control, ...]:
    """Of a cell's path."""
    return CONTROLS if path == "sparsecore" else CONTROLS_OF_COPIES
