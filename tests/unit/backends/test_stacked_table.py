"""Stacks whose shards the SparseCores cannot share are refused: no compiler would."""

import dataclasses

import pytest

from tests.support.messages import refused
from tpuembed.backends.tpu.stacked_table import StackLayout, check_shards
from tpuembed.errors import ConfigError

# 100 rows dealt out to 8 SparseCores, 16 rows of the stack in each, of which the first two are another table's.
LAYOUT = StackLayout("users_videos", rows=100, dim=8, sparse_cores=8, rows_per_core=16, offset=2, rotation=0)
SHARDS = [(64, 8), (64, 8)]


def test_stacks_are_shared_evenly() -> None:
    check_shards({"users": LAYOUT}, {"users_videos": SHARDS})


@pytest.mark.parametrize(
    ("shards", "changes"),
    [
        ([(64, 8), (63, 8)], {}),  # one row short
        ([(63, 8), (63, 8)], {}),
        ([(128, 8)] * 3, {}),  # 8 SparseCores of 3 TPUs
        ([(64, 4), (64, 4)], {}),  # narrower than the table
        (SHARDS, {"rows_per_core": 15}),  # no longer what the TPUs hold
        (SHARDS, {"offset": 4}),  # the last rows would be the next SparseCore's
    ],
)
def test_stacks_that_cannot_be_shared(shards: list[tuple[int, int]], changes: dict[str, int]) -> None:
    layout = StackLayout(**{**dataclasses.asdict(LAYOUT), **changes})
    with refused(ConfigError, match="table 'users'"):
        check_shards({"users": layout}, {"users_videos": shards})
