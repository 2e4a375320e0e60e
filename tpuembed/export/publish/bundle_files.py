"""What the data files of an export's bundle are called: those that TensorFlow wrote come first, one for each stack follows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tpuembed.export.plan.plan import StackPlan
from tpuembed.tensor_bundle import index_path, read_index, shard_path

__all__ = ["BUNDLE", "data_file_names"]

BUNDLE: Final = Path("variables", "variables")


def data_file_names(version: Path, stacks: Sequence[StackPlan]) -> Mapping[str, str]:
    """`StackPlan.file` -> the path of its data file inside `version`, where TensorFlow has saved the graph and nothing more."""
    first = read_index(index_path(version / BUNDLE)).num_shards
    count = first + len(stacks)
    return {
        stack.file: shard_path(BUNDLE, number, count).as_posix() for number, stack in enumerate(stacks, start=first)
    }
