"""Runs a tower on a Ray cluster. This process reads the dataset, and each worker builds the tower once for many batches."""

import dataclasses
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tpuembed.checkpoint import open_checkpoint
from tpuembed.errors import ConfigError
from tpuembed.export.options import ExportOptions
from tpuembed.export.stream.batch import Failure
from tpuembed.export.stream.engines import default_workers
from tpuembed.export.stream.engines.ray import RETRIES, Head, MayPassError, connected, reply_of
from tpuembed.retrieval.candidates import CandidateBatch, of_tower
from tpuembed.retrieval.partitions import Floats
from tpuembed.retrieval.towers import Tower

__all__ = ["on_ray"]

_BATCHES_OF_A_WORKER: Final = 2
"""One is run while the next is sent."""


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What a worker builds the tower of.

    Attributes:
        key: of the export. A worker keeps the tower of one.
        path: of the checkpoint.
        options: of `open_checkpoint`.
        candidates: a function, or "MODULE:FACTORY", that returns (the tower, a dataset).
        identity: that of the tower here; see `Tower.identity`.
    """

    key: str
    path: str
    options: Mapping[str, Any]
    candidates: Any
    identity: str


def on_ray(
    tower: Tower,
    candidates: Any,
    checkpoint_options: Mapping[str, Any],
    dataset: Iterable[Any],
    made: Path,
    options: ExportOptions,
) -> Iterator[CandidateBatch]:
    """Yield what `of_tower` yields, and run the tower on a cluster.

    Args:
        tower: the same one, built here.
        candidates: a function, or "MODULE:FACTORY", that returns (the tower, a dataset). Workers call it for the tower.
        checkpoint_options: further arguments of `open_checkpoint`.
        dataset: of batches.
        made: see `of_tower`.
        options: `workers` and `ray_address`.

    Raises:
        MissingExtraError: Ray is not installed.
        ExportError: there is no cluster, or it lost a batch too often.
        TpuEmbedError: the tower failed in a worker, or is another one there.
    """
    with connected(options.ray_address) as ray:
        workers = default_workers("ray") if options.workers is None else options.workers
        runs = _RayTower(ray, tower, candidates, checkpoint_options, workers)
        try:
            yield from of_tower(tower, dataset, made, runs)
        finally:
            runs.cancel()


class _RayTower:
    """See RunsTower."""

    def __init__(self, ray: Any, tower: Tower, candidates: Any, options: Mapping[str, Any], workers: int) -> None:
        self._ray, self._tower = ray, tower
        cpus = int(ray.cluster_resources().get("CPU", 1))
        self.at_once = _BATCHES_OF_A_WORKER * max(1, min(workers, cpus))
        self._recipe = _Recipe(os.urandom(16).hex(), str(tower.checkpoint.path), dict(options), candidates, "")
        self._sent: Any = None
        self._run = ray.remote(num_cpus=1, max_retries=RETRIES, retry_exceptions=[MayPassError])(_run)
        self._head = Head(ray.get_runtime_context().gcs_address)
        self._running: set[Any] = set()
        self._started = 0

    def start(self, inputs: Mapping[str, Any]) -> Callable[[], Floats]:
        """See RunsTower."""
        if self._sent is None:
            self._sent = self._ray.put(dataclasses.replace(self._recipe, identity=self._tower.identity(inputs)))
        number, self._started = self._started, self._started + 1
        reference = self._run.remote(self._sent, _packed(self._tower.tensors(inputs)))
        self._running.add(reference)

        def wait() -> Floats:
            while not self._ray.wait([reference], num_returns=1, timeout=Head.LOOK_SECONDS)[0]:
                self._head.check()
            reply = reply_of(self._ray, reference, f"candidates: batch {number} of the tower")
            self._running.discard(reference)
            vectors: Floats = reply["vectors"]
            return vectors

        return wait

    def cancel(self) -> None:
        """Stop the batches that nobody waits for."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)


_towers: dict[str, Tower] = {}
"""The last tower of a worker, by the key of its export."""


def _run(recipe: _Recipe, packed: Mapping[str, Any]) -> dict[str, Any]:
    """Run one batch in a worker of Ray. Return its vectors, or its failure as JSON values."""
    try:
        inputs = _unpacked(packed)
        tower = _towers.get(recipe.key) or _built(recipe, inputs)
        return {"vectors": tower(inputs)}
    except Exception as error:
        failure = Failure.of(error)
        if failure.may_pass:
            raise MayPassError(failure.message) from None
        return {"failure": dataclasses.asdict(failure)}


def _built(recipe: _Recipe, inputs: Mapping[str, Any]) -> Tower:
    from tpuembed.export.graph.keras_model import import_factory

    candidates = recipe.candidates
    factory = import_factory(candidates) if isinstance(candidates, str) else candidates
    tower = Tower(open_checkpoint(recipe.path, **recipe.options), lambda: factory()[0])
    if recipe.identity and (own := tower.identity(inputs)) and own != recipe.identity:
        raise ConfigError(
            f"candidates: the tower on node {socket.gethostname()} is not the one of this machine: their graphs, weights, "
            "TensorFlow or checkpoints differ. Install the same code on all nodes, and let them see the same files."
        )
    _towers.clear()
    _towers[recipe.key] = tower
    return tower


def _packed(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors, also ragged and sparse ones, as numpy arrays with the types that they are parts of."""
    return {
        name: (
            tf.type_spec_from_value(value),
            [part.numpy() for part in tf.nest.flatten(value, expand_composites=True)],
        )
        for name, value in inputs.items()
    }


def _unpacked(packed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: tf.nest.pack_sequence_as(spec, [tf.constant(np.asarray(part)) for part in parts], expand_composites=True)
        for name, (spec, parts) in packed.items()
    }
