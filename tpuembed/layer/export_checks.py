"""What an export of a model could not tell, checked while the model is called."""

from collections.abc import Iterable, Sequence

from tpuembed.errors import ConfigError
from tpuembed.lookup import Ids
from tpuembed.runtime.keras_saving import exports_a_model

__all__ = ["ListFeatures", "check_table_names"]


class ListFeatures:
    """Which features of a layer took lists, ragged or sparse, in its calls."""

    def __init__(self, layer: str) -> None:
        """Begin with no call of the layer of that name."""
        self._layer = layer
        self._were_combined: dict[str, set[bool]] = {}

    def note(self, inputs: Sequence[Ids]) -> None:
        """Note a call. Raises ConfigError if an exporter traces a model that gives a feature of lists a matrix."""
        dense = [each.path for each in inputs if not each.is_combined and len(each.ids.shape) > 1]
        changed = any(self._were_combined.get(path) == {True} for path in dense)
        if changed and exports_a_model() and (refusal := self.refusal()) is not None:
            raise refusal
        for each in inputs:
            self._were_combined.setdefault(each.path, set()).add(each.is_combined)

    def refusal(self) -> ConfigError | None:
        """Return the error of an export that would look up dense ids, or None if no feature takes lists alone."""
        lists = [path for path, kinds in self._were_combined.items() if kinds == {True}]
        if not lists:
            return None
        of_features = f" of {', '.join(lists)}" if any(lists) else ""
        return ConfigError(
            f"layer {self._layer!r}: its ids{of_features} were ragged or sparse in every call, and this export gives the model a "
            "dense matrix, whose ids are looked up one by one. Call tpuembed.export_saved_model(model, MODEL_DIR), with (model, "
            "specs of its inputs) for a subclassed model, or give tf.saved_model.save a function that makes ragged or sparse ids."
        )


def check_table_names(model: str, layer: str, tables: set[str], others: Iterable[tuple[str, set[str]]]) -> None:
    """Raise ConfigError if another layer of the model, (its name, its tables), has a table of the same name as `layer`."""
    for other, names in others:
        if shared := sorted(tables & names):
            raise ConfigError(
                f"layers {layer!r} and {other!r} of model {model!r} both have a table {shared[0]!r}. An export could not tell them "
                "apart. Rename one, use one layer for the features of both, or put each into a keras.Model of its own, of which an "
                "export chooses one."
            )
