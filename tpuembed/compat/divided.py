"""Several `TPUEmbedding` layers called as one: what both libraries need for tables that live in different places."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tpuembed.config.structure import flatten, flatten_up_to, pack_like
from tpuembed.layer import TPUEmbedding

__all__ = ["DividedEmbedding", "Division", "divide"]

Leaves = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Division:
    """Which feature goes where.

    Attributes:
        structure: the nested structure of configs that the layer was built with.
        places: path of a feature -> the name of its place, in walking order.
    """

    structure: Any
    places: Mapping[str, str]

    def part(self, place: str, leaves: Mapping[str, Any]) -> Leaves:
        """Those of `leaves`, by path, that belong to `place`."""
        return {path: leaf for path, leaf in leaves.items() if self.places[path] == place}

    def pack(self, leaves: Mapping[str, Any]) -> Any:
        """`leaves`, by path, in the structure."""
        return pack_like(self.structure, [leaves[path] for path in self.places])

    def unpack(self, structure: Any, what: str) -> Leaves:
        """path -> what stands there in `structure`, which errors call `what`."""
        return {path: leaf for path, _, leaf in flatten_up_to(self.structure, structure, what)}


def divide(structure: Any, place: Callable[[Any], str]) -> Division:
    """`place(config)` of every feature of `structure`."""
    return Division(structure, {path: place(config) for path, config in flatten(structure)})


class DividedEmbedding(keras.layers.Layer):
    """A layer of `TPUEmbedding` layers, one per place, each of which has some of the tables."""

    def _set_parts(self, division: Division, parts: Mapping[str, TPUEmbedding]) -> None:
        """`parts`: place -> the layer of its features, which takes {path: ids}."""
        self._division = _Untracked(division)
        self._places = tuple(parts)
        for place, layer in parts.items():
            setattr(self, f"_{place}", layer)  # an attribute each, so that checkpoints have a stable name for it
        self.built = True

    def part(self, place: str) -> TPUEmbedding | None:
        """The layer of one place; None where no feature belongs to it."""
        layer: TPUEmbedding | None = getattr(self, f"_{place}", None)
        return layer

    @property
    def _parts(self) -> list[tuple[str, TPUEmbedding]]:
        return [(place, getattr(self, f"_{place}")) for place in self._places]

    def _look_up(self, ids: Leaves, weights: Leaves | None) -> Any:
        """Activations, in the structure, of ids and weights by path."""
        division, found = self._division.value, {}
        for place, layer in self._parts:
            of_part = None if weights is None else division.part(place, weights)
            found.update(layer(division.part(place, ids), of_part))
        return division.pack(found)

    def _specs(self, ids: Leaves) -> Any:
        """Symbolic activations of symbolic ids by path."""
        division, found = self._division.value, {}
        for place, layer in self._parts:
            found.update(layer.compute_output_spec(division.part(place, ids)))
        return division.pack(found)

    def table_variables(self) -> dict[str, Any]:
        """{table name: its variable, float32 [vocabulary_size, dim]}."""
        return {
            config.name: variable for _, layer in self._parts for config, variable in layer.embedding_tables.items()
        }

    def _plain_config(self) -> dict[str, Any]:
        return {key: value for key, value in super().get_config().items() if key != "autocast"}


@dataclasses.dataclass(frozen=True)
class _Untracked:
    """Out of sight of Keras' tracking, which would turn dicts and lists into its own."""

    value: Division
