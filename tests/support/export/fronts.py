"""A server in front of shards, in numpy and TensorFlow: as shards.yaml and the front's manifest say, without our server's code."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import yaml

from tpuembed.manifest import Manifest
from tpuembed_serving.tensorflow.activations import NativeActivations

__all__ = ["Front", "OutsideError", "load", "native"]

Array = npt.NDArray[Any]
Signature = Callable[[Mapping[str, Array]], dict[str, Array]]


class OutsideError(Exception):
    """An id is outside of its table, and its feature's policy is "error"."""


class Front:
    """A version of all shards of a folder. They look up in TensorFlow, or if `is_native` by the C library."""

    def __init__(self, folder: Path, version: int = 1, *, is_native: bool = False) -> None:
        self.content = yaml.safe_load((folder / "shards.yaml").read_text())
        self.split: dict[str, Any] = self.content.get("split", {})
        versions = [folder / shard["name"] / str(version) for shard in self.content["shards"]]
        self.shards = [native(path) if is_native else load(path) for path in versions]
        self.manifest: Manifest | None = None
        if "front" in self.content:
            path = folder / self.content["front"] / str(version)
            self.rest, self.manifest = load(path, "from_activations"), Manifest.read(path)

    def activations(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the answers of all shards, those of parts of a table added up."""
        given = dict(inputs)
        if self.manifest is not None:
            for entry in self.manifest.from_activations.features:
                given[entry.name] = inputs[entry.ids]
                if entry.weighted:
                    given[f"{entry.name}_weights"] = inputs[entry.weights]
        for name, feature in self.split.items():
            self._follow_policy(name, feature, given)
        found: dict[str, Array] = {}
        for signature in self.shards:
            for name, value in signature(given).items():
                found[name] = found[name] + value if name in found else value
        return found

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the whole model."""
        given = {**inputs, **self.activations(inputs)}
        return self.rest(given)

    def _follow_policy(self, name: str, feature: Mapping[str, Any], given: dict[str, Array]) -> None:
        ids, policy = given[name].copy(), feature["out_of_vocabulary"]
        padding = ids == -1 if feature["input"] == "ids" else np.zeros(ids.shape, bool)
        if feature["drops_negative"]:
            if f"{name}_weights" in given:
                given[f"{name}_weights"] = np.where(ids < -1, np.float32(0), given[f"{name}_weights"])
            ids[ids < -1] = -1
            padding = ids == -1
        outside = ~padding & ((ids < 0) | (ids >= feature["rows"]))
        if feature["max_sequence_length"]:
            outside[:, feature["max_sequence_length"] :] = False
        if policy == "error" and outside.any():
            raise OutsideError(name)
        if isinstance(policy, int):
            ids[outside] = policy
        given[name] = ids


def load(version: Path, name: str = "serving_default") -> Signature:
    """Return a signature of a SavedModel. It takes arrays by name, more than its inputs."""
    loaded = tf.saved_model.load(str(version))
    signature = loaded.signatures[name]

    def call(given: Mapping[str, Array]) -> dict[str, Array]:
        assert loaded is not None, "its variables live as long as it"
        taken = signature.structured_input_signature[1]
        return {name: value.numpy() for name, value in signature(**{n: tf.constant(given[n]) for n in taken}).items()}

    return call


def native(version: Path) -> Signature:
    """Return the activations of a whole model, or of the shard of one, by the C library."""
    manifest = Manifest.read(version)
    assert manifest is not None
    activations = NativeActivations(manifest, version)

    def call(given: Mapping[str, Array]) -> dict[str, Array]:
        found = activations.look_up(given)
        assert found is not None, "it takes plain weights"
        return found

    return call
