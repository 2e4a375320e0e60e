"""Graphs with one signature, run on several requests at once and on each alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from tpuembed.row_proof import Verdict, prove

__all__ = ["Failed", "RowGraph"]

Array = npt.NDArray[Any]


class Failed:
    """What a run that fails gives."""


class RowGraph:
    """A graph of inputs and outputs by name, in a session of its own."""

    def __init__(self, build: Callable[..., Any], specs: Mapping[str, tf.TensorSpec]) -> None:
        """`build` is called with a tensor for each of `specs`, and returns one tensor or a dict of them."""
        self._graph = tf.Graph()
        with self._graph.as_default():
            self._inputs = {
                name: tf.compat.v1.placeholder(spec.dtype, spec.shape, name) for name, spec in specs.items()
            }
            made = build(**self._inputs)
            made = made if isinstance(made, dict) else {"y": made}
            self._outputs = {name: tf.identity(value) for name, value in made.items()}
            signature = tf.compat.v1.saved_model.predict_signature_def(self._inputs, self._outputs)
            self._meta_graph = tf.compat.v1.train.export_meta_graph(graph=self._graph, strip_default_attrs=True)
            self._meta_graph.signature_def["f"].CopyFrom(signature)
            start = [
                tf.compat.v1.global_variables_initializer(),
                tf.compat.v1.tables_initializer(),
            ]
        self._session = tf.compat.v1.Session(graph=self._graph)
        self._session.run(start)

    def __enter__(self) -> "RowGraph":
        return self

    def __exit__(self, *_: object) -> None:
        self._session.close()

    @property
    def verdict(self) -> Verdict:
        """What is proven of it."""
        return prove(self._meta_graph, "f")

    @property
    def export_verdict(self) -> Verdict:
        """What is proven of it if tpuembed has written it."""
        return prove(self._meta_graph, "f", is_export=True)

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array] | Failed:
        """The outputs of one run."""
        try:
            found: dict[str, Array] = self._session.run(
                self._outputs, {self._inputs[name]: value for name, value in inputs.items()}
            )
        except tf.errors.OpError:
            return Failed()
        return found

    def differences(self, requests: Sequence[Mapping[str, Array]], scale: float = 0.0) -> list[str]:
        """How a run of all of `requests` differs from runs of each alone; it may fail if one of these does.

        Args:
            scale: which share of an output's largest number rounding may change.
        """
        merged = self.run({name: np.concatenate([each[name] for each in requests]) for name in self._inputs})
        alone = [self.run(each) for each in requests]
        if isinstance(merged, Failed):  # then the server runs halves
            return []
        found, start = [], 0
        for number, (request, own) in enumerate(zip(requests, alone, strict=True)):
            stop = start + len(next(iter(request.values())))
            if isinstance(own, Failed):
                found.append(f"request {number} fails alone")
            else:
                parts = {name: value[start:stop] for name, value in merged.items()}
                found += [f"{name} of request {number}" for name in own if not _equal(parts[name], own[name], scale)]
            start = stop
        return found


def _equal(one: Array, other: Array, scale: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    if not scale:
        return bool(np.array_equal(one, other, equal_nan=True))
    finite = np.abs(other[np.isfinite(other)])
    return bool(np.allclose(one, other, rtol=0, atol=scale * max(finite.max(initial=0), 1e-30), equal_nan=True))
