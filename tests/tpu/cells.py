"""What is proven, as data: every cell is one step of the layer, for one chip, which must be traced, lowered and compiled.

Imports nothing but the standard library: the processes of all environments read it.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Final

__all__ = [
    "CHIPS",
    "COVERING",
    "DLRM",
    "DLRM_CELLS",
    "MODELS",
    "NO_LOOP",
    "SMALL",
    "Cell",
    "Chip",
    "Model",
    "Table",
]


@dataclasses.dataclass(frozen=True)
class Chip:
    """A TPU.

    Attributes:
        topology: what the compiler is asked for.
        sparse_cores: of one chip; 0 where tables are replicated.
    """

    topology: str
    sparse_cores: int


CHIPS: Final = {
    ("v5p", "sparsecore"): Chip("v5p:2x2x1", 4),
    ("v6e", "sparsecore"): Chip("v6e:2x2", 2),
    ("v4", "replicated"): Chip("v4:2x2x1", 0),
    ("v5e", "replicated"): Chip("v5e:2x2", 0),
    ("v5p", "replicated"): Chip("v5p:2x2x1", 0),
}
"""(chip, path) -> what it is."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step.

    Attributes:
        chip: v4, v5e, v5p or v6e.
        path: "sparsecore", or "replicated" where the TPUs have no embedding hardware.
        optimizer: the class' name in `tpuembed.config`.
        tables: "one", "stacked" (two of one width), "widths" (three of different widths), or "dlrm".
        combiner: of all tables.
        weighted: whether ids have weights.
        pipelining: pipeline_execution_with_tensor_core; the step then runs in a loop on the device.
        replicas: TPUs.
        training: a training step, else one that only looks up.
        tracked: track_rows, which the host does.
        broken: the name of what is deliberately broken in it (`broken.BROKEN`).
    """

    chip: str
    path: str
    optimizer: str
    tables: str = "stacked"
    combiner: str = "mean"
    weighted: bool = False
    pipelining: bool = False
    replicas: int = 1
    training: bool = True
    tracked: bool = False
    broken: str = ""

    @property
    def name(self) -> str:
        """Of its files."""
        flags = [
            "weighted" if self.weighted else "",
            "pipelined" if self.pipelining else "",
            "tracked" if self.tracked else "",
            "" if self.training else "evaluation",
            self.broken,
        ]
        parts = [self.chip, self.path, self.optimizer, self.tables, self.combiner, f"r{self.replicas}", *flags]
        return "-".join(part for part in parts if part).lower()

    @property
    def hardware(self) -> Chip:
        """Its chip."""
        return CHIPS[self.chip, self.path]

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Cell":
        """From `dataclasses.asdict`."""
        return cls(**values)


# ---- models


@dataclasses.dataclass(frozen=True)
class Table:
    """An embedding table with one feature.

    Attributes:
        max_ids, max_unique_ids: limits per SparseCore and step; None for TensorFlow's default.
    """

    name: str
    rows: int
    dim: int
    max_ids: int | None = 64
    max_unique_ids: int | None = 32


@dataclasses.dataclass(frozen=True)
class Model:
    """Tables, and a dense layer of `units` over all activations.

    Attributes:
        batch: examples of one replica.
        hot: ids of an example, at most.
        units: outputs of the dense layer, the shape of targets: [batch, units].
        ids_per_sample: SparseCoreEmbeddingConfig's max_ids_per_chip_per_sample.
    """

    tables: tuple[Table, ...]
    batch: int = 32
    hot: int = 5
    units: int = 3
    ids_per_sample: int = 24


_VIDEOS = Table("videos", 100, 8)
SMALL: Final = {
    "one": Model((_VIDEOS,)),
    "stacked": Model((_VIDEOS, Table("users", 50, 8))),
    "widths": Model((_VIDEOS, Table("users", 50, 16), Table("items", 30, 32))),
}
"""The models of the covering cells."""
DLRM: Final = Model(
    tuple(Table(f"table_{index:02}", 1000 * (1 + index % 7), 64, None, None) for index in range(26)),
    batch=4096,
    hot=1,
    units=1,
    ids_per_sample=4,
)
"""26 tables of width 64, as the Criteo data set has features; what the compiler says of its memory is in the document."""
MODELS: Final = {**SMALL, "dlrm": DLRM}
"""Name of a cell's tables -> the model."""

# ---- cells

# (optimizer, tables, combiner, weighted, pipelining, training): every value with every chip and number of replicas.
_SPARSECORE = (
    ("SGD", "one", "sum", False, False, True),
    ("Adagrad", "stacked", "mean", True, False, True),
    ("AdagradMomentum", "one", "sqrtn", False, True, True),
    ("Adam", "stacked", "sum", True, True, True),
    ("FTRL", "widths", "mean", False, False, True),
    ("Adam", "widths", "sqrtn", True, False, False),
    ("Adagrad", "one", "mean", False, True, False),
)
_REPLICATED = (
    ("SGD", "one", "sum", False, False, True),
    ("Adagrad", "stacked", "mean", True, False, True),
    ("AdagradMomentum", "widths", "sqrtn", False, False, True),
    ("Adam", "stacked", "sum", True, False, True),
    ("FTRL", "widths", "mean", False, False, True),
    ("Adagrad", "widths", "sqrtn", True, False, False),
)
_ROWS = {"sparsecore": _SPARSECORE, "replicated": _REPLICATED}


def _cells() -> Iterator[Cell]:
    for (chip, path), replicas in itertools.product(CHIPS, (1, 4)):
        for optimizer, tables, combiner, weighted, pipelining, training in _ROWS[path]:
            yield Cell(chip, path, optimizer, tables, combiner, weighted, pipelining, replicas, training)


_TRACKED = tuple(
    Cell(chip, "sparsecore", "Adam", "stacked", "mean", weighted=True, replicas=replicas, tracked=True)
    for chip, replicas in itertools.product(("v5p", "v6e"), (1, 4))
)
COVERING: Final = (*_cells(), *_TRACKED)
"""The cells of `make tpu-proof`."""


DLRM_CELLS: Final = tuple(
    Cell(chip, "sparsecore", "Adagrad", "dlrm", "sum", pipelining=pipelining)
    for chip, pipelining in itertools.product(("v5p", "v6e"), (False, True))
)
"""What the compiler says of a larger model."""
NO_LOOP: Final = Cell("v5p", "sparsecore", "Adam", pipelining=True, broken="no_loop")
"""A negative control: pipelined steps need a loop on the device."""
