"""Chooses the storage type of each table: one type for all, or one per table."""

from collections.abc import Iterable, Mapping

from tpuembed.config.checks import check_choice, did_you_mean
from tpuembed.errors import ConfigError, UnknownTableError
from tpuembed.export.storage.formats import STORAGES

__all__ = ["OTHERS", "Storage", "storage_by_table"]

OTHERS = "*"
"""The key that stands for every table that is not named."""

Storage = str | Mapping[str, str]


def storage_by_table(storage: Storage, tables: Iterable[str]) -> dict[str, str]:
    """Return the key of STORAGES for each of `tables`.

    Args:
        storage: one type for all tables, or a mapping by name, with "*" for other tables. Without "*", they are
            float32.
        tables: the exported tables.

    Raises:
        ConfigError: unknown storage type.
        UnknownTableError: a table is not exported.
    """
    tables = list(tables)
    chosen = {OTHERS: storage} if isinstance(storage, str) else storage
    if not isinstance(chosen, Mapping):
        raise ConfigError(f"storage must be a storage type, or a mapping of tables to storage types, got {storage!r}.")
    for name, value in chosen.items():
        if name != OTHERS and name not in tables:
            raise UnknownTableError(f"storage: table {name!r} is not exported; {did_you_mean(str(name), tables)}")
        check_choice("storage" if name == OTHERS else f"storage: table {name!r}: it", value, STORAGES)
    return {table: chosen.get(table, chosen.get(OTHERS, "float32")) for table in tables}
