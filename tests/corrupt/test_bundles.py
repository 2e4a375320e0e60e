"""Damaged and hostile bundles: each is refused by a CheckpointError that names the file, quickly and in little memory."""

import io
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from tests.support.checkpoint.bundles import write
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointCorruptError, CheckpointError, CheckpointFormatError, UnknownTableError
from tpuembed.formats.sstable import read_table, write_table
from tpuembed.formats.tensor_bundle import Bundle, crc, shard_path
from tpuembed.formats.tensor_bundle.ordered_code import slice_key

EntryProto = tensor_bundle_pb2.BundleEntryProto
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture(autouse=True)
def _little_memory() -> Iterator[None]:
    """Whatever a file claims, no test of this module holds 100 MB at a time."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100 << 20


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """A TensorFlow 2 checkpoint of a few tensors, one of them in slices over several data files."""
    checkpoint = tf.train.Checkpoint(
        table=tf.Variable(tf.random.uniform((9, 40))), user=tf.Variable([[1.0]]), step=tf.Variable(3)
    )
    policy = tf.train.experimental.MaxShardSizePolicy(max_shard_size=700)
    options = tf.train.CheckpointOptions(experimental_sharding_callback=policy)
    return Path(checkpoint.write(str(tmp_path / "ckpt"), options))


def index_of(prefix: Path) -> Path:
    return Path(f"{prefix}.index")


def items_of(prefix: Path) -> dict[bytes, bytes]:
    with open(index_of(prefix), "rb") as file:
        return dict(read_table(file))


def rewrite(prefix: Path, items: dict[bytes, bytes]) -> None:
    """An index of `items`, every CRC right."""
    with open(index_of(prefix), "wb") as file:
        write_table(file, sorted(items.items()))


def refusal(prefix: Path, kind: type[CheckpointError] = CheckpointError, names: Path | None = None) -> str:
    with pytest.raises(kind) as caught:
        open_checkpoint(prefix)
    message = str(caught.value)
    assert str(names or index_of(prefix)) in message
    assert "\n" not in message
    return message


def test_index_cut_at_many_lengths(prefix: Path) -> None:
    """At every one inside of the footer and before it, where what is left is nearest to an index."""
    whole = index_of(prefix).read_bytes()
    for size in (*range(0, len(whole) - 100, 5), *range(len(whole) - 100, len(whole))):
        index_of(prefix).write_bytes(whole[:size])
        refusal(prefix, CheckpointCorruptError)


def test_every_byte_of_the_index_flipped(prefix: Path) -> None:
    """Refused, or read as it was: padding, and the handle of the meta index, which nothing is read through."""
    whole = index_of(prefix).read_bytes()
    with Bundle.open(prefix) as bundle:
        entries = dict(bundle.entries)
    survived, messages = 0, set()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= (0x01, 0xFF)[position % 2]
        index_of(prefix).write_bytes(damaged)
        try:
            with Bundle.open(prefix) as bundle:
                assert dict(bundle.entries) == entries
            survived += 1
        except CheckpointError as error:
            messages.add(str(error).replace(str(index_of(prefix)), "INDEX"))
    assert survived < 60
    assert all("INDEX" in message for message in messages)


def test_data_files_cut_at_many_lengths(prefix: Path) -> None:
    with Bundle.open(prefix) as bundle:
        paths = [shard_path(prefix, shard, bundle.num_shards) for shard in range(bundle.num_shards)]
    assert len(paths) > 2
    for path in paths:
        whole = path.read_bytes()
        for size in {*range(0, len(whole), 31), len(whole) - 1}:
            path.write_bytes(whole[:size])
            message = refusal(prefix, CheckpointCorruptError, path)
            assert f"has {size} bytes" in message
        path.unlink()
        assert "is missing" in refusal(prefix, CheckpointCorruptError, path)
        path.write_bytes(whole)


def test_data_file_cut_while_it_is_open(prefix: Path) -> None:
    with open_checkpoint(prefix) as checkpoint:
        checkpoint.read("table")
        for path in prefix.parent.glob("*.data-*"):
            path.write_bytes(b"")
        with refused(CheckpointCorruptError):
            checkpoint.read("table")


def test_data_file_gone_while_it_is_open(prefix: Path) -> None:
    with Bundle.open(prefix) as bundle:
        for path in prefix.parent.glob("*.data-*"):
            path.unlink()
        with refused(CheckpointError):
            bundle.read(f"table{VALUE}")


def entry(**fields: Any) -> Any:
    """A BundleEntryProto of float32; `shape` is a list."""
    proto = EntryProto(
        **{"dtype": 1, **{key: value for key, value in fields.items() if key not in ("shape", "slices")}}
    )
    for size in fields.get("shape", []):
        proto.shape.dim.add(size=size)
    for region in fields.get("slices", []):
        proto.slices.add(extent=[{"start": start, "length": length} for start, length in region])
    return proto


@pytest.mark.parametrize(
    "fields",
    [
        {"shape": [2**62, 4], "size": 16},
        {"shape": [2**63 - 1, 2**63 - 1], "size": 16},
        {"shape": [0, 2**62, 4], "size": 0},
        {"shape": [2**40, 4], "size": 16},
        {"shape": [2**40, 4], "size": 2**44},
        {"shape": [-1, 4], "size": 16},
        {"shape": [1, 4], "size": 16, "offset": -8},
        {"shape": [1, 4], "size": 16, "offset": 2**63 - 1},
        {"shape": [1, 4], "size": 16, "offset": 1_000_000},
        {"shape": [1, 4], "size": 16, "shard_id": 1},
        {"shape": [1, 4], "size": 16, "shard_id": -1},
        {"shape": [1, 2], "size": 8, "offset": 4},
        {"shape": [1] * 60, "size": 4},
        {"dtype": 7, "shape": [2**62], "size": 16},
        {"shape": [4, 4], "slices": [[(0, 2), (0, 4)], [(1, 2), (0, 4)]]},
        {"shape": [4, 4], "slices": [[(0, 2), (0, 4)]]},
        {"shape": [4, 4], "slices": [[(3, 2), (0, 4)]]},
        {"shape": [4, 4], "slices": [[(-1, 2), (0, 4)]]},
        {"shape": [4, 4], "slices": [[(0, 2)]]},
        {"shape": [4, 4], "size": 64, "slices": [[(0, 4), (0, 4)]]},
    ],
)
def test_absurd_entries(tmp_path: Path, fields: dict[str, Any]) -> None:
    prefix = tmp_path / "ckpt"
    write(prefix, {"good": np.ones((2, 2), np.float32)})
    rewrite(prefix, {**items_of(prefix), b"table": entry(**fields).SerializeToString()})
    if fields.get("dtype") == 7:
        rewrite(prefix, {**items_of(prefix), b"good": entry(shape=[0, 2]).SerializeToString()})
        with (
            Bundle.open(prefix) as bundle,
            refused(CheckpointCorruptError, match="inside a varint"),
        ):
            bundle.read("table")
        return
    with refused(CheckpointError) as caught:
        open_checkpoint(prefix)
    assert str(prefix) in str(caught.value)


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        ([((0, 2), (0, 4)), ((1, 3), (0, 4))], "overlap"),
        ([((0, 2), (0, 4)), ((1, 2), (0, 4))], "overlap and leave holes"),
        ([((0, 2), (0, 4)), ((2, 1), (0, 4))], "leave holes"),
        ([((0, 4), (0, 2)), ((0, 4), (1, 2))], "overlap and leave holes"),
    ],
)
def test_slices_that_do_not_tile(tmp_path: Path, regions: list[Any], message: str) -> None:
    prefix, offset = tmp_path / "ckpt", 0
    write(prefix, {"filler": np.ones((20, 4), np.float32)})
    items = {b"": items_of(prefix)[b""], b"table": entry(shape=[4, 4], slices=regions).SerializeToString()}
    for region in regions:
        starts, lengths = [start for start, _ in region], [length for _, length in region]
        size = 4 * lengths[0] * lengths[1]
        items[slice_key(b"table", starts, lengths)] = entry(shape=lengths, offset=offset, size=size).SerializeToString()
        offset += size
    rewrite(prefix, items)
    assert message in refusal(prefix, CheckpointCorruptError)


def test_a_slice_of_another_shape_or_of_no_tensor(tmp_path: Path) -> None:
    prefix = tmp_path / "ckpt"
    write(prefix, {"filler": np.ones((20, 4), np.float32)})
    header = items_of(prefix)[b""]
    table = entry(shape=[4, 4], slices=[[(0, 4), (0, 4)]]).SerializeToString()
    piece = slice_key(b"table", [0, 0], [4, 4])
    rewrite(prefix, {b"": header, b"table": table, piece: entry(shape=[4, 2], size=32).SerializeToString()})
    assert "should be float32 [4, 4], but the index has float32 [4, 2]" in refusal(prefix, CheckpointCorruptError)
    rewrite(prefix, {b"": header, piece: entry(shape=[4, 4], size=64).SerializeToString()})
    assert "1 slices belong to no tensor" in refusal(prefix, CheckpointCorruptError)


@pytest.mark.parametrize(
    ("header", "kind", "message"),
    [
        ({"num_shards": 0}, CheckpointCorruptError, "claims 0 data files"),
        ({"num_shards": -5}, CheckpointCorruptError, "claims -5 data files"),
        ({"num_shards": 1, "endianness": 1}, CheckpointFormatError, "big-endian, which is not supported"),
        ({"num_shards": 1, "version": {"min_consumer": 2}}, CheckpointFormatError, "bundle version 2"),
    ],
)
def test_headers(prefix: Path, header: dict[str, Any], kind: type[CheckpointError], message: str) -> None:
    rewrite(prefix, {**items_of(prefix), b"": tensor_bundle_pb2.BundleHeaderProto(**header).SerializeToString()})
    assert message in refusal(prefix, kind)


def test_two_billion_data_files(prefix: Path) -> None:
    header = tensor_bundle_pb2.BundleHeaderProto(num_shards=2**31 - 1)
    rewrite(prefix, {**items_of(prefix), b"": header.SerializeToString()})
    refusal(prefix, CheckpointCorruptError, shard_path(prefix, 0, 2**31 - 1))


def test_no_header(prefix: Path) -> None:
    items = items_of(prefix)
    del items[b""]
    rewrite(prefix, items)
    assert "no header" in refusal(prefix, CheckpointCorruptError)


def test_names_that_are_not_utf8(prefix: Path) -> None:
    rewrite(prefix, {**items_of(prefix), b"x\xff": entry(shape=[0, 1]).SerializeToString()})
    assert "not UTF-8" in refusal(prefix, CheckpointCorruptError)


def table_of_blocks(*blocks: bytes, compression: bytes = b"\0") -> bytes:
    """A table file of raw data blocks with right CRCs."""
    file = io.BytesIO()

    def put(block: bytes) -> bytes:
        offset, typed = file.tell(), block + compression
        file.write(typed + crc.mask(crc.value(typed)).to_bytes(4, "little"))
        return varint(offset) + varint(len(block))

    handles = [put(block) for block in blocks]
    index = b"".join(b"\0\1" + varint(len(handle)) + b"k" + handle for handle in handles) + one_restart
    footer = put(one_restart) + put(index)
    file.write(footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db"))
    return file.getvalue()


EMPTY = b"\x08\x01\x12\x02\x12\x00"
"""The entry of a float32 [0]."""

one_restart = bytes(4) + (1).to_bytes(4, "little")


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (b"", "claims 0 restarts"),
        (b"\xff\xff\xff\xff", "claims 4294967295 restarts"),
        (b"\x05\x01\x00x" + one_restart, "reaches past its end"),
        (b"\x00\x7f\x00x" + one_restart, "reaches past its end"),
        (b"\x00\x01\xff\xff\x7fx" + one_restart, "reaches past its end"),
        (b"\x00\x01\x06b" + EMPTY + b"\x00\x01\x06a" + EMPTY + one_restart, "'a' comes after 'b'"),
        (b"\x00\x01\x06a" + EMPTY + b"\x00\x01\x06a" + EMPTY + one_restart, "'a' comes after 'a'"),
        (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff" + one_restart, "varint"),
    ],
)
def test_blocks(tmp_path: Path, block: bytes, message: str) -> None:
    prefix = tmp_path / "ckpt"
    index_of(prefix).write_bytes(table_of_blocks(block))
    assert message in refusal(prefix, CheckpointCorruptError)


def test_keys_that_grow_without_end(tmp_path: Path) -> None:
    """400 kB whose keys, each the one before and a byte, would take 3 GB."""
    block = b"\x00" + varint(100_000) + b"\x06" + b"a" * 100_000 + EMPTY
    block += b"".join(varint(100_000 + i) + b"\x01\x06a" + EMPTY for i in range(30_000)) + one_restart
    index_of(tmp_path / "ckpt").write_bytes(table_of_blocks(block))
    assert "absurdly long" in refusal(tmp_path / "ckpt", CheckpointCorruptError)


@pytest.mark.parametrize(("number", "name"), [(1, "snappy"), (2, "zstd"), (9, "number 9")])
def test_compressed_blocks(tmp_path: Path, number: int, name: str) -> None:
    index_of(tmp_path / "ckpt").write_bytes(table_of_blocks(b"", compression=bytes([number])))
    assert f"compressed ({name})" in refusal(tmp_path / "ckpt", CheckpointFormatError)


def test_a_huge_index_that_is_none(tmp_path: Path) -> None:
    """100 GB of holes."""
    with open(index_of(tmp_path / "ckpt"), "wb") as file:
        file.truncate(100 << 30)
    assert "magic number" in refusal(tmp_path / "ckpt", CheckpointCorruptError)


def make_graph() -> bytes:
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    root, table, slot = graph.nodes.add(), graph.nodes.add(), graph.nodes.add()
    root.children.add(local_name="table", node_id=1)
    root.children.add(local_name="me", node_id=0)
    root.slot_variables.add(original_variable_node_id=1, slot_name="m", slot_variable_node_id=2)
    table.attributes.add(name="VARIABLE_VALUE", checkpoint_key="t")
    slot.attributes.add(name="VARIABLE_VALUE", checkpoint_key="s")
    serialized: bytes = graph.SerializeToString()
    return serialized


GRAPH = make_graph()
TENSORS = {"t": np.ones((3, 2), np.float32), "s": np.ones((3, 2), np.float32)}


def test_the_undamaged_graph_is_read(tmp_path: Path) -> None:
    write(tmp_path / "graph", {"_CHECKPOINTABLE_OBJECT_GRAPH": np.array(GRAPH, object)} | TENSORS)
    with open_checkpoint(tmp_path / "graph") as checkpoint:
        assert checkpoint.tables()["table"].slots == ("momenta",)


def graph_of(targets: list[list[int]], variables: list[int]) -> bytes:
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    for children in targets:
        graph.nodes.add(children=[{"local_name": f"c{child}", "node_id": child} for child in children])
    for number in variables:
        graph.nodes[number].attributes.add(name="VARIABLE_VALUE", checkpoint_key="t")
    serialized: bytes = graph.SerializeToString()
    return serialized


def test_a_graph_of_objects_that_all_know_each_other(tmp_path: Path) -> None:
    graph = graph_of([list(range(100))] * 100, [99])
    write(tmp_path / "ckpt", {"_CHECKPOINTABLE_OBJECT_GRAPH": np.array(graph, object)} | TENSORS)
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert list(checkpoint.tables()) == ["c99"]


@pytest.mark.parametrize("deep", [False, True])
def test_a_ring_of_objects(tmp_path: Path, deep: bool) -> None:
    """5,000 objects in a ring: read where the variables lie near the root, refused where their names would be huge."""
    count = 5_000
    targets = [[(number + 1) % count] for number in range(count)]
    graph = graph_of(targets, list(range(1, count)) if deep else [2])
    write(tmp_path / "ckpt", {"_CHECKPOINTABLE_OBJECT_GRAPH": np.array(graph, object)} | TENSORS)
    if deep:
        assert "over 1000 objects deep" in refusal(tmp_path / "ckpt", CheckpointCorruptError, tmp_path / "ckpt")
        return
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert list(checkpoint.tables()) == ["c1/c2"]


def test_an_optimizer_whose_variables_have_names_of_a_million_scopes(tmp_path: Path) -> None:
    """And which lies where its variables have no path."""
    from tensorflow.core.protobuf import trackable_object_graph_pb2

    graph, depth = trackable_object_graph_pb2.TrackableObjectGraph(), 1100
    for number in range(depth):
        graph.nodes.add(children=[{"local_name": "next", "node_id": number + 1}])
    graph.nodes[0].children.add(local_name="table", node_id=depth + 4)
    optimizer, listed = graph.nodes.add(), graph.nodes.add()
    for name, child in {"_iterations": 3, "_variables": 1, "momentums": 1}.items():
        optimizer.children.add(local_name=name, node_id=depth + child)
    listed.children.add(local_name="0", node_id=depth + 2)
    for key, name in (("s", "m/" * 1_000_000 + "x"), ("i", "iteration"), ("t", "x")):
        graph.nodes.add(attributes=[{"name": "VARIABLE_VALUE", "checkpoint_key": key, "full_name": name}])
    tensors = {**TENSORS, "i": np.array(1), "_CHECKPOINTABLE_OBJECT_GRAPH": np.array(graph.SerializeToString(), object)}
    write(tmp_path / "ckpt", tensors)
    with open_checkpoint(tmp_path / "ckpt") as checkpoint:
        assert checkpoint.tables()["table"].slots == ()
        with refused(UnknownTableError, match="table 'other'"):
            checkpoint.read("other")


@pytest.mark.parametrize(
    "damaged",
    [
        b"\xff" * 9,
        b"",  # no nodes
        GRAPH + b"\x0a\x04\x0a\x02\x08\x63",  # a child of number 99
        graph_of([[-1]], [0]),
        graph_of([[0, 0]], [0]),  # two children of one name
        GRAPH + b"\x0a\x04\x1a\x02\x08\x63",  # a slot of variable 99
    ],
)
def test_graphs_that_do_not_parse_or_lead_nowhere(tmp_path: Path, damaged: bytes) -> None:
    write(tmp_path / "ckpt", {"_CHECKPOINTABLE_OBJECT_GRAPH": np.array(damaged, object)} | TENSORS)
    message = refusal(tmp_path / "ckpt", CheckpointCorruptError, tmp_path / "ckpt")
    assert "its object graph: " in message


def test_state_file_of_garbage(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(b"\xff\xfe\x00")
    refusal(tmp_path, CheckpointError, tmp_path / "checkpoint")


def test_an_error_is_one_line_in_a_process_of_its_own(prefix: Path) -> None:
    """No traceback of TensorFlow's, no warning: what a command prints."""
    index_of(prefix).write_bytes(b"not an index")
    script = """
import sys
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import TpuEmbedError
try:
    open_checkpoint(sys.argv[1])
except TpuEmbedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(prefix)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
