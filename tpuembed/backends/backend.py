"""The interface of a hardware path: it owns the tables of a layer, looks them up and updates them."""

# ruff: noqa: B027 - most paths have nothing to do in some methods

import abc
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from tpuembed.backends.layer_call import LayerCall
from tpuembed.backends.row_gradients import RowGradients
from tpuembed.backends.table_state import TableState
from tpuembed.backends.tpu.stacked_table import StackLayout
from tpuembed.lookup import Ids
from tpuembed.vocabulary import Vocabulary

__all__ = ["Backend", "TrainingStep"]

Tensor = Any


class TrainingStep(Protocol):
    """One call of the layer."""

    def lookup(self) -> list[Tensor]:
        """Return the activations, each [..., dim]."""

    def apply(self, gradients: Sequence[Tensor]) -> list[Any]:
        """Update the tables by the gradients of the activations, one for each. Returns the update ops."""


class Backend(abc.ABC):
    """A hardware path, or an exporter. By default no tables are in memory, and rows are read and written in place and in order.

    Attributes:
        states: table name -> its variables.
        is_export: rows come from an exporter, which is told what each table takes, and nothing is trained.
        names: the layer's `LayerVocabularies`. None if it has none, and in an export.
    """

    states: Mapping[str, TableState] = {}
    is_export = False
    names: Any = None

    @abc.abstractmethod
    def lookup(self, features: Sequence[Ids]) -> list[Tensor]:
        """Return the activations of `features`, without a gradient trap."""

    def table(self, name: str) -> Any:
        """Return the rows of a table, as `embedding_tables` gives them: the variable, or in an export a tensor."""
        return self.states[name].variable

    def rows_of(self, vocabulary: Vocabulary, table: str, names: Tensor, padded: bool) -> Tensor:  # noqa: ARG002 - for exports
        """Return the row of each name in the `vocabulary` of `table`, int64 [n]."""
        rows: Tensor = self.names.rows_of(table, names, padded)
        return rows

    def note_names(self, vocabulary: Vocabulary, table: str) -> None:
        """Note that features of `table` take names, those of `vocabulary` or of the checkpoint."""

    def note_numbers(self, table: str, feature: str | None = None) -> None:
        """Note that `feature` of `table` takes row numbers, and others names. None: all features take numbers."""

    def checkpoint_children(self) -> dict[str, Any]:
        """Return the children of the layer's checkpoint node: name -> variable or node."""
        return {}

    def layouts(self) -> dict[str, StackLayout]:
        """Return {table: its layout in a stack}. Tables without an entry are saved in row order."""
        return {}

    def writing(self) -> AbstractContextManager[None]:
        """Return a context in which rows of the tables in `states` may be written."""
        return nullcontext()

    def fetch(self) -> None:
        """Copy the tables to the hosts. Called before `table_rows.read_rows` reads rows of the tables in `states`."""

    def row_gradients(self) -> RowGradients | None:
        """Return the weights whose gradients move the tables in the trainer's optimizer step.

        None: the tables move while the gradient is taken, as on accelerators.
        """
        return None

    def weights(self) -> list[tuple[Any, bool]]:
        """Return (variable, True if the user's optimizer trains it) for every Keras weight of the layer."""
        return []

    def check_symbolic_call(self) -> None:
        """Raise TrainingError if a model that is being built could not train the tables."""

    @abc.abstractmethod
    def begin(self, features: Sequence[Ids], call: LayerCall) -> TrainingStep:
        """Return a training step of `features`, all of whose tables have an optimizer, in a `call` of the layer."""
