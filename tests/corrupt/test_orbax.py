"""Damaged and hostile Orbax checkpoints: each is refused by a CheckpointError that names the file and what is wrong."""

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import tensorstore

from tests.support.checkpoint.orbax_trees import STACKED, Array, Leaves, metadata, spec, stacked_rows, write_tree
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
    ConfigError,
)

ROWS = np.arange(92, dtype=np.float32).reshape(23, 4)
LEAVES: Leaves = {("emb",): ROWS, ("step",): np.ones(3, np.float32)}


@pytest.fixture(params=[False, True], ids=["files", "ocdbt"])
def any_tree(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tree(tmp_path / "ckpt", LEAVES, chunks=(5, 4), ocdbt=request.param)


@pytest.fixture
def files_tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "ckpt", LEAVES, chunks=(5, 4), ocdbt=False)


@pytest.fixture
def ocdbt_tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "ckpt", LEAVES, chunks=(5, 4), compressed=False)


def read_all(path: Path, **options: Any) -> None:
    with open_checkpoint(path, **options) as checkpoint:
        for name in checkpoint.tables():
            checkpoint.read(name)


def refusal(path: Path, kind: type[CheckpointError] = CheckpointError, **options: Any) -> str:
    """The message of what opening and reading everything raises."""
    with pytest.raises(kind) as caught:
        read_all(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def edit(path: Path, change: Callable[[Any], None]) -> None:
    document = json.loads(path.read_bytes())
    change(document)
    path.write_text(json.dumps(document))


def test_metadata_cut_at_every_length(any_tree: Path) -> None:
    file = any_tree / "_METADATA"
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert f"file {file}: is not JSON" in refusal(any_tree, CheckpointCorruptError)


def test_every_byte_of_the_metadata_flipped(any_tree: Path) -> None:
    """Refused, or read as it was."""
    file = any_tree / "_METADATA"
    whole = file.read_bytes()
    for position in range(len(whole)):
        for flip in (0x01, 0x20):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            file.write_bytes(damaged)
            try:
                with open_checkpoint(any_tree) as checkpoint:
                    np.testing.assert_array_equal(checkpoint.read("emb"), ROWS)
            except CheckpointError as error:
                assert str(any_tree) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("tree_metadata"), "should have an object 'tree_metadata'"),
        (lambda d: d.update(tree_metadata=[]), "should have an object 'tree_metadata'"),
        (lambda d: d.update(use_ocdbt="yes"), "should have true or false as 'use_ocdbt'"),
        (lambda d: d.update(use_zarr3=1), "should have true or false as 'use_zarr3'"),
        (lambda d: d["tree_metadata"].update(x=3), "'x' should have a list 'key_metadata'"),
        (lambda d: d["tree_metadata"]["('emb',)"].update(key_metadata=[]), "should be the path ()"),
        (lambda d: d["tree_metadata"]["('emb',)"]["key_metadata"][0].update(key="emc"), "should be the path ('emc',)"),
        (lambda d: d["tree_metadata"]["('emb',)"]["key_metadata"][0].update(key=1), "should have a string 'key'"),
        (lambda d: d["tree_metadata"]["('emb',)"]["value_metadata"].update(write_shape=23), "a list of integers"),
        (lambda d: d["tree_metadata"]["('emb',)"]["value_metadata"].pop("value_type"), "a string 'value_type'"),
    ],
)
def test_metadata_of_another_form(any_tree: Path, change: Callable[[Any], None], words: str) -> None:
    edit(any_tree / "_METADATA", change)
    assert words in refusal(any_tree, CheckpointCorruptError)


@pytest.mark.parametrize("text", ["[" * 200_000, "1" * 10_000, '{"tree_metadata": ' * 5_000, "\xff", ""])
def test_metadata_that_no_one_writes(any_tree: Path, text: str) -> None:
    (any_tree / "_METADATA").write_bytes(text.encode("latin-1"))
    assert len(refusal(any_tree, CheckpointCorruptError)) < 1000


def test_metadata_with_a_key_twice(any_tree: Path) -> None:
    """Which of the two would count, nobody says."""
    file = any_tree / "_METADATA"
    whole = file.read_text()
    for key in ("use_ocdbt", "tree_metadata", "write_shape"):
        file.write_text(whole.replace(f'"{key}": ', f'"{key}": {{}}, "{key}": ', 1))
        assert "a key appears twice in one object" in refusal(any_tree, CheckpointCorruptError)


def test_metadata_is_lost(ocdbt_tree: Path) -> None:
    (ocdbt_tree / "_METADATA").unlink()
    assert "has manifest.ocdbt but no _METADATA" in refusal(ocdbt_tree, CheckpointCorruptError)


def test_an_array_that_the_tree_has_and_the_store_has_not(any_tree: Path) -> None:
    leaves = {**LEAVES, ("gone",): ROWS}
    (any_tree / "_METADATA").write_text(json.dumps(metadata(leaves, ocdbt=(any_tree / "d").exists())))
    message = refusal(any_tree, CheckpointCorruptError)
    assert "array 'gone': NOT_FOUND" in message
    assert "tensorstore_spec" not in message


def test_chunk_is_lost(files_tree: Path) -> None:
    """TensorStore would return zeros."""
    (files_tree / "emb" / "2.0").unlink()
    with open_checkpoint(files_tree) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("emb", 0, 10), ROWS[:10])
        with pytest.raises(CheckpointCorruptError, match=r"array 'emb': NOT_FOUND: chunk \{2, 0\}"):
            checkpoint.read("emb", 14, 15)


@pytest.mark.parametrize("role", ["table", "slot/x"])
def test_the_last_chunk_of_a_stack_or_slot_is_lost(role: str, tmp_path: Path) -> None:
    """Known before a row is read."""
    rows = stacked_rows({name: np.ones(shape, np.float32) for name, shape in STACKED.items()})
    leaves: Leaves = {("a_b_c", "table"): rows, ("a_b_c", "slot", "x"): rows}
    folder = write_tree(tmp_path / "ckpt", leaves, chunks=(5, 8), ocdbt=False)
    (folder / f"a_b_c.{role.replace('/', '.')}" / "6.0").unlink()
    with refused(CheckpointCorruptError):
        open_checkpoint(folder, embedding_spec=spec())


def says_nothing(folder: Path) -> None:
    """The tree of an older Orbax, which did not say that all chunks are stored."""
    edit(folder / "_METADATA", lambda d: d.pop("store_array_data_equal_to_fill_value"))


@pytest.mark.parametrize("says", [None, False])
def test_chunk_is_lost_of_an_array_without_a_fill_value(says: bool | None, files_tree: Path) -> None:
    """An older Orbax stored all of them too: nothing was left out that is equal to no value."""
    says_nothing(files_tree)
    if says is not None:
        edit(files_tree / "_METADATA", lambda d: d.update(store_array_data_equal_to_fill_value=says))
    (files_tree / "emb" / "2.0").unlink()
    assert "array 'emb': NOT_FOUND: chunk {2, 0}" in refusal(files_tree, CheckpointCorruptError)
    (files_tree / "emb" / "4.0").unlink()
    assert "array 'emb' should be [23, 4], but its last chunk is missing" in refusal(files_tree, CheckpointCorruptError)


@pytest.mark.parametrize("zarr3", [False, True])
def test_chunk_that_was_never_written(zarr3: bool, tmp_path: Path) -> None:
    """Where an array has a fill value, an older Orbax left out what is equal to it."""
    folder = write_tree(tmp_path / "ckpt", LEAVES, chunks=(5, 4), ocdbt=False, zarr3=zarr3)
    says_nothing(folder)
    value = 0
    if not zarr3:
        value = 7
        edit(folder / "emb" / ".zarray", lambda d: d.update(fill_value=value))
    for chunk in (2, 4):
        (folder / "emb" / (f"c/{chunk}/0" if zarr3 else f"{chunk}.0")).unlink()
    expected = ROWS.copy()
    expected[10:15] = expected[20:] = value
    with open_checkpoint(folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("emb"), expected)


def test_elements_in_another_order(files_tree: Path) -> None:
    """One letter of the metadata would permute every chunk."""
    edit(files_tree / "emb" / ".zarray", lambda d: d.update(order="F"))
    assert "array 'emb': its metadata has column-major" in refusal(files_tree, CheckpointFormatError)
    edit(files_tree / "emb" / ".zarray", lambda d: d.update(order="C", dtype=">f4"))
    assert "or big-endian chunks, which Orbax never writes" in refusal(files_tree, CheckpointFormatError)


def test_elements_in_another_order_in_zarr_3(tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "ckpt", LEAVES, chunks=(5, 4), ocdbt=False, zarr3=True)
    file = folder / "emb" / "zarr.json"
    whole = file.read_bytes()
    turn = {"name": "transpose", "configuration": {"order": [1, 0]}}
    edit(file, lambda d: d["codecs"].insert(0, turn))
    assert "its metadata has column-major" in refusal(folder, CheckpointFormatError)
    file.write_bytes(whole)
    edit(file, lambda d: d["codecs"][0]["configuration"].update(endian="big"))
    assert "or big-endian chunks, which Orbax never writes" in refusal(folder, CheckpointFormatError)


@pytest.mark.parametrize("written", [[22, 4], [4, 23], [23], [23, 4, 1], [46, 4], [23, 8], [0, 4], [-23, 4], [23, -1]])
def test_an_array_of_another_shape_than_the_tree_says(any_tree: Path, written: list[int]) -> None:
    """`write_shape` is of one shard; [23, 2] is of two."""
    entry = "('emb',)"
    edit(any_tree / "_METADATA", lambda d: d["tree_metadata"][entry]["value_metadata"].update(write_shape=[23, 2]))
    read_all(any_tree)
    edit(any_tree / "_METADATA", lambda d: d["tree_metadata"][entry]["value_metadata"].update(write_shape=written))
    if len(written) == 2:  # others are no table
        message = refusal(any_tree, CheckpointCorruptError)
        assert f"array 'emb': is [23, 4], but by its tree it was written in parts of {written}" in message
    else:
        assert "has no table" in refusal(any_tree)


@pytest.mark.parametrize("shape", [[20, 4], [5, 4], [1, 4], [23, 3]])
@pytest.mark.parametrize("zarr3", [False, True])
@pytest.mark.parametrize("ocdbt", [False, True])
def test_fewer_rows_or_columns_than_there_are(shape: list[int], zarr3: bool, ocdbt: bool, tmp_path: Path) -> None:
    folder = write_tree(tmp_path / "ckpt", LEAVES, chunks=(10, 1), ocdbt=ocdbt, zarr3=zarr3)
    forget_shape(folder)
    name = "zarr.json" if zarr3 else ".zarray"
    kvstore: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
    if ocdbt:
        kvstore = {"driver": "ocdbt", "base": kvstore}
    store = tensorstore.KvStore.open(kvstore).result()
    document = json.loads(store[f"emb/{name}"]) | {"shape": shape}
    store[f"emb/{name}"] = json.dumps(document).encode()
    assert f"should be {shape}, but there is a chunk" in refusal(folder, CheckpointCorruptError)


def test_chunks_cut_at_every_length(files_tree: Path) -> None:
    file = files_tree / "emb" / "1.0"
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert f"{file}" in refusal(files_tree, CheckpointCorruptError)


def test_database_files_cut_at_every_length(ocdbt_tree: Path) -> None:
    files = [ocdbt_tree / "manifest.ocdbt", *(ocdbt_tree / "d").iterdir()]
    assert len(files) > 2
    for file in files:
        whole = file.read_bytes()
        for size in range(0, len(whole), 11):
            file.write_bytes(whole[:size])
            try:
                with open_checkpoint(ocdbt_tree) as checkpoint:  # a node that a newer one has replaced is not read
                    np.testing.assert_array_equal(checkpoint.read("emb"), ROWS)
            except CheckpointCorruptError as error:
                assert str(ocdbt_tree) in str(error)  # noqa: PT017
        file.write_bytes(whole)


def test_every_byte_of_the_manifest_flipped(ocdbt_tree: Path) -> None:
    file = ocdbt_tree / "manifest.ocdbt"
    whole = file.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        file.write_bytes(damaged)
        refusal(ocdbt_tree, CheckpointCorruptError)


def forget_shape(folder: Path) -> None:
    """The tree of an older Orbax, which did not say what parts an array was written in."""
    edit(folder / "_METADATA", lambda d: d["tree_metadata"]["('emb',)"]["value_metadata"].pop("write_shape"))


@pytest.mark.parametrize("rows", [24, 26, 10**12, 1 << 55])
def test_more_rows_than_there_are(files_tree: Path, rows: int) -> None:
    """24 rows end in a chunk that is there, whose padding is the 24th row: only the tree says that it is not one."""
    edit(files_tree / "emb" / ".zarray", lambda d: d.update(shape=[rows, 4]))
    assert f"is [{rows}, 4], but by its tree" in refusal(files_tree, CheckpointCorruptError)
    forget_shape(files_tree)
    if rows == 24:
        with open_checkpoint(files_tree) as checkpoint:
            assert checkpoint.tables()["emb"].rows == 24
    else:
        assert f"should be [{rows}, 4], but its last chunk is missing" in refusal(files_tree, CheckpointCorruptError)


@pytest.mark.parametrize(
    "shape",
    [
        [1 << 63, 4],
        [1 << 62, 4],
        [(1 << 62) - 1, 4],
        [1 << 57, 4],
        [-1, 4],
        ["23", 4],
        [23],
        [23, 4, 1],
        [],
        None,
        [1e3, 4],
    ],
)
def test_absurd_shapes(files_tree: Path, shape: Any) -> None:
    """Refused, or, where it is no matrix, no table."""
    edit(files_tree / "emb" / ".zarray", lambda d: d.update(shape=shape))
    refusal(files_tree)


@pytest.mark.parametrize("chunks", [[1 << 40, 4], [1 << 62, 1 << 62], [0, 4], [-5, 4], [1 << 31, 1 << 31]])
def test_absurd_chunks(files_tree: Path, chunks: list[int]) -> None:
    edit(files_tree / "emb" / ".zarray", lambda d: d.update(chunks=chunks))
    refusal(files_tree)


def test_chunk_over_the_memory_for_chunks(files_tree: Path) -> None:
    edit(files_tree / "emb" / ".zarray", lambda d: d.update(chunks=[1 << 27, 4]))
    for beyond in (files_tree / "emb").glob("[1-9].0"):
        beyond.unlink()
    message = refusal(files_tree, CheckpointFormatError)
    assert "a chunk of [134217728, 4] takes" in message
    decoded = 2147483648 + 2147483648 // 64 + 1024
    for number in (decoded, 2 * decoded, 2 << 30):
        assert str(number) in message
    assert f"chunk_memory_bytes={2 * decoded}" in message
    assert "SaveArgs(chunk_byte_size=...)" in message


def test_names_that_lead_outside(files_tree: Path, tmp_path: Path) -> None:
    """An array elsewhere on the disk is not read."""
    shutil.copytree(files_tree / "emb", tmp_path / "secret")
    for name in ("../secret", "/../secret", "x/../../secret", f"{tmp_path}/secret", "x//y", "./emb"):
        (files_tree / "_METADATA").write_text(json.dumps(metadata({(name,): ROWS}, ocdbt=False)))
        assert "outside the checkpoint" in refusal(files_tree, CheckpointCorruptError)


def test_a_database_that_leads_outside(tmp_path: Path) -> None:
    """Its manifest may name any file; TensorStore takes none outside its folder.

    Names are random and stored without what they begin with in common: until there is nothing, a tree is written anew.
    """
    for attempt in range(50):
        folder = write_tree(tmp_path / str(attempt) / "ckpt", LEAVES, compressed=False)
        manifest = folder / "manifest.ocdbt"
        data = manifest.read_bytes()
        for file in (folder / "d").iterdir():
            data = data.replace(file.name.encode(), f"../../{file.name[6:]}".encode())
            shutil.move(file, folder.parent / file.name[6:])
        manifest.write_bytes(data[:-4] + struct.pack("<I", google_crc32c.value(data[:-4])))
        message = refusal(folder, CheckpointCorruptError)
        if "Invalid key" in message:
            return
        assert "NOT_FOUND" in message
    raise AssertionError("no manifest could be changed")


def test_a_chunk_that_swells(files_tree: Path) -> None:
    """32 KB that decode to 1 GiB, where 80 bytes should be."""
    zeros = {"driver": "zarr", "kvstore": f"file://{files_tree.parent}/big/", "store_data_equal_to_fill_value": True}
    layout = {"shape": [1 << 28], "chunks": [1 << 28], "dtype": "<f4", "compressor": {"id": "zstd", "level": 1}}
    array = tensorstore.open({**zeros, "metadata": layout}, create=True).result()
    array.write(np.zeros((), np.float32)).result()
    shutil.copy(files_tree.parent / "big" / "0", files_tree / "emb" / "0.0")
    script = """
import resource, sys
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError
with open_checkpoint(sys.argv[1]) as checkpoint:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        checkpoint.read("emb")
    except CheckpointCorruptError:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50 << 10
    else:
        raise AssertionError
"""
    subprocess.run([sys.executable, "-c", script, str(files_tree)], check=True)


def test_two_arrays_with_one_name_in_the_store(tmp_path: Path) -> None:
    leaves: Leaves = {("a.b", "c"): ROWS, ("a", "b.c"): ROWS + 1}
    folder = write_tree(tmp_path / "ckpt", leaves)
    assert "'a.b/c' and 'a/b.c' are both stored as 'a.b.c'" in refusal(folder, CheckpointFormatError)


@pytest.fixture
def stacked(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    values: dict[str, Array] = {name: rng.random(shape, np.float32) for name, shape in STACKED.items()}
    return write_tree(tmp_path / "ckpt", {("var:a_b_c:table",): stacked_rows(values)})


def change_table(**numbers: int) -> Callable[[Any], None]:
    return lambda stack: stack["tables"]["b"].update(numbers)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_table(row_offset_in_shard=4), "overlap"),
        (change_table(row_offset_in_shard=7), "rows [7, 9) in shards of 8"),
        (change_table(vocab_size=9), "overlap"),
        (change_table(vocab_size=10**9), "rows [5, 250000005) in shards of 8"),
        (change_table(embedding_dim=9), "9 columns in 8 padded ones"),
        (change_table(shard_rotation=4), "rotation 4 of 4 SparseCores"),
        (change_table(padded_vocab_size=7), "7 padded rows on 4 SparseCores|8 rows in 7 padded ones"),
        (change_table(padded_embedding_dim=16), "16 columns"),
        (lambda stack: stack.update(num_sparsecores=3), "stack of [32, 8] does not fit 3 SparseCores"),
        (lambda stack: stack.update(num_sparsecores=1 << 62), "does not fit 4611686018427387904 SparseCores"),
        (lambda stack: stack.update(stack_vocab_size=64), "its stack of [64, 8]"),
        (lambda stack: stack.update(stack_embedding_dim=16), "its stack of [32, 16]"),
    ],
)
def test_specs_that_do_not_fit_the_stack(stacked: Path, change: Callable[[Any], None], words: str) -> None:
    stacks = spec()
    change(stacks["a_b_c"])
    message = refusal(stacked, CheckpointMismatchError, embedding_spec=stacks)
    assert any(word in message for word in words.split("|"))
    assert "stack 'a_b_c' is [32, 8]" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d["a_b_c"]["tables"]["a"].update(vocab_size=-1), "vocab_size must be at least 1, got -1"),
        (lambda d: d["a_b_c"]["tables"]["a"].update(vocab_size="19"), "vocab_size must be an integer"),
        (lambda d: d["a_b_c"]["tables"]["a"].pop("embedding_dim"), "embedding_dim must be at least 1, got 0"),
        (lambda d: d["a_b_c"]["tables"]["a"].update(rotation=1), "unknown key 'rotation'"),
        (lambda d: d["a_b_c"].pop("num_sparsecores"), "num_sparsecores must be at least 1, got 0"),
        (lambda d: d["a_b_c"].pop("tables"), "tables must be a mapping by name"),
        (lambda d: d.update(other=d["a_b_c"]), "two tables are called 'a'"),
        (lambda d: d.clear(), "must be a mapping by name"),
    ],
)
def test_specs_that_contradict_themselves(stacked: Path, change: Callable[[Any], None], words: str) -> None:
    stacks = spec()
    change(stacks)
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(stacked, embedding_spec=stacks)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "stacked_table_specs {", 'stacked_table_specs { stack_name: "a', "stacked_table_specs: 3", "stacked_table_specs {}",
        'stacked_table_specs { stack_name: "a" num_sparsecores: 4 }', "stacked_table_specs { stack_name: 3 }", "{" * 5000,
        "stacked_table_specs " + "{ a " * 5000, "stacked_table_specs { num_sparsecores: 1.5 }", "@", "stacked_table_specs { x }",
        "a:[" + "1," * 500_000 + "1]", "a:1 \n" * 500_000,
        "stacked_table_specs { num_sparsecores: " + "9" * 5000 + " }", 'stacked_table_specs { stack_name: "\\377" }',
    ],
)  # fmt: skip
def test_damaged_specs_in_the_checkpoint(stacked: Path, text: str) -> None:
    step = stacked.parent / "1"
    shutil.move(stacked, step / "emb")
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    (step / "spec").mkdir()
    (step / "spec" / "proto.pbtxt").write_text(text)
    message = refusal(step)
    assert len(message) < 1000
