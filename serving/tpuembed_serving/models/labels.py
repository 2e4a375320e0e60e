"""Labels: names by which requests may select the versions of a model."""

from collections.abc import Collection, Mapping

from tpuembed_serving.core.status import invalid_argument

__all__ = ["VersionLabels"]


class VersionLabels:
    """The labels of one model. The caller of a method holds the lock of the model's versions.

    Labels of the first config wait until their versions are available. TensorFlow Serving would not start with them.
    """

    def __init__(self, model: str, labels: Mapping[str, int]) -> None:
        self._model = model
        self._assigned: dict[str, int] = {}
        self._waiting: dict[str, int] = dict(labels)

    def version(self, label: str) -> int:
        """Return the version that `label` names.

        Raises:
            StatusError: INVALID_ARGUMENT, the label is unknown.
        """
        if label not in self._assigned:
            raise invalid_argument(f"Unrecognized servable version label: {label}")
        return self._assigned[label]

    @property
    def assigned(self) -> dict[str, int]:
        """Return label -> version, in the order of labels, as requests may use them now."""
        return dict(sorted(self._assigned.items()))

    def fault(self, labels: Mapping[str, int], available: Collection[int]) -> str:
        """Return why `labels` cannot be assigned now, in TensorFlow Serving's words. Empty if they can."""
        for version in labels.values():
            if version not in available:
                what = f"Request to assign label to version {version} of model {self._model}"
                return f"{what}, which is not currently available for inference"
        return ""

    def assign(self, labels: Mapping[str, int]) -> None:
        """Replace all labels with these."""
        self._assigned, self._waiting = dict(labels), {}

    def settle(self, available: Collection[int]) -> None:
        """Assign the waiting labels whose version is available now."""
        due = {label: version for label, version in self._waiting.items() if version in available}
        self._assigned.update(due)
        self._waiting = {label: version for label, version in self._waiting.items() if label not in due}
