"""Names of the data files of an export's bundle: TensorFlow's files come first, then one per stack."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tpuembed.export.plan.plan import StackPlan
from tpuembed.tensor_bundle import index_path, read_index, shard_path

__all__ = ["BUNDLE", "data_file_names"]

BUNDLE: Final = Path("variables", "variables")


def data_file_names(version: Path, stacks: Sequence[StackPlan]) -> Mapping[str, str]:
    """Return the path inside `version` of the data file of each `StackPlan.file`. Call it right after the graph is
    saved.
    """
    first = read_index(index_path(version / BUNDLE)).num_shards
    count = first + len(stacks)
    return {
        stack.file: shard_path(BUNDLE, number, count).as_posix() for number, stack in enumerate(stacks, start=first)
    }
