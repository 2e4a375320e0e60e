"""What reads of dealt rows prove: sums over files that TensorFlow wrote, against the checksums that TensorFlow put into them."""

import itertools
import random
import shutil
from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from pathlib import Path

import numpy as np
import pytest

from tests.support.goldens import FOLDER, read_golden
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.bundle.checkpoint import BundleCheckpoint
from tpuembed.checkpoint.types import PartialChecksum

STACKS = [*sorted(path.name for path in (FOLDER / "tpu").glob("sparse_cores_*")), "partitioned_mod"]


def opened(name: str, path: Path | None = None) -> BundleCheckpoint:
    golden = read_golden(f"tpu/{name}")
    checkpoint = open_checkpoint(path or golden.path, **golden.options)
    assert isinstance(checkpoint, BundleCheckpoint)
    return checkpoint


def ranges(rows: int, seed: int) -> Iterator[tuple[int, int]]:
    """All rows, in pieces of random sizes and in random order."""
    moments = random.Random(seed)
    cuts = sorted({0, rows, *(moments.randrange(rows + 1) for _ in range(5))})
    pieces = list(itertools.pairwise(cuts))
    moments.shuffle(pieces)
    return iter(pieces)


def read_all(checkpoint: BundleCheckpoint, tables: Collection[str]) -> dict[str, PartialChecksum]:
    """The sums of two readers per table: shards are read by different processes."""
    met: list[Mapping[str, PartialChecksum]] = []
    for seed, table in enumerate(tables):
        readers = [checkpoint.checksums.reader(table), checkpoint.checksums.reader(table)]
        info = checkpoint.tables()[table]
        for number, (start, stop) in enumerate(ranges(info.rows, seed)):
            out = np.empty((stop - start, info.dim), info.dtype)
            reader = readers[number % 2]
            assert reader
            reader.read_into(start, out)
            np.testing.assert_array_equal(out, checkpoint.read(table, start, stop))
        met += [reader.sums() for reader in readers if reader]
    keys = {key for sums in met for key in sums}
    return {key: reduce(PartialChecksum.__add__, (sums.get(key, PartialChecksum()) for sums in met)) for key in keys}


@pytest.mark.parametrize("name", STACKS)
def test_reads_of_all_rows_prove_the_files_of_tensorflow(name: str) -> None:
    with opened(name) as checkpoint:
        dealt = [table for table in checkpoint.tables() if checkpoint.checksums.reader(table)]
        assert dealt
        assert checkpoint.checksums.proven(dealt, read_all(checkpoint, dealt)) == dict.fromkeys(dealt, True)


@pytest.mark.parametrize("name", STACKS)
def test_reads_of_one_table_prove_it_with_its_stack(name: str) -> None:
    with opened(name) as checkpoint:
        for table in checkpoint.tables():
            if checkpoint.checksums.reader(table):
                assert checkpoint.checksums.proven([table], read_all(checkpoint, [table])) == {table: True}


@pytest.mark.parametrize("name", STACKS)
def test_rows_that_were_not_read_or_read_twice_prove_nothing(name: str) -> None:
    with opened(name) as checkpoint:
        table = next(table for table in checkpoint.tables() if checkpoint.checksums.reader(table))
        reader, info = checkpoint.checksums.reader(table), checkpoint.tables()[table]
        assert reader
        assert checkpoint.checksums.proven([table], {}) == {}
        reader.read_into(0, np.empty((info.rows - 1, info.dim), info.dtype))
        assert checkpoint.checksums.proven([table], reader.sums()) == {}
        for start in (info.rows - 1, 0):
            reader.read_into(start, np.empty((1, info.dim), info.dtype))
        assert checkpoint.checksums.proven([table], reader.sums()) == {}


def test_a_row_twice_in_place_of_another_is_no_proof() -> None:
    """As many bytes as the tensor has, and not its bytes."""
    with opened("sparse_cores_2_adagrad_momentum") as checkpoint:
        table = next(iter(checkpoint.tables()))
        reader, info = checkpoint.checksums.reader(table), checkpoint.tables()[table]
        assert reader
        reader.read_into(0, np.empty((info.rows - 1, info.dim), info.dtype))
        reader.read_into(0, np.empty((1, info.dim), info.dtype))
        assert checkpoint.checksums.proven([table], reader.sums()) == {table: False}


@pytest.mark.parametrize("name", STACKS)
def test_every_damaged_byte_is_noticed(name: str, tmp_path: Path) -> None:
    """Of the tables and of what lies beside them; a sample of the bytes."""
    golden = read_golden(f"tpu/{name}")
    for file in golden.path.parent.glob(f"{golden.path.name}.*"):
        shutil.copy(file, tmp_path)
    with opened(name, tmp_path / golden.path.name) as checkpoint:
        table = next(table for table in checkpoint.tables() if checkpoint.checksums.reader(table))
        reader = checkpoint.checksums.reader(table)
        assert reader
        info = checkpoint.tables()[table]
        reader.read_into(0, np.empty((info.rows, info.dim), info.dtype))
        (key,) = reader.sums()
        parts = list(checkpoint.bundle.entries[key].parts())
        for part in parts:
            place = part.offset + random.Random(part.offset).randrange(part.size)
            flip(checkpoint.bundle.data_path(part.shard), place)
            assert checkpoint.checksums.proven([table], read_all(checkpoint, [table])) == {table: False}
            flip(checkpoint.bundle.data_path(part.shard), place)
        assert checkpoint.checksums.proven([table], read_all(checkpoint, [table])) == {table: True}


def flip(path: object, place: int) -> None:
    with open(str(path), "r+b") as file:
        file.seek(place)
        (value,) = file.read(1)
        file.seek(place)
        file.write(bytes([value ^ 16]))
