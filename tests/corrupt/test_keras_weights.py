"""Damaged and hostile weight files: each is refused by a CheckpointError that names the file, in bounded time and memory."""

import json
import re
import shutil
import struct
import sys
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.checkpoint.keras_files import LAYER, add_table, write_archive, write_tables
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, MissingExtraError

GOLDENS = Path(__file__).parents[1] / "golden" / "keras_rs"
TABLE = np.arange(36, dtype=np.float32).reshape(9, 4)
FIRST = f"{LAYER}/_default_device_embedding_layers/embed_reduce/vars/0"


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Whatever a file claims, no test of this module holds 100 MB at a time."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


def read_all(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        for name, info in checkpoint.tables().items():
            for slot in (None, *info.slots):
                checkpoint.read(name, slot=slot)


def refusal(path: Path, kind: type[CheckpointError] = CheckpointCorruptError) -> str:
    with pytest.raises(kind) as caught:
        read_all(path)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    assert str(path.parent) in message
    assert "\n" not in message
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_tables(tmp_path / "model.weights.h5", {"user": TABLE, "item": TABLE[:5]})


# ---- the file


def test_cut_at_many_lengths(path: Path) -> None:
    whole = path.read_bytes()
    for size in [0, 8, 96, *np.linspace(100, len(whole) - 1, 6, dtype=int)]:
        path.write_bytes(whole[:size])
        refusal(path)


@pytest.mark.parametrize("data", [b"", b"\0" * 5000, b"no weights", b"PK\x03\x04" + b"\0" * 100], ids=range(4))
def test_no_hdf5(data: bytes, tmp_path: Path) -> None:
    for name in ("x.weights.h5", "x.h5", "x.hdf5", "x.keras", "x.weights.json"):
        (tmp_path / name).write_bytes(data)
        refusal(tmp_path / name)


def test_h5py_not_installed(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with refused(MissingExtraError, match=r"'tpuembed\[hdf5\]'"):
        open_checkpoint(path)


def test_cut_while_it_is_open(path: Path) -> None:
    write_tables(path, {"user": np.zeros((1 << 16, 4), np.float32)})
    with open_checkpoint(path) as checkpoint:
        path.write_bytes(b"")
        with refused(CheckpointCorruptError):
            checkpoint.read("user")


# ---- what HDF5 allows and Keras does not write


def spoil(path: Path, change: Callable[[Any], object]) -> None:
    with h5py.File(path, "a") as file:
        change(file)


def link(kind: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        file[f"{LAYER}/more"] = kind

    return change


def test_links_are_refused(path: Path, tmp_path: Path) -> None:
    other = write_tables(tmp_path / "other.weights.h5", {"x": TABLE})
    whole = path.read_bytes()
    for kind in (h5py.SoftLink("/layers"), h5py.SoftLink("nowhere"), h5py.ExternalLink(other, "/layers")):
        path.write_bytes(whole)
        spoil(path, link(kind))
        assert f"{type(kind).__name__}, which is not followed" in refusal(path)


def test_groups_in_circles(path: Path) -> None:
    spoil(path, lambda file: file.__setitem__(f"{LAYER}/again", file["layers"]))
    assert "is listed twice, or is inside itself" in refusal(path)


def test_one_array_under_two_names(path: Path) -> None:
    spoil(path, lambda file: file.__setitem__(f"{LAYER}/vars/0", file[FIRST]))
    assert "is listed twice" in refusal(path)


def replace(**options: Any) -> Callable[[Any], None]:
    def change(file: Any) -> None:
        del file[FIRST]
        file.create_dataset(FIRST, **options)

    return change


def virtual(file: Any) -> None:
    del file[FIRST]
    layout = h5py.VirtualLayout(TABLE.shape, "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "x", TABLE.shape)
    file.create_virtual_dataset(FIRST, layout)


@pytest.mark.parametrize(
    ("change", "kind", "says"),
    [
        (replace(shape=(9, 4), dtype="f4", external="/etc/passwd"), CheckpointFormatError, "is in other files"),
        (virtual, CheckpointFormatError, "is in other files"),
        (replace(shape=(9, 4), dtype="f4"), CheckpointCorruptError, "has 0 bytes in the file, but should have 144"),
        (replace(shape=(2**59, 4), dtype="f4"), CheckpointCorruptError, f"should have {2**63}"),
        (
            replace(data=TABLE, chunks=(9, 4), compression="gzip"),
            CheckpointFormatError,
            "is stored in chunks, which Keras does not write",
        ),
        (replace(data=TABLE.astype(">f4")), CheckpointFormatError, r"should be one matrix of floats, but is 0: >f4"),
        (replace(data=TABLE.astype("i4")), CheckpointFormatError, "should be one matrix of floats, but is 0: <i4"),
        (replace(data=TABLE.view("V4")), CheckpointFormatError, r"is 0: \|V4"),
        (replace(data=TABLE[0]), CheckpointFormatError, r"is 0: <f4 \(4,\)"),
        (replace(data=h5py.Empty("f4")), CheckpointFormatError, "is 0: <f4 None"),
        (lambda file: file.__delitem__(FIRST), CheckpointCorruptError, "table 'user' has no rows"),
        (lambda file: add_table(file, 2, None, TABLE), CheckpointCorruptError, "is called None"),
        (lambda file: add_table(file, 2, "", TABLE), CheckpointCorruptError, "is called ''"),
        (lambda file: add_table(file, 2, "a\nb", TABLE), CheckpointCorruptError, r"is called 'a\\nb'"),
        (lambda file: add_table(file, 2, "a/b", TABLE), CheckpointCorruptError, "is called 'a/b'"),
        (lambda file: add_table(file, 2, "user", TABLE), CheckpointFormatError, "two tables are called 'user'"),
        (
            lambda file: file.__setitem__(FIRST[:-1] + "1", TABLE),
            CheckpointFormatError,
            r"0: <f4 \(9, 4\), 1: <f4 \(9, 4\). Save it without quantization or LoRA",
        ),
        (
            lambda file: file.__setitem__(f"{LAYER}/vars/0", [0.0]),
            CheckpointFormatError,
            r"layer 'de' has variables of its own.*layer\._tpu_embedding",
        ),
        (
            lambda file: file.move(FIRST.rpartition("/vars")[0], f"{LAYER}/_default_device_embedding_layers/other"),
            CheckpointFormatError,
            "among the tables of layer .* is 'other'",
        ),
        (lambda file: file.__setitem__("stray", TABLE), CheckpointCorruptError, "has 'stray' outside of the groups"),
    ],
)
@pytest.mark.sampled(6)
def test_odd_arrays(path: Path, change: Callable[[Any], object], kind: type[CheckpointError], says: str) -> None:
    spoil(path, change)
    assert re.search(says, refusal(path, kind))


def patch(path: Path, old: bytes, new: bytes) -> None:
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))


def layout_of(path: Path, name: str) -> tuple[bytes, int, int]:
    """A dataset's layout message (version 3, contiguous), its offset and size."""
    with h5py.File(path) as file:
        offset, size = file[name].id.get_offset(), file[name].id.get_storage_size()
    return struct.pack("<BBQQ", 3, 1, offset, size), offset, size


def test_offset_past_the_end(path: Path) -> None:
    size = path.stat().st_size
    message, _, stored = layout_of(path, FIRST)
    patch(path, message, struct.pack("<BBQQ", 3, 1, size - 100, stored))
    assert refusal(path)  # by the library, or by us


def test_shape_and_size_that_disagree(path: Path) -> None:
    """The dataspace says 8 rows, the layout stores 9."""
    dims = struct.pack("<QQ", 9, 4) * 2
    data = path.read_bytes()
    assert data.count(dims) == 1
    path.write_bytes(data.replace(dims, struct.pack("<QQ", 8, 4) * 2))
    assert "has 144 bytes in the file, but should have 128" in refusal(path)


# ---- .keras


def test_wrong_archives_are_refused(path: Path, tmp_path: Path) -> None:
    keras = tmp_path / "model.keras"
    write_archive(keras, path, compression=zipfile.ZIP_DEFLATED)
    assert f"unzip {keras} model.weights.h5" in refusal(keras, CheckpointFormatError)
    write_archive(keras, None)
    assert "has no model.weights.h5, only config.json, metadata.json" in refusal(keras)
    write_archive(keras, None, more={"model.weights.npz": b""})
    assert "its weights are model.weights.npz, which is not supported" in refusal(keras, CheckpointFormatError)
    write_archive(keras, path, config=[])
    assert "config.json is not an object" in refusal(keras)
    with zipfile.ZipFile(keras, "w") as archive:
        archive.write(path, "model.weights.h5")
    assert "has no config.json" in refusal(keras)
    with zipfile.ZipFile(keras, "a") as archive:
        archive.writestr("config.json", "[" * 100_000)
    assert "config.json does not parse" in refusal(keras)


def test_config_bomb(path: Path, tmp_path: Path) -> None:
    keras = tmp_path / "model.keras"
    with zipfile.ZipFile(keras, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("config.json", "w") as member:
            for _ in range(90):
                member.write(b" " * (1 << 20))
        archive.write(path, "model.weights.h5", zipfile.ZIP_STORED)
    tracemalloc.clear_traces()
    assert "has a config.json of over" in refusal(keras)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_two_members_of_one_name(path: Path, tmp_path: Path) -> None:
    keras = write_archive(tmp_path / "model.keras", path)
    with zipfile.ZipFile(keras, "a") as archive:
        archive.writestr("model.weights.h5", b"")
    assert "two files of the same name" in refusal(keras)


def test_archives_cut_and_patched(path: Path, tmp_path: Path) -> None:
    keras = write_archive(tmp_path / "model.keras", path)
    whole = keras.read_bytes()
    for size in np.linspace(0, len(whole) - 1, 8, dtype=int):
        keras.write_bytes(whole[:size])
        refusal(keras)
    for size, says in [
        (0, "is empty, 0 bytes. Restore"),
        (1, "is no zip archive: it has 1 bytes"),
        (21, "has 21 bytes"),
    ]:
        keras.write_bytes(whole[:size])
        assert says in refusal(keras)
    end = whole.rindex(b"PK\x05\x06")
    for offset, value in [(end + 12, 2**31), (end + 16, 2**31), (end + 12, 0)]:  # size and offset of the directory
        keras.write_bytes(whole[:offset] + struct.pack("<I", value) + whole[offset + 4 :])
        refusal(keras)
    directory = whole.rindex(b"PK\x01\x02")
    for offset, value in [(directory + 42, 2**31), (directory + 20, 2**31), (directory + 24, 2**31)]:
        keras.write_bytes(whole[:offset] + struct.pack("<I", value) + whole[offset + 4 :])
        refusal(keras)


def test_directory_of_a_sparse_archive(tmp_path: Path) -> None:
    """An end record that claims 1 GiB of directory, in a file that has it."""
    keras = tmp_path / "model.keras"
    with open(keras, "wb") as file:
        file.truncate(1 << 30)
        file.seek(1 << 30)
        file.write(struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, 1, 1, 1 << 30, 0, 0))
    assert "requests 1073741824 bytes" in refusal(keras)


# ---- .weights.json


@pytest.fixture
def index(tmp_path: Path) -> Path:
    shutil.copytree(GOLDENS / "sharded", tmp_path / "sharded")
    return tmp_path / "sharded" / "model.weights.json"


def rewrite(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


TABLE_GROUP = "/layers/distributed_embedding/_default_device_embedding_layers/embed_reduce/vars"


@pytest.mark.parametrize(
    "name",
    ["../evil.weights.h5", "/etc/passwd", "..", ".", "", "a/b.h5", "..\\evil.h5", "a\0b", "a\nb"],
)
def test_paths_in_shard_names(index: Path, name: str) -> None:
    rewrite(index, lambda groups: groups.__setitem__(TABLE_GROUP, name))
    assert "which is not a file beside it" in refusal(index)


def test_link_out_of_the_folder(index: Path, tmp_path: Path) -> None:
    shard = index.parent / "model_00000.weights.h5"
    shutil.move(shard, tmp_path / "elsewhere.h5")
    shard.symlink_to(tmp_path / "elsewhere.h5")
    assert "a link to another folder" in refusal(index)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda groups: groups.clear(), "has no mapping `weight_map`"),
        (lambda groups: groups.__setitem__(TABLE_GROUP, 3), "which are not names of files"),
        (lambda groups: groups.__setitem__(TABLE_GROUP, []), "which are not names of files"),
        (lambda groups: groups.__setitem__(TABLE_GROUP, ["a.h5", "a.h5"]), "to one file twice"),
        (lambda groups: groups.__setitem__(TABLE_GROUP.strip("/"), "a.h5"), "names a group twice"),
        (lambda groups: groups.__setitem__(TABLE_GROUP, "missing.weights.h5"), "is missing"),
        (lambda groups: groups.__setitem__(TABLE_GROUP, "model_00001.weights.h5"), "its arrays are in"),
        (lambda groups: groups.pop(TABLE_GROUP), r"puts '.*embed_reduce' in \[\], but its arrays"),
        (lambda groups: groups.__setitem__("/layers/x/vars", "model_00000.weights.h5"), "which is in no file"),
    ],
)
def test_indexes_that_lie(index: Path, change: Callable[[dict[str, Any]], object], says: str) -> None:
    rewrite(index, change)
    assert re.search(says, refusal(index))


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": []}', "[" * 100_000, "\xff"])
def test_indexes_that_do_not_parse(index: Path, text: str) -> None:
    index.write_bytes(text.encode("latin-1"))
    refusal(index)


def test_index_of_absurd_size(index: Path) -> None:
    with open(index, "r+b") as file:
        file.truncate(1 << 40)
    assert "has over 67108864 bytes" in refusal(index)


def test_shards_that_contradict_each_other(index: Path) -> None:
    first, second = (index.parent / f"model_0000{number}.weights.h5" for number in (0, 1))
    with h5py.File(first) as file:
        (name,) = (name for name in file[TABLE_GROUP.rpartition("/")[0]]["vars"])
        rows = file[TABLE_GROUP][name][:]
    whole = second.read_bytes()
    spoil(second, lambda file: file.create_group(TABLE_GROUP).attrs.__setitem__("name", "other"))
    assert "calls" in refusal(index)
    second.write_bytes(whole)
    spoil(second, lambda file: file.create_dataset(f"{TABLE_GROUP}/0", data=rows))
    assert "in two files" in refusal(index)


def test_part_of_a_whole(index: Path) -> None:
    part = index.parent / "model_00000.weights.h5"
    with refused(CheckpointFormatError, match=r"model\.weights\.json"):
        open_checkpoint(part)


# ---- the layer's own


OWN = "layers/tpu_embedding/vars"


def own_file(path: Path, config: Any = None, **arrays: Any) -> Path:
    table = {"vocabulary_size": 9, "dim": 4, "name": "user", "optimizer": {"kind": "adagrad"}}
    default = {"tables": {"user": table}, "features": {"u": {"table": "user"}}}
    text = config if isinstance(config, bytes) else json.dumps(default if config is None else config).encode()
    held = {"user": TABLE, "user|accumulators": TABLE + 1, "|updates": np.int64(3)} | arrays
    with h5py.File(path, "w") as file:
        file.create_group(OWN).attrs["name"] = "tpu_embedding"
        for name, array in {**held, "|config": np.frombuffer(text, np.uint8)}.items():
            if array is not None:
                file[OWN][name] = array
    return path


def test_own_file(tmp_path: Path) -> None:
    """What the cases below spoil."""
    with open_checkpoint(own_file(tmp_path / "x.weights.h5")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.read("user", slot="accumulators"), TABLE + 1)
        assert checkpoint.layer_config is not None


@pytest.mark.parametrize(
    ("config", "arrays", "kind", "says"),
    [
        (b"{", {}, CheckpointCorruptError, "the config of layer 'tpu_embedding' does not parse"),
        ([], {}, CheckpointCorruptError, "has no mapping `tables`"),
        (
            {"tables": {"user": {"vocabulary_size": 9, "dim": 4, "optimizer": {"kind": "magic"}}}},
            {},
            CheckpointFormatError,
            "optimizer 'magic'.*Upgrade tpuembed",
        ),
        (
            {"tables": {"user": {"vocabulary_size": 9, "dim": 5, "optimizer": "adagrad"}}},
            {},
            CheckpointCorruptError,
            r"is \[9, 5\] in its layer's config, but \[9, 4\] on disk",
        ),
        ({"tables": {}}, {}, CheckpointCorruptError, r"has 'user', which is not a table or slot"),
        (None, {"user|momenta": TABLE}, CheckpointCorruptError, r"has 'user\|momenta', which is not a table or slot"),
        (None, {"user": None}, CheckpointCorruptError, "a matrix 'user', but there is none"),
        (None, {"user": np.int32(1)}, CheckpointCorruptError, r"a matrix 'user', but it is <i4 \(\)"),
        (None, {"user|accumulators": None}, CheckpointCorruptError, "'user/accumulators', but there is none"),
        (None, {"user|accumulators": TABLE[:5]}, CheckpointCorruptError, r"its slot 'accumulators' .* \[5, 4\]"),
        (None, {"user|accumulators": TABLE.astype("f8")}, CheckpointCorruptError, "its slot 'accumulators' .* <f8"),
    ],
)
@pytest.mark.sampled(4)
def test_own_files_that_contradict_themselves(
    config: Any, arrays: dict[str, Any], kind: type[CheckpointError], says: str, tmp_path: Path
) -> None:
    path = own_file(tmp_path / "x.weights.h5", config, **arrays)
    assert re.search(says, refusal(path, kind))


def test_own_file_without_config(tmp_path: Path) -> None:
    path = own_file(tmp_path / "x.weights.h5")
    spoil(path, lambda file: file[OWN].__delitem__("|config"))
    assert "Load it into the layer and save it again" in refusal(path, CheckpointFormatError)
    spoil(path, lambda file: file[OWN].__setitem__("|config", [1.0, 2.0]))
    assert "is <f8 (2,), not bytes" in refusal(path)


@pytest.mark.parametrize("count", [np.int64(-3), np.int32(3), np.zeros(2, np.int64)])
def test_counts_of_updates(count: Any, tmp_path: Path) -> None:
    with open_checkpoint(own_file(tmp_path / "right.weights.h5")) as checkpoint:
        assert checkpoint.update_counts == {"user": 3}
    wrong = own_file(tmp_path / "wrong.weights.h5", **{"|updates": count})
    with open_checkpoint(wrong) as checkpoint, pytest.raises(CheckpointCorruptError, match="count of updates"):
        _ = checkpoint.update_counts


HISTORY = np.frombuffer(json.dumps({"spans": [["a", 0]], "updates": 3, "shapes": {"user": [9, 4]}}).encode(), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"|vocabulary|user": np.uint8(3)}, "table 'user' (|vocabulary|user) is uint8 [], not uint8 [bytes]"),
        ({"|vocabulary|user": np.zeros(3, np.int32)}, "is int32 [3], not uint8 [bytes]"),
        ({"|vocabulary|item": np.zeros(3, np.uint8)}, "has a vocabulary of 'item', which is not a table"),
        ({"|history": np.float32(1)}, "its history is <f4 (), not bytes"),
        ({"|history": HISTORY[:-1]}, "layers/tpu_embedding"),
        ({"|history": HISTORY}, "the stamps of table 'user' are missing, not int32 [9]"),
        ({"|history": HISTORY, "|stamps|user": np.zeros(8, np.int32)}, "are int32 [8], not int32 [9]"),
        ({"|history": HISTORY, "|stamps|user": np.zeros(9, np.int64)}, "are int64 [9], not int32 [9]"),
    ],
)
def test_what_lies_beside_the_tables(arrays: dict[str, Any], says: str, tmp_path: Path) -> None:
    with (
        open_checkpoint(own_file(tmp_path / "x.weights.h5", **arrays)) as checkpoint,
        pytest.raises(CheckpointCorruptError, match=re.escape(says)),
    ):
        _ = checkpoint.vocabularies, checkpoint.stamps
