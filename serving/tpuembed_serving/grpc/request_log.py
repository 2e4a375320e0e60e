"""Logs sampled requests with their answers, as `logging_config` of a models.config asks: PredictionLogs in TFRecord files.

Warm-up reads the files. A thread writes them. A prediction never waits for it: what the thread
cannot take is dropped and counted.

Source: core/server_request_logger.cc and core/request_logger.cc of TensorFlow Serving.
"""

import errno
import logging
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import google_crc32c

from tpuembed.errors import reason
from tpuembed.formats.sstable import mask
from tpuembed_serving.core.classify_regress import LOG_TYPES, interpret
from tpuembed_serving.core.noop import noop
from tpuembed_serving.core.pipeline import Call
from tpuembed_serving.core.status import Code, StatusError

__all__ = ["RequestLog"]

logger = logging.getLogger(__name__)

_MOST_WAITING: Final = 1000
_MOST_WAITING_BYTES: Final = 64 << 20
_MOST_FILE_BYTES: Final = 64 << 20
_MOST_BYTES: Final = 1 << 30
_RETRY_SECONDS: Final = 60.0
"""How long nothing is written after a file could not be."""
_METHODS: Final = {kind: method for method, kind in LOG_TYPES.items()}


class _Entry(NamedTuple):
    """An answered request that waits to be written, and about how much memory it takes."""

    call: Call
    answer: bytes
    seconds: int
    size: int


class RequestLog:
    """Writes what the event loop passes to `log`, in a thread that starts with the first request.

    Attributes:
        dropped: how many requests were dropped because too many waited, or could not be written.
    """

    def __init__(
        self, counted: Callable[[str, Code], None] = noop, *, processes: int = 1, max_bytes: int = _MOST_BYTES
    ) -> None:
        """Prepare to write.

        Args:
            counted: called with the model and the outcome of each sampled request, by any thread.
            processes: how many of them write files of one prefix at a time.
            max_bytes: the most that the files of one prefix take together. The oldest are removed.
        """
        self.dropped = 0
        self._max_bytes, self._processes, self._counted = max_bytes, processes, counted
        self._noted, self._note_at = 0, 0.0
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._put_bytes = self._done_bytes = 0
        self._files: dict[str, _Files] = {}
        self._thread: threading.Thread | None = None

    def log(self, call: Call, answer: bytes) -> None:
        """Queue a sampled request that was answered, or drop it. Never blocks. The event loop's thread calls it."""
        arrays = [array for task in call.tasks for array in task.inputs]
        arrays += [array for one in call.outputs for array in one.values()]
        # A slice of a batch's output holds the whole.
        size = len(call.body) + len(answer) + sum(getattr(array.base, "nbytes", array.nbytes) for array in arrays)
        if self._queue.qsize() >= _MOST_WAITING or self._put_bytes - self._done_bytes + size > _MOST_WAITING_BYTES:
            self.dropped += 1
            self._counted(call.model, Code.RESOURCE_EXHAUSTED)
            return
        self._put_bytes += size
        self._queue.put(_Entry(call, answer, int(time.time()), size))
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write all queued requests, and close the files."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            self._write(entry)
            del entry  # it keeps the version, which may be unloaded while the thread waits
        for files in self._files.values():
            files.close()

    def _write(self, entry: _Entry) -> None:
        code, model = Code.OK, entry.call.model
        try:
            if not self._files_of(entry.call).write(_record(entry)):
                code = Code.UNAVAILABLE
        except StatusError as error:
            code = error.code
        except Exception:
            code = Code.INTERNAL
            logger.exception("model %s: a request could not be logged", model)
        self.dropped += code is not Code.OK
        self._counted(model, code)
        self._done_bytes += entry.size
        if self.dropped > self._noted and time.monotonic() >= self._note_at:
            self._noted, self._note_at = self.dropped, time.monotonic() + _RETRY_SECONDS
            text = (
                "request log: %d requests were not logged since the start. Lower sampling_rate, or see the lines above"
            )
            logger.warning(text, self._noted)

    def _files_of(self, call: Call) -> "_Files":
        assert call.loaded.request_logging is not None
        prefix = call.loaded.request_logging.filename_prefix
        if prefix not in self._files:
            self._files[prefix] = _Files(Path(prefix), self._max_bytes, self._processes)
        return self._files[prefix]


class _Files:
    """The files PREFIX-TIME-PID-NUMBER.tfrecord of this process. Other processes write files of the same prefix."""

    def __init__(self, prefix: Path, max_bytes: int, processes: int) -> None:
        self._prefix = prefix
        self._file_bytes = min(_MOST_FILE_BYTES, max(1, max_bytes // (4 * processes)))
        # What the open file of each process may become is kept free.
        self._kept_bytes = max_bytes - processes * self._file_bytes
        self._names = re.compile(re.escape(prefix.name) + r"-\d{8}T\d{6}-\d+-\d+\.tfrecord")
        self._descriptor = -1
        self._size = self._number = 0
        self._path = prefix
        self._retry_at = 0.0

    def write(self, record: bytes) -> bool:
        """Append a record. Returns False if it cannot be written, and for a minute after that."""
        length = struct.pack("<Q", len(record))
        data = b"".join((length, _checksum(length), record, _checksum(record)))
        if len(data) > self._file_bytes or time.monotonic() < self._retry_at:
            return False
        try:
            if self._size + len(data) > self._file_bytes or not self._is_there():
                self._open()
            written = os.write(self._descriptor, data)
            if written < len(data):  # a disk that is nearly full
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError as error:
            self._retry_at = time.monotonic() + _RETRY_SECONDS
            text = "request log %s: cannot be written: %s. Requests are not logged; retried in %d s"
            logger.error(text, self._path, reason(error), _RETRY_SECONDS)
            self._end_after_last_record()
            return False
        self._size += len(data)
        return True

    def _is_there(self) -> bool:
        """Returns True if the open file has its name still: another process may have removed or renamed it."""
        if self._descriptor < 0:
            return False
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self._descriptor))

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> None:
        """Begin a new file, and remove the oldest ones that are too much."""
        self.close()
        self._number += 1
        name = (
            f"{self._prefix.name}-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}-{self._number}.tfrecord"
        )
        self._path = self._prefix.with_name(name)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._size = 0
        found = []
        for path in self._path.parent.iterdir():
            if self._names.fullmatch(path.name) and path != self._path:
                try:
                    about = path.stat()
                except FileNotFoundError:  # another process has removed it
                    continue
                found.append((about.st_mtime_ns, path, about.st_size))
        total = sum(size for _, _, size in found)
        for _, path, size in sorted(found):
            if total <= self._kept_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _end_after_last_record(self) -> None:
        """Remove what was written of a record."""
        if self._descriptor >= 0:
            try:
                os.ftruncate(self._descriptor, self._size)
            except OSError:
                logger.exception("request log %s: its last record is cut off", self._path)
            self.close()


def _checksum(data: bytes) -> bytes:
    return struct.pack("<I", mask(google_crc32c.value(data)))


def _record(entry: _Entry) -> bytes:
    """Return a PredictionLog.

    Raises:
        StatusError: the log has no form for it.
    """
    from tensorflow_serving.apis import prediction_log_pb2  # these import TensorFlow, which the model has done

    from tpuembed_serving.grpc.prediction_service import fill_result
    from tpuembed_serving.grpc.tensor_proto import encode_tensor

    call, kind, settings = entry.call, entry.call.prediction.log_type, entry.call.loaded.request_logging
    assert settings is not None
    log = prediction_log_pb2.PredictionLog()
    about = log.log_metadata
    about.model_spec.name = call.model
    about.model_spec.version.value = call.loaded.version
    about.sampling_config.sampling_rate = settings.sampling_rate
    about.saved_model_tags.append("serve")
    if "timestamp_secs" in about.DESCRIPTOR.fields_by_name:  # not in the oldest supported package
        about.timestamp_secs = entry.seconds
    pair = getattr(log, kind)
    if call.prediction.is_log_message:
        pair.request.MergeFromString(call.body)
        pair.response.MergeFromString(entry.answer)
        return bytes(log.SerializeToString())
    ((signature, inputs, _),), (outputs,) = call.tasks, call.outputs
    about.model_spec.signature_name = signature.name
    for message in (pair.request, pair.response):
        message.model_spec.CopyFrom(about.model_spec)
    if kind == "predict_log":
        for info, array in zip(signature.inputs, inputs, strict=True):
            encode_tensor(array, info.dtype, pair.request.inputs[info.alias])
        for alias, array in outputs.items():
            encode_tensor(array, signature.output_dtypes[alias], pair.response.outputs[alias])
    else:
        examples = inputs[0].ravel().tolist()
        for example in examples:
            pair.request.input.example_list.examples.add().MergeFromString(example)
        fill_result(pair.response.result, interpret(_METHODS[kind], signature, outputs, len(examples)))
    return bytes(log.SerializeToString())
