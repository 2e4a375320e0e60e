"""Large chunks of Orbax checkpoints, decoded as streams: the rows that were written, and how often a chunk is decoded."""

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore

from tests.support.checkpoint.orbax_trees import Array, Leaves, write_shards, write_tree
from tests.support.messages import refused
from tpuembed.checkpoint import open_checkpoint
from tpuembed.checkpoint.orbax import OrbaxCheckpoint, arrays, chunk_memory, chunk_stream, chunk_streams
from tpuembed.errors import CheckpointCorruptError, CheckpointError, MissingExtraError

pytest.importorskip("zstandard", reason="needs zstandard, of the extra [jax]")

ROWS, DIM = 40_000, 24


@pytest.fixture(scope="module")
def table() -> Array:
    """Of bytes, of zeros, and of rows that repeat, so that blocks of every type and size come."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    rows[5_000:15_000] = 0
    rows[20_000:24_000] = rows[:4_000]
    return rows


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of any size are streamed, and read by TensorStore never."""

    def refuse(*args: object) -> None:
        raise AssertionError("decoded whole")

    def never(*args: object, spread: bool) -> None:
        """No cache."""

    monkeypatch.setattr(chunk_streams, "_STREAMED_FROM_BYTES", 0)
    monkeypatch.setattr(arrays, "_ALONE_FROM_BYTES", 0)
    monkeypatch.setattr(arrays.StoredArray, "_read_group", refuse)
    monkeypatch.setattr(chunk_memory.ChunkMemory, "pool", never)


def pieces(path: Path, table: Array) -> None:
    """In order, in another order, and again."""
    starts = [*range(0, ROWS, 3_000), 39_999, 100, 12_345, 12_344, 0, 20_000]
    with open_checkpoint(path) as checkpoint:
        for start in starts:
            stop = min(start + 3_000, ROWS)
            np.testing.assert_array_equal(checkpoint.read("t", start, stop), table[start:stop])
        np.testing.assert_array_equal(checkpoint.read("t"), table)


@pytest.mark.usefixtures("small")
class TestRows:
    @pytest.mark.parametrize("compressed", [False, True], ids=["plain", "zstd"])
    @pytest.mark.parametrize("zarr3", [False, True], ids=["zarr2", "zarr3"])
    @pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
    @pytest.mark.parametrize("chunks", [(ROWS, DIM), (9_999, 7), (50_000, 32), (17_000, 24)], ids=str)
    def test_rows_are_read_from_chunks_of_every_form(
        self, chunks: tuple[int, int], ocdbt: bool, zarr3: bool, compressed: bool, table: Array, tmp_path: Path
    ) -> None:
        leaves: Leaves = {("t",): table}
        how: Any = {"chunks": chunks, "ocdbt": ocdbt, "zarr3": zarr3, "compressed": compressed}
        pieces(write_tree(tmp_path / "ckpt", leaves, **how), table)

    @pytest.mark.parametrize(
        ("chunk", "shard"), [((10_000, 24), (20_000, 24)), ((5_000, 8), (20_000, 24)), ((4_000, 6), (20_000, 12))]
    )
    def test_rows_are_read_from_shards(
        self, chunk: tuple[int, int], shard: tuple[int, int], table: Array, tmp_path: Path
    ) -> None:
        pieces(write_shards(tmp_path / "ckpt", table, chunk, shard), table)

    @pytest.mark.parametrize("level", [-5, 0, 1, 3, 10, 19])
    def test_rows_are_read_at_every_compression_level(self, level: int, table: Array, tmp_path: Path) -> None:
        write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(ROWS, DIM), ocdbt=False)
        layout = {"shape": [ROWS, DIM], "chunks": [ROWS, DIM], "compressor": {"id": "zstd", "level": level}}
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/ckpt/t/", "metadata": layout, "dtype": "float32"}
        tensorstore.open(spec, create=True, delete_existing=True).result().write(table).result()
        pieces(tmp_path / "ckpt", table)

    def test_without_room_for_decoders(self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunk_streams, "_DEFAULT_BYTES", 0)
        pieces(write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(9_999, 7)), table)

    def test_many_threads_read_the_same_rows(self, table: Array, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(20_000, DIM))
        failures: list[BaseException] = []

        def read(seed: int, checkpoint: Any) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(20):
                    start, stop = sorted(rng.integers(0, ROWS + 1, 2).tolist())
                    np.testing.assert_array_equal(checkpoint.read("t", start, stop), table[start:stop])
            except BaseException as error:
                failures.append(error)

        with open_checkpoint(path) as checkpoint:
            threads = [threading.Thread(target=read, args=(seed, checkpoint)) for seed in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not failures

    def test_a_tables_rows_are_read_out_of_a_stack(self, table: Array, tmp_path: Path) -> None:
        """Of 16 SparseCores, two in a chunk."""
        stack = table.reshape(-1, 16, DIM).swapaxes(0, 1).reshape(ROWS, DIM)
        path = write_tree(tmp_path / "ckpt", {("var:t:table",): stack}, chunks=(ROWS // 8, DIM))
        spec = {"t": {"num_sparsecores": 16, "tables": {"t": {"vocab_size": ROWS, "embedding_dim": 20}}}}
        with open_checkpoint(path, embedding_spec=spec) as checkpoint:
            for start in [*range(0, ROWS, 3_001), 5, 1_000]:
                stop = min(start + 3_001, ROWS)
                np.testing.assert_array_equal(checkpoint.read("t", start, stop), table[start:stop, :20])

    def test_a_checkpoint_that_is_written_anew(self, table: Array, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): table}, ocdbt=False)
        with open_checkpoint(path) as checkpoint:
            checkpoint.read("t", 0, 10)
            file = path / "t" / "0.0"
            whole = file.read_bytes()
            file.unlink()
            file.write_bytes(whole)
            with refused(CheckpointError, match="chunk '0.0'"):
                checkpoint.read("t", 10, 20)


def bytes_decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what streams decode from now on."""
    sizes: list[int] = []
    decode = chunk_stream._ZstdStream._decode

    def counted(stream: Any, wanted: int) -> None:
        decode(stream, wanted)
        sizes.append(len(stream._decoded))

    monkeypatch.setattr(chunk_stream._ZstdStream, "_decode", counted)
    return sizes


@pytest.mark.usefixtures("small")
class TestWork:
    def test_a_chunk_in_pieces_is_decoded_twice(
        self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once to its end, so that all of it is proven before a row is handed out."""
        path = write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(20_000, DIM))
        sizes = bytes_decoded(monkeypatch)
        with open_checkpoint(path) as checkpoint:
            for start in range(0, ROWS, 1_000):
                checkpoint.read("t", start, start + 1_000)
        assert sum(sizes) == 2 * table.nbytes

    def test_a_chunk_at_once_is_decoded_once(
        self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(20_000, DIM))
        sizes = bytes_decoded(monkeypatch)
        with open_checkpoint(path) as checkpoint:
            checkpoint.read("t")
        assert sum(sizes) == table.nbytes

    def test_what_is_small_when_stored_is_decoded_in_pieces(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): np.zeros((1 << 16, 32), np.float32)})
        sizes = bytes_decoded(monkeypatch)
        with open_checkpoint(path) as checkpoint:
            assert not checkpoint.read("t", 0, 1).any()
        assert sum(sizes) == 8 << 20
        assert max(sizes) <= 1 << 20

    def test_a_stack_is_decoded_twice(self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        stack = table.reshape(-1, 16, DIM).swapaxes(0, 1).reshape(ROWS, DIM)
        path = write_tree(tmp_path / "ckpt", {("var:t:table",): stack}, chunks=(ROWS // 16, DIM))
        spec = {"t": {"num_sparsecores": 16, "tables": {"t": {"vocab_size": ROWS, "embedding_dim": DIM}}}}
        sizes = bytes_decoded(monkeypatch)
        with open_checkpoint(path, embedding_spec=spec) as checkpoint:
            assert isinstance(checkpoint, OrbaxCheckpoint)
            assert checkpoint.advise("t", 4_000) is None
            for start in range(0, ROWS, 4_000):
                checkpoint.read("t", start, start + 4_000)
        assert sum(sizes) == 2 * table.nbytes

    def test_several_parts_of_a_chunk_in_step(
        self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of 4 SparseCores of a device: each part has a decoder, which begins at the chunk's beginning, once."""
        stack = table.reshape(-1, 16, DIM).swapaxes(0, 1).reshape(ROWS, DIM)
        path = write_tree(tmp_path / "ckpt", {("var:t:table",): stack}, chunks=(ROWS // 4, DIM))
        spec = {"t": {"num_sparsecores": 16, "tables": {"t": {"vocab_size": ROWS, "embedding_dim": DIM}}}}
        sizes = bytes_decoded(monkeypatch)
        with open_checkpoint(path, embedding_spec=spec) as checkpoint:
            for start in range(0, ROWS, 1_000):
                rows = checkpoint.read("t", start, start + 1_000)
                np.testing.assert_array_equal(rows, table[start : start + 1_000])
            once = sum(sizes)
            checkpoint.read("t", 16_000, 16_016)
        proof, ways, parts = 1, (1 + 2 + 3) / 4, 1
        assert once <= (proof + ways + parts) * table.nbytes + 16 * (128 << 10)
        assert sum(sizes) - once < table.nbytes, "what does not go on has one decoder"

    def test_too_many_chunks_for_their_decoders_are_said(
        self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With what the advice says, each is decoded twice."""
        monkeypatch.setattr(chunk_streams, "_DEFAULT_BYTES", 1 << 20)
        monkeypatch.setattr(chunk_memory, "_SPARE_BYTES", 0)
        stack = table.reshape(-1, 16, DIM).swapaxes(0, 1).reshape(ROWS, DIM)
        path = write_tree(tmp_path / "ckpt", {("var:t:table",): stack}, chunks=(ROWS // 16, DIM))
        spec = {"t": {"num_sparsecores": 16, "tables": {"t": {"vocab_size": ROWS, "embedding_dim": DIM}}}}

        def read(**options: int) -> int:
            sizes = bytes_decoded(monkeypatch)
            with open_checkpoint(path, embedding_spec=spec, **options) as checkpoint:
                for start in range(0, ROWS, 2_000):
                    checkpoint.read("t", start, start + 2_000)
            return sum(sizes)

        with open_checkpoint(path, embedding_spec=spec) as checkpoint:
            assert isinstance(checkpoint, OrbaxCheckpoint)
            advice = checkpoint.advise("t", 2_000)
        assert advice is not None
        need = int(advice.split("chunk_memory_bytes=")[1].split()[0])
        with pytest.warns(UserWarning, match="is in 16 chunks"):
            assert read() > 3 * table.nbytes
        assert read(chunk_memory_bytes=need) == 2 * table.nbytes


class TestLeftToTensorStore:
    """What is not a frame of Orbax's is read as before."""

    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(chunk_streams, "_STREAMED_FROM_BYTES", 0)
        monkeypatch.setattr(arrays, "_ALONE_FROM_BYTES", 0)

    @pytest.mark.parametrize("compressor", [{"id": "blosc"}, {"id": "zlib"}], ids=str)
    def test_rows_are_read_with_other_compressors(
        self, compressor: dict[str, str], table: Array, tmp_path: Path
    ) -> None:
        write_tree(tmp_path / "ckpt", {("t",): table}, ocdbt=False)
        layout = {"shape": [ROWS, DIM], "chunks": [20_000, DIM], "compressor": compressor}
        spec = {"driver": "zarr", "kvstore": f"file://{tmp_path}/ckpt/t/", "metadata": layout, "dtype": "float32"}
        tensorstore.open(spec, create=True, delete_existing=True).result().write(table).result()
        pieces(tmp_path / "ckpt", table)

    def test_chunks_with_too_wide_windows_are_not_streamed(
        self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(chunk_stream, "_WINDOW_BYTES", 1 << 16)
        path = write_tree(tmp_path / "ckpt", {("t",): table})
        sizes = bytes_decoded(monkeypatch)
        pieces(path, table)
        assert not sizes

    def test_without_zstandard(self, table: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): table})
        monkeypatch.setitem(sys.modules, "zstandard", None)
        pieces(path, table)
        with (
            open_checkpoint(path, chunk_memory_bytes=table.nbytes) as checkpoint,
            refused(MissingExtraError, match="array 't'"),
        ):
            checkpoint.read("t")

    @pytest.mark.parametrize("complete", [False, True])
    def test_chunks_that_are_not_there(self, complete: bool, table: Array, tmp_path: Path) -> None:
        """Lost, or zeros that an older Orbax left out."""
        path = write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(10_000, DIM), ocdbt=False, zarr3=True)
        (path / "t" / "c" / "1" / "0").unlink()
        if not complete:
            file = path / "_METADATA"
            file.write_text(file.read_text().replace('"store_array_data_equal_to_fill_value": true, ', ""))
        with open_checkpoint(path) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("t", 0, 10_000), table[:10_000])
            if complete:
                with pytest.raises(CheckpointCorruptError, match=r"NOT_FOUND: chunk \{1, 0\}"):
                    checkpoint.read("t", 9_999, 10_001)
            else:
                assert not checkpoint.read("t", 10_000, 20_000).any()
