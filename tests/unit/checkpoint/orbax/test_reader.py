"""What a user meets with Orbax checkpoints: paths, names, slots, layouts, memory, stores."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorstore

from tests.support.checkpoint.orbax_trees import STACKED, Array, Leaves, spec, stacked_rows, write_spec, write_tree
from tests.support.messages import refused
from tests.support.stores import S3, moto_server
from tpuembed.checkpoint import Checkpoint, open_checkpoint
from tpuembed.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointFormatError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ConfigError,
    MissingExtraError,
)
from tpuembed.export.stream.engines.local import MALLOC
from tpuembed.files import remote

ROWS = np.arange(92, dtype=np.float32).reshape(23, 4)


def stacks(seed: int = 0) -> tuple[dict[str, Array], Array]:
    """The tables of STACKED, and the stack that holds them."""
    rng = np.random.default_rng(seed)
    values: dict[str, Array] = {name: rng.random(shape, np.float32) for name, shape in STACKED.items()}
    return values, stacked_rows(values)


def step(folder: Path, value: float, number: str = "1") -> Path:
    """What a CheckpointManager leaves of one step."""
    write_tree(folder / number / "default", {("table",): np.full((2, 2), value, np.float32)})
    (folder / number / "_CHECKPOINT_METADATA").write_text("{}")
    return folder / number


def value(path: Path | str) -> float:
    with open_checkpoint(path) as checkpoint:
        return float(checkpoint.read("table")[0, 0])


def test_an_item_without_arrays_is_beside_the_tables(tmp_path: Path) -> None:
    """The callback OrbaxCheckpoint of Keras writes the model's config as such an item, which has no manifest."""
    path = step(tmp_path, 3.0)
    (path / "model_config").mkdir()
    of_text = {"key_metadata": [{"key": "config", "key_type": 2}], "value_metadata": {"value_type": "string"}}
    (path / "model_config" / "_METADATA").write_text(
        json.dumps({"tree_metadata": {"('config',)": of_text}, "use_ocdbt": True, "use_zarr3": True})
    )
    (path / "model_config" / "_strings.json").write_text('{"config": "{}"}')
    with open_checkpoint(path) as checkpoint:
        (table,) = checkpoint.tables()
        assert checkpoint.read(table)[0, 0] == 3.0
        assert checkpoint.fingerprint() == checkpoint.fingerprint()


class TestPaths:
    def test_what_leads_to_a_step(self, tmp_path: Path) -> None:
        for number in (9, 10, 2):
            step(tmp_path, number, str(number))
        (tmp_path / "11.orbax-checkpoint-tmp-123").mkdir()
        (tmp_path / "notes").mkdir()
        assert value(tmp_path) == 10
        for inside in ["", "default", "_CHECKPOINT_METADATA", "default/_METADATA", "default/manifest.ocdbt"]:
            assert value(tmp_path / "9" / inside) == 9
        with open_checkpoint(tmp_path) as checkpoint:
            assert checkpoint.path == str(tmp_path / "10")

    def test_steps_of_an_older_orbax_have_no_file_of_their_own(self, tmp_path: Path) -> None:
        (step(tmp_path, 3, "3") / "_CHECKPOINT_METADATA").unlink()
        assert value(tmp_path) == value(tmp_path / "3") == 3

    def test_numbers_after_a_prefix(self, tmp_path: Path) -> None:
        step(tmp_path, 2, "run_2")
        step(tmp_path, 10, "run_10")
        assert value(tmp_path) == 10
        step(tmp_path, 1, "other_1")
        with refused(CheckpointFormatError, match=r"\(other_1, run_10, run_2\)"):
            open_checkpoint(tmp_path)

    def test_an_unfinished_checkpoint_is_refused(self, tmp_path: Path) -> None:
        unfinished = step(tmp_path, 1, "5.orbax-checkpoint-tmp-9")
        with refused(CheckpointFormatError):
            open_checkpoint(unfinished)
        with refused(CheckpointNotFoundError):
            open_checkpoint(tmp_path)

    def test_a_step_without_arrays(self, tmp_path: Path) -> None:
        shutil.rmtree(step(tmp_path, 1) / "default")
        with refused(CheckpointCorruptError):
            open_checkpoint(tmp_path / "1")

    def test_the_layout_before_metadata(self, tmp_path: Path) -> None:
        """One file in msgpack, named as TensorFlow names its state file, and a folder per array."""
        write_tree(tmp_path / "ckpt", {("table",): ROWS}, ocdbt=False)
        (tmp_path / "ckpt" / "_METADATA").unlink()
        (tmp_path / "ckpt" / "checkpoint").write_bytes(b"\x81\xa5table\xc0")
        with refused(CheckpointFormatError):
            open_checkpoint(tmp_path / "ckpt")

    def test_a_file_named_as_tensorflows_state_file(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "ckpt", {("table",): ROWS}, ocdbt=False)
        (tmp_path / "ckpt" / "checkpoint").write_bytes(b"\x81\xa5table\xc0")
        assert value(tmp_path / "ckpt") == 0

    def test_other_checkpoints_are_left_to_others(self, tmp_path: Path) -> None:
        (tmp_path / "12").mkdir()
        (tmp_path / "12" / "model.txt").write_text("")
        with refused(CheckpointNotFoundError):
            open_checkpoint(tmp_path)


class TestPlainTrees:
    def test_names_of_several_items(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "1" / "params", {("emb",): ROWS, ("bias",): np.ones(3, np.float32)})
        write_tree(tmp_path / "1" / "ema", {("emb",): ROWS + 1})
        with open_checkpoint(tmp_path) as checkpoint:
            assert set(checkpoint.tables()) == {"params/emb", "ema/emb"}
            np.testing.assert_array_equal(checkpoint.read("ema/emb"), ROWS + 1)
        with open_checkpoint(tmp_path / "1" / "params") as checkpoint:
            assert set(checkpoint.tables()) == {"emb"}

    def test_no_table(self, tmp_path: Path) -> None:
        leaves: Leaves = {("bias",): np.ones(3, np.float32), ("ids",): np.ones((3, 2), np.int32)}
        write_tree(tmp_path / "ckpt", leaves)
        with refused(CheckpointFormatError, match="2 leaves"):
            open_checkpoint(tmp_path / "ckpt")

    def test_names_that_meet(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "ckpt", {("a/b",): ROWS, ("a", "b"): ROWS})
        with refused(CheckpointFormatError, match="table 'a/b'"):
            open_checkpoint(tmp_path / "ckpt")


def keras_leaves(**changes: Array) -> Leaves:
    """keras-rs' state: one table of one layer, a dense layer, Adagrad; `changes` by path with "__" for "/"."""
    leaves = {
        "trainable_variables__de__t__embeddings": ROWS,
        "trainable_variables__head__kernel": ROWS,
        "optimizer_variables__adagrad__iteration": np.ones((), np.int32),
        "optimizer_variables__adagrad__de_t_embeddings_accumulator": ROWS + 1,
        "optimizer_variables__adagrad__head_kernel_accumulator": ROWS + 2,
        **changes,
    }
    return {tuple(path.split("__")): rows for path, rows in leaves.items()}


def open_keras(folder: Path, **changes: Array) -> Checkpoint:
    return open_checkpoint(write_tree(folder / "ckpt", keras_leaves(**changes)))


class TestKeras:
    def test_a_slot_of_another_shape(self, tmp_path: Path) -> None:
        accumulator = {"optimizer_variables__adagrad__de_t_embeddings_accumulator": np.ones((23, 1), np.float32)}
        with refused(CheckpointCorruptError, match=r"\[23, 4\]"):
            open_keras(tmp_path, **accumulator)

    def test_factored_statistics_are_no_slots(self, tmp_path: Path) -> None:
        """Adafactor keeps a row and a column for a table."""
        kept = {
            "optimizer_variables__adafactor__de_t_embeddings_velocity_row": np.ones(23, np.float32),
            "optimizer_variables__adafactor__de_t_embeddings_other": ROWS + 3,
            "optimizer_variables__adafactor__de_t_embeddings_counts": ROWS.astype(np.int32),
        }
        with open_keras(tmp_path, **kept) as checkpoint:
            assert checkpoint.tables()["t"].slots == ("accumulators", "other")

    def test_two_optimizers(self, tmp_path: Path) -> None:
        with refused(CheckpointFormatError, match="'accumulators'"):
            open_keras(tmp_path, optimizer_variables__ftrl__de_t_embeddings_accumulator=ROWS)

    @pytest.mark.parametrize(
        ("optimizer", "expected"),
        [
            ("adam", {"momenta", "velocities"}),
            ("adam_1", {"momenta", "velocities"}),
            ("rmsprop", {"momentum", "velocity"}),  # means of squares, and steps
            ("mine", {"momentum", "velocity"}),
        ],
    )
    def test_slots_of_other_optimizers_keep_their_names(
        self, tmp_path: Path, optimizer: str, expected: set[str]
    ) -> None:
        leaves: dict[tuple[str, ...], Array] = {("trainable_variables", "de", "video", "embeddings"): ROWS}
        for slot in ("momentum", "velocity"):
            leaves["optimizer_variables", optimizer, f"de_video_embeddings_{slot}"] = ROWS
        write_tree(tmp_path / "tree", leaves)
        with open_checkpoint(tmp_path / "tree") as checkpoint:
            assert set(checkpoint.tables()["video"].slots) == expected

    def test_a_slot_that_may_be_of_two_tables(self, tmp_path: Path) -> None:
        """Layer "de_x" with table "t", and layer "de" with table "x_t"."""
        more = {
            "trainable_variables__de_x__u__embeddings": ROWS,
            "trainable_variables__de__x_u__embeddings": ROWS,
            "optimizer_variables__adagrad__de_x_u_embeddings_accumulator": ROWS,
        }
        with refused(CheckpointFormatError, match="'accumulators'"):
            open_keras(tmp_path, **more)

    def test_two_layers_with_one_table_name(self, tmp_path: Path) -> None:
        with refused(CheckpointFormatError, match="table 't'"):
            open_keras(tmp_path, trainable_variables__other__t__embeddings=ROWS)

    def test_a_table_that_is_changed_by_more(self, tmp_path: Path) -> None:
        with refused(CheckpointFormatError, match="'lora_embeddings_a'"):
            open_keras(tmp_path, trainable_variables__de__t__lora_embeddings_a=ROWS)

    def test_a_table_that_is_no_matrix_of_floats(self, tmp_path: Path) -> None:
        with refused(CheckpointMismatchError, match=r"\[23, 4\]"):
            open_keras(tmp_path, trainable_variables__de__t__embeddings=ROWS.astype(np.int8))

    def test_a_frozen_table(self, tmp_path: Path) -> None:
        with open_keras(tmp_path, non_trainable_variables__de__u__embeddings=ROWS) as checkpoint:
            assert {name: info.slots for name, info in checkpoint.tables().items()} == {"t": ("accumulators",), "u": ()}


class TestStacks:
    def test_without_a_layout(self, tmp_path: Path) -> None:
        _, rows = stacks()
        trees: dict[str, Leaves] = {
            "keras_rs": {("trainable_variables", "de", "var:a_b_c:table"): rows},
            "variables": {("x", "a_b_c", "table"): rows, ("x", "a_b_c", "slot", "0"): rows},
        }
        for name, leaves in trees.items():
            with refused(CheckpointFormatError, match=r"\(a_b_c\)"):
                open_checkpoint(write_tree(tmp_path / name, leaves))

    @pytest.mark.parametrize("form", ["mapping", "json", "text"])
    def test_the_layout_that_a_user_gives(self, form: str, tmp_path: Path) -> None:
        values, rows = stacks()
        path = write_tree(tmp_path / "ckpt", {("trainable_variables", "de", "var:a_b_c:table"): rows}, chunks=(5, 3))
        given: Any = spec()
        if form == "json":
            given = tmp_path / "spec.json"
            given.write_text(json.dumps(spec()))
        elif form == "text":
            given = str(write_spec(tmp_path / "spec.pbtxt", spec()))
        with open_checkpoint(path, embedding_spec=given) as checkpoint:
            options = json.loads(json.dumps(dict(checkpoint.options)))
            assert checkpoint.tables()["b"].layout == "stack a_b_c, 4 SparseCores, rotation 2"
        with open_checkpoint(path, **options) as checkpoint:
            for name, expected in values.items():
                np.testing.assert_array_equal(checkpoint.read(name), expected)

    def test_the_layout_that_is_given_goes_before_the_one_that_is_saved(self, tmp_path: Path) -> None:
        values, rows = stacks()
        write_tree(tmp_path / "1" / "emb", {("a_b_c", "table"): rows, ("a_b_c", "slot", "x"): rows})
        saved = spec()
        saved["a_b_c"]["tables"]["a"]["shard_rotation"] = 1
        write_spec(tmp_path / "1" / "spec" / "proto.pbtxt", saved)
        with open_checkpoint(tmp_path / "1", embedding_spec=spec()) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("a"), values["a"])
        with open_checkpoint(tmp_path / "1") as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("a", 0, 3), values["a"][1:4])  # as it says: one core further

    @pytest.mark.parametrize(
        "more",
        [
            ("trainable_variables", "other", "var:a_b_c:table:slot:accumulator"),
            ("trainable_variables", "de", "var:a_b_c:table:slot:accumulators"),
        ],
    )
    def test_two_slots_of_one_name(self, more: tuple[str, ...], tmp_path: Path) -> None:
        """Which of them is the table's, nothing says."""
        values, rows = stacks()
        stack = ("trainable_variables", "de", "var:a_b_c:table")
        slot = (*stack[:-1], f"{stack[-1]}:slot:accumulator")
        path = write_tree(tmp_path / "one", {stack: rows, slot: rows + 1})
        with open_checkpoint(path, embedding_spec=spec()) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("a", slot="accumulators"), values["a"] + 1)
        path = write_tree(tmp_path / "two", {stack: rows, slot: rows + 1, more: rows + 2})
        with refused(CheckpointFormatError):
            open_checkpoint(path, embedding_spec=spec())

    def test_the_item_alone_has_the_layout_beside_it(self, tmp_path: Path) -> None:
        values, rows = stacks()
        write_tree(tmp_path / "1" / "emb", {("a_b_c", "table"): rows, ("a_b_c", "slot", "x"): rows})
        (tmp_path / "1" / "_CHECKPOINT_METADATA").write_text("{}")
        write_spec(tmp_path / "1" / "spec" / "proto.pbtxt", spec())
        with open_checkpoint(tmp_path / "1" / "emb") as checkpoint:
            np.testing.assert_array_equal(checkpoint.read("c"), values["c"])

    def test_two_stack_specs_are_refused(self, tmp_path: Path) -> None:
        write_tree(tmp_path / "1" / "emb", {("a_b_c", "table"): stacks()[1]})
        for name in ("one", "two"):
            write_spec(tmp_path / "1" / name / "proto.pbtxt", spec())
        with refused(CheckpointFormatError):
            open_checkpoint(tmp_path / "1")

    def test_another_protocol_buffer(self, tmp_path: Path) -> None:
        path = step(tmp_path, 4)
        (path / "other").mkdir()
        (path / "other" / "proto.pbtxt").write_text('name: "x"\n')
        assert value(path) == 4

    @pytest.mark.parametrize(
        ("stored", "given"),
        [
            (["var:a_b_c:table"], {"other": spec()["a_b_c"]}),
            (
                ["var:a_b_c:table"],
                {**spec(), "z": {"num_sparsecores": 1, "tables": {"z": {"vocab_size": 1, "embedding_dim": 1}}}},
            ),
            (["var:a_b_c:table", "var:more:table"], spec()),
            (["emb"], spec()),
        ],
        ids=["other", "more in the spec", "more in the checkpoint", "not stacked"],
    )
    def test_layouts_of_other_stacks(self, stored: list[str], given: Any, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", dict.fromkeys(((name,) for name in stored), stacks()[1]))
        with refused(CheckpointMismatchError):
            open_checkpoint(path, embedding_spec=given)

    def test_a_stack_and_what_an_optimizer_keeps_under_its_name(self, tmp_path: Path) -> None:
        _, rows = stacks()
        leaves: Leaves = {
            (*prefix, "a_b_c", role): rows for prefix in [("params",), ("mu",)] for role in ("table", "slot")
        }
        path = write_tree(tmp_path / "ckpt", leaves)
        with refused(CheckpointFormatError, match="stack 'a_b_c'"):
            open_checkpoint(path, embedding_spec=spec())

    def test_a_stacked_table_and_one_that_is_not_with_one_name(self, tmp_path: Path) -> None:
        leaves: Leaves = {
            ("trainable_variables", "de", "var:a_b_c:table"): stacks()[1],
            ("trainable_variables", "de", "a", "embeddings"): ROWS,
        }
        with refused(CheckpointFormatError, match="'a'"):
            open_checkpoint(write_tree(tmp_path / "ckpt", leaves), embedding_spec=spec())

    def test_padding_is_never_read(self, tmp_path: Path) -> None:
        """It is NaN; single rows at every border."""
        values, rows = stacks()
        assert np.isnan(rows).any()
        path = write_tree(tmp_path / "ckpt", {("var:a_b_c:table",): rows}, chunks=(3, 5))
        with open_checkpoint(path, embedding_spec=spec()) as checkpoint:
            for name, (count, dim) in STACKED.items():
                for start in range(count):
                    for stop in range(start, count + 1):
                        found = checkpoint.read(name, start, stop)
                        assert found.shape == (stop - start, dim)
                        np.testing.assert_array_equal(found, values[name][start:stop])

    def test_the_full_name_of_a_stack_whose_name_was_cut(self, tmp_path: Path) -> None:
        """As jax-tpu-embedding 0.1.0 cut it."""
        names = ["a_table_whose_name_is_rather_long", "another_one_with_a_long_name"]
        short = "a_table_whose_name_is_rather_long_another_one_with...df1a11c46b74"
        rows = np.arange(8 * 16, dtype=np.float32).reshape(16, 8)
        tables = {
            name: {"vocab_size": 8, "embedding_dim": 8, "row_offset_in_shard": number}
            for number, name in enumerate(names)
        }
        path = write_tree(tmp_path / "ckpt", {(f"var:{short}:table",): rows})
        with open_checkpoint(
            path, embedding_spec={"_".join(names): {"num_sparsecores": 8, "tables": tables}}
        ) as checkpoint:
            np.testing.assert_array_equal(checkpoint.read(names[1]), rows[1::2])


class TestReading:
    def test_many_threads(self, tmp_path: Path) -> None:
        table = np.random.default_rng(0).random((5_000, 7), np.float32)
        path = write_tree(tmp_path / "ckpt", {("t",): table}, chunks=(64, 4))
        failures: list[BaseException] = []

        def read(seed: int, checkpoint: Checkpoint) -> None:
            rng = np.random.default_rng(seed)
            try:
                for _ in range(20):
                    start, stop = sorted(rng.integers(0, len(table) + 1, 2).tolist())
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

    def test_pieces_of_large_chunks(self, tmp_path: Path) -> None:
        """Each is kept until another one is read, whichever table or slot it is of."""
        rng = np.random.default_rng(0)
        rows = {name: rng.random((3_000, 64), np.float32) for name in "ab"}
        leaves: Leaves = {(name,): table for name, table in rows.items()}
        path = write_tree(tmp_path / "ckpt", leaves, chunks=(1024, 64))
        with open_checkpoint(path) as checkpoint:
            for start in [0, 100, 1000, 1024, 2000, 2999, 2900, 0, 1023]:
                for stop in (start + 1, min(start + 100, 3_000), 3_000):
                    for name, table in rows.items():
                        np.testing.assert_array_equal(checkpoint.read(name, start, stop), table[start:stop])

    def test_into_every_other_row_of_an_array(self, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS}, chunks=(5, 3))
        whole = np.full((46, 4), -1, np.float32)
        with open_checkpoint(path) as checkpoint:
            checkpoint.read_into("t", 0, whole[::2])
        np.testing.assert_array_equal(whole[::2], ROWS)
        assert (whole[1::2] == -1).all()

    def test_reads_after_close_are_refused(self, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(write_tree(tmp_path / "ckpt", {("t",): ROWS}))
        checkpoint.close()
        with refused(CheckpointError):
            checkpoint.read("t")

    def test_no_checksum(self, tmp_path: Path) -> None:
        with open_checkpoint(write_tree(tmp_path / "ckpt", {("t",): ROWS})) as checkpoint:
            assert checkpoint.checksums is None
            assert checkpoint.layer_config is None

    @pytest.mark.parametrize("ocdbt", [False, True])
    def test_the_fingerprint_follows_the_files(self, ocdbt: bool, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS}, ocdbt=ocdbt)
        with open_checkpoint(path) as checkpoint:
            before = checkpoint.fingerprint()
            assert checkpoint.fingerprint() == before
            for file in sorted(child for child in path.rglob("*") if child.is_file()):
                status = file.stat()
                os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
                after = checkpoint.fingerprint()
                assert after != before
                before = after
            shutil.rmtree(path)
            with refused(CheckpointError):
                checkpoint.fingerprint()

    @pytest.mark.parametrize(("compressed", "need"), [(True, 2 * (160 + 2 + 1024)), (False, 160 + 2 + 1024)])
    @pytest.mark.parametrize("zarr3", [False, True])
    def test_memory_for_chunks(self, compressed: bool, need: int, zarr3: bool, tmp_path: Path) -> None:
        """A chunk as stored is held beside what is decoded from it, unless it is the same."""
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS}, chunks=(10, 4), zarr3=zarr3, compressed=compressed)
        with open_checkpoint(path, chunk_memory_bytes=need - 1) as checkpoint:
            with refused(CheckpointFormatError):
                checkpoint.read("t", 0, 1)
            assert checkpoint.tables()["t"].layout == "chunks of 10 rows"
        for memory in (need, str(need), 1 << 30):
            with open_checkpoint(path, chunk_memory_bytes=memory) as checkpoint:
                np.testing.assert_array_equal(checkpoint.read("t"), ROWS)
                np.testing.assert_array_equal(checkpoint.read("t", 8, 22), ROWS[8:22])
                assert checkpoint.options == {"chunk_memory_bytes": int(memory)}

    @pytest.mark.parametrize("memory", [0, -1, "1 GiB", 1.5, True])
    def test_memory_that_is_no_number_of_bytes(self, memory: Any, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS})
        with refused(ConfigError, match="chunk_memory_bytes"):
            open_checkpoint(path, chunk_memory_bytes=memory)

    def test_unknown_options(self, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS})
        with refused(ConfigError, match="'embedding_spec'"):
            open_checkpoint(path, embeding_spec={})
        with refused(ConfigError, match="embedding_spec"):
            open_checkpoint(path, embedding_spec=3)
        with refused(ConfigError, match="embedding_spec"):
            open_checkpoint(path, embedding_spec="nowhere")

    def test_without_tensorstore(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS})
        monkeypatch.setitem(sys.modules, "tensorstore", None)
        with pytest.raises(
            MissingExtraError, match=re.escape("tensorstore, which is not installed: pip install 'tpuembed[jax]'")
        ):
            open_checkpoint(path)

    def test_what_the_system_refuses_is_no_damage(self, tmp_path: Path) -> None:
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS}, ocdbt=False)
        script = """
import resource, sys
from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import CheckpointError
with open_checkpoint(sys.argv[1]) as checkpoint:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    try:
        checkpoint.read("t")
    except CheckpointError as error:
        print(type(error).__name__, error)
"""
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
        assert re.match(
            r"CheckpointError checkpoint .*array 't': RESOURCE_EXHAUSTED: .*Too many open files", done.stdout
        )

    def test_no_permission(self, tmp_path: Path) -> None:
        if os.geteuid() == 0:
            pytest.skip("needs a user for whom permissions hold")
        path = write_tree(tmp_path / "ckpt", {("t",): ROWS}, ocdbt=False)
        (path / "t" / ".zarray").chmod(0)
        with pytest.raises(CheckpointError, match="PERMISSION_DENIED"):
            open_checkpoint(path)


def peak_mib(path: Path, cores: int) -> tuple[str, int]:
    """Of a process that reads table `t`, 128 MiB on `cores` SparseCores, in 16 pieces, as a worker: CRC of all, peak in MiB."""
    script = """
import sys, zlib
import numpy as np
from tpuembed.checkpoint import open_checkpoint

path, cores = sys.argv[1], int(sys.argv[2])
spec = {"t": {"num_sparsecores": cores, "tables": {"t": {"vocab_size": 1 << 19, "embedding_dim": 64}}}}
with open_checkpoint(path, embedding_spec=spec) as checkpoint:
    crc, out = 0, np.ones(((1 << 19) // 16, 64), np.float32)
    for start in range(0, 1 << 19, len(out) * (4 if cores > 1 else 1)):
        checkpoint.read_into("t", start, out)
        crc = zlib.crc32(out, crc)
peak = next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(crc, peak)
"""
    command = [sys.executable, "-c", script, str(path), str(cores)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **MALLOC})
    crc, peak = done.stdout.split()
    return crc, int(peak)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("compressed", [True, False], ids=["zstd", "plain"])
@pytest.mark.parametrize("chunk_mib", [1, 16, pytest.param(128, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("ocdbt", [False, True], ids=["files", "ocdbt"])
def test_peak_memory(compressed: bool, chunk_mib: int, ocdbt: bool, tmp_path: Path) -> None:
    """128 MiB with all imports, and one large chunk, or two, decoded and as stored. No compressor makes these bytes smaller."""
    random = np.random.default_rng(0).integers(0, 256, (1 << 19, 256), np.uint8).view(np.float32)
    leaves: Leaves = {("var:t:table",): random}
    path = write_tree(tmp_path / "ckpt", leaves, chunks=(chunk_mib << 12, 64), ocdbt=ocdbt, compressed=compressed)
    limit = 128 + 2 * {1: 0, 16: 32, 128: 128}[chunk_mib]
    found, peak = peak_mib(path, 1)
    assert found == str(zlib.crc32(random.tobytes()))
    assert peak < limit
    _, peak = peak_mib(path, 16)
    assert peak < limit


def bytes_read() -> int:
    """By TensorStore from files, since the process started."""
    metrics = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(int(cell["value"]) for metric in metrics for cell in metric["values"])


class TestSpreadRows:
    """A stack of 4 SparseCores in chunks of which each piece of rows needs one per SparseCore."""

    ROWS = 1 << 14
    STACKS: ClassVar = {"t": {"num_sparsecores": 4, "tables": {"t": {"vocab_size": ROWS, "embedding_dim": 16}}}}

    def tree(self, folder: Path, rows_per_chunk: int) -> tuple[Path, Array, int]:
        """The checkpoint, its table, and how many bytes its chunks have on the disk."""
        table = np.random.default_rng(0).random((self.ROWS, 16), np.float32)
        stack = table.reshape(-1, 4, 16).swapaxes(0, 1).reshape(self.ROWS, 16)
        path = write_tree(folder / "ckpt", {("var:t:table",): stack}, chunks=(rows_per_chunk, 16), ocdbt=False)
        return path, table, sum(file.stat().st_size for file in path.rglob("[0-9]*.0"))

    def read(self, path: Path, table: Array, rows_per_piece: int, **options: Any) -> int:
        """How many bytes were read for all rows, in pieces."""
        with open_checkpoint(path, embedding_spec=self.STACKS, **options) as checkpoint:
            before = bytes_read()
            for start in range(0, self.ROWS, rows_per_piece):
                stop = min(start + rows_per_piece, self.ROWS)
                np.testing.assert_array_equal(checkpoint.read("t", start, stop), table[start:stop])
            return bytes_read() - before

    @pytest.mark.parametrize("rows_per_chunk", [64, 1024, 3000, 1 << 14])
    @pytest.mark.parametrize("rows_per_piece", [100, 512])
    def test_chunks_that_fit_are_decoded_once(self, rows_per_chunk: int, rows_per_piece: int, tmp_path: Path) -> None:
        path, table, stored = self.tree(tmp_path, rows_per_chunk)
        assert stored <= self.read(path, table, rows_per_piece) < 1.1 * stored + 8192

    def test_a_larger_cache_decodes_chunks_once(self, tmp_path: Path) -> None:
        path, table, stored = self.tree(tmp_path, 1024)
        assert self.read(path, table, 500, chunk_memory_bytes=200_000) > 2.5 * stored
        assert self.read(path, table, 500, chunk_memory_bytes=400_000) < 1.1 * stored


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with moto_server() as server:
        server.make_bucket("models")
        yield server


class TestStores:
    @pytest.mark.parametrize("ocdbt", [False, True])
    def test_rows_in_s3_are_those_of_the_disk(
        self, ocdbt: bool, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remote._store.cache_clear()
        for name, text in s3.environment.items():
            monkeypatch.setenv(name, text)
        values, rows = stacks()
        leaves: Leaves = {("a_b_c", "table"): rows, ("a_b_c", "slot", "accumulator"): rows}
        write_tree(tmp_path / "7" / "emb", leaves, chunks=(5, 8), ocdbt=ocdbt)
        (tmp_path / "7" / "_CHECKPOINT_METADATA").write_text("{}")
        write_spec(tmp_path / "7" / "spec" / "proto.pbtxt", spec())
        url = s3.upload(tmp_path, "models", f"run/{ocdbt}")
        for inside in ("", "/7", "/7/emb"):
            with open_checkpoint(url + inside) as checkpoint:
                assert checkpoint.path == url + (inside or "/7")
                assert checkpoint.fingerprint()
                for name, expected in values.items():
                    np.testing.assert_array_equal(checkpoint.read(name), expected)
                    np.testing.assert_array_equal(checkpoint.read(name, 0, 1), expected[:1])
        remote._store.cache_clear()

    @pytest.mark.parametrize("signed", [True, False])
    def test_s3_with_credentials_in_the_environment_alone(self, signed: bool, s3: S3, tmp_path: Path) -> None:
        """A process of its own: what TensorStore says about files that it looks for in vain comes once."""
        write_tree(tmp_path / "7", {("t",): np.ones((3, 2), np.float32)})
        bucket = f"signed-{signed}".lower()
        s3.make_bucket(bucket)
        url = s3.upload(tmp_path, bucket, "alone")
        code = f"from tpuembed import open_checkpoint\nassert open_checkpoint('{url}/7').read('t').all()"
        environment = {**os.environ, **s3.environment, "HOME": str(tmp_path)}
        if not signed:
            s3.publish(bucket)
            environment["AWS_SKIP_SIGNATURE"] = "true"
            del environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")
