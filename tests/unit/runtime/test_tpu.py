"""`configure_tpu` in processes of their own: what it sets, keeps and refuses. libtpu is a stub."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tests.support.fake_tpu import fake_tpu
from tpuembed import input_options

MINE = (
    "TF_PLUGGABLE_DEVICE_LIBRARY_PATH",
    "PJRT_DEVICE",
    "NEXT_PLUGGABLE_DEVICE_USE_C_API",
    "TF_XLA_FLAGS",
    "KERAS_BACKEND",
)
FLAGS = (  # as keras-rs' tutorial sets them
    "--tf_mlir_enable_mlir_bridge=true "
    "--tf_mlir_enable_convert_control_to_data_outputs_pass=true "
    "--tf_mlir_enable_merge_control_flow_pass=true"
)
CODE = """
import json, os, sys, warnings
import tpuembed
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        done = tpuembed.configure_tpu()
    except tpuembed.TpuEmbedError as error:
        sys.exit(f"{type(error).__name__}: {error}")
print(json.dumps({"set": done.set, "kept": done.kept, "environ": {n: os.environ.get(n) for n in sys.argv[1:]},
    "warnings": [str(each.message) for each in caught], "files": [each.filename for each in caught],
    "tensorflow": "tensorflow" in sys.modules}))
"""


@pytest.fixture
def libtpu(tmp_path: Path) -> Path:
    """A folder with a package that looks like libtpu; the library it names."""
    package = tmp_path / "packages" / "libtpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "import pathlib\ndef get_library_path(): return str(pathlib.Path(__file__).with_name('libtpu.so'))\n"
    )
    (package / "libtpu.so").touch()
    return package / "libtpu.so"


def run(packages: Path, code: str = CODE, **variables: str) -> "subprocess.CompletedProcess[str]":
    environ = {name: value for name, value in os.environ.items() if name not in MINE}
    environ |= {"PYTHONPATH": f"{packages}:{Path(__file__).parents[3]}", **variables}
    return subprocess.run(
        [sys.executable, "-c", code, *MINE[:4]], capture_output=True, text=True, env=environ, timeout=120
    )


def done(libtpu: Path, **variables: str) -> Any:
    finished = run(libtpu.parents[1], **variables)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout)


def test_what_is_right_already_is_kept_in_silence(libtpu: Path) -> None:
    given = {"PJRT_DEVICE": "TPU", "TF_XLA_FLAGS": f"--tf_xla_auto_jit=2 {FLAGS}"}
    found = done(libtpu, **given)
    assert {name: found["environ"][name] for name in given} == given
    assert set(found["set"]) == {"TF_PLUGGABLE_DEVICE_LIBRARY_PATH", "NEXT_PLUGGABLE_DEVICE_USE_C_API"}
    assert set(found["kept"]) == {"PJRT_DEVICE", *(flag.split("=")[0] for flag in FLAGS.split())}
    assert found["warnings"] == []


def test_what_the_user_set_otherwise_is_kept_and_named(libtpu: Path) -> None:
    found = done(libtpu, PJRT_DEVICE="CPU", TF_PLUGGABLE_DEVICE_LIBRARY_PATH="/mine.so")
    assert found["environ"]["PJRT_DEVICE"] == "CPU"
    assert found["environ"]["TF_PLUGGABLE_DEVICE_LIBRARY_PATH"] == "/mine.so"
    assert found["kept"] == {"PJRT_DEVICE": "CPU", "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": "/mine.so"}
    text = "\n".join(found["warnings"])
    assert "PJRT_DEVICE keeps your value 'CPU'. TPUs with SparseCores need 'TPU'" in text
    assert (
        f"TF_PLUGGABLE_DEVICE_LIBRARY_PATH keeps your value '/mine.so'. TPUs with SparseCores need '{libtpu}'" in text
    )
    assert found["files"] == ["<string>", "<string>"]  # where the user called


def test_flags_are_added_to_the_users(libtpu: Path) -> None:
    mine = "--tf_xla_auto_jit=2 --tf_mlir_enable_mlir_bridge=false --tf_mlir_enable_merge_control_flow_pass"
    found = done(libtpu, TF_XLA_FLAGS=mine)
    assert found["environ"]["TF_XLA_FLAGS"] == f"{mine} --tf_mlir_enable_convert_control_to_data_outputs_pass=true"
    (warning,) = found["warnings"]
    assert "--tf_mlir_enable_mlir_bridge keeps your value '--tf_mlir_enable_mlir_bridge=false'" in warning


def test_a_file_of_flags_is_not_broken(libtpu: Path) -> None:
    found = done(libtpu, TF_XLA_FLAGS="/my/flags")
    assert found["environ"]["TF_XLA_FLAGS"] == found["kept"]["TF_XLA_FLAGS"] == "/my/flags"
    assert f"TF_XLA_FLAGS keeps your value '/my/flags'. TPUs with SparseCores need '{FLAGS}'" in found["warnings"][0]


def test_a_libtpu_without_its_library_is_refused(libtpu: Path) -> None:
    libtpu.unlink()
    finished = run(libtpu.parents[1])
    assert f"its library is {libtpu}. That file does not exist" in finished.stderr
    assert "pip install --force-reinstall libtpu" in finished.stderr


def test_another_keras_backend_is_refused(libtpu: Path) -> None:
    assert "KERAS_BACKEND is 'jax'" in run(libtpu.parents[1], KERAS_BACKEND="jax").stderr


# ---- input_options


@pytest.mark.parametrize("hardware", ["V1", "V2", "UNSUPPORTED"])
def test_on_tpus_ids_stay_on_the_hosts(hardware: str) -> None:
    with fake_tpu(hardware) as strategy:
        assert input_options(strategy).experimental_fetch_to_device is False
        with strategy.scope():
            assert input_options().experimental_fetch_to_device is False


def test_elsewhere_tensorflows_defaults_hold() -> None:
    for strategy in (None, tf.distribute.get_strategy(), tf.distribute.MirroredStrategy(["CPU:0"])):
        assert input_options(strategy) == tf.distribute.InputOptions()


@pytest.mark.filterwarnings("ignore:To make it possible to preserve tf.data options:UserWarning")  # of graphs
def test_tensorflow_wants_them_for_ragged_ids_on_tpus() -> None:
    with fake_tpu("V2") as strategy:
        dataset = tf.data.Dataset.from_tensors(tf.RaggedTensor.from_row_lengths([1, 2, 3], [1, 2]))
        with pytest.raises(ValueError, match="experimental_fetch_to_device"):
            strategy.experimental_distribute_dataset(dataset)
        strategy.experimental_distribute_dataset(dataset, input_options(strategy))
