"""Runs the warmup requests in a version's folder before the version is available.

Source: saved_model_warmup_util.cc and saved_model_warmup.cc of TensorFlow Serving, and record_reader.cc of TensorFlow.
"""

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import google_crc32c

from tpuembed.formats.sstable import mask
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.servable import LoadedVersion, Servable
from tpuembed_serving.core.status import Code, StatusError, invalid_argument
from tpuembed_serving.tensorflow.import_lock import IMPORTING_TENSORFLOW

__all__ = ["MAX_RECORDS", "WARMUP_PATH", "read_records", "warm_up"]

WARMUP_PATH: Final = Path("assets.extra") / "tf_serving_warmup_requests"
MAX_RECORDS: Final = 1000
_LENGTH: Final = struct.Struct("<Q")
_CHECKSUM: Final = struct.Struct("<I")
_METHODS: Final = {
    "predict_log": "Predict",
    "classify_log": "Classify",
    "regress_log": "Regress",
    "multi_inference_log": "MultiInference",
}


def warm_up(version_dir: Path, servable: Servable, between: Callable[[], None]) -> int:
    """Run the warmup records of a version in order, and return their number. `between` is called before each; it may raise.

    Raises:
        StatusError: a record fails or is malformed, or there are more than MAX_RECORDS.
    """
    path = version_dir / WARMUP_PATH
    if not path.is_file():
        return 0
    with IMPORTING_TENSORFLOW:
        from tensorflow_serving.apis import prediction_log_pb2

    count = 0
    with _named(version_dir, "cannot be read"):
        for count, record in enumerate(read_records(path), 1):
            between()
            with _named(version_dir, f"record {count}"):
                if count > MAX_RECORDS:
                    raise invalid_argument(f"Number of warmup records exceeds the maximum ({MAX_RECORDS})")
                _run(servable, prediction_log_pb2.PredictionLog, record)
    return count


def _run(servable: Servable, log_class: Any, record: bytes) -> None:
    """Run a record on `servable`, whatever model it names. Its steps are those of the pipeline, in this thread."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    from tpuembed_serving.grpc.prediction_service import PREDICTIONS

    try:
        log = log_class.FromString(record)
    except DecodeError:
        raise invalid_argument("Failed to parse warmup record") from None
    kind = log.WhichOneof("log_type")
    if kind is None:  # TensorFlow Serving skips it too
        return
    if kind not in _METHODS:
        number = log.DESCRIPTOR.fields_by_name[kind].number
        raise StatusError(Code.UNIMPLEMENTED, f"Unsupported log_type for warmup: {number}")
    request = getattr(log, kind).request
    if kind != "multi_inference_log":
        request.model_spec.SetInParent()
    prediction, loaded = PREDICTIONS[_METHODS[kind]](), LoadedVersion(0, servable)
    prediction.parse(request.SerializeToString(), noop)
    outputs = []
    for task in prediction.decode(loaded, noop):
        task.signature.check_shapes(task.inputs)
        found = servable.run(task.signature, task.inputs)
        outputs.append(dict(zip(task.signature.output_dtypes, found, strict=True)))
    prediction.encode(loaded, outputs, noop)


@contextlib.contextmanager
def _named(version_dir: Path, what: str) -> Iterator[None]:
    """Add the version and `what` to the messages of errors in the block."""
    try:
        yield
    except StatusError as error:
        if error.message.startswith("version ") or error.code is Code.CANCELLED:
            raise
        raise StatusError(error.code, f"version {version_dir.name}: {WARMUP_PATH}, {what}: {error.message}") from None
    except OSError as error:
        text = f"version {version_dir.name}: {WARMUP_PATH}, {what}: {error.strerror}"
        raise StatusError(Code.UNKNOWN, text) from None


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a TFRecord file. Each is compared with its checksums.

    Raises:
        StatusError: DATA_LOSS, the file is damaged, truncated or not a TFRecord file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        while (offset := file.tell()) < size:
            (length,) = _LENGTH.unpack(_checked(file, _LENGTH.size, size, offset))
            yield _checked(file, length, size, offset)


def _checked(file: BinaryIO, length: int, size: int, offset: int) -> bytes:
    """Read the next `length` bytes and compare them with the masked CRC32C that follows."""
    if length + _CHECKSUM.size > size - file.tell():
        raise _damaged("truncated", offset)
    data = file.read(length)
    (stored,) = _CHECKSUM.unpack(file.read(_CHECKSUM.size))
    checksum = google_crc32c.value(data)
    if stored != mask(checksum):
        raise _damaged("corrupted", offset)
    return data


def _damaged(how: str, offset: int) -> StatusError:
    text = f"{how} record at {offset}. Please verify your warmup data is in TFRecord format."
    return StatusError(Code.DATA_LOSS, text)
