"""A server in front of shards, in numpy and TensorFlow: as shards.yaml and the front's manifest say, without our server's code."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf
import yaml

from tpuembed.manifest import Manifest

__all__ = ["Front", "OutsideError", "load"]

Array = npt.NDArray[Any]


class OutsideError(Exception):
    """An id is outside of its table, and its feature's policy is "error"."""


class Front:
    """A version of all shards of a folder."""

    def __init__(self, folder: Path, version: int = 1) -> None:
        self.content = yaml.safe_load((folder / "shards.yaml").read_text())
        self.split: dict[str, Any] = self.content.get("split", {})
        self.shards = [load(folder / shard["name"] / str(version)) for shard in self.content["shards"]]
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
            for name, value in signature(
                **{name: tf.constant(given[name]) for name in signature.structured_input_signature[1]}
            ).items():
                found[name] = found[name] + value.numpy() if name in found else value.numpy()
        return found

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the whole model."""
        given = {**inputs, **self.activations(inputs)}
        taken = self.rest.structured_input_signature[1]
        return {name: value.numpy() for name, value in self.rest(**{n: tf.constant(given[n]) for n in taken}).items()}

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


def load(version: Path, signature: str = "serving_default") -> Any:
    """Return a signature of a SavedModel, which lives as long as it."""
    loaded = tf.saved_model.load(str(version))
    function = loaded.signatures[signature]
    function.kept = loaded
    return function
