"""TensorFlow Serving's batching parameters: every field is honoured or refused by name."""

from pathlib import Path

import pytest

from tests.support.messages import refused
from tpuembed.errors import ConfigError
from tpuembed_serving.batching.parameters import BatchingParameters, read_parameters
from tpuembed_serving.settings import BatchingSettings

# The example of TensorFlow Serving's guide, and the fields that it leaves out.
EVERYTHING = """
# Of one machine.
max_batch_size { value: 128 }
batch_timeout_micros { value: 1000 }
max_enqueued_batches { value: 1000000 }
num_batch_threads { value: 8 }
thread_pool_name { value: "batches" }
allowed_batch_sizes: [16, 64]
pad_variable_length_inputs: true
enable_large_batch_splitting { value: true }
max_execution_batch_size { value: 64 }
"""


def read(tmp_path: Path, text: str) -> BatchingParameters:
    path = tmp_path / "batching.pbtxt"
    path.write_text(text)
    return read_parameters(path)


def test_every_field_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, EVERYTHING) == BatchingParameters(
        max_batch_size=128,
        batch_timeout_micros=1000,
        max_enqueued_batches=1_000_000,
        num_batch_threads=8,
        thread_pool_name="batches",
        allowed_batch_sizes=(16, 64),
        pad_variable_length_inputs=True,
        enable_large_batch_splitting=True,
        max_execution_batch_size=64,
    )


def test_nothing_said_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, "") == BatchingParameters()
    assert BatchingParameters().run_rows == 512


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_batch_size { value: 0 }", "max_batch_size is 0. Give 1 or more"),
        ("max_batch_size { }", "max_batch_size is 0. Give 1 or more"),
        ("max_enqueued_batches { value: 0 }", "max_enqueued_batches is 0. Give 1 or more"),
        ("num_batch_threads { value: -1 }", "num_batch_threads is -1. Give 1 or more"),
        ("batch_timeout_micros { value: -1 }", "batch_timeout_micros is -1. Give 0 or more"),
        (
            "max_batch_size { value: 8 } allowed_batch_sizes: [4, 2, 8]",
            "allowed_batch_sizes are 4, 2, 8. Give increasing sizes above 0",
        ),
        (
            "max_batch_size { value: 8 } allowed_batch_sizes: [0, 8]",
            "allowed_batch_sizes are 0, 8. Give increasing sizes above 0",
        ),
        ("max_batch_size { value: 8 } allowed_batch_sizes: [2, 4]", "is 4. It must equal max_batch_size, 8"),
        (
            "max_batch_size { value: 8 } enable_large_batch_splitting { value: true } "
            "max_execution_batch_size { value: 4 } allowed_batch_sizes: [8]",
            "is 8. It must equal max_execution_batch_size, 4",
        ),
        ("max_execution_batch_size { value: 4 }", "enable_large_batch_splitting is not true"),
        (
            "max_batch_size { value: 8 } enable_large_batch_splitting { value: true } "
            "max_execution_batch_size { value: 9 }",
            "max_execution_batch_size is 9, and max_batch_size is 8",
        ),
        ("full_batch_scheduling_boost_micros { value: 1 }", "has no field named"),
        ("max_batch_size: 8", "line 1, column 17: "),
        ("max_batch_size { value: 'x' }", "line 1, column 25: "),
    ],
)
def test_what_is_wrong_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(f"batching parameters {tmp_path / 'batching.pbtxt'}: ")
    assert message in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with refused(ConfigError):
        read_parameters(tmp_path / "none")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with refused(ConfigError):
        read_parameters(tmp_path / "binary")


def test_parameters_without_batching_are_refused() -> None:
    for enabled in (None, False):
        with refused(ConfigError):
            BatchingSettings(enabled=enabled, parameters=BatchingParameters())
