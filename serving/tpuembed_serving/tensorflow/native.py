"""Runs the lookups of an export by the C library of `tpuembed.native_lookup`, in place of TensorFlow."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from tpuembed.errors import TpuEmbedError
from tpuembed.manifest import Manifest
from tpuembed.native_lookup import NativeLookups, available, refusal, variant
from tpuembed_serving.core.log_once import ONCE
from tpuembed_serving.core.servable import Array, Signature

__all__ = ["Lookups", "native_call", "native_lookups"]

logger = logging.getLogger(__name__)

Lookups = Literal["auto", "native", "tensorflow"]
Call = Callable[..., list[Array]]

_LEAST_IDS: Final = 512
"""With "auto", TensorFlow runs a request with fewer ids, and one of one id per feature and row: its gather is as fast there."""


def native_lookups(
    version_dir: Path, manifest: Manifest | None, lookups: Lookups, threads: int | None, where: str
) -> NativeLookups | None:
    """Return the lookups of the version at `version_dir`, or None if TensorFlow must run them.

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
    if reason := refusal(manifest):
        if lookups == "native":
            logger.warning("%s: TensorFlow runs it: %s", where, reason, extra=ONCE)
        return None
    found = NativeLookups(manifest, version_dir, threads=threads)
    logger.info("%s: native lookups, built for %s", where, variant())
    return found


def native_call(native: NativeLookups, signature: Signature, lookups: Lookups, tensorflow: Call) -> Call:
    """Return a call of `signature`, which is `packed` or `serving_default`.

    Inputs that native lookups refuse go to `tensorflow`: its graph reports the error. Lookups that read ahead run every request:
    TensorFlow's gather waits for one page after the other.
    """
    names = [info.alias for info in signature.inputs]
    run: Callable[[Sequence[Array]], list[Array]]
    if signature.name == "packed":
        run = lambda inputs: [native.packed(inputs[0])]  # noqa: E731
    else:
        run = lambda inputs: _in_order(signature, native.named(dict(zip(names, inputs, strict=True))))  # noqa: E731

    def call(*inputs: Array) -> list[Array]:
        if lookups == "auto" and not native.reads_ahead and not _is_pooled_and_large(native, inputs):
            return tensorflow(*inputs)
        try:
            return run(inputs)
        except TpuEmbedError:
            return tensorflow(*inputs)

    return call


def _is_pooled_and_large(native: NativeLookups, inputs: Sequence[Array]) -> bool:
    ids = sum(array.size for array in inputs)
    return ids >= _LEAST_IDS and inputs[0].ndim > 0 and ids > len(inputs[0]) * len(native.features)


def _in_order(signature: Signature, outputs: Mapping[str, Array]) -> list[Array]:
    return [outputs[info.alias] for info in signature.outputs]
