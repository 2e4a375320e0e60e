"""Loads a SavedModel into a TensorFlow session and runs its signatures. The only module here that uses private TensorFlow names.

It uses a TF1 session, not `tf.saved_model.load`: a call costs a third of a signature call. As in TensorFlow Serving, the
graph decides whether it accepts a rank that differs from the signature's. `Session.run` and `Session.make_callable`
refuse such a feed in Python; `_make_callable_from_options` passes it on.
"""

import dataclasses
import functools
import gc
import hashlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import pywrap_tf_session as tf_session
from tensorflow.python.saved_model import loader_impl

from tpuembed.errors import ConfigError
from tpuembed.formats.saved_model import GRAPH_FILE, mapped_from, relative_graph
from tpuembed.manifest import FeatureEntry, Manifest, Packing
from tpuembed.native.search import EXCLUDE
from tpuembed.row_proof import VERSION, Verdict, prove
from tpuembed_serving.batching.concat import count_rows
from tpuembed_serving.batching.known_ids import known_ids
from tpuembed_serving.core.batch_deadline import remaining_seconds
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.servable import Array, Merging, Signature
from tpuembed_serving.core.status import Code, StatusError, invalid_argument, plain_message
from tpuembed_serving.models.versions import INDEX_FILE, check_files
from tpuembed_serving.tensorflow.larger_than_memory import MAPPED, MappedVersion
from tpuembed_serving.tensorflow.native import Lookups, NativeCalls, native_calls
from tpuembed_serving.tensorflow.row_store import RowStoreOptions, stored_calls
from tpuembed_serving.tensorflow.signatures import signature_json, signature_of

__all__ = ["RunOptions", "SavedModelServable", "load"]

logger = logging.getLogger(__name__)

_PADDING = -1
"""The padding of lists of ids, and of integers that are names, in every export of lookups."""
_VARIABLE_OPS = frozenset({"VarHandleOp", "VariableV2", "Variable"})
_LOOP_OPS = frozenset({"While", "StatelessWhile", "NextIteration", "RefNextIteration", "For"})
_SHOWN = 4
"""How many names of variables a message has."""
_SHORT = 0.9
"""A client with less than this share of the callables' timeout left gets a run with its own timeout."""
_PYTHON_OPS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the runs of a model's signatures.

    Attributes:
        timeout_ms: when TensorFlow cancels a run whose duration is not bounded by its inputs; 0 is never.
        threads: the size of TensorFlow's pool, on which such runs happen. All other runs stay on the calling thread, which is
            faster. A timeout has no effect there: TensorFlow checks it after the run (measured).
        may_wait: whether a run may wait for rows of mapped tables, or of tables in Redis.
        lookups: what runs the lookups of exports with layout mmap: the C library, TensorFlow, or the faster one.
        lookup_threads: how many threads a call of the C library may use; None is one for each processor.
        row_store: where the rows of versions without tables are; None if the server is not given one.
    """

    timeout_ms: int = 0
    threads: int = 1
    may_wait: bool = False
    lookups: Lookups = "auto"
    lookup_threads: int | None = None
    row_store: RowStoreOptions | None = None


class SavedModelServable:
    """A loaded SavedModel; see `tpuembed_serving.core.servable.Servable`."""

    def __init__(
        self,
        session: Any,
        meta_graph: Any,
        verdicts: dict[str, Verdict],
        manifest: Manifest | None,
        options: RunOptions,
        where: str,
        native: NativeCalls | None = None,
        mapped_files: Sequence[Path] = (),
    ) -> None:
        """Build the callables.

        Args:
            session: has the graph loaded.
            meta_graph: of the SavedModel.
            verdicts: maps signatures to what is known to be proven of them. All others are proven when they are needed.
            manifest: None if tpuembed did not export it.
            options: how the signatures are run.
            where: the model's folder and version, for messages.
            native: the calls that look up without TensorFlow. None if there are none.
            mapped_files: the files of its tables that are mapped.
        """
        self._session, self.manifest = session, manifest
        self._is_stored = manifest is not None and manifest.row_store is not None  # its rows are in Redis
        self._native = native
        is_steady = _is_steady(meta_graph.graph_def, manifest)
        self._timeout_ms = 0 if is_steady else options.timeout_ms
        self.signatures: Mapping[str, Signature] = {
            name: dataclasses.replace(
                _with_padding(signature_of(name, sig, is_export=manifest is not None), manifest),
                ids=None if manifest is None else known_ids(name, sorted(sig.inputs), manifest),
            )
            for name, sig in meta_graph.signature_def.items()
        }
        self.signature_defs: Mapping[str, Any] = {
            name: signature_json(meta_graph.signature_def[name]) for name in sorted(meta_graph.signature_def)
        }
        self._is_steady = is_steady and not options.may_wait
        self._meta_graph, self._where = meta_graph, where
        self._merging: dict[str, Merging | None] = {}
        self._verdicts = verdicts
        self._proving = threading.Lock()
        self._callables: dict[str, Callable[..., list[Any]]] = {}
        self._building = threading.RLock()
        self._is_closing = False
        self._mapped = MappedVersion(files=tuple(mapped_files), set_reads_ahead=self._set_reads_ahead)
        self._prepare()
        if mapped_files:
            MAPPED.add(self._mapped)

    def merging(self, signature: Signature) -> Merging | None:
        """Return how requests of `signature` may be batched, or None if they may not."""
        if not self.knows_merging(signature):
            with self._proving:  # of any signature
                if not self.knows_merging(signature):
                    self._merging[signature.name] = self._find_merging(signature)
        return self._merging[signature.name]

    def knows_merging(self, signature: Signature) -> bool:
        """Return True if `merging` returns at once: the signature's proof is done."""
        return signature.name in self._merging

    def _verdict(self, name: str) -> Verdict:
        if name not in self._verdicts:
            self._verdicts[name] = prove(self._meta_graph, name, is_export=self.manifest is not None)
        return self._verdicts[name]

    def _find_merging(self, signature: Signature) -> Merging | None:
        verdict = self._verdict(signature.name)
        if verdict.is_proven and _is_worth_packing(self.manifest, signature):
            verdict = self._verdict("packed")  # this one runs
        is_search = self.manifest is not None and self.manifest.retrieval is not None  # a loop over the queries
        if not verdict.is_proven and signature.inputs and not is_search:
            text = "%s: signature %s: requests are not batched: %s. Give --enable-batching to batch them anyway"
            logger.warning(text, self._where, signature.name, verdict.reason, extra=ONCE)
        return _merging_of(
            signature,
            _shapes(self._meta_graph.signature_def[signature.name]),
            self.manifest,
            is_proven=verdict.is_proven,
            is_steady=self._is_steady,
        )

    def run(self, signature: Signature, inputs: Sequence[Array]) -> list[Array]:
        """Return the outputs for `inputs`. Raises StatusError for TensorFlow's errors."""
        try:
            seconds = remaining_seconds() if self._timeout_ms else None
            if seconds is not None and 1000 * seconds < _SHORT * self._timeout_ms:
                return [_as_array(value) for value in self._run_within(seconds, signature, inputs)]
            return [_as_array(value) for value in self._callable(signature)(*inputs)]
        except tf.errors.OpError as error:
            raise _status(error) from None
        except UnicodeDecodeError as error:  # the message quotes the client's bytes; its code is lost
            raise invalid_argument(plain_message(error.object.decode("utf-8", "replace"))) from None

    def close(self) -> None:
        """Cancel the current runs, and free the variables and the graph."""
        self._is_closing = True
        self._rest.join()
        MAPPED.remove(self._mapped)
        self._callables.clear()
        self._session.close()
        self._session = self._native = None
        _collect()

    def _prepare(self) -> None:
        """Build the callables before the first request. One that cannot be built fails its own requests.

        An export's `serving_default` is built first and can be called at once, or the signature that goes on from rows in Redis. A
        thread builds the others, which take most of the load time. `close` joins it, because a process must not exit while a
        thread is in TensorFlow.
        """
        callable_ones = [signature for signature in self.signatures.values() if signature.inputs]
        main = "from_activations" if self._is_stored else "serving_default"
        first = [one for one in callable_ones if self.manifest is None or one.name == main]
        self._build(first)
        rest = [signature for signature in callable_ones if signature not in first]
        self._rest = threading.Thread(target=self._build_last, args=(rest,), name="model-signatures")
        self._rest.start()

    def _build_last(self, signatures: Sequence[Signature]) -> None:
        """Build these, then drop the copy of the graph, which may hold whole tables."""
        self._build(signatures)
        for signature in self.signatures.values():
            self.merging(signature)
        self._meta_graph = None
        MAPPED.remap(self._mapped)  # TensorFlow maps the tables for each signature

    def _set_reads_ahead(self, reads_ahead: bool) -> None:
        if self._native is not None:
            self._native.set_reads_ahead(reads_ahead)
        elif reads_ahead:
            text = "%s: TensorFlow looks rows up: those that are not in memory are read one after the other"
            logger.info(text, self._where, extra=ONCE)

    def _build(self, signatures: Sequence[Signature]) -> None:
        for signature in signatures:
            try:
                if not self._is_closing:
                    self._callable(signature)
                    self.merging(signature)  # logs its warning at load time
            except tf.errors.OpError as error:
                text = "%s: signature %s cannot be called: %s"
                logger.warning(text, self._where, signature.name, error.message, extra=ONCE)

    def _callable(self, signature: Signature) -> Callable[..., list[Any]]:
        return self._callables.get(signature.name) or self._built(signature)

    def _built(self, signature: Signature) -> Callable[..., list[Any]]:
        with self._building:
            found = self._callables.get(signature.name)
            if found is not None:
                return found
            if self.manifest is not None and _is_worth_packing(self.manifest, signature) and not self._is_stored:
                found = self._packed_call(self.manifest, signature)
            else:
                found = self._make_callable(signature)
            self._callables[signature.name] = found
            return found

    def _packed_call(self, manifest: Manifest, signature: Signature) -> "_PackedCall":
        """Return a call through `packed`. The callable of `signature` is built when inputs do not fit: that is slow."""
        packed = self._callable(self.signatures["packed"])
        return _PackedCall(manifest.packing, signature, packed, _when_called(lambda: self._make_callable(signature)))

    def _run_within(self, seconds: float, signature: Signature, inputs: Sequence[Array]) -> list[Any]:
        """Run without a callable, with this timeout: a callable's timeout is fixed, and building one is slower than a run."""
        graph = self._session.graph
        feeds = {
            graph.get_tensor_by_name(info.tensor)._as_tf_output(): array
            for info, array in zip(signature.inputs, inputs, strict=True)
        }
        fetches = [graph.get_tensor_by_name(info.tensor)._as_tf_output() for info in signature.outputs]
        options = config_pb2.RunOptions(timeout_in_ms=max(1, round(1000 * seconds)))
        buffer = tf_session.TF_NewBufferFromString(options.SerializeToString())
        try:
            outputs: list[Any] = self._session._call_tf_sessionrun(buffer, feeds, fetches, [], None)
        finally:
            tf_session.TF_DeleteBuffer(buffer)
        return outputs

    def _make_callable(self, signature: Signature) -> Callable[..., list[Any]]:
        """Return a call of a signature. If the C library can answer, it is asked before TensorFlow."""
        if self._native is not None and self._native.answers_almost_all(signature):
            tensorflow = _when_called(lambda: self._make_tensorflow_callable(signature))
        else:
            tensorflow = self._make_tensorflow_callable(signature)
        if self._native is None:
            return tensorflow
        return self._native.call(signature, tensorflow, self._other)

    def _other(self, name: str) -> tuple[Signature, Callable[..., list[Any]]]:
        signature = self.signatures[name]
        return signature, self._callable(signature)

    def _make_tensorflow_callable(self, signature: Signature) -> Callable[..., list[Any]]:
        options = config_pb2.CallableOptions(
            feed=[info.tensor for info in signature.inputs], fetch=[info.tensor for info in signature.outputs]
        )
        options.run_options.timeout_in_ms = self._timeout_ms
        return self._session._make_callable_from_options(options)


# ---- how requests of a signature are concatenated; `queue.BatchQueue.of` decides whether they are


def _merging_of(
    signature: Signature,
    shapes: Sequence[Sequence[int] | None],
    manifest: Manifest | None,
    *,
    is_proven: bool,
    is_steady: bool,
) -> Merging | None:
    """Return how requests of `signature` are batched, or None if they cannot be.

    Args:
        signature: the signature, as `_with_padding` returns it.
        shapes: the shapes of all inputs, then of all outputs. The first size of each must be unknown.
        manifest: the manifest of an export.
        is_proven: whether the graph proves that rows are independent.
        is_steady: whether the duration of a run depends only on shapes, unless inputs are strings.
    """
    if not signature.inputs or not all(shape is None or (len(shape) > 0 and shape[0] == -1) for shape in shapes):
        return None
    is_numeric = all(info.dtype != "string" for info in signature.inputs)
    is_lookups = manifest is not None and bool(manifest.features) and signature.name == "serving_default"
    return Merging(
        is_proven=is_proven,
        shapes=tuple(None if shape is None else tuple(shape[1:]) for shape in shapes[: len(signature.inputs)]),
        is_steady=is_steady and is_numeric,
        padding=signature.padding if is_lookups else (),
    )


def _with_padding(signature: Signature, manifest: Manifest | None) -> Signature:
    """Return `signature` with the padding of the inputs that the manifest of an export lists.

    For a whole model, this does not allow to batch requests of different widths: a model may depend on the width.
    """
    if manifest is None or (manifest.retrieval is None and signature.name != "serving_default"):
        return signature
    features = {feature.name: feature for feature in manifest.features}
    weights = {f"{feature.name}_weights": feature for feature in manifest.features if feature.weighted}
    of_models = {name: math.nan if value == "NaN" else value for name, value in manifest.padding.items()}
    if manifest.retrieval is not None and signature.name == "filtered":
        of_models[EXCLUDE] = _PADDING if manifest.retrieval.ids == "int64" else ""
    padding = tuple(
        of_models.get(info.alias, _padding(features.get(info.alias), weights.get(info.alias)))
        for info in signature.inputs
    )
    return dataclasses.replace(signature, padding=padding)


def _padding(ids: FeatureEntry | None, weights: FeatureEntry | None) -> int | str | None:
    if ids is not None and ids.input == "ids":
        return "" if ids.names == "string" else _PADDING
    if ids is not None:
        return None
    return 0 if weights is not None and weights.input == "ids" else None


# ---- the signature packed


def _is_worth_packing(manifest: Manifest | None, signature: Signature) -> bool:
    """Returns True if the named `signature` has the outputs of `packed`, in one matrix.

    Features with names take them in `serving_default` alone.
    A whole model has its own outputs in both. It spends most of its time elsewhere, and neither is faster (measured).
    """
    return (
        manifest is not None
        and signature.name == "serving_default"
        and not manifest.packing.left_out
        and manifest.packing.outputs is not None
        and not any(feature.names for feature in manifest.features)
    )


class _PackedCall:
    """Calls `packed`, which takes one matrix and returns one, with the inputs of `serving_default`, and returns its outputs.

    This is faster: each named input costs as much as a lookup.
    """

    def __init__(
        self,
        packing: Packing,
        signature: Signature,
        packed: Callable[..., list[Array]],
        named: Callable[..., list[Array]],
    ) -> None:
        """Prepare the calls. `named` is called with inputs that do not fit `packed`, so that its graph reports the error."""
        order = {info.alias: index for index, info in enumerate(signature.inputs)}
        self._fixed = [(order[one.name], one.columns) for one in packing.inputs if one.columns is not None]
        self._lists = [order[one.name] for one in packing.inputs if one.columns is None]
        places = {one.name: one for one in packing.outputs or ()}
        self._outputs = [places[info.alias] for info in signature.outputs]
        self._packed, self._named = packed, named

    def __call__(self, *inputs: Array) -> list[Array]:
        """Return the outputs in the signature's order."""
        matrix = self._matrix(inputs)
        if matrix is None:
            return self._named(*inputs)
        (activations,) = self._packed(matrix)
        return [activations[:, one.start : one.stop].reshape(len(matrix), *one.shape) for one in self._outputs]

    def _matrix(self, inputs: Sequence[Array]) -> Array | None:
        """Return the inputs as one int64 matrix [rows, columns], or None if they do not fit."""
        rows = count_rows(inputs)
        if rows is None or not self._fits(inputs):
            return None
        parts = [inputs[index].reshape(rows, columns) for index, columns in self._fixed]
        parts += self._lists_of_one_width([inputs[index] for index in self._lists])
        return np.concatenate(parts, axis=1)

    def _fits(self, inputs: Sequence[Array]) -> bool:
        fixed = all(inputs[index].ndim == 1 + (columns != 1) for index, columns in self._fixed)
        return fixed and all(inputs[index].ndim == 2 for index in self._lists)

    def _lists_of_one_width(self, lists: Sequence[Array]) -> list[Array]:
        widest = max((array.shape[1] for array in lists), default=0)
        return [_padded(array, widest) for array in lists]


def _padded(array: Array, width: int) -> Array:
    missing = width - array.shape[1]
    return np.pad(array, ((0, 0), (0, missing)), constant_values=_PADDING) if missing else array


def _when_called(make: Callable[[], Callable[..., list[Any]]]) -> Callable[..., list[Any]]:
    """Return what `make` returns, and call `make` when it is called first."""
    made = functools.cache(make)
    return lambda *inputs: made()(*inputs)


def load(version_dir: Path, options: RunOptions | None = None) -> SavedModelServable:
    """Load the SavedModel at `version_dir`. Nothing is written there.

    Mapped tables are mapped from `version_dir`, whatever path the graph names.

    Args:
        version_dir: the version's folder.
        options: how the signatures are run.

    Raises:
        StatusError: the version is incomplete, is not a SavedModel, or TensorFlow cannot load it.
    """
    gc.freeze()  # exclude the existing objects, among them TensorFlow's half a million, from the collection below
    manifest = check_files(version_dir)
    mapped = manifest if manifest is not None and manifest.layout == "mmap" else None
    stored = manifest if manifest is not None and manifest.row_store is not None else None
    options = options or RunOptions()
    # A run that waits for a disk or for Redis must not block the event loop.
    options = dataclasses.replace(options, may_wait=stored is not None or mapped is not None)
    where = f"{version_dir.parent.name}/{version_dir.name}"
    try:
        native: NativeCalls | None
        if stored is not None:
            native = stored_calls(version_dir, stored, options.row_store, options.lookup_threads)
        else:
            native = native_calls(version_dir, manifest, options.lookups, options.lookup_threads, where)
        restored = _restore(version_dir, manifest, options)
        files = [version_dir / array.file for array in mapped.arrays] if mapped else []
        servable = SavedModelServable(*restored, manifest, options, where, native, files)
    except tf.errors.OpError as error:
        raise _without_path(_status(error), version_dir) from None
    except (OSError, RuntimeError, ValueError) as error:
        raise _without_path(StatusError(Code.INTERNAL, str(error)), version_dir) from None
    finally:
        gc.collect()
        gc.freeze()
    return servable


def _restore(version_dir: Path, manifest: Manifest | None, options: RunOptions) -> tuple[Any, Any, dict[str, Verdict]]:
    loader = loader_impl.SavedModelLoader(str(version_dir))
    verdicts: dict[str, Verdict] = {}
    if manifest is not None:
        graph = (version_dir / GRAPH_FILE).read_bytes()
        try:
            graph = relative_graph(graph, manifest)
            proof = manifest.row_proof
            # Whatever the manifest says, its verdicts hold for the graph that they were found for, and for no other one.
            if proof is not None and (proof.version, proof.sha256) == (VERSION, hashlib.sha256(graph).hexdigest()):
                verdicts = {name: Verdict(reason) for name, reason in proof.reasons.items()}
            if manifest.layout == "mmap":
                graph = mapped_from(graph, manifest, version_dir.absolute())
        except ConfigError as error:
            raise StatusError(Code.DATA_LOSS, f"version {version_dir.name}: {error}") from None
        loader.saved_model.ParseFromString(graph)  # the bytes that were compared
    meta_graph = loader.get_meta_graph_def_from_tags([tf.saved_model.SERVING])
    _check_variables(version_dir, meta_graph)
    on_caller = not options.timeout_ms or _is_steady(meta_graph.graph_def, manifest)
    config = config_pb2.ConfigProto(
        inter_op_parallelism_threads=-1 if on_caller else options.threads,
        intra_op_parallelism_threads=1,
        use_per_session_threads=not on_caller,  # with True, -1 would create another pool
    )
    # The exporter writes lookups and searches as they run. TensorFlow's graph optimizer takes most of their load time, and requests
    # are as fast without it (measured: benchmarks/load.py).
    is_plain = manifest is not None and (bool(manifest.features) or manifest.retrieval is not None)
    config.graph_options.rewrite_options.disable_meta_optimizer = is_plain
    session = tf.compat.v1.Session(graph=tf.Graph(), config=config)
    try:
        with session.graph.as_default():
            loader.load(session, [tf.saved_model.SERVING])
            if manifest is None:  # an export is known to hold them
                _check_values(session, meta_graph, version_dir)
    except BaseException:
        session.close()
        raise
    return session, meta_graph, verdicts


def _check_variables(version_dir: Path, meta_graph: Any) -> None:
    """Raise NOT_FOUND if the variables are missing. TensorFlow would load the graph, and the first request would fail."""
    if (version_dir / INDEX_FILE).is_file():
        return
    for node in meta_graph.graph_def.node:
        if node.op in _VARIABLE_OPS:
            what = f"{INDEX_FILE} is missing though the graph has variables ({node.name})"
            raise StatusError(Code.NOT_FOUND, f"version {version_dir.name}: {what}. Write the version again")


def _check_values(session: Any, meta_graph: Any, version_dir: Path) -> None:
    """Raise FAILED_PRECONDITION if a signature reads a variable without a value. Each request would fail.

    `tf.saved_model.save` saves a variable of Keras 3 in a way that `tf.saved_model.load` follows, and a session does not.
    """
    operations = {operation.name: operation for operation in session.graph.get_operations()}
    for name, signature in sorted(meta_graph.signature_def.items()):
        outputs = (info.name.partition(":")[0] for info in signature.outputs.values())
        pending = [operations[output] for output in outputs if output in operations]
        seen = set(pending)
        for operation in pending:  # grows while it is walked
            before = {*(value.op for value in operation.inputs), *operation.control_inputs} - seen
            seen |= before
            pending += before
        variables = sorted((one for one in seen if one.type == "VarHandleOp"), key=lambda one: one.name)
        have = session.run([tf.raw_ops.VarIsInitializedOp(resource=one.outputs[0]) for one in variables])
        if missing := [one.name for one, has in zip(variables, have, strict=True) if not has]:
            raise StatusError(
                Code.FAILED_PRECONDITION,
                f"version {version_dir.name}: signature {name!r}: TensorFlow's session finds no values of its variables "
                f"{', '.join(missing[:_SHOWN])}. tf.saved_model.save of a Keras 3 model writes such versions. Write it with "
                "model.export(FOLDER) or tpuembed.export_saved_model(model, MODEL_DIR)",
            )


def _is_steady(graph: Any, manifest: Manifest | None) -> bool:
    """Returns True if only input shapes decide how long a run takes: an export without loops and Python functions."""
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    return manifest is not None and not any(node.op in _LOOP_OPS or node.op in _PYTHON_OPS for node in nodes)


def _shapes(definition: Any) -> list[list[int] | None]:
    """Return the shapes of all inputs, then of all outputs."""
    infos = [info for _, info in (*sorted(definition.inputs.items()), *sorted(definition.outputs.items()))]
    shapes = [info.tensor_shape for info in infos]
    return [None if shape.unknown_rank else [dim.size for dim in shape.dim] for shape in shapes]


def _as_array(value: Any) -> Array:
    """Convert an output to an array. A scalar string needs dtype object: numpy would cut bytes at trailing zeros."""
    return np.array(value, dtype=object) if isinstance(value, bytes) else np.asarray(value)


def _status(error: Any) -> StatusError:
    return StatusError(Code(error.error_code), plain_message(error.message))


def _without_path(status: StatusError, version_dir: Path) -> StatusError:
    return StatusError(status.code, status.message.replace(str(version_dir), version_dir.name))


def _collect() -> None:
    """Collect all garbage, then exclude the rest from later collections: a full one takes half a second with a model."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
