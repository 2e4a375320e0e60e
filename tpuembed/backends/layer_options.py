"""The arguments of a layer for its backend, checked, as one record."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tpuembed.config import FeatureConfig, TableConfig

__all__ = ["LayerOptions"]


@dataclasses.dataclass(frozen=True)
class LayerOptions:
    """The arguments of a layer, in the backends' terms.

    Attributes:
        features: every feature with its path in the structure, in walking order.
        optimizer: the spec that trains tables without their own, or None.
        updates: the int64 variable that counts updates.
        embedding_feature: the hardware to use. None takes the hardware that exists.
        pipelining: overlap lookups with dense computation.
        batch_size: one replica's examples, for features without an output_shape.
        sparse_core_config: TensorFlow's SparseCoreEmbeddingConfig, or None.
        size_threshold: tables of at most this many rows are replicated. None replicates no table.
        track_rows: keep the number of the update that last touched each row.
    """

    features: Sequence[tuple[str, FeatureConfig]]
    optimizer: Any
    updates: Any
    embedding_feature: Any = None
    pipelining: bool = False
    batch_size: int | None = None
    sparse_core_config: Any = None
    size_threshold: int | None = None
    track_rows: bool = False

    @property
    def tables(self) -> list[TableConfig]:
        """Return each table once, in order of first use."""
        return list({feature.table.name: feature.table for _, feature in self.features}.values())
