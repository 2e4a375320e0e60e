"""The options of an export, shared by every entry point."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

from tpuembed.config.checks import check_count, check_keys, check_number
from tpuembed.errors import ConfigError
from tpuembed.export.plan.planner import DEFAULT_MAX_MEMORY_BYTES
from tpuembed.export.storage.formats import Storage

__all__ = ["LATEST", "BaseOption", "ExportOptions"]

LATEST: Final = "latest"

BaseOption = Literal["latest"] | int
"""The base of an overlay: the newest complete version, or a number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How an export is written.

    Attributes:
        storage: "float32", "bfloat16", "float16" or "int8" (codes with a scale and a centre per row), for all tables.
            Or by table, such as {"videos": "int8", "*": "bfloat16"}. "*" stands for all other tables, which are float32
            without it.
        max_error: fail if a stored value of a table differs by more than this from its float32 value; None for no
            bound.
        layout: "variables" loads the tables from any location. "mmap" maps them from files whose paths are in the
            graph.
        serving_root: for "mmap": the path of MODEL_DIR on the machine or in the container that serves it; None for
            `model_dir`.
        max_memory_bytes: bound on the buffers of all workers together.
        workers: processes that stream; None for one per processor.
        engine: "local", processes of this machine; or "ray", the Ray cluster of RAY_ADDRESS, whose nodes all see
            `checkpoint` and `model_dir` under the same paths.
        require_finite: fail at a NaN or an infinity in a table or a dense weight.
        version: None for the next free integer.
        base: write an overlay of a version of `model_dir`: its number, or "latest". The version then links the files of
            its base and has only the rows that changed, unless these are too many. None for a full version.
        keep: then remove all versions but the newest `keep`, see `prune_versions`; None removes none.
        resume: reuse the shards that an interrupted run of the same export finished in `model_dir`; False removes them. In a
            store, no shards are kept.
    """

    storage: Storage = "float32"
    max_error: float | None = None
    layout: str = "variables"
    serving_root: str | None = None
    max_memory_bytes: int = DEFAULT_MAX_MEMORY_BYTES
    workers: int | None = None
    engine: str = "local"
    require_finite: bool = False
    version: int | None = None
    base: BaseOption | None = None
    keep: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        if self.max_error is not None:
            check_number("max_error", self.max_error, 0)
        if self.keep is not None:
            check_count("keep", self.keep)
        if self.base is not None:
            if isinstance(self.base, str) and self.base != LATEST:
                raise ConfigError(f'base must be "latest" or the number of a version, got {self.base!r}.')
            if self.base != LATEST:
                check_count("base", self.base)
            if self.engine != "local":
                raise ConfigError(
                    f"base {self.base}: rows are compared on this machine, and the engine is {self.engine!r}. Leave "
                    "engine out, or leave base out."
                )

    @classmethod
    def of(
        cls, where: str, given: Mapping[str, Any], without: Iterable[str] = (), others: Iterable[str] = ()
    ) -> "ExportOptions":
        """Return the options given as keyword arguments of the function `where`, which does not accept those in
        `without`. Messages list its own keyword arguments, `others`, too.

        Raises:
            ConfigError: an argument is not an option.
        """
        known = {field.name for field in dataclasses.fields(cls)} - set(without)
        check_keys(where, given, {*known, *others})
        return cls(**given)
