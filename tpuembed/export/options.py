"""How to export, whatever is exported: what every entry to the exporter takes."""

import dataclasses

from tpuembed.export.plan import DEFAULT_MAX_MEMORY_BYTES

__all__ = ["ExportOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of an export; `tpuembed.export_saved_model` explains them."""

    storage: str = "float32"
    layout: str = "variables"
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES
    workers: int | None = None
    engine: str = "local"
    version: int | None = None
