"""One call of a layer, as the framework around it sees it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

__all__ = ["LayerCall"]


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """One call of a layer. A backend knows no more of the framework.

    Attributes:
        compute_dtype: of the activations.
        trainable: False if the layer is frozen.
        dummy: the weight of the whole step, a variable; None if no table is trained by the layer.
        optimizer: of the compiled model whose call reached the layer; None in an own training loop.
        models: the models whose calls reached the layer, the innermost first.
    """

    compute_dtype: str
    trainable: bool
    dummy: Any = None
    optimizer: Any = None
    models: Sequence[Any] = ()
