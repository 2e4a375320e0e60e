"""Checkpoints of this layer on every kind of hardware, written now, and the rows that were put into its tables."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import tensorflow as tf

from tests.support.goldens import Golden
from tests.support.layer import tpu_v1
from tests.support.simulated_tpu.simulation import simulated_tpu
from tpuembed import FeatureConfig, TableConfig, TPUEmbedding

__all__ = ["HARDWARE", "write_own"]

SHAPES: Final = {"a/x.1": (30, 8), "b": (9, 5), "c": (40, 8), "one": (1, 1)}
BATCH: Final = 8


@contextlib.contextmanager
def _mirrored() -> Iterator[Any]:
    yield tf.distribute.MirroredStrategy(["CPU:0"])


@contextlib.contextmanager
def _host() -> Iterator[Any]:
    yield tf.distribute.get_strategy()


_STRATEGIES: Final[Mapping[str, tuple[Callable[[], Any], int | None]]] = {
    "host": (_host, None),
    "mirrored": (_mirrored, None),
    "sparse_cores": (lambda: simulated_tpu(replicas=2), None),
    "replicated": (lambda: simulated_tpu(replicas=2, feature="UNSUPPORTED"), None),
    "mixed": (lambda: simulated_tpu(replicas=2), 9),
}
"""Hardware -> its strategy, and the layer's size_threshold there."""

HARDWARE: Final = (*_STRATEGIES, "hosts_of_tpus")


def write_own(hardware: str, folder: Path) -> Golden:
    """A checkpoint of a layer on `hardware`, in `folder`."""
    if hardware == "hosts_of_tpus":
        return _write_hosts(folder)
    make, size_threshold = _STRATEGIES[hardware]
    with make() as strategy:
        with strategy.scope():
            layer = _layer(size_threshold)
        truth = {name: _rows(variable) for name, variable in layer.named_variables().items() if name in SHAPES}
        path = tf.train.Checkpoint(model=layer).write(str(folder / "ckpt"))
    assert set(truth) == set(SHAPES)
    return Golden(Path(path), {}, truth)


def _layer(size_threshold: int | None) -> TPUEmbedding:
    features = {
        f"f{number}": FeatureConfig(TableConfig(rows, dim, name), output_shape=(BATCH,))
        for number, (name, (rows, dim)) in enumerate(SHAPES.items())
    }
    layer = TPUEmbedding(features, "adagrad", size_threshold=size_threshold)
    layer.build(dict.fromkeys(features, (BATCH,)))
    return layer


def _rows(variable: Any) -> dict[str | None, Any]:
    rows = np.random.default_rng(np.prod(variable.shape)).normal(size=variable.shape).astype(np.float32)
    variable.assign(rows)
    return {None: rows}


def _write_hosts(folder: Path) -> Golden:
    """The backend of TPU v2 to v4, whose tables lie on three hosts."""
    with tpu_v1.stand_ins() as accelerator:
        layer = tpu_v1.Layer(accelerator)
        memory = tpu_v1.train(accelerator)
        path = tf.train.Checkpoint(layer=layer).write(str(folder / "ckpt"))
    return Golden(
        Path(path), {}, {table: {None: rows} for (table, role), rows in memory.items() if role == "parameters"}
    )
