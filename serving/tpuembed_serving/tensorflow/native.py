"""Runs the lookups of an export by the C library of `tpuembed.native.lookup`, in place of TensorFlow."""

import abc
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np
import tensorflow as tf

from tpuembed.errors import TpuEmbedError
from tpuembed.manifest import Manifest
from tpuembed.native.lookup import NativeLookups, available, refusal, variant
from tpuembed.native.search import EXCLUDE, REQUIRE, NativeSearch, search_refusal
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.servable import Array, Signature
from tpuembed_serving.tensorflow.activations import NativeActivations, of_lookups

__all__ = ["Lookups", "NativeCalls", "native_calls"]

logger = logging.getLogger(__name__)

Lookups = Literal["auto", "native", "tensorflow"]
Call = Callable[..., list[Array]]
Other = Callable[[str], tuple[Signature, Call]]

_LEAST_IDS: Final = 512
"""With "auto", TensorFlow runs a request with fewer ids, and one of one id per feature and row: its gather is as fast there."""
_LEAST_LISTS: Final = 0.2
"""With "auto", TensorFlow runs a whole model of which a smaller share of the features are lists. One id per feature and row takes
less time in its graph, but a list takes several times longer, of any length (measured: benchmarks/native_models.py)."""
_OF_THE_RUN: Final = (tf.errors.DeadlineExceededError, tf.errors.CancelledError)
"""Errors that another run does not explain."""


class NativeCalls(abc.ABC):
    """The calls of an export's signatures that ask the C library before TensorFlow.

    Inputs that native lookups refuse go to TensorFlow: its graph reports the error.
    """

    @abc.abstractmethod
    def call(self, signature: Signature, tensorflow: Call, other: Other) -> Call:
        """Return the call of `signature`.

        Args:
            signature: any one of the export.
            tensorflow: its call by TensorFlow.
            other: returns another signature of the export by its name, and TensorFlow's call of it.
        """

    def set_reads_ahead(self, reads_ahead: bool) -> None:  # noqa: B027 - most map no tables that are read by row
        """Make every request read ahead, or none. TensorFlow's gather waits for one page after the other."""

    def answers_almost_all(self, signature: Signature) -> bool:  # noqa: ARG002
        """Return True if only faulty requests of `signature` need TensorFlow. Its call is made for the first of them then."""
        return False


class _TableCalls(NativeCalls):
    """Those of an export of lookups, and of a whole model: native lookups, and then its signature `from_activations`."""

    def __init__(self, native: NativeLookups | NativeActivations, lookups: Lookups) -> None:
        """Make calls that look up by `native`: always, or with the `lookups` "auto" where it is faster."""
        self._native, self._lookups = native, lookups

    def set_reads_ahead(self, reads_ahead: bool) -> None:
        self._native.reads_ahead = reads_ahead

    def call(self, signature: Signature, tensorflow: Call, other: Other) -> Call:
        native, names = self._native, [info.alias for info in signature.inputs]
        run: Callable[[Sequence[Array]], list[Array] | None]
        is_faster: Callable[[Sequence[Array]], bool]
        if isinstance(native, NativeActivations):
            if signature.name != "serving_default":
                return tensorflow
            has_lists = native.lists_share >= _LEAST_LISTS
            is_faster = lambda _: has_lists  # noqa: E731
            run = functools.partial(_run_model, native, names, *other("from_activations"))
        elif signature.name == "packed":
            is_faster = functools.partial(_is_pooled_and_large, native)
            run = lambda inputs: [native.packed(inputs[0])]  # noqa: E731
        elif signature.name == "serving_default":
            is_faster = functools.partial(_is_pooled_and_large, native)
            run = lambda inputs: _in_order(signature, native.named(dict(zip(names, inputs, strict=True))))  # noqa: E731
        else:
            return tensorflow

        def call(*inputs: Array) -> list[Array]:
            found = None
            if self._lookups == "native" or native.reads_ahead or is_faster(inputs):
                try:
                    found = run(inputs)
                except _OF_THE_RUN:
                    raise
                except (TpuEmbedError, tf.errors.OpError):
                    found = None
            return tensorflow(*inputs) if found is None else found

        return call


def _run_model(
    native: NativeActivations, names: Sequence[str], rest: Signature, run_rest: Call, inputs: Sequence[Array]
) -> list[Array] | None:
    named = dict(zip(names, inputs, strict=True))
    activations = native.look_up(named)
    if activations is None:
        return None
    given = named | activations
    return run_rest(*[given[info.alias] for info in rest.inputs])


class _RetrievalCalls(NativeCalls):
    """Those of a retrieval: TensorFlow's signature `query`, and then a search."""

    def __init__(self, search: NativeSearch) -> None:
        self._search = search

    def answers_almost_all(self, signature: Signature) -> bool:
        """Return True for searches."""
        return signature.name in ("serving_default", "filtered")

    def call(self, signature: Signature, tensorflow: Call, other: Other) -> Call:
        if not self.answers_almost_all(signature):
            return tensorflow
        search, names = self._search, [info.alias for info in signature.inputs]
        query, run_query = other("query")

        def call(*inputs: Array) -> list[Array]:
            named = dict(zip(names, inputs, strict=True))
            (vectors,) = run_query(*[named[info.alias] for info in query.inputs])
            if not np.isfinite(vectors).all():
                return tensorflow(*inputs)
            try:
                if signature.name == "filtered":
                    ids, scores = search.filtered(vectors, named[EXCLUDE], named[REQUIRE])
                else:
                    scores, places = search.search(vectors, search.entry.k)
                    ids = search.ids(places)
            except TpuEmbedError:
                return tensorflow(*inputs)
            return _in_order(signature, {"ids": ids, "scores": scores})

        return call


def native_calls(
    version_dir: Path, manifest: Manifest | None, lookups: Lookups, threads: int | None, where: str
) -> NativeCalls | None:
    """Return the native calls of the version at `version_dir`, or None if TensorFlow must run them all.

    Args:
        version_dir: the version's folder.
        manifest: of the version; None if tpuembed did not export it.
        lookups: how lookups are run.
        threads: how many threads one call may use; None is one for each processor.
        where: the model's folder and version, for the log.
    """
    if lookups == "tensorflow" or manifest is None:
        return None
    if reason := available():
        logger.warning("TensorFlow runs all lookups: %s", reason, extra=ONCE)
        return None
    if reason := _refusal(manifest):
        if lookups == "native":
            logger.warning("%s: TensorFlow runs it: %s", where, reason, extra=ONCE)
        return None
    found: NativeCalls
    if manifest.retrieval is not None:
        found = _RetrievalCalls(NativeSearch(manifest, version_dir))
    elif manifest.features:
        found = _TableCalls(NativeLookups(manifest, version_dir, threads=threads), lookups)
    else:
        found = _TableCalls(NativeActivations(manifest, version_dir, threads=threads), lookups)
    logger.info("%s: native lookups, built for %s", where, variant())
    return found


def _refusal(manifest: Manifest) -> str:
    """Return "" if native lookups can answer for the export, else the reason why not."""
    if manifest.retrieval is not None:
        return search_refusal(manifest)
    if manifest.features:
        return refusal(manifest)
    if reason := manifest.from_activations.left_out:
        return f"it is a whole model without the signature from_activations: {reason}"
    return refusal(of_lookups(manifest, manifest.from_activations.features))


def _is_pooled_and_large(native: NativeLookups, inputs: Sequence[Array]) -> bool:
    ids = sum(array.size for array in inputs)
    return ids >= _LEAST_IDS and inputs[0].ndim > 0 and ids > len(inputs[0]) * len(native.features)


def _in_order(signature: Signature, outputs: Mapping[str, Array]) -> list[Array]:
    return [outputs[info.alias] for info in signature.outputs]
