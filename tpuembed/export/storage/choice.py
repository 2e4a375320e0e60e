"""Which table is stored how: one storage type for all, or one per table."""

from collections.abc import Iterable, Mapping

from tpuembed.config.checks import check_choice, did_you_mean
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.export.storage.formats import STORAGES

__all__ = ["OTHERS", "Storage", "storage_by_table"]

OTHERS = "*"
"""Stands for every table that is not named."""

Storage = str | Mapping[str, str]


def storage_by_table(storage: Storage, tables: Iterable[str]) -> dict[str, str]:
    """The key of STORAGES of each of `tables`.

    Args:
        storage: for all of them; or by name, with "*" for those that are not named, float32 without it.
        tables: those that are exported.

    Raises:
        ConfigError: no such storage type.
        UnknownTableError: a table that is not exported.
    """
    tables = list(tables)
    chosen = {OTHERS: storage} if isinstance(storage, str) else storage
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"storage must be a storage type, or a mapping of tables to them; got {storage!r}")
    for name, value in chosen.items():
        if name != OTHERS and name not in tables:
            raise UnknownTableError(f"storage: table {name!r} is not exported; {did_you_mean(str(name), tables)}")
        check_choice("storage" if name == OTHERS else f"storage: table {name!r}: it", value, STORAGES)
    return {table: chosen.get(table, chosen.get(OTHERS, "float32")) for table in tables}
