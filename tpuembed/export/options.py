"""The options of an export, shared by every entry point."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tpuembed.config.checks import check_keys, check_number
from tpuembed.export.plan.plan import DEFAULT_MAX_MEMORY_BYTES
from tpuembed.export.plan.row_ranges import RowRanges
from tpuembed.export.storage.choice import Storage

__all__ = ["ExportOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The options of an export; `tpuembed.export_saved_model` explains them."""

    storage: Storage = "float32"
    max_error: float | None = None
    rows: RowRanges = dataclasses.field(default_factory=dict)
    layout: str = "variables"
    serving_root: str | None = None
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES
    workers: int | None = None
    engine: str = "local"
    ray_address: str | None = None
    version: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        if self.max_error is not None:
            check_number("max_error", self.max_error, 0)

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any], without: Iterable[str] = ()) -> "ExportOptions":
        """Return the options given as keyword arguments of the function `where`, which does not accept those in
        `without`.

        Raises:
            ConfigError: an argument is not an option.
        """
        known = {field.name for field in dataclasses.fields(cls)} - set(without)
        check_keys(where, given, known)
        return cls(**given)
